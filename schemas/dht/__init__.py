"""Bytes of the BitTorrent DHT: bencoding, KRPC messages (BEP 5), mutable items (BEP 44), node ids (BEP 42), and the
value that announces a batch in an item. Pure: no clock and no socket."""
