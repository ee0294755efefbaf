"""The Delta tables in the lake folder, as plain data (docs/design/contracts.md, Delta tables).

One folder a table. Peer ids, StreamIDs and CIDs are text in their usual form, separator values base36 text as in the
topic name, times are timestamps in UTC. Only types of the base protocol, so that any reader opens them.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Column(NamedTuple):
    """A column: its type as Spark DDL, and the comment a user sees in SQL."""

    name: str
    type: str
    comment: str
    nullable: bool = True


class Table(NamedTuple):
    """A table; `key` names the columns that tell its rows apart.

    Without a key it is append only and may hold repeats.
    """

    name: str
    comment: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]

    @property
    def ddl(self) -> str:
        """The columns as Spark DDL, with NOT NULL and comments: for CREATE TABLE and StructType.fromDDL."""
        return ", ".join(
            f"`{column.name}` {column.type}{'' if column.nullable else ' NOT NULL'} COMMENT '{_quote(column.comment)}'"
            for column in self.columns
        )


def _quote(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def _must(name: str, ddl: str, comment: str) -> Column:
    return Column(name, ddl, comment, nullable=False)


def _may(name: str, ddl: str, comment: str) -> Column:
    return Column(name, ddl, comment)


_NETWORK: Final = _must("network", "string", "Ceramic network, e.g. testnet-clay")
_ORIGIN: Final = _must("origin", "string", "LIVE: heard on the network; REPLAY: from a capture. The two never mix")
_MESSAGE: Final = _must("message", "string", "Message id: author/seqno in hex if signed, sha256/hex of the data if not")
_OBSERVED: Final = _must(
    "observed_at", "timestamp", "When the frame was on the wire, by the clock of who captured it (UTC)"
)
_SEPARATOR_KEY: Final = _may("separator_key", "string", "Separator key, e.g. model; null: no separator")
_SEPARATOR_VALUE: Final = _may("separator_value", "string", "Separator value, base36 text as in the topic name")
_PARTITION: Final = _must("kafka_partition", "int", "Partition of the frame in kiln.frames")
_OFFSET: Final = _must("kafka_offset", "bigint", "Offset of the frame in kiln.frames")
_INDEX: Final = _must("message_index", "int", "Position of the message in the frame's RPC, from 0")
_VERDICT: Final = "0 not checked, 1 good signature, 2 bad, 3 unsigned and allowed, 4 against the network's policy"

_ALL: Final = (
    Table(
        "frames",
        "Every frame exactly as it was on the wire, both directions",
        (
            _must("network", "string", "Ceramic network the frame was captured on, e.g. testnet-clay"),
            _must("connection", "binary", "16 bytes, new for each peer connection"),
            _must("direction", "string", "IN: received, OUT: sent"),
            _must("local_peer", "string", "Our peer id (bep50: node id in hex)"),
            _must("remote_peer", "string", "Peer id of the other side (bep50: node id in hex)"),
            _must("protocol", "string", "Negotiated protocol, e.g. /meshsub/1.3.0, or bep50"),
            _OBSERVED,
            _must("sequence", "bigint", "1, 2, 3 … on this connection and direction: a gap is a lost frame"),
            _must(
                "payload", "binary", "The RPC (bep50: the datagram) exactly as on the wire; empty: the direction ended"
            ),
            _must("hello_in", "binary", "ExtTopicTable bytes of the remote peer's hello; empty: none, or refused"),
            _must("hello_out", "binary", "ExtTopicTable bytes of our hello"),
            _must("verdicts", "binary", f"One byte per message in payload: {_VERDICT}; empty: none checked"),
            _ORIGIN,
            _must("remote_address", "binary", "Multiaddr or compact socket address; empty: unknown"),
            _must("declared_length", "bigint", "Length of an RPC that was too long and cut; 0: payload is whole"),
            _PARTITION,
            _OFFSET,
            _must("kafka_timestamp", "timestamp", "When the broker took the frame (UTC)"),
        ),
        ("connection", "direction", "sequence"),
    ),
    Table(
        "copies",
        "Every received copy of every message: who sent it to us and when",
        (
            _NETWORK,
            _MESSAGE,
            _must("remote_peer", "string", "Peer id of the peer this copy came from"),
            _OBSERVED,
            _must("verdict", "int", f"On this copy: {_VERDICT}"),
            _PARTITION,
            _OFFSET,
            _INDEX,
        ),
        ("kafka_partition", "kafka_offset", "message_index"),
    ),
    Table(
        "messages",
        "One row per message, from one good copy of it; which one is not defined",
        (
            _MESSAGE,
            _NETWORK,
            _ORIGIN,
            _may("topic", "string", "Topic it was published on"),
            _may("topic_source", "string", "name: the topic was on the wire; index: resolved through the topic table"),
            _must("type", "string", "UPDATE, QUERY, RESPONSE, KEEPALIVE or BATCH_UPDATE"),
            _may("from_peer", "string", "Peer id of the author; null: unsigned"),
            _may("seqno", "binary", "The author's number of the message; null: unsigned"),
            _may("stream", "string", "StreamID, base36 (UPDATE, QUERY)"),
            _may("tip", "string", "CID of the new tip (UPDATE)"),
            _may("model", "string", "StreamID of the stream's model, as claimed by the author (UPDATE)"),
            _may("sep", "string", "Separator as key/value, as announced (BATCH_UPDATE)"),
            _may("batch", "string", "CID of the batch block (BATCH_UPDATE)"),
            _may("query_id", "string", "Id that joins a QUERY and its RESPONSEs"),
            _may("tips", "map<string,string>", "StreamID to tip CID (RESPONSE)"),
            _may("ts", "bigint", "Sender's time, ms since the epoch (KEEPALIVE)"),
            _may("ver", "string", "Version of the sender's node (KEEPALIVE)"),
            _may("ipfs_ver", "string", "Version of the sender's IPFS node (KEEPALIVE)"),
            _must("data", "binary", "The message's bytes as published"),
            _must("verdict", "int", f"On the copy that was kept: {_VERDICT}"),
            _must("remote_peer", "string", "Peer id of the peer the kept copy came from"),
            _OBSERVED,
            _PARTITION,
            _OFFSET,
            _INDEX,
        ),
        ("network", "message"),
    ),
    Table(
        "updates",
        "Every update of a stream that was heard, with its separator and its place in the log that decides the batches",
        (
            _NETWORK,
            _ORIGIN,
            _MESSAGE,
            _may("from_peer", "string", "Peer id of the author; null: unsigned"),
            _SEPARATOR_KEY,
            _SEPARATOR_VALUE,
            _may("separator_source", "string", "Where it is known from: genesis (it may name none), topic or model"),
            _must("stream", "string", "StreamID, base36"),
            _must("tip", "string", "CID of the new tip"),
            _OBSERVED,
            _must(
                "updated_at",
                "timestamp",
                "Log time that decides the batch: greatest broker stamp of its partition up to here",
            ),
            _must("log_partition", "int", "Partition in kiln.updates"),
            _must("log_offset", "bigint", "Offset in kiln.updates"),
        ),
        ("network", "origin", "message"),
    ),
    Table(
        "batches",
        "Every CIP-123 block that was made: the tips of one separator's window",
        (
            _must("cid", "string", "CID of the block"),
            _NETWORK,
            _ORIGIN,
            _must("separator_key", "string", "Separator key, e.g. model"),
            _must("separator_value", "string", "Separator value, base36 text as in the topic name"),
            _must("opened_at", "timestamp", "Log time t0 of the window's first update"),
            _must("closed_at", "timestamp", "t0 + T"),
            _must("emitted_at", "timestamp", "When the broker took the batch into kiln.batches (UTC)"),
            _must("streams", "int", "How many streams the block has tips of"),
            _must("tips", "int", "How many tips the block has"),
            _must("bytes", "int", "Length of the block"),
            _must("block", "binary", "The block, DAG-CBOR"),
        ),
        ("network", "origin", "separator_key", "separator_value", "opened_at", "cid"),
    ),
    Table(
        "batch_tips",
        "The tips in each batch, one row each",
        (
            _must("cid", "string", "CID of the batch block"),
            _must("stream", "string", "StreamID, base36"),
            _must("tip", "string", "CID of the tip"),
        ),
        ("cid", "stream", "tip"),
    ),
    Table(
        "tips",
        "Every tip of a stream that became known, with how it did",
        (
            _NETWORK,
            _must("stream", "string", "StreamID, base36"),
            _must("tip", "string", "CID of the tip"),
            _must("source", "string", "update: heard in an UPDATE; batch: read out of another node's batch"),
            _may("cid", "string", "CID of the batch it was read out of; null for an update"),
            _OBSERVED,
        ),
        ("network", "stream", "tip", "source"),
    ),
    Table(
        "streams",
        "What is known of each stream's separator",
        (
            _NETWORK,
            _must("stream", "string", "StreamID, base36"),
            _SEPARATOR_KEY,
            _SEPARATOR_VALUE,
            _must("source", "string", "How it is known: genesis (verified), topic or model"),
        ),
        ("network", "stream"),
    ),
    Table(
        "publications",
        "Every attempt to publish a batch: receipt or error",
        (
            _must("cid", "string", "CID of the batch block"),
            _must("transport", "string", "How it was published: gossipsub, ipfs, bep50"),
            _may("topic", "string", "Pubsub topic it went to"),
            _may("target", "string", "DHT target it went to"),
            _may("peers", "bigint", "How many peers it was sent to"),
            _must("published_at", "timestamp", "When it was tried (UTC)"),
            _may("error", "string", "Why it failed; null: it did not"),
        ),
        ("cid", "transport", "topic", "published_at"),
    ),
    Table(
        "bundles",
        "Topic bundles: what the hashes in the hellos of peers stand for. Once known, never forgotten",
        (
            _must("hash", "string", "Last 4 bytes of sha256 of the joined sorted topics, hex"),
            _may("name", "string", "A name for people, where one was given"),
            _must("topics", "array<string>", "Its topics, in bytewise order"),
            _must("first_seen", "timestamp", "When it became known (UTC)"),
        ),
        ("hash",),
    ),
    Table(
        "quarantine",
        "Everything that could not be used: the bytes, where they came from, and why. Nothing is dropped silently",
        (
            _may("kafka_partition", "int", "Partition of the frame in kiln.frames; null: it came from no frame"),
            _may("kafka_offset", "bigint", "Offset of the frame in kiln.frames"),
            _may("message_index", "int", "Position of the message in the frame's RPC; null: the whole frame"),
            _may("cid", "string", "CID of the block it is about, if it came from no frame"),
            _must("stage", "string", "Step that refused it"),
            _must("reason", "string", "Reason code"),
            _may("detail", "string", "The reason in words"),
            _must("data", "binary", "The bytes that were refused"),
            _OBSERVED,
        ),
        (),
    ),
    Table(
        "quality_results",
        "Results of the quality expectations over the other tables, one row per expectation and run",
        (
            _must("run_id", "string", "Id of the quality run"),
            _must("run_at", "timestamp", "When the run began (UTC)"),
            _must("table_name", "string", "Table that was looked at"),
            _must("expectation", "string", "Type of the expectation"),
            _may("column_name", "string", "Column it is about; null: the whole table"),
            _must("success", "boolean", "Whether it was met"),
            _may("observed_value", "string", "What was found"),
            _may("unexpected_count", "bigint", "How many rows did not meet it"),
            _may("details", "string", "The full result as JSON"),
        ),
        ("run_id", "table_name", "expectation", "column_name"),
    ),
)

TABLES: Final[dict[str, Table]] = {table.name: table for table in _ALL}


def markdown() -> str:
    """The tables as a page for people, docs/TABLES.md. Write it anew: `python -m schemas.tables > docs/TABLES.md`."""
    lines = [
        "# Tables",
        "",
        "<!-- Made from schemas/tables.py by `python -m schemas.tables > docs/TABLES.md`: do not edit it here. -->",
        "",
        "The Delta tables in the lake folder, one folder a table. Peer ids, StreamIDs and CIDs are text in their usual",
        "form, separator values base36 text as in the topic name, times are UTC. The comments below are also in the",
        "tables themselves. [The contracts](design/contracts.md#delta-tables) say which query fills which table;",
        "[SQL.md](SQL.md) has questions to ask them.",
        "",
        " · ".join(f"[{name}](#{name})" for name in TABLES),
    ]
    for table in TABLES.values():
        key = ", ".join(f"`{name}`" for name in table.key) or "none: append only, and it may hold repeats"
        lines += ["", f"## {table.name}", "", f"{table.comment}.", "", f"Key: {key}.", ""]
        lines += ["| column | type | null | what it is |", "| --- | --- | --- | --- |"]
        for column in table.columns:
            null = "may be" if column.nullable else "never"
            lines.append(f"| `{column.name}` | {column.type} | {null} | {column.comment.replace('|', chr(92) + '|')} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(markdown(), end="")
