"""The libp2p node: identity, sequence numbers, connections and the pubsub streams on them."""
