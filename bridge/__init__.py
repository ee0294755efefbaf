"""The network side of Kiln: gossip and captures into Kafka (docs/DESIGN.md, Who owns what)."""
