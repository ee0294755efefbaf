"""Delta tables and views."""
