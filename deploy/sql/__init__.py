"""SQL over the lake with DuckDB: questions, views, estimates."""
