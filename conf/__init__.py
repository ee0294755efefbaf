"""Files that a user of Kiln may change: `kiln.toml` (read by `kiln.conf.settings`), the pinned jars, settings of broker
and logs. Also code that every top-level package may import: errors, locks, back-off."""
