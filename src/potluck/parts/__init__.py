"""What methods are made of: pieces with two users, and pieces of mathematics that a test meets alone."""
