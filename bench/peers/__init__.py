"""Three programs that a user could write instead of the query `archive`, from the same topic into the same tables.

Each program is short and idiomatic for its tools, and does less than Kiln. No program

- checks a signature (all use the bridge's verdict), a StreamID, a CID or a separator;
- normalizes the spelling of ids;
- supports topics by index, hellos or announcements in the DHT;
- drops repeated frames;
- distinguishes faults: the reason in quarantine is always `decoding`;
- writes each row exactly once if it crashes between two appends.

The docstring of each program lists what else is missing. Quarantine goes to a table; Kiln's `archive` writes it to a
Kafka topic.
"""
