"""Kiln's streaming queries, and all that they are made of."""
