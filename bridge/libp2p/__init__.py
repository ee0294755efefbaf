"""The libp2p node: identity, connections, pubsub streams and peer discovery."""
