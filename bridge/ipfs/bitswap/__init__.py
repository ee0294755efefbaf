"""Bitswap on the bridge's own host: single blocks, served and fetched (https://specs.ipfs.tech/bitswap-protocol/).

`messages` reads and writes messages, `engine` decides what to send to which peer, and `exchange` puts the engine on the
streams of the node. `messages` and `engine` do no I/O.
"""
