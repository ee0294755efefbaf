"""Query `updates`: each new update, with its separator, into `kiln.updates`."""
