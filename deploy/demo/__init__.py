"""A small libp2p network on this machine to try Kiln with."""
