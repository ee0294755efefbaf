"""The lake: Delta tables are opened, created, read and appended to here."""
