"""Formats of the gossip network: pubsub messages, ids, topics, topic tables and batch blocks."""
