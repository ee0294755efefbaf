"""Breaks in Kiln's code, and the tests that notice them."""
