"""The settings: the model, its reading, its errors, its printing. Only entry points import this package."""
