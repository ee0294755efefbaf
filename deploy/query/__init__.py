"""SQL over the lake: questions, answers, traces, the SQL server."""
