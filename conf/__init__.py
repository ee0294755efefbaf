"""What a user of Kiln may change: `kiln.toml` (read by `kiln.conf.settings`), the pinned jars, settings of broker and
logs; and what every room may import: errors, locks, back-off."""
