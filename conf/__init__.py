"""What a user of Kiln may change: `kiln.toml` (read by `conf.settings`), the pinned jars, the broker's settings."""
