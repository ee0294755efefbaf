"""SQL over the lake: queries and their output, traces, the SQL server."""
