"""Bytes of the gossip network: pubsub messages, ids, topics, topic tables, batch blocks."""
