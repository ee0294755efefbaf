"""The gossipsub RPC as protobuf."""
