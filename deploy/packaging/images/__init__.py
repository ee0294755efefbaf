"""Container images: their packages and their build."""
