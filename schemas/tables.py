"""The Delta tables in the lake folder, as plain data (docs/design/contracts.md, Delta tables).

One folder a table. Peer ids, StreamIDs and CIDs are text in their usual form. Separator values are base36 text as in
the topic name. Times are timestamps in UTC. The tables use only types of Delta's base protocol, so that any reader
opens them. A table keeps the comments that the table was made with.
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
    """A table; `key` names the columns that tell the table's rows apart.

    A table without a key is append only and may hold repeats.
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
_ORIGIN: Final = _must(
    "origin",
    "string",
    "LIVE: the bridge heard the frame. REPLAY: the frame came from a capture file or from kiln quarantine replay. "
    "Batches never mix the two",
)
_MESSAGE: Final = _must(
    "message",
    "string",
    "Message id. Signed: author/seqno in hex. Unsigned: sha256/hash of the data in hex. "
    "Over BEP 50: bep50/target/sequence in hex",
)
_OBSERVED: Final = _must(
    "observed_at", "timestamp", "When the frame was on the wire, by the clock of the node that captured the frame (UTC)"
)
_SEPARATOR_KEY: Final = _may("separator_key", "string", "Separator key, e.g. model; null: no separator")
_SEPARATOR_VALUE: Final = _may("separator_value", "string", "Separator value, base36 text as in the topic name")
_PARTITION: Final = _must("kafka_partition", "int", "Partition of the frame in kiln.frames")
_OFFSET: Final = _must("kafka_offset", "bigint", "Offset of the frame in kiln.frames")
_INDEX: Final = _must("message_index", "int", "Position of the message in the RPC of the frame, from 0")
_VERDICT: Final = (
    "0 not checked, 1 good signature, 2 bad signature, 3 unsigned and allowed, 4 against the policy of the network"
)

