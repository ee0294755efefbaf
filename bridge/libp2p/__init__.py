"""Our place on the network: identity, sequence numbers, connections and the pubsub streams on them."""
