"""What was on the wire, into `kiln.frames` (docs/design, The bridge): frames made by the tap, kept by the spool."""
