"""Schemas of the Delta tables in the lake folder (docs/design/contracts.md, Delta tables).

Peer ids, StreamIDs and CIDs are text in their usual form. Separator values are base36 text as in the topic name. Times
are timestamps in UTC. The tables use only types of Delta's base protocol, so that any reader opens them. A table keeps
the comments with which it was created.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kiln.schemas.queries import QUERIES


class Column(NamedTuple):
    """A column, with its type as Spark DDL and the comment that users see in SQL."""

    name: str
    type: str
    comment: str
    nullable: bool = True
    example: str = ""
    """example value: binary as 0x and hex, where "…" may stand for the rest; arrays and maps as JSON"""


class Table(NamedTuple):
    """A table; `key` names the columns that identify a row.

    A table without a key is append-only and may hold duplicates.
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


def _must(name: str, ddl: str, comment: str, example: str = "") -> Column:
    return Column(name, ddl, comment, nullable=False, example=example)


def _may(name: str, ddl: str, comment: str, example: str = "") -> Column:
    return Column(name, ddl, comment, example=example)


# for the examples
_A_STREAM: Final = "kjzl6kcym7w8y5d65f9okn4riydat92h3s6vvzpwwu7544i92fjygc567lzhrvc"
_A_TIP: Final = "bafyreigtsyqmmvgtal3y2ahcs277xjk5prvb673lb3li2i2egz2nhp6u4y"
_A_MODEL: Final = "kjzl6hvfrbw6c8x4r08h39j30tl3a19x0r80i15hubw8afv4fu2w9m9owz4cbol"
_A_BATCH: Final = "bafyreiddjfzlqbl2njq6sb57ndobby7s6ymmx5x2ewkcdfshdgfplnh2b4"
_A_TOPIC: Final = f"/ceramic/testnet-clay/sep/model/{_A_MODEL}"
_AN_AUTHOR: Final = "12D3KooWMc2ZTTt8tiVUbzy9qhS34YNAnWzRegkonQ6bfjhJbUP3"
_A_PEER: Final = "12D3KooWEEVhG8wbgnJWs7FT7VA9PhXrJTqeo8pQT12jEYfaUufv"
_OUR_NODE: Final = "12D3KooWCbx9hUuRmx5cHyHFyUcVQdwjUTqLjQFqXg29HABj6Ppi"

_NETWORK: Final = _must("network", "string", "Network, e.g. testnet-clay", "testnet-clay")
_ORIGIN: Final = _must(
    "origin",
    "string",
    "LIVE: captured by the bridge. REPLAY: from a capture file or from kiln quarantine replay. A batch never mixes "
    "the two",
    "LIVE",
)
_MESSAGE: Final = _must(
    "message_id",
    "string",
    "Message id. Signed: author/seqno in hex. Unsigned: sha256/hash of the data in hex. "
    "Over BEP 50: bep50/target/sequence in hex. From the log of another node: unverified/author/seqno in hex",
    f"{_AN_AUTHOR}/18ea84e3da4699c6",
)
_OBSERVED: Final = _must(
    "observed_at",
    "timestamp",
    "Capture time of the frame, by the clock of the node that captured it (UTC)",
    "2026-11-01 12:00:00.123456",
)
_SEPARATOR_KEY: Final = _may("separator_key", "string", "Separator key, e.g. model. Null: no separator", "model")
_SEPARATOR_VALUE: Final = _may(
    "separator_value", "string", "Separator value, base36 text as in the topic name", _A_MODEL
)
_PARTITION: Final = _must("kafka_partition", "int", "Partition of the frame in kiln.frames", "5")
_OFFSET: Final = _must("kafka_offset", "bigint", "Offset of the frame in kiln.frames", "481516")
_INDEX: Final = _must("message_index", "int", "Position of the message in the RPC of the frame, from 0", "0")
_VERDICT_VALUES: Final = (
    "valid (good signature), invalid (bad signature), unsigned (and allowed), against_policy (violates the policy of "
    "the network), not_checked, or unverifiable (from the log of another node, which has no signatures)"
)

