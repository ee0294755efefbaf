"""Schemas of the Delta tables in the lake folder (docs/design/contracts.md, Delta tables).

Peer ids, StreamIDs and CIDs are text in their usual form. Separator values are base36 text, as in topic names. Times
are timestamps in UTC. The tables need no optional features of Delta, so any Delta reader opens them. Changing a comment
here does not change the comments of existing tables.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kiln.schemas.queries import QUERIES


class Column(NamedTuple):
    """A column of a table: `type` is Spark DDL, and `comment` is stored in the table."""

    name: str
    type: str
    comment: str
    nullable: bool = True
    example: str = ""
    """example value for docs/TABLES.md: binary as 0x and hex digits, arrays and maps as JSON; "…" marks an omission"""


class Table(NamedTuple):
    """A Delta table. `key` names the columns that identify a row; if it is empty, rows may repeat."""

    name: str
    comment: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]

    @property
    def ddl(self) -> str:
        """The columns as Spark DDL, with NOT NULL and comments, for CREATE TABLE and StructType.fromDDL."""
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
    "LIVE: captured by the bridge. REPLAY: written by kiln replay or kiln quarantine replay, or read from a file by a "
    "backfill. A batch never mixes both",
    "LIVE",
)
_MESSAGE: Final = _must(
    "message_id",
    "string",
    "Message id. Signed: AUTHOR/SEQNO. Unsigned: sha256/HASH of the data. Over BEP 50: bep50/TARGET/SEQUENCE. From the "
    "log of another node: unverified/AUTHOR/SEQNO. SEQNO, HASH, TARGET and SEQUENCE are in hex",
    f"{_AN_AUTHOR}/18ea84e3da4699c6",
)
_OBSERVED: Final = _must(
    "observed_at",
    "timestamp",
    "Capture time of the frame, by the clock of the node that captured it (UTC)",
    "2026-11-01 12:00:00.123456",
)
_SEPARATOR_KEY: Final = _may(
    "separator_key",
    "string",
    "Separator key, e.g. model. Null: the stream has no separator, or it is not known",
    "model",
)
_SEPARATOR_VALUE: Final = _may(
    "separator_value",
    "string",
    "Separator value, base36 text as in the topic name. Null if separator_key is null",
    _A_MODEL,
)
_PARTITION: Final = _must(
    "kafka_partition",
    "int",
    "Kafka partition of the frame in the topic kiln.frames. Negative: a backfill read the frame from a file",
    "5",
)
_OFFSET: Final = _must(
    "kafka_offset",
    "bigint",
    "Kafka offset of the frame in the topic kiln.frames. From a file: number of the line or frame in it",
    "481516",
)
_INDEX: Final = _must("message_index", "int", "Position of the message among those of the frame's RPC, from 0", "0")
_VERDICT_VALUES: Final = (
    "valid (good signature), invalid (bad signature), unsigned (which the network allows), against_policy (violates "
    "the network's signature policy), not_checked, or unverifiable (from the log of another node, without signatures)"
)

# first columns of the tables subscriptions and controls
_ENTRY_HEAD: Final = (
    _NETWORK,
    _ORIGIN,
    _must(
        "connection",
        "binary",
        "Id of the connection between the two peers, as in the table frames",
        "0x8d0c2b7fa1e94e35b6f0d2c47a19e853",
    ),
    _must("direction", "string", "IN: the remote peer sent the entry. OUT: Kiln's node sent it", "IN"),
    _must("local_peer", "string", "Peer id of Kiln's node", _OUR_NODE),
    _must("remote_peer", "string", "Peer id of the remote peer", _A_PEER),
    _OBSERVED,
)
_ENTRY_TOPIC: Final = (
    _may(
        "topic",
        "string",
        "Name of the topic. Null: the entry has no topic, or gives it by an index that cannot be resolved, or the name "
        "is longer than 4,096 characters or not UTF-8",
        _A_TOPIC,
    ),
    _may(
        "topic_source",
        "string",
        "Form of the topic on the wire: name, or index (into the topic table). Null: the entry has no topic",
        "name",
    ),
    _may(
        "topic_index",
        "bigint",
        "Index of the topic on the wire. Null: the topic was sent as a name, or not at all",
        "17",
    ),
)
_ENTRY_TAIL: Final = (
    _may(
        "raw",
        "binary",
        "Bytes of the entry, without message ids, at most 64 KiB. Set only if the other columns do not represent the "
        "whole entry: its topic could not be resolved or read, or it has unknown fields",
        "0x1005",
    ),
    _must("wire_bytes", "int", "Size of the entry on the wire in bytes, with its tag and length prefix", "77"),
    _PARTITION,
    _OFFSET,
    _must("entry_index", "int", "Position of the entry among the rows of its frame in this table, from 0", "0"),
)

_ALL: Final = (
    Table(
        "frames",
        "Every frame (gossipsub RPC, or BEP 50 datagram) that Kiln's node received or sent, exactly as on the wire",
        (
            _must(
                "network",
                "string",
                "Network on which the frame was captured, e.g. testnet-clay",
                "testnet-clay",
            ),
            _must(
                "connection",
                "binary",
                "Id of the connection: 16 bytes, different for each connection to a peer",
                "0x8d0c2b7fa1e94e35b6f0d2c47a19e853",
            ),
            _must("direction", "string", "IN: Kiln's node received the frame. OUT: Kiln's node sent the frame", "IN"),
            _must(
                "local_peer",
                "string",
                "Peer id of the node that captured the frame: Kiln's node or, for a frame from a file, another node "
                "(bep50: node id in hex). Empty: not known",
                _OUR_NODE,
            ),
            _must(
                "remote_peer", "string", "Peer id of the remote peer (bep50: node id in hex). Empty: not known", _A_PEER
            ),
            _must(
                "protocol",
                "string",
                "Negotiated protocol, e.g. /meshsub/1.3.0, or bep50. For a frame from another program's file: its "
                "format",
                "/meshsub/1.3.0",
            ),
            _OBSERVED,
            _must(
                "sequence",
                "bigint",
                "Number of the frame on this connection in this direction: 1, 2, 3 … A gap is a lost frame. From a log "
                "file: number of the line",
                "17",
            ),
            _must(
                "payload",
                "binary",
                "The RPC (bep50: the datagram) exactly as on the wire. Empty: the closing frame, which marks the end "
                "of the pubsub stream in this direction",
                "0x1a191a170a152f636572616d69632f746573746e65742d636c6179",
            ),
            _must(
                "hello_in",
                "binary",
                "Topic table (ExtTopicTable) in the hello, the first RPC of the remote peer. Empty: no topic table, "
                "or an invalid one",
                "0x0a042cfd3499",
            ),
            _must(
                "hello_out",
                "binary",
                "Topic table (ExtTopicTable) in the hello, the first RPC of Kiln's node",
                "0x0a042cfd3499",
            ),
            _must(
                "verdicts",
                "binary",
                "Signature verdicts at capture, one byte per message in the payload: 0 not_checked, 1 valid, 2 "
                "invalid, 3 unsigned, 4 against_policy, 5 unverifiable. Empty: not checked. In an OUT frame, only "
                "messages that Kiln's node published have a verdict",
                "0x01",
            ),
            _ORIGIN,
            _must(
                "remote_address",
                "binary",
                "Address of the remote peer: binary multiaddr (bep50: compact socket address). Empty: not known",
                "0x04cb007107060fa1",
            ),
            _must(
                "declared_length",
                "bigint",
                "True length in bytes of an RPC that was too long to store: the payload has only its first 64 KiB. 0: "
                "the payload is complete",
                "0",
            ),
            _PARTITION,
            _OFFSET,
            _must(
                "kafka_timestamp",
                "timestamp",
                "Kafka's LogAppendTime of the frame in kiln.frames (UTC). From a file: same as observed_at",
                "2026-11-01 12:00:00.125",
            ),
            _may(
                "agent",
                "string",
                "Agent version of the remote peer. Set, if known, only in the closing IN frame (empty payload) of a "
                "connection",
                "kubo/0.43.1/",
            ),
            _may(
                "end_reason",
                "string",
                "Reason why the connection ended. Null except in its last IN frame, whose payload is empty",
                "stream closed by the peer",
            ),
            _may(
                "dialled",
                "boolean",
                "True if Kiln's node opened the connection. Null except in its last IN frame, whose payload is empty",
                "true",
            ),
        ),
        ("connection", "direction", "sequence"),
    ),
    Table(
        "copies",
        "Every received copy of a gossip message, with its sender and time. Gossip delivers a message several times. "
        "Copies of rejected messages are included",
        (
            _NETWORK,
            _MESSAGE,
            _must("remote_peer", "string", "Peer id of the peer that sent this copy. Empty: not known", _A_PEER),
            _OBSERVED,
            _must("verdict", "string", f"Signature verdict on this copy: {_VERDICT_VALUES}", "valid"),
            _PARTITION,
            _OFFSET,
            _INDEX,
        ),
        ("kafka_partition", "kafka_offset", "message_index"),
    ),
    Table(
        "subscriptions",
        "Every SUBSCRIBE and UNSUBSCRIBE that Kiln's node received or sent",
        (
            *_ENTRY_HEAD,
            _must("subscribe", "boolean", "True: SUBSCRIBE. False: UNSUBSCRIBE", "true"),
            *_ENTRY_TOPIC,
            *_ENTRY_TAIL,
        ),
        ("kafka_partition", "kafka_offset", "entry_index"),
    ),
    Table(
        "controls",
        "Every entry (IHAVE, GRAFT …) of the gossipsub control messages that Kiln's node received or sent",
        (
            *_ENTRY_HEAD,
            _must(
                "kind",
                "string",
                "IHAVE, IWANT, IDONTWANT, GRAFT or PRUNE; EXTENSIONS (sent in the first RPC); or UNKNOWN (unknown "
                "fields of the RPC or of its control message)",
                "IHAVE",
            ),
            *_ENTRY_TOPIC,
            _may(
                "message_ids",
                "array<string>",
                "Message ids of an IHAVE, IWANT or IDONTWANT, as in the table messages; ids of unknown form are in "
                "hex. Only the first 5,000 ids of an RPC are stored",
                f'["{_AN_AUTHOR}/18ea84e3da4699c6"]',
            ),
            _may(
                "message_id_count",
                "int",
                "Number of message ids on the wire (IHAVE, IWANT, IDONTWANT), including those not stored",
                "1",
            ),
            _may("peer_count", "int", "Number of peers in the peer exchange of a PRUNE", "0"),
            _may("backoff", "bigint", "Backoff of a PRUNE in seconds. Null: the PRUNE has none", "60"),
            *_ENTRY_TAIL,
        ),
        ("kafka_partition", "kafka_offset", "entry_index"),
    ),
    Table(
        "messages",
        "One row per valid message, however many copies arrived. A BATCH_UPDATE that Kiln's node published has a row "
        "even if no peer sent it back",
        (
            _MESSAGE,
            _NETWORK,
            _ORIGIN,
            _may("topic", "string", "Topic on which the message was published", _A_TOPIC),
            _may(
                "topic_source",
                "string",
                "Form of the topic on the wire: name, or index (into the topic table)",
                "name",
            ),
            _must(
                "type",
                "string",
                "UPDATE, QUERY, RESPONSE, KEEPALIVE or BATCH_UPDATE. On networks other than Ceramic: DATA",
                "UPDATE",
            ),
            _may("from_peer", "string", "Peer id of the author. Null: the message is unsigned", _AN_AUTHOR),
            _may(
                "seqno",
                "binary",
                "Sequence number that the author gave the message. Null: the message is unsigned",
                "0x18ea84e3da4699c6",
            ),
            _may("stream", "string", "StreamID, base36. Set only for UPDATE and QUERY", _A_STREAM),
            _may("tip", "string", "CID of the new tip. Set only for UPDATE", _A_TIP),
            _may(
                "model",
                "string",
                "StreamID of the stream's model, as claimed by the author. Set only for UPDATE",
                _A_MODEL,
            ),
            _may(
                "sep",
                "string",
                "Separator that the message names, as KEY/VALUE. Set only for BATCH_UPDATE",
                f"model/{_A_MODEL}",
            ),
            _may("batch_cid", "string", "CID of the batch block. Set only for BATCH_UPDATE", _A_BATCH),
            _may(
                "query_id",
                "string",
                "Id that a QUERY and its RESPONSEs have in common. Null for other types",
                "EiDJzhPfx5LNWKc2G49O42NvgfXb76bhKwTTdXapSujoGg",
            ),
            _may(
                "tips",
                "map<string,string>",
                "CID of the tip by StreamID. Set only for RESPONSE",
                f'{{"{_A_STREAM}": "{_A_TIP}"}}',
            ),
            _may(
                "ts",
                "bigint",
                "Time by the author's clock, ms since the epoch. Set only for KEEPALIVE",
                "1793534400123",
            ),
            _may("ver", "string", "Version of the author's node. Set only for KEEPALIVE", "2.35.0"),
            _may("ipfs_ver", "string", "Version of the author's IPFS node. Set only for KEEPALIVE", "0.22.0"),
            _must(
                "data",
                "binary",
                "Data of the message, exactly as published. From a log of js-ceramic: rebuilt from the logged fields",
                "0x7b22747970223a332c227473223a313634363932353936383037377d",
            ),
            _must(
                "verdict",
                "string",
                f"Signature verdict on the copy from which this row was made: {_VERDICT_VALUES}",
                "valid",
            ),
            _must(
                "remote_peer",
                "string",
                "Peer id of the peer that sent the copy from which this row was made (bep50: node id in hex). "
                "For a BATCH_UPDATE that Kiln's node published: Kiln's node, or the peer that sent it back",
                _A_PEER,
            ),
            _OBSERVED,
            _PARTITION,
            _OFFSET,
            _INDEX,
            _may(
                "decoded",
                "string",
                "Result of your decoder (setting network.decoder) for the data of a message of type DATA, as JSON. "
                "Null: no decoder is set, or it failed",
                '{"sensor": 7, "celsius": 21.5}',
            ),
        ),
        ("network", "message_id"),
    ),
    Table(
        "updates",
        "Every new update of a stream, with its separator and its offset in kiln.updates. Kiln builds batches from "
        "these updates. A repeated announcement of a tip has no row here, unless its author has announced another tip "
        "of the stream since",
        (
            _NETWORK,
            _ORIGIN,
            _MESSAGE,
            _may("from_peer", "string", "Peer id of the author. Null: the message is unsigned", _AN_AUTHOR),
            _SEPARATOR_KEY,
            _SEPARATOR_VALUE,
            _may(
                "separator_source",
                "string",
                "Source of the separator: genesis (verified), topic or model (claims). Null: the separator is not "
                "known. If the source is genesis and separator_key is null, the stream has no separator",
                "genesis",
            ),
            _must("stream", "string", "StreamID, base36", _A_STREAM),
            _must("tip", "string", "CID of the new tip", _A_TIP),
            _OBSERVED,
            _must(
                "log_time",
                "timestamp",
                "Greatest LogAppendTime in this partition of kiln.updates up to this record (UTC). The event time of "
                "the update is the earlier of observed_at and log_time",
                "2026-11-01 12:00:00.141",
            ),
            _must(
                "log_partition",
                "int",
                "Kafka partition of the update in the topic kiln.updates. -1: the update is from a backfill, so it "
                "was never in that topic",
                "3",
            ),
            _must(
                "log_offset",
                "bigint",
                "Kafka offset of the update in the topic kiln.updates. If log_partition is -1: capture time in µs "
                "since the epoch",
                "90214",
            ),
        ),
        ("network", "origin", "message_id"),
    ),
    Table(
        "batches",
        "Every CIP-123 batch that Kiln built: the tips of one window of one separator",
        (
            _must("batch_cid", "string", "CID of the batch block", _A_BATCH),
            _NETWORK,
            _ORIGIN,
            _must("separator_key", "string", "Separator key, e.g. model", "model"),
            _must("separator_value", "string", "Separator value, base36 text as in the topic name", _A_MODEL),
            _must(
                "opened_at",
                "timestamp",
                "Start of the window, t0: event time of its first update (UTC)",
                "2026-11-01 12:00:00.123456",
            ),
            _must(
                "closed_at",
                "timestamp",
                "End of the window, t0 + T, in event time (UTC). T is the setting batch.window",
                "2026-11-01 12:00:01.123456",
            ),
            _must(
                "emitted_at",
                "timestamp",
                "Kafka's LogAppendTime of the batch in kiln.batches (UTC)",
                "2026-11-01 12:00:01.530",
            ),
            _must("stream_count", "int", "Number of streams with tips in the block", "1"),
            _must("tip_count", "int", "Number of tips in the block", "1"),
            _must("block_bytes", "int", "Length of the block in bytes", "114"),
            _must("block", "binary", "Batch block, DAG-CBOR", "0xa16474697073a1783f6b6a7a6c366b63796d3777…"),
        ),
        ("network", "origin", "separator_key", "separator_value", "opened_at", "batch_cid"),
    ),
    Table(
        "batch_tips",
        "The tips of each batch, one row per tip. If Kiln builds the same block again after dedupe.signed_ttl, its "
        "rows repeat",
        (
            _must("batch_cid", "string", "CID of the batch block", _A_BATCH),
            _must("stream", "string", "StreamID, base36", _A_STREAM),
            _must("tip", "string", "CID of the tip", _A_TIP),
        ),
        ("batch_cid", "stream", "tip"),
    ),
    Table(
        "tips",
        "Every known tip (newest event) of a stream, with its source",
        (
            _NETWORK,
            _must("stream", "string", "StreamID, base36", _A_STREAM),
            _must("tip", "string", "CID of the tip", _A_TIP),
            _must(
                "source",
                "string",
                "Source of the tip. update: an UPDATE. batch: a batch of another node",
                "update",
            ),
            _may(
                "batch_cid", "string", "CID of the batch that contains the tip. Null: the source is an update", _A_BATCH
            ),
            _must(
                "observed_at",
                "timestamp",
                "For an update: capture time of the frame, by the clock of the node that captured it. For a batch: "
                "time when the bridge had fetched the block (UTC)",
                "2026-11-01 12:00:00.123456",
            ),
        ),
        ("network", "stream", "tip", "source"),
    ),
    Table(
        "streams",
        "Every stream whose genesis (first event) the bridge has fetched and verified, with the separator in it",
        (
            _NETWORK,
            _must("stream", "string", "StreamID, base36", _A_STREAM),
            _may("separator_key", "string", "Separator key, e.g. model. Null: the stream has no separator", "model"),
            _SEPARATOR_VALUE,
            _must(
                "source",
                "string",
                "Source of the separator: always genesis, because unverified claims have no row here",
                "genesis",
            ),
        ),
        ("network", "stream"),
    ),
    Table(
        "publications",
        "Every attempt to publish a batch, with the number of peers or the error. After a crash, a batch may be "
        "published again and have another row",
        (
            _must("batch_cid", "string", "CID of the batch block", _A_BATCH),
            _must("transport", "string", "Transport by which the batch was published: gossipsub or bep50", "gossipsub"),
            _may("topic", "string", "Pubsub topic on which the batch was published", _A_TOPIC),
            _may(
                "target",
                "string",
                "Target of the announcement in the BitTorrent DHT, in hex (bep50)",
                "4a533d47ec9c7d95b1ad75f576cffc641853b750",
            ),
            _may(
                "peer_count",
                "bigint",
                "Number of peers to which the batch was sent (bep50: number of nodes known to have it)",
                "8",
            ),
            _must("published_at", "timestamp", "Time of the attempt to publish (UTC)", "2026-11-01 12:00:01.561"),
            _may("error", "string", "Reason why publishing failed. Null: it succeeded", "no peer on the topic"),
        ),
        ("batch_cid", "transport", "topic", "published_at"),
    ),
    Table(
        "bundles",
        "Known topic bundles: sets of topics that peers may send by index (Topic Table Extension). A peer's first RPC "
        "names its bundles by hash. Rows are never removed",
        (
            _must(
                "hash",
                "string",
                "Hash of the bundle: the last 4 bytes of the sha256 of its sorted and concatenated topics, in hex",
                "2cfd3499",
            ),
            _may("name", "string", "Name of the bundle in the settings. Null: it is not in the settings", "clay"),
            _must(
                "topics",
                "array<string>",
                "Topics in the topic bundle, in bytewise order",
                f'["/ceramic/testnet-clay", "{_A_TOPIC}"]',
            ),
            _must(
                "first_seen",
                "timestamp",
                "Time when Kiln first knew the topics of the bundle (UTC)",
                "2026-11-01 11:58:20.004",
            ),
        ),
        ("hash",),
    ),
    Table(
        "quarantine",
        "All input that Kiln rejected: the bytes, their position in Kafka, and the reason",
        (
            _may(
                "kafka_partition",
                "int",
                "Kafka partition of the frame in the topic kiln.frames, or negative as in the table frames. Null: the "
                "bytes are not from a frame",
                "5",
            ),
            _may(
                "kafka_offset",
                "bigint",
                "Kafka offset of the frame in the topic kiln.frames. Null: the bytes are not from a frame",
                "481516",
            ),
            _may(
                "message_index",
                "int",
                "Position of the message in the frame's RPC, from 0. Null: the row is not about a single message",
                "0",
            ),
            _may(
                "cid", "string", "CID of the block that the row is about. Null: the row is not about a block", _A_BATCH
            ),
            _must(
                "stage",
                "string",
                "Processing step that rejected the bytes. docs/RUNBOOK.md explains every stage and reason",
                "message",
            ),
            _must(
                "reason",
                "string",
                "Code of the reason. docs/RUNBOOK.md explains every stage and reason",
                "bad_tip",
            ),
            _may(
                "detail",
                "string",
                "Explanation of the reason. If data has only a part of the bytes, detail names the part",
                "the tip is not a CID",
            ),
            _must(
                "data",
                "binary",
                "The rejected bytes. Bytes over 5 MiB are split over several rows",
                "0x7b22747970223a332c227473223a313634363932353936383037377d",
            ),
            _must(
                "observed_at",
                "timestamp",
                "Capture time of the frame, by the clock of the node that captured it. If the bytes are not from a "
                "frame: LogAppendTime of the record, or time when the bridge rejected the bytes (UTC)",
                "2026-11-01 12:00:00.123456",
            ),
        ),
        (),
    ),
    Table(
        "quarantine_dropped",
        "Rows that the command kiln quarantine drop has removed from the table quarantine, with the time and the "
        "reason of the removal, and with a hash in place of the bytes",
        (
            _must(
                "drop_id",
                "string",
                "Id of the execution of kiln quarantine drop that removed the row",
                "1f0c9a7e5b3d4c21",
            ),
            _must("dropped_at", "timestamp", "Time when the command ran (UTC)", "2026-11-03 09:00:00"),
            _must(
                "why",
                "string",
                "Reason for the removal, given by the user",
                "garbage of one client, looked at on 2 November",
            ),
            _may("kafka_partition", "int", "As in the table quarantine", "5"),
            _may("kafka_offset", "bigint", "As in the table quarantine", "481516"),
            _may("message_index", "int", "As in the table quarantine", "0"),
            _may("cid", "string", "As in the table quarantine", _A_BATCH),
            _must("stage", "string", "As in the table quarantine", "message"),
            _must("reason", "string", "As in the table quarantine", "bad_tip"),
            _may("detail", "string", "As in the table quarantine", "the tip is not a CID"),
            _must("bytes", "bigint", "Length of the removed data in bytes", "28"),
            _must(
                "sha256",
                "string",
                "SHA-256 of the removed data, in hex. If the row came from a frame, the table frames still has the "
                "bytes",
                "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            ),
            _must("observed_at", "timestamp", "As in the table quarantine", "2026-11-01 12:00:00.123456"),
        ),
        (),
    ),
    Table(
        "quality_results",
        "Results of the data quality checks of the other tables: one row per expectation and check run",
        (
            _must("run_id", "string", "Id of the check run", "5f0c9a7e5b3d4c211f0c9a7e5b3d4c21"),
            _must("run_at", "timestamp", "Time when the check run began (UTC)", "2026-11-01 12:00:00"),
            _must("table_name", "string", "Name of the checked table", "messages"),
            _must("expectation", "string", "Name of the expectation", "expect_column_values_to_not_be_null"),
            _may(
                "column_name",
                "string",
                "Column, table or rule that the expectation is about. Null: the whole table",
                "observed_at",
            ),
            _must("success", "boolean", "True if the table met the expectation", "true"),
            _may("observed_value", "string", "Observed value, as text", "3 of 5,000 rows"),
            _may("unexpected_count", "bigint", "Number of faults: rows or keys that did not meet the expectation", "0"),
            _may("details", "string", "Full result as JSON, as kiln quality --json prints it", '{"success": true}'),
        ),
        ("run_id", "table_name", "expectation", "column_name"),
    ),
    Table(
        "backfill_runs",
        "History of the backfill runs, one row per event. Rows are never changed or removed, even if you drop a run",
        (
            _must(
                "run",
                "string",
                "Name of the backfill run. Its tables are in the folder backfill/NAME of the lake",
                "november",
            ),
            _must(
                "event",
                "string",
                "Event of the run: begun, chunk (a chunk was written to the run's tables), done, swapping, swapped, "
                "dropping or dropped",
                "chunk",
            ),
            _must(
                "happened_at",
                "timestamp",
                "Time of the event, by the clock of the machine that executes the run (UTC)",
                "2026-11-05 09:30:00.5",
            ),
            _may(
                "range_from",
                "timestamp",
                "Start of the time range of the run or chunk, inclusive (UTC)",
                "2026-11-01 00:00:00",
            ),
            _may(
                "range_to",
                "timestamp",
                "End of the time range of the run or chunk, exclusive (UTC)",
                "2026-11-03 00:00:00",
            ),
            _may("rows", "bigint", "Number of rows that the chunk wrote, over all tables", "2318000"),
            _must(
                "details",
                "string",
                "Details as JSON. begun: the input, and all settings on which the results depend. chunk: number of "
                "rows by table. swapping, swapped: tables and their versions",
                '{"step": "decoding", "number": 0, "rows": {"updates": 190000}}',
            ),
        ),
        ("run", "event", "happened_at"),
    ),
)

TABLES_VERSION: Final = 2
"""Version of the table schemas. Raise it only for an incompatible change: at each start, Kiln adds new tables and new
nullable columns to an existing lake."""

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
"""DuckDB type for each Spark type that columns have."""

TIMES: Final = {
    **dict.fromkeys(("frames", "copies", "subscriptions", "controls", "messages"), "observed_at"),
    **dict.fromkeys(("updates", "tips", "quarantine"), "observed_at"),
    "batches": "emitted_at",
    "publications": "published_at",
    "bundles": "first_seen",
    "quarantine_dropped": "dropped_at",
}
"""Column for selecting rows by time, by table name. Tables that are never selected by time are missing."""


def markdown() -> str:
    """Build the text of docs/TABLES.md: `python -m kiln.schemas.delta.tables > docs/TABLES.md`."""
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
        "- The examples of a table come from different rows. Binary values are written as 0x and hex digits, with …",
        "  for omitted digits, and arrays and maps as JSON.",
        "",
        "See [the contracts](design/contracts.md#delta-tables) for what each query reads and writes, and",
        "[SQL.md](SQL.md) for queries.",
        "",
        " · ".join(f"[{name}](#{name})" for name in TABLES),
    ]
    for table in TABLES.values():
        key = ", ".join(f"`{name}`" for name in table.key) or "none. The table may hold duplicates"
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
