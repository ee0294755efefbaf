"""Pure functions and state machines of the queries: no Spark, no socket, no clock."""
