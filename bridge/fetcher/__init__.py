"""Blocks fetched from IPFS: which records wait for a block, the attempts to fetch it, and the offsets that are done."""
