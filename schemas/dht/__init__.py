"""Formats of the BitTorrent DHT: bencoding, KRPC messages (BEP 5), mutable items (BEP 44) and node ids (BEP 42), and
Kiln's announcement of a batch in such an item."""