# columns of the tables of entries of an RPC
_ENTRY_HEAD: Final = (
    _NETWORK,
    _ORIGIN,
    _must("connection", "binary", "Id of the connection, as in the table frames", "0x8d0c2b7fa1e94e35b6f0d2c47a19e853"),
    _must("direction", "string", "IN: the remote peer sent the entry. OUT: our node sent the entry", "IN"),
    _must("local_peer", "string", "Peer id of our node", _OUR_NODE),
    _must("remote_peer", "string", "Peer id of the other side", _A_PEER),
    _OBSERVED,
)
_ENTRY_TOPIC: Final = (
    _may(
        "topic",
        "string",
        "Topic. Null: the entry names none, its index does not resolve, or its name is not UTF-8 text of at most "
        "4,096 characters",
        _A_TOPIC,
    ),
    _may(
        "topic_source",
        "string",
        "name: sent as a name. index: sent as an index into the topic table. Null: neither",
        "name",
    ),
    _may("topic_index", "bigint", "Index on the wire, if there was no name", "17"),
)
_ENTRY_TAIL: Final = (
    _may(
        "raw",
        "binary",
        "Bytes of the entry without message ids. Set if topic is null although the entry names one, or if the entry "
        "has unknown fields. At most 64 KiB; the frame has all bytes",
        "0x1005",
    ),
    _must("wire_bytes", "int", "Bytes of the entry on the wire, with its tag and length", "77"),
    _PARTITION,
    _OFFSET,
    _must("entry_index", "int", "Position of the entry among those of the RPC that are in this table, from 0", "0"),
)

