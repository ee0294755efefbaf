"""Query `batch`: windows of updates by separator into CIP-123 batches."""
