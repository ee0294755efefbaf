"""What was on the wire, into `kiln.frames` (docs/DESIGN.md, The bridge): frames made by the tap, kept by the spool."""
