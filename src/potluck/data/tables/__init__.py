"""Tables as data sets: rows of a CSV or Parquet file are examples, whose columns are numbers, names or text."""
