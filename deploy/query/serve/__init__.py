"""SQL for other programs: Spark's Thrift server over the lake, with a password, and read only."""
