"""What a user would write instead of the query `archive`: three programs over the same topic into the same tables.

Each is short and idiomatic for its tools, and each does less than Kiln. None of them

- checks a signature (they take the bridge's verdict), a StreamID, a CID or a separator;
- writes an id in one spelling, whichever it came in;
- knows topics by index, hellos or announcements in the DHT;
- takes out a frame that came twice;
- tells a fault from Kiln's list of reasons: quarantine says `decoding` of all;
- writes each row once where the program crashes between two appends.

What else a program lacks stands at its top. Quarantine goes to a table, where Kiln's `archive` writes a Kafka topic.
"""
