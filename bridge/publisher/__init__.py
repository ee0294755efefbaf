"""Publishing of batches to the network."""
