"""The Frame as protobuf."""
