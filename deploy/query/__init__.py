"""SQL over the lake: queries and their output, traces, exports to DuckDB."""
