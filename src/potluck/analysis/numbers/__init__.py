"""Mathematics on arrays of models: how alike they see, how far apart they are, how sure and how fair."""
