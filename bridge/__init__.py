"""The network side of Kiln: gossip and captures into Kafka (docs/design, Who owns what)."""
