"""Publishing of batches to the network: the topics, the order, and the block in IPFS first."""
