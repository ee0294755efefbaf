"""Data quality checks of the Delta tables, run by Great Expectations and DuckDB."""
