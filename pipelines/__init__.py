"""Kiln's streaming queries and their parts."""
