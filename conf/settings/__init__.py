"""The settings: their model, and how they are read, checked and printed. Only entry points import this package."""
