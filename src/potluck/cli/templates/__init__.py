"""What `potluck new` writes: a working part and its test, in which names are replaced."""