_ALL: Final = (
    Table(
        "frames",
        "Every frame in both directions, exactly as it was on the wire",
        (
            _must(
                "network",
                "string",
                "Network on which the frame was captured, e.g. testnet-clay",
                "testnet-clay",
            ),
            _must(
                "connection", "binary", "16 bytes, new for each peer connection", "0x8d0c2b7fa1e94e35b6f0d2c47a19e853"
            ),
            _must("direction", "string", "IN: our node received the frame. OUT: our node sent the frame", "IN"),
            _must("local_peer", "string", "Peer id of our node (bep50: node id in hex)", _OUR_NODE),
            _must("remote_peer", "string", "Peer id of the other side (bep50: node id in hex)", _A_PEER),
            _must("protocol", "string", "The negotiated protocol, e.g. /meshsub/1.3.0, or bep50", "/meshsub/1.3.0"),
            _OBSERVED,
            _must(
                "sequence",
                "bigint",
                "1, 2, 3 … on this connection in this direction. A gap is a lost frame",
                "17",
            ),
            _must(
                "payload",
                "binary",
                "The RPC (bep50: the datagram) exactly as on the wire. Empty: the pubsub stream ended here in "
                "this direction",
                "0x1a191a170a152f636572616d69632f746573746e65742d636c6179",
            ),
            _must(
                "hello_in",
                "binary",
                "ExtTopicTable bytes of the hello (first RPC) of the remote peer. Empty: no hello, or our node refused "
                "it",
                "0x0a042cfd3499",
            ),
            _must("hello_out", "binary", "ExtTopicTable bytes of the hello (first RPC) of our node", "0x0a042cfd3499"),
            _must(
                "verdicts",
                "binary",
                "Verdicts of our node at capture, one byte per message in the payload: 0 not_checked, 1 valid, "
                "2 invalid, 3 unsigned, 4 against_policy, 5 unverifiable. Empty: not checked. In an OUT frame, only "
                "messages that our node publishes have a verdict",
                "0x01",
            ),
            _ORIGIN,
            _must(
                "remote_address",
                "binary",
                "Address of the other side: multiaddr or compact socket address. Empty: not known",
                "0x04cb007107060fa1",
            ),
            _must(
                "declared_length",
                "bigint",
                "Length in bytes of an RPC that was too long, of which the payload has only the beginning. 0: the "
                "payload is complete",
                "0",
            ),
            _PARTITION,
            _OFFSET,
            _must(
                "kafka_timestamp",
                "timestamp",
                "LogAppendTime of the frame in kiln.frames (UTC)",
                "2026-11-01 12:00:00.125",
            ),
            _may(
                "agent",
                "string",
                "Agent version of the remote peer, if known. Set only in the closing IN frame (empty payload) of a "
                "connection",
                "kubo/0.43.1/",
            ),
            _may(
                "end_reason",
                "string",
                "Why the connection ended. Set only in its closing IN frame (empty payload)",
                "stream closed by the peer",
            ),
            _may(
                "dialled",
                "boolean",
                "True if our node opened the connection. Set only in its closing IN frame (empty payload)",
                "true",
            ),
        ),
        ("connection", "direction", "sequence"),
    ),
    Table(
        "copies",
        "Every received copy of every gossip message, rejected copies included: which peer sent it, and when",
        (
            _NETWORK,
            _MESSAGE,
            _must("remote_peer", "string", "Peer id of the peer that sent this copy", _A_PEER),
            _OBSERVED,
            _must("verdict", "string", f"Verdict on this copy: {_VERDICT_VALUES}", "valid"),
            _PARTITION,
            _OFFSET,
            _INDEX,
        ),
        ("kafka_partition", "kafka_offset", "message_index"),
    ),
    Table(
        "subscriptions",
        "Every SUBSCRIBE and UNSUBSCRIBE in both directions",
        (
            *_ENTRY_HEAD,
            _must("subscribe", "boolean", "true: SUBSCRIBE. false: UNSUBSCRIBE", "true"),
            *_ENTRY_TOPIC,
            *_ENTRY_TAIL,
        ),
        ("kafka_partition", "kafka_offset", "entry_index"),
    ),
    Table(
        "controls",
        "Every entry of a gossipsub control message in both directions",
        (
            *_ENTRY_HEAD,
            _must(
                "kind",
                "string",
                "IHAVE, IWANT, IDONTWANT, GRAFT or PRUNE; EXTENSIONS (the hello); or UNKNOWN (unknown fields of the "
                "RPC or of its control message)",
                "IHAVE",
            ),
            *_ENTRY_TOPIC,
            _may(
                "message_ids",
                "array<string>",
                "Message ids as in messages, or in hex if they have another form (IHAVE, IWANT, IDONTWANT). Only the "
                "first 5,000 of an RPC",
                f'["{_AN_AUTHOR}/18ea84e3da4699c6"]',
            ),
            _may("message_id_count", "int", "Number of all message ids (IHAVE, IWANT, IDONTWANT)", "1"),
            _may("peer_count", "int", "Number of peers in the peer exchange (PRUNE)", "0"),
            _may("backoff", "bigint", "Backoff in seconds (PRUNE). Null: none given", "60"),
            *_ENTRY_TAIL,
        ),
        ("kafka_partition", "kafka_offset", "entry_index"),
    ),
    Table(
        "messages",
        "One row per message, from any one of its valid copies. A BATCH_UPDATE that our node published also has a row "
        "if no peer sent it back",
        (
            _MESSAGE,
            _NETWORK,
            _ORIGIN,
            _may("topic", "string", "Topic on which the message was published", _A_TOPIC),
            _may(
                "topic_source",
                "string",
                "name: sent as a name. index: sent as an index into the topic table",
                "name",
            ),
            _must(
                "type",
                "string",
                "UPDATE, QUERY, RESPONSE, KEEPALIVE or BATCH_UPDATE; DATA on any network that is not Ceramic's",
                "UPDATE",
            ),
            _may("from_peer", "string", "Peer id of the author; null: unsigned", _AN_AUTHOR),
            _may(
                "seqno",
                "binary",
                "Sequence number of the message by its author; null: unsigned",
                "0x18ea84e3da4699c6",
            ),
            _may("stream", "string", "StreamID, base36 (UPDATE, QUERY)", _A_STREAM),
            _may("tip", "string", "CID of the new tip (UPDATE)", _A_TIP),
            _may("model", "string", "StreamID of the stream's model, as the author claims (UPDATE)", _A_MODEL),
            _may("sep", "string", "Separator as key/value, as announced (BATCH_UPDATE)", f"model/{_A_MODEL}"),
            _may("batch_cid", "string", "CID of the batch block (BATCH_UPDATE)", _A_BATCH),
            _may(
                "query_id",
                "string",
                "Id that joins a QUERY and its RESPONSEs",
                "EiDJzhPfx5LNWKc2G49O42NvgfXb76bhKwTTdXapSujoGg",
            ),
            _may("tips", "map<string,string>", "Tip CID by StreamID (RESPONSE)", f'{{"{_A_STREAM}": "{_A_TIP}"}}'),
            _may("ts", "bigint", "Time of the sender, ms since the epoch (KEEPALIVE)", "1793534400123"),
            _may("ver", "string", "Version of the sender's node (KEEPALIVE)", "2.35.0"),
            _may("ipfs_ver", "string", "Version of the sender's IPFS node (KEEPALIVE)", "0.22.0"),
            _must(
                "data",
                "binary",
                "The bytes of the message as published. From a log of js-ceramic: rebuilt from the fields in the log",
                "0x7b22747970223a332c227473223a313634363932353936383037377d",
            ),
            _must("verdict", "string", f"Verdict on the copy from which this row was made: {_VERDICT_VALUES}", "valid"),
            _must(
                "remote_peer",
                "string",
                "Peer id of the peer that sent the copy from which this row was made (bep50: node id in hex). "
                "Of a BATCH_UPDATE that our node published: our node, or the peer that sent it back",
                _A_PEER,
            ),
            _OBSERVED,
            _PARTITION,
            _OFFSET,
            _INDEX,
            _may(
                "decoded",
                "string",
                "For type DATA: JSON that the decoder named in network.decoder made of `data`. Null: no decoder, or it "
                "failed",
                '{"sensor": 7, "celsius": 21.5}',
            ),
        ),
        ("network", "message_id"),
    ),
    Table(
        "updates",
        "Every new update of a stream, with its separator and its offset in kiln.updates. Batches are built from "
        "these updates. If an update is announced again, the repeat is only in messages and copies, unless its author "
        "has announced another tip of the stream since",
        (
            _NETWORK,
            _ORIGIN,
            _MESSAGE,
            _may("from_peer", "string", "Peer id of the author; null: unsigned", _AN_AUTHOR),
            _SEPARATOR_KEY,
            _SEPARATOR_VALUE,
            _may(
                "separator_source",
                "string",
                "Source of the separator: genesis (which may have none), topic or model. Null: not known",
                "genesis",
            ),
            _must("stream", "string", "StreamID, base36", _A_STREAM),
            _must("tip", "string", "CID of the new tip", _A_TIP),
            _OBSERVED,
            _must(
                "log_time",
                "timestamp",
                "Log time at this record: the greatest LogAppendTime so far in the partition (UTC). The event time of "
                "the update is the earlier of observed_at and log_time",
                "2026-11-01 12:00:00.141",
            ),
            _must("log_partition", "int", "Partition in kiln.updates", "3"),
            _must("log_offset", "bigint", "Offset in kiln.updates", "90214"),
        ),
        ("network", "origin", "message_id"),
    ),
    Table(
        "batches",
        "Every CIP-123 batch block that Kiln built, with the tips of one window of one separator",
        (
            _must("batch_cid", "string", "CID of the batch block", _A_BATCH),
            _NETWORK,
            _ORIGIN,
            _must("separator_key", "string", "Separator key, e.g. model", "model"),
            _must("separator_value", "string", "Separator value, base36 text as in the topic name", _A_MODEL),
            _must(
                "opened_at",
                "timestamp",
                "t0: event time of the first update of the window (UTC)",
                "2026-11-01 12:00:00.123456",
            ),
            _must("closed_at", "timestamp", "t0 + T, in event time (UTC)", "2026-11-01 12:00:01.123456"),
            _must(
                "emitted_at",
                "timestamp",
                "LogAppendTime of the batch in kiln.batches (UTC)",
                "2026-11-01 12:00:01.530",
            ),
            _must("stream_count", "int", "Number of streams with tips in the block", "1"),
            _must("tip_count", "int", "Number of tips in the block", "1"),
            _must("block_bytes", "int", "Length of the block in bytes", "114"),
            _must("block", "binary", "The block, DAG-CBOR", "0xa16474697073a1783f6b6a7a6c366b63796d3777…"),
        ),
        ("network", "origin", "separator_key", "separator_value", "opened_at", "batch_cid"),
    ),
    Table(
        "batch_tips",
        "The tips of each batch, one row per tip. If a batch with the same tips is built again after more than "
        "dedupe.signed_ttl, its rows are repeated",
        (
            _must("batch_cid", "string", "CID of the batch block", _A_BATCH),
            _must("stream", "string", "StreamID, base36", _A_STREAM),
            _must("tip", "string", "CID of the tip", _A_TIP),
        ),
        ("batch_cid", "stream", "tip"),
    ),
    Table(
        "tips",
        "Every known tip of a stream, and its source",
        (
            _NETWORK,
            _must("stream", "string", "StreamID, base36", _A_STREAM),
            _must("tip", "string", "CID of the tip", _A_TIP),
            _must(
                "source",
                "string",
                "update: from an UPDATE. batch: from the batch of another node",
                "update",
            ),
            _may("batch_cid", "string", "CID of the batch with the tip; null for an update", _A_BATCH),
            _must(
                "observed_at",
                "timestamp",
                "update: capture time of the frame, by the clock of the node that captured it. batch: when the bridge "
                "finished fetching the block (UTC)",
                "2026-11-01 12:00:00.123456",
            ),
        ),
        ("network", "stream", "tip", "source"),
    ),
    Table(
        "streams",
        "Every stream whose genesis the bridge has fetched and verified, with the separator in the genesis",
        (
            _NETWORK,
            _must("stream", "string", "StreamID, base36", _A_STREAM),
            _SEPARATOR_KEY,
            _SEPARATOR_VALUE,
            _must(
                "source",
                "string",
                "Source of the separator: genesis (verified). Claimed separators have no row here",
                "genesis",
            ),
        ),
        ("network", "stream"),
    ),
    Table(
        "publications",
        "Every attempt to publish a batch, with a receipt or an error. After a crash a batch may be announced again, "
        "with a further row",
        (
            _must("batch_cid", "string", "CID of the batch block", _A_BATCH),
            _must("transport", "string", "Transport: gossipsub or bep50", "gossipsub"),
            _may("topic", "string", "Pubsub topic on which the batch was published", _A_TOPIC),
            _may(
                "target",
                "string",
                "Target in the BitTorrent DHT, hex (bep50)",
                "4a533d47ec9c7d95b1ad75f576cffc641853b750",
            ),
            _may(
                "peer_count",
                "bigint",
                "Number of peers that the batch was sent to (bep50: number of contacts known to have it)",
                "8",
            ),
            _must("published_at", "timestamp", "Time of the attempt (UTC)", "2026-11-01 12:00:01.561"),
            _may("error", "string", "Why the attempt failed. Null: it succeeded", "no peer on the topic"),
        ),
        ("batch_cid", "transport", "topic", "published_at"),
    ),
    Table(
        "bundles",
        "Topic bundles: the topics behind each hash in the hellos of peers. A known bundle is never removed",
        (
            _must("hash", "string", "Last 4 bytes of the sha256 of the sorted and joined topics, hex", "2cfd3499"),
            _may("name", "string", "Name of the bundle in the settings, if any", "clay"),
            _must(
                "topics",
                "array<string>",
                "Topics of the bundle, in bytewise order",
                f'["/ceramic/testnet-clay", "{_A_TOPIC}"]',
            ),
            _must("first_seen", "timestamp", "When the bundle first became known (UTC)", "2026-11-01 11:58:20.004"),
        ),
        ("hash",),
    ),
    Table(
        "quarantine",
        "All input that Kiln rejected: the bytes, their origin, and the reason. Nothing is dropped silently",
        (
            _may(
                "kafka_partition",
                "int",
                "Partition of the frame in kiln.frames; null: not from a frame",
                "5",
            ),
            _may(
                "kafka_offset",
                "bigint",
                "Offset of the frame in kiln.frames; null: not from a frame",
                "481516",
            ),
            _may(
                "message_index",
                "int",
                "Position of the message in the RPC of the frame; null: the row is about a whole frame",
                "0",
            ),
            _may(
                "cid", "string", "CID of the block that the row is about, if the bytes are not from a frame", _A_BATCH
            ),
            _must(
                "stage",
                "string",
                "Step that rejected the bytes; docs/RUNBOOK.md explains every stage and reason",
                "message",
            ),
            _must(
                "reason",
                "string",
                "Reason, in snake_case",
                "bad_tip",
            ),
            _may(
                "detail",
                "string",
                "Human-readable reason. If data has only a part of the bytes, detail also states which part",
                "the tip is not a CID",
            ),
            _must(
                "data",
                "binary",
                "The rejected bytes. More than 5 MiB are split into several rows",
                "0x7b22747970223a332c227473223a313634363932353936383037377d",
            ),
            _must(
                "observed_at",
                "timestamp",
                "Capture time of the frame, by the clock of the node that captured it. Without a frame: LogAppendTime "
                "of the record, or when the bridge detected the fault (UTC)",
                "2026-11-01 12:00:00.123456",
            ),
        ),
        (),
    ),
    Table(
        "quarantine_dropped",
        "Rows that the command kiln quarantine drop has removed from quarantine, without their bytes; when and why",
        (
            _must(
                "drop_id", "string", "Id of the drop, shared by all rows that one command removed", "1f0c9a7e5b3d4c21"
            ),
            _must("dropped_at", "timestamp", "When the command ran (UTC)", "2026-11-03 09:00:00"),
            _must("why", "string", "Reason given by the user", "garbage of one client, looked at on 2 November"),
            _may("kafka_partition", "int", "As in quarantine", "5"),
            _may("kafka_offset", "bigint", "As in quarantine", "481516"),
            _may("message_index", "int", "As in quarantine", "0"),
            _may("cid", "string", "As in quarantine", _A_BATCH),
            _must("stage", "string", "As in quarantine", "message"),
            _must("reason", "string", "As in quarantine", "bad_tip"),
            _may("detail", "string", "As in quarantine", "the tip is not a CID"),
            _must("bytes", "bigint", "Number of bytes that the row held", "28"),
            _must(
                "sha256",
                "string",
                "SHA-256, in hex, of the bytes that the row held. If the row came from a frame, the table frames still "
                "has the bytes",
                "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            ),
            _must("observed_at", "timestamp", "As in quarantine", "2026-11-01 12:00:00.123456"),
        ),
        (),
    ),
    Table(
        "quality_results",
        "Results of the quality expectations on the other tables, one row per expectation and run",
        (
            _must("run_id", "string", "Id of the quality run", "2026-11-01T12:00"),
            _must("run_at", "timestamp", "When the run began (UTC)", "2026-11-01 12:00:00"),
            _must("table_name", "string", "Table that was checked", "messages"),
            _must("expectation", "string", "Type of the expectation", "expect_column_values_to_not_be_null"),
            _may(
                "column_name",
                "string",
                "Columns, tables or rule of the expectation. Null: the whole table",
                "observed_at",
            ),
            _must("success", "boolean", "True if the table met the expectation", "true"),
            _may("observed_value", "string", "Observed value", "0"),
            _may("unexpected_count", "bigint", "Number of rows that did not meet the expectation", "0"),
            _may("details", "string", "The full result as JSON", '{"success": true}'),
        ),
        ("run_id", "table_name", "expectation", "column_name"),
    ),
    Table(
        "backfill_runs",
        "History of each backfill run, one row per event. Rows are never changed or removed, even if the run is "
        "dropped",
        (
            _must(
                "run",
                "string",
                "Name of the run. Its tables are in the folder backfill/NAME of the lake",
                "november",
            ),
            _must(
                "event",
                "string",
                "begun, chunk (a chunk was written to the run's tables), done, swapping, swapped, dropping or dropped",
                "chunk",
            ),
            _must(
                "happened_at",
                "timestamp",
                "Time of the event, by the clock of the machine of the run (UTC)",
                "2026-11-05 09:30:00.5",
            ),
            _may(
                "range_from",
                "timestamp",
                "Start of the range of the run or chunk, inclusive (UTC)",
                "2026-11-01 00:00:00",
            ),
            _may(
                "range_to",
                "timestamp",
                "End of the range of the run or chunk, exclusive (UTC)",
                "2026-11-03 00:00:00",
            ),
            _may("rows", "bigint", "Rows that the chunk wrote, over all tables", "2318000"),
            _must(
                "details",
                "string",
                "JSON. begun: the input, and all settings on which the results depend. chunk: rows by table. "
                "swapping, swapped: tables and their versions",
                '{"step": "decoding", "number": 0, "rows": {"updates": 190000}}',
            ),
        ),
        ("run", "event", "happened_at"),
    ),
)

TABLES_VERSION: Final = 2
"""Version of the tables. Raise it with an incompatible change only: new tables and nullable columns are added to
existing lakes."""

TABLES: Final[dict[str, Table]] = {table.name: table for table in _ALL}


DUCKDB_TYPES: Final = {
    "string": "VARCHAR",
    "binary": "BLOB",
    "int": "INTEGER",
    "bigint": "BIGINT",
    "boolean": "BOOLEAN",
    "timestamp": "TIMESTAMPTZ",
    "map<string,string>": "MAP(VARCHAR, VARCHAR)",
    "array<string>": "VARCHAR[]",
}
"""DuckDB types by type of a column."""

TIMES: Final = {
    **dict.fromkeys(("frames", "copies", "subscriptions", "controls", "messages"), "observed_at"),
    **dict.fromkeys(("updates", "tips", "quarantine"), "observed_at"),
    "batches": "emitted_at",
    "publications": "published_at",
    "bundles": "first_seen",
    "quarantine_dropped": "dropped_at",
}
"""Time column of each table that has one."""


def markdown() -> str:
    """Build docs/TABLES.md: `python -m kiln.schemas.delta.tables > docs/TABLES.md`."""
    lines = [
        "# Tables",
        "",
        "<!-- Generated by `python -m kiln.schemas.delta.tables > docs/TABLES.md`: do not edit it here. -->",
        "",
        "The lake folder contains one folder per Delta table. The descriptions of columns are also stored in the",
        "tables as comments.",
        "",
        "- Peer ids, StreamIDs and CIDs are text in their usual form.",
        "- Separator values are base36 text as in the topic name.",
        "- Times are UTC.",
        "- The key of a table consists of the columns that identify a row.",
        "- The examples of a table come from different rows. Binary values are written as 0x and hex, where …",
        "  stands for the rest, and arrays and maps as JSON.",
        "",
        "See [the contracts](design/contracts.md#delta-tables) for what each query reads and writes, and",
        "[SQL.md](SQL.md) for queries.",
        "",
        " · ".join(f"[{name}](#{name})" for name in TABLES),
    ]
    for table in TABLES.values():
        key = ", ".join(f"`{name}`" for name in table.key) or "none. The table is append-only and may hold duplicates"
        writer = next((query.name for query in QUERIES.values() if table.name in query.tables), None)
        filled = f"Filled by the query `{writer}`." if writer else "No streaming query fills the table."
        lines += ["", f"## {table.name}", "", f"{table.comment}.", "", f"Key: {key}.", "", filled, ""]
        lines += ["| column | type | null | description | example |", "| --- | --- | --- | --- | --- |"]
        for column in table.columns:
            null = "yes" if column.nullable else "no"
            comment, example = (text.replace("|", "\\|") for text in (column.comment, column.example))
            lines.append(f"| `{column.name}` | {column.type} | {null} | {comment} | `{example}` |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(markdown(), end="")