_ALL: Final = (
    Table(
        "frames",
        "Every frame exactly as the frame was on the wire, in both directions",
        (
            _must("network", "string", "Ceramic network on which the frame was captured, e.g. testnet-clay"),
            _must("connection", "binary", "16 bytes, new for each peer connection"),
            _must("direction", "string", "IN: our node received the frame. OUT: our node sent the frame"),
            _must("local_peer", "string", "Peer id of our node (bep50: node id in hex)"),
            _must("remote_peer", "string", "Peer id of the other side (bep50: node id in hex)"),
            _must("protocol", "string", "The negotiated protocol, e.g. /meshsub/1.3.0, or bep50"),
            _OBSERVED,
            _must(
                "sequence",
                "bigint",
                "1, 2, 3 … on this connection in this direction. A gap is a lost frame",
            ),
            _must(
                "payload",
                "binary",
                "The RPC (bep50: the datagram) exactly as on the wire. Empty: the direction ended here",
            ),
            _must(
                "hello_in",
                "binary",
                "ExtTopicTable bytes of the hello of the remote peer. Empty: there was no hello, or our node refused "
                "the hello",
            ),
            _must("hello_out", "binary", "ExtTopicTable bytes of the hello of our node"),
            _must(
                "verdicts",
                "binary",
                f"What our node found when the frame came, one byte for each message in the payload: {_VERDICT}. "
                "Empty: nobody checked",
            ),
            _ORIGIN,
            _must(
                "remote_address", "binary", "Address of the other side: multiaddr or compact socket. Empty: not known"
            ),
            _must(
                "declared_length",
                "bigint",
                "Length in bytes of an RPC that was too long, of which the payload has only the beginning. "
                "0: the payload is whole",
            ),
            _PARTITION,
            _OFFSET,
            _must("kafka_timestamp", "timestamp", "When the broker took the frame (UTC)"),
        ),
        ("connection", "direction", "sequence"),
    ),
    Table(
        "copies",
        "Every received copy of every gossip message: which peer sent the copy, and when. Also copies of "
        "what turned out to be no good message",
        (
            _NETWORK,
            _MESSAGE,
            _must("remote_peer", "string", "Peer id of the peer that sent this copy"),
            _OBSERVED,
            _must("verdict", "int", f"What our node found of this copy: {_VERDICT}"),
            _PARTITION,
            _OFFSET,
            _INDEX,
        ),
        ("kafka_partition", "kafka_offset", "message_index"),
    ),
    Table(
        "messages",
        "One row for each message, from one good copy of the message. Which good copy is not defined",
        (
            _MESSAGE,
            _NETWORK,
            _ORIGIN,
            _may("topic", "string", "Topic on which the message was published"),
            _may(
                "topic_source",
                "string",
                "name: the topic was on the wire. index: Kiln resolved an index through the topic table",
            ),
            _must("type", "string", "UPDATE, QUERY, RESPONSE, KEEPALIVE or BATCH_UPDATE"),
            _may("from_peer", "string", "Peer id of the author; null: unsigned"),
            _may("seqno", "binary", "Sequence number that the author gave the message; null: unsigned"),
            _may("stream", "string", "StreamID, base36 (UPDATE, QUERY)"),
            _may("tip", "string", "CID of the new tip (UPDATE)"),
            _may("model", "string", "StreamID of the stream's model, as the author claims (UPDATE)"),
            _may("sep", "string", "Separator as key/value, as announced (BATCH_UPDATE)"),
            _may("batch", "string", "CID of the batch block (BATCH_UPDATE)"),
            _may("query_id", "string", "Id that joins a QUERY and its RESPONSEs"),
            _may("tips", "map<string,string>", "Tip CID by StreamID (RESPONSE)"),
            _may("ts", "bigint", "Time of the sender, ms since the epoch (KEEPALIVE)"),
            _may("ver", "string", "Version of the sender's node (KEEPALIVE)"),
            _may("ipfs_ver", "string", "Version of the sender's IPFS node (KEEPALIVE)"),
            _must("data", "binary", "The bytes of the message as published"),
            _must("verdict", "int", f"Verdict on the copy that was kept: {_VERDICT}"),
            _must(
                "remote_peer",
                "string",
                "Peer id of the peer that sent the copy that was kept (bep50: node id in hex)",
            ),
            _OBSERVED,
            _PARTITION,
            _OFFSET,
            _INDEX,
        ),
        ("network", "message"),
    ),
    Table(
        "updates",
        "Every new update of a stream that Kiln heard, with the separator of the update and its place in the log that "
        "decides the batches. An update announced again is in messages and copies, and not here",
        (
            _NETWORK,
            _ORIGIN,
            _MESSAGE,
            _may("from_peer", "string", "Peer id of the author; null: unsigned"),
            _SEPARATOR_KEY,
            _SEPARATOR_VALUE,
            _may(
                "separator_source",
                "string",
                "Where Kiln knows the separator from: genesis (which may name no separator), topic or model. "
                "Null: nothing told Kiln",
            ),
            _must("stream", "string", "StreamID, base36"),
            _must("tip", "string", "CID of the new tip"),
            _OBSERVED,
            _must(
                "updated_at",
                "timestamp",
                "Clock of the log at this record: the greatest stamp of the broker in the partition so far (UTC). The "
                "update was heard at observed_at, or at updated_at where that is earlier",
            ),
            _must("log_partition", "int", "Partition in kiln.updates"),
            _must("log_offset", "bigint", "Offset in kiln.updates"),
        ),
        ("network", "origin", "message"),
    ),
    Table(
        "batches",
        "Every CIP-123 block that Kiln made: the tips of one window of one separator",
        (
            _must("cid", "string", "CID of the block"),
            _NETWORK,
            _ORIGIN,
            _must("separator_key", "string", "Separator key, e.g. model"),
            _must("separator_value", "string", "Separator value, base36 text as in the topic name"),
            _must("opened_at", "timestamp", "t0, in hearing time: when the first update of the window was heard (UTC)"),
            _must("closed_at", "timestamp", "t0 + T, in hearing time (UTC)"),
            _must("emitted_at", "timestamp", "When the broker took the batch into kiln.batches (UTC)"),
            _must("streams", "int", "How many streams the block has tips of"),
            _must("tips", "int", "How many tips the block has"),
            _must("bytes", "int", "Length of the block in bytes"),
            _must("block", "binary", "The block, DAG-CBOR"),
        ),
        ("network", "origin", "separator_key", "separator_value", "opened_at", "cid"),
    ),
    Table(
        "batch_tips",
        "The tips in each batch, one row for each tip",
        (
            _must("cid", "string", "CID of the batch block"),
            _must("stream", "string", "StreamID, base36"),
            _must("tip", "string", "CID of the tip"),
        ),
        ("cid", "stream", "tip"),
    ),
    Table(
        "tips",
        "Every tip of a stream that Kiln learned of, and how Kiln learned of the tip",
        (
            _NETWORK,
            _must("stream", "string", "StreamID, base36"),
            _must("tip", "string", "CID of the tip"),
            _must(
                "source",
                "string",
                "update: Kiln heard the tip in an UPDATE. batch: Kiln read the tip out of the batch of another node",
            ),
            _may("cid", "string", "CID of the batch that the tip came out of; null for an update"),
            _must(
                "observed_at",
                "timestamp",
                "update: when the frame was on the wire, by the clock of the node that captured the frame. "
                "batch: when the bridge had the block (UTC)",
            ),
        ),
        ("network", "stream", "tip", "source"),
    ),
    Table(
        "streams",
        "Every stream whose genesis the bridge fetched and verified, with the separator that the genesis names",
        (
            _NETWORK,
            _must("stream", "string", "StreamID, base36"),
            _SEPARATOR_KEY,
            _SEPARATOR_VALUE,
            _must("source", "string", "How Kiln knows the separator: genesis (verified). A claim has no row here"),
        ),
        ("network", "stream"),
    ),
    Table(
        "publications",
        "Every attempt to publish a batch: a receipt or an error",
        (
            _must("cid", "string", "CID of the batch block"),
            _must("transport", "string", "How the bridge published the batch: gossipsub or bep50"),
            _may("topic", "string", "Pubsub topic on which the batch was published"),
            _may("target", "string", "Target in the BitTorrent DHT, hex (bep50)"),
            _may(
                "peers",
                "bigint",
                "How many peers the batch went to (bep50: how many contacts are known to have the batch)",
            ),
            _must("published_at", "timestamp", "When the bridge tried (UTC)"),
            _may("error", "string", "Why the attempt failed; null: the attempt did not fail"),
        ),
        ("cid", "transport", "topic", "published_at"),
    ),
    Table(
        "bundles",
        "Topic bundles: which topics the hashes in the hellos of peers stand for. Kiln never forgets a known bundle",
        (
            _must("hash", "string", "Last 4 bytes of the sha256 of the sorted and joined topics, hex"),
            _may("name", "string", "Name for people, where the settings gave a name"),
            _must("topics", "array<string>", "Topics of the bundle, in bytewise order"),
            _must("first_seen", "timestamp", "When Kiln first knew the bundle (UTC)"),
        ),
        ("hash",),
    ),
    Table(
        "quarantine",
        "Everything that Kiln could not use: the bytes, where the bytes came from, and why. Kiln drops nothing "
        "silently",
        (
            _may("kafka_partition", "int", "Partition of the frame in kiln.frames; null: the bytes came from no frame"),
            _may("kafka_offset", "bigint", "Offset of the frame in kiln.frames; null: the bytes came from no frame"),
            _may(
                "message_index",
                "int",
                "Position of the message in the RPC of the frame; null: the row is of a whole frame",
            ),
            _may("cid", "string", "CID of the block that the row is about, where the bytes came from no frame"),
            _must("stage", "string", "Step that refused the bytes; docs/RUNBOOK.md explains every stage and reason"),
            _must(
                "reason",
                "string",
                "Why, in snake_case. Rows of earlier Kilns have three reasons with spaces: compare "
                "replace(reason, ' ', '_')",
            ),
            _may("detail", "string", "The reason in words, for people. Where data holds a part, which part"),
            _must("data", "binary", "The refused bytes. More than 5 MiB are split over several rows"),
            _must(
                "observed_at",
                "timestamp",
                "When the frame was on the wire, by the clock of the node that captured the frame. Without a frame: "
                "when the broker took the record, or when the bridge found the fault (UTC)",
            ),
        ),
        (),
    ),
    Table(
        "quality_results",
        "Results of the quality expectations on the other tables, one row for each expectation and run",
        (
            _must("run_id", "string", "Id of the quality run"),
            _must("run_at", "timestamp", "When the run began (UTC)"),
            _must("table_name", "string", "Table that the run looked at"),
            _must("expectation", "string", "Type of the expectation"),
            _may(
                "column_name", "string", "Columns, tables or rule that the expectation is about; null: the whole table"
            ),
            _must("success", "boolean", "Whether the table met the expectation"),
            _may("observed_value", "string", "What the run found"),
            _may("unexpected_count", "bigint", "How many rows did not meet the expectation"),
            _may("details", "string", "The full result as JSON"),
        ),
        ("run_id", "table_name", "expectation", "column_name"),
    ),
)

