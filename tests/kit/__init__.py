"""Helpers that tests share: nodes, processes and programs to test against, and ways to wait for them."""
