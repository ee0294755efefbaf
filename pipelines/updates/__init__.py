"""Query `updates`: finds new updates in `kiln.frames`, and writes them with their separators to `kiln.updates`."""
