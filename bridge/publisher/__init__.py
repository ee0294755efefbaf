"""Batches out to the network: which topics, in what order, with the block kept in IPFS first."""
