"""Delta tables of the lake: how Kiln opens, creates, reads and appends to them."""
