"""The care of tables: few files of a sensible size, a short log, no garbage, and rows that go by age."""
