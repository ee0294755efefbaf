"""Kiln: gossip traffic into Delta tables, and its updates into CIP-123 batches."""
