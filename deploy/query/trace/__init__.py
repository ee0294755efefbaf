"""Trace of a batch, a stream, a tip or a message through the tables, with the query of each step."""
