"""What is wanted out of IPFS: who waits for what, and what becomes of it. The thread around it is bridge.fetching.fetcher."""
