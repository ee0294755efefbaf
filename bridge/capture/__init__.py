"""Write RPCs as captured frames to `kiln.frames` (docs/design/bridge.md): the tap, the sink and its spool."""