TABLES_VERSION: Final = 1
"""To be raised with a change of tables after which an earlier Kiln would do harm in them. Tables of 0.1.0 name none."""

TABLES: Final[dict[str, Table]] = {table.name: table for table in _ALL}


def markdown() -> str:
    """The tables as a page for people, docs/TABLES.md. Write it anew: `python -m schemas.tables > docs/TABLES.md`."""
    lines = [
        "# Tables",
        "",
        "<!-- Made from schemas/tables.py by `python -m schemas.tables > docs/TABLES.md`: do not edit it here. -->",
        "",
        "Kiln keeps these Delta tables in the lake folder, one folder for each table. The comments below are also in",
        "the tables themselves.",
        "",
        "- Peer ids, StreamIDs and CIDs are text in their usual form.",
        "- Separator values are base36 text as in the topic name.",
        "- Times are UTC.",
        "- The key of a table is the columns that tell the table's rows apart.",
        "",
        "[The contracts](design/contracts.md#delta-tables) say which query fills which table. [SQL.md](SQL.md) has",
        "questions to ask the tables.",
        "",
        " · ".join(f"[{name}](#{name})" for name in TABLES),
    ]
    for table in TABLES.values():
        key = ", ".join(f"`{name}`" for name in table.key) or "none. The table is append only, and may hold repeats"
        lines += ["", f"## {table.name}", "", f"{table.comment}.", "", f"Key: {key}.", ""]
        lines += ["| column | type | null | what it is |", "| --- | --- | --- | --- |"]
        for column in table.columns:
            null = "may be" if column.nullable else "never"
            lines.append(f"| `{column.name}` | {column.type} | {null} | {column.comment.replace('|', chr(92) + '|')} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(markdown(), end="")
