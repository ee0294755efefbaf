"""The settings: model, reading, checks and output as TOML. docs/design/overview.md lists its users."""
