"""The lake: opening and creating the Delta tables, and appending to them."""
