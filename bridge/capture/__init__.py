"""Capture of the bytes on the wire into `kiln.frames` (docs/design/bridge.md): tap and spool."""
