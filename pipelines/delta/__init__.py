"""The lake: where the Delta tables are; how Kiln opens, makes and appends to them."""
