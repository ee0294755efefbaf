"""Spark's Thrift server over the lake: read-only SQL for other programs, with a password."""
