"""Data quality: suites of expectations over the lake's tables, checked by Great Expectations and DuckDB."""
