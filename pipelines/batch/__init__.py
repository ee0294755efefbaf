"""Query `batch`: groups the updates of each separator into windows, and each window into a CIP-123 batch."""
