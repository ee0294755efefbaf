"""The settings: model, reading, checks and output as TOML. Only entry points import this package."""
