"""Fetching of blocks from IPFS: the geneses of streams, and the blocks of other nodes' batches."""
