"""Process-wide building blocks that every room but `schemas/` may import."""
