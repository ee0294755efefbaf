"""Every counter and gauge that Kiln's bridge reports: its name, its unit, and a sentence.

The name is the path in `STATE/bridge/status.json`: `[]` stands for each entry of a list, `*` for any key. Counters
count since the bridge started, if nothing else is said. A number that the bridge reports and this list lacks fails
tests/unit/schemas/test_metrics.py. `markdown()` is docs/METRICS.md; write that file anew with
`python -m kiln.schemas.metrics > docs/METRICS.md`.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from kiln.schemas.exposition import markdown as exposed

Kind = Literal["counter", "gauge"]


class Metric(NamedTuple):
    """A number that the bridge reports."""

    name: str
    kind: Kind
    """counter: only grows while the bridge runs; gauge: as things are now"""
    unit: str
    says: str


class MetricGroup(NamedTuple):
    """Metrics that stand side by side in the status."""

    title: str
    path: str
    """what stands before each name in the status"""
    note: str
    metrics: tuple[Metric, ...]


def _counter(name: str, unit: str, says: str) -> Metric:
    return Metric(name, "counter", unit, says)


def _gauge(name: str, unit: str, says: str) -> Metric:
    return Metric(name, "gauge", unit, says)


GROUPS: Final = (
    MetricGroup(
        "The bridge",
        "",
        "",
        (
            _counter("frames_in", "frames", "Frames that peers sent and the node captured."),
            _counter("frames_out", "frames", "Frames that the node sent to peers."),
            _counter("bytes_in", "bytes", "Bytes of RPCs that peers sent, without length prefixes."),
            _counter("bytes_out", "bytes", "Bytes that the node wrote to peers, with length prefixes."),
            _gauge(
                "kept_out", "peers", "Peers that the node hung up on for their conduct, and keeps out for `bridge.ban`."
            ),
            _gauge("topics_refused", "topics", "Topics of the interests that lack room and are not joined."),
            _counter("topic_refusals", "topics", "Topics that the node did not join, each as often as it came anew."),
            _gauge("mesh.*", "peers", "Peers in the mesh of a topic."),
        ),
    ),
    MetricGroup(
        "A peer",
        "peers[].",
        "since the stream opened",
        (
            _gauge("score", "points", "The score that the router gives the peer. Below 0 the peer enters no mesh."),
            _counter("frames_in", "frames", "Frames that the peer sent."),
            _counter("frames_out", "frames", "Frames that the node sent to the peer."),
            _counter(
                "dropped",
                "RPCs",
                "RPCs for the peer that the node dropped, because too much waited for the peer.",
            ),
            _gauge("topics", "topics", "Topics of the peer that the router remembers."),
            _gauge("queued", "bytes", "Bytes that wait to be sent to the peer."),
            _counter("bytes_in", "bytes", "Bytes of captured frames that the peer sent."),
            _counter("bytes_out", "bytes", "Bytes of captured frames that the node sent to the peer."),
        ),
    ),
    MetricGroup(
        "A topic by index",
        "savings[].",
        "over all peers that there were; the same stands in `peers[].savings[]` for one peer",
        (
            _counter("references", "references", "References to a topic by index."),
            _counter("as_names", "bytes", "Bytes that the references would have taken as names."),
            _counter("as_indices", "bytes", "Bytes that the references took as indices."),
        ),
    ),
    MetricGroup(
        "The spool",
        "spool.",
        "",
        (
            _counter("put", "frames", "Frames that the bridge captured."),
            _counter("acknowledged", "frames", "Frames that Kafka has, with those of an earlier run's spool."),
            _gauge(
                "waiting",
                "frames",
                "Frames that Kafka does not have yet. Of a spool from an earlier run: at most.",
            ),
            _gauge("memory_bytes", "bytes", "Bytes of memory that waiting frames take."),
            _gauge("disk_bytes", "bytes", "Bytes of the spool's files."),
            _counter("spooled", "frames", "Frames that the bridge wrote to the spool."),
            _gauge("free_bytes", "bytes", "Bytes free on the disk of the spool."),
            _counter("torn_bytes", "bytes", "Bytes of the spool that the bridge could not read back."),
        ),
    ),
    MetricGroup(
        "Other bridges of the network",
        "sharing.",
        "",
        (
            _gauge("round", "number", "Kafka's number of the round of bridges that live. Each change has a new round."),
            _gauge("topics_left", "topics", "Topics of the interests that another bridge hears."),
        ),
    ),
    MetricGroup(
        "The IPFS node",
        "ipfs_node.",
        "where `ipfs.api` is set",
        (
            _gauge("connections", "peers", "Peers that the IPFS node is connected to, whoever they are."),
            _gauge("gossip_peers", "peers", "Gossip peers in good standing that speak bitswap."),
            _gauge("gossip_connected", "peers", "Of these, those that the IPFS node is connected to."),
            _gauge("gossip_left_out", "peers", "Of these, those beyond the 64 that the IPFS node is connected to."),
            _counter("provided", "blocks", "Blocks that the IPFS node told its routing of."),
            _counter(
                "unprovided",
                "blocks",
                "Blocks that the routing was not told of: too many waited, or the node could not. Connected peers can "
                "fetch these blocks too.",
            ),
        ),
    ),
    MetricGroup(
        "The publisher",
        "publisher.",
        "",
        (
            _counter("published", "batches", "Receipts of publications that reached a peer."),
            _counter("failed", "batches", "Receipts with an error: no peer in time, too old, refused by IPFS."),
            _counter("lost", "records", "Records of `kiln.batches` that Kafka let go before the publisher read them."),
            _counter("places_lost", "times", "How often Kafka had lost the publisher's place in a partition."),
        ),
    ),
    MetricGroup(
        "The fetcher",
        "fetcher.",
        "",
        (
            _gauge("waiting", "records", "Records of `kiln.wanted` that wait."),
            _gauge("fetching", "blocks", "Blocks that the fetcher asks IPFS for now."),
            _counter("places_lost", "times", "How often Kafka had lost the fetcher's place in a partition."),
            _gauge("claimed", "geneses", "Geneses that are still to be held against what updates claim."),
        ),
    ),
    MetricGroup(
        "What became of the fetcher's records",
        "fetcher.counts.",
        "",
        (
            _counter("released", "updates", "Updates that went on to `kiln.updates` with what their genesis says."),
            _counter("blocks", "batches", "Announced batches of which the block went on to `kiln.blocks`."),
            _counter("streams", "streams", "Answers that the fetcher wrote to `kiln.streams`."),
            _counter("quarantined", "records", "Records that the fetcher wrote to quarantine."),
            _counter("own", "batches", "Batches of this bridge that came back."),
            _counter("not_of_interest", "batches", "Announced batches of separators that no interest covers."),
            _counter("again", "batches", "Announced batches that the fetcher has fetched of late."),
            _counter("other_network", "records", "Records of another network than the bridge's."),
            _counter("lost", "records", "Records that Kafka let go before the fetcher was done with them."),
            _counter("claims", "updates", "Updates that went on under a separator that is only claimed."),
            _counter("claims_checked", "geneses", "Geneses that came and were held against what updates claim."),
            _counter("claims_unchecked", "geneses", "Geneses that claims gave up: malformed, or not had in six tries."),
            _counter(
                "claims_dropped",
                "geneses",
                "Geneses that gave way to others, as the fetcher remembers 10,000 that are claimed.",
            ),
            _counter(
                "claims_untold",
                "updates",
                "Claims that quarantine will not tell if they are false, as four others of their genesis came first.",
            ),
            _counter(
                "contradicts_genesis",
                "updates",
                "False claims that the fetcher wrote to quarantine: the first of each, and all that waited.",
            ),
            _counter(
                "claimed_already",
                "updates",
                "Updates that had waited, and that were in `kiln.updates` meanwhile under the same separator.",
            ),
            _counter("wanted_malformed", "records", "Records of `kiln.wanted` that ask for nothing that can be given."),
            _counter(
                "genesis_unavailable",
                "records",
                "Updates given up, because no peer gave the block of the genesis in time.",
            ),
            _counter("block_unavailable", "records", "Batches given up, because no peer gave the block in time."),
            _counter("block_malformed", "records", "Batches given up, because the block is no batch."),
            _counter("block_too_large", "records", "Records given up, because the block is larger than Kiln reads."),
            _counter(
                "block_hash_mismatch",
                "records",
                "Records given up, because the bytes that came have another hash than the CID names.",
            ),
            _counter(
                "block_cid_mismatch",
                "records",
                "Records given up, because the IPFS node keeps the block under another CID.",
            ),
            _counter("cid_malformed", "records", "Records given up, because a CID is none."),
            _counter(
                "cid_hash_unsupported",
                "records",
                "Records given up, because the CID names a hash other than sha2-256.",
            ),
            _counter(
                "cid_codec_unsupported",
                "records",
                "Records given up, because the CID has a codec that no such block has.",
            ),
            _counter("genesis_malformed", "records", "Updates given up, because the block is no event."),
            _counter(
                "genesis_not_init",
                "records",
                "Updates given up, because the block is an event, and not an init event.",
            ),
            _counter(
                "fetch_fault",
                "records",
                "Records given up, because reading the block went wrong in a way that Kiln does not know. The "
                "log has the error.",
            ),
            _counter("sep_missing", "streams", "Streams without a separator: the header of the genesis has no `sep`."),
            _counter("sep_not_text", "streams", "Streams without a separator: `sep` is no text."),
            _counter(
                "value_missing",
                "streams",
                "Streams without a separator: the header lacks the field that `sep` names.",
            ),
            _counter("value_not_bytes", "streams", "Streams without a separator: that field is no byte string."),
            _counter("value_empty", "streams", "Streams without a separator: that field is empty."),
            _counter(
                "bad_separator",
                "streams",
                "Streams without a separator: no topic name can hold the key or the value.",
            ),
        ),
    ),
    MetricGroup(
        "BEP 50",
        "bep50.",
        "where `bep50.enabled`",
        (
            _gauge("joined", "topics", "Topics of the overlay that the bridge is on."),
            _gauge("contacts", "contacts", "Contacts of all joined topics."),
            _counter("items", "items", "New items, the bridge's own included."),
            _counter("stored", "nodes", "Nodes of the plain DHT that took an item of the bridge."),
            _counter("frames_in", "frames", "Datagrams with an item that others sent."),
            _counter("frames_out", "frames", "Datagrams with an item that the bridge sent."),
            _counter(
                "gaps",
                "items",
                "Items that do not name the batch of the item before: announcements between the two are lost.",
            ),
        ),
    ),
    MetricGroup(
        "A topic of BEP 50",
        "bep50.topics[].",
        "",
        (
            _gauge("contacts", "contacts", "Contacts of the topic."),
            _gauge("sequence", "number", "Sequence number of the newest item."),
        ),
    ),
    MetricGroup(
        "The publisher to BEP 50",
        "bep50.publisher.",
        "",
        (
            _counter("published", "batches", "Receipts of publications that reached a peer."),
            _counter("failed", "batches", "Receipts with an error: no peer in time, too old, refused by IPFS."),
            _counter("lost", "records", "Records of `kiln.batches` that Kafka let go before the publisher read them."),
            _counter("places_lost", "times", "How often Kafka had lost the publisher's place in a partition."),
        ),
    ),
    MetricGroup(
        "Datagrams that changed nothing",
        "bep50.dropped.",
        "",
        (
            _counter("unusable_source", "datagrams", "The source address is none that a datagram can be sent to."),
            _counter("not_asked_for", "datagrams", "An answer to no query of the bridge."),
            _counter("too_many_queries", "datagrams", "Queries of one address over its rate."),
            _counter("bad_item", "datagrams", "An item whose signature, key or salt is not the topic's."),
            _counter("too_big", "datagrams", "A datagram larger than Kiln reads."),
            _counter("not_bencoded", "datagrams", "No canonical bencoded dictionary."),
            _counter("bad_transaction", "datagrams", "`t` is absent, no string, or too long."),
            _counter("bad_topic", "datagrams", "`c` is there and is not 20 bytes."),
            _counter("bad_message", "datagrams", "`y` is unknown, or what it promises is absent."),
            _counter("bad_id", "datagrams", "There is no node id of 20 bytes."),
            _counter(
                "refused_203",
                "datagrams",
                "Queries that the bridge refused: malformed, bad token, unknown topic, another item.",
            ),
            _counter(
                "refused_204",
                "datagrams",
                "Queries that the bridge refused: the method is unknown, or prohibited on a topic.",
            ),
            _counter("refused_205", "datagrams", "Queries that the bridge refused: the value is too big."),
            _counter("refused_206", "datagrams", "Queries that the bridge refused: the signature is invalid."),
            _counter("refused_207", "datagrams", "Queries that the bridge refused: the salt is too big."),
            _counter(
                "refused_301",
                "datagrams",
                "Queries that the bridge refused: `cas` is not the sequence number of the item.",
            ),
            _counter(
                "refused_302",
                "datagrams",
                "Queries that the bridge refused: the sequence number is less than the item's.",
            ),
        ),
    ),
    MetricGroup(
        "Datagrams that the system did not take",
        "bep50.unsent.",
        "",
        (
            _counter("no_socket", "datagrams", "The bridge listens on no address of that family."),
            _counter(
                "*",
                "datagrams",
                "The operating system refused the datagram: the name of the error, such as `OSError`.",
            ),
        ),
    ),
    MetricGroup(
        "Node and router",
        "counters.",
        "",
        (
            _counter("frames_in", "frames", "As `frames_in` of the bridge."),
            _counter("frames_out", "frames", "As `frames_out` of the bridge."),
            _counter("bytes_in", "bytes", "As `bytes_in` of the bridge."),
            _counter("bytes_out", "bytes", "As `bytes_out` of the bridge."),
            _counter("dialled", "dials", "Bootstrap peers that the node reached by dialling."),
            _counter("dial_failed", "dials", "Addresses of bootstrap peers that did not answer."),
            _counter(
                "stream_not_opened",
                "streams",
                "Pubsub streams that the node could not open to a connected peer.",
            ),
            _counter("stream_replaced", "streams", "Streams that a peer gave up for a new one."),
            _counter("stream_ended", "streams", "Streams that a peer ended or that broke."),
            _counter("stream_unreadable", "streams", "Streams on which the length of an RPC could not be read."),
            _counter("stream_broken_off", "streams", "Streams that ended in the middle of an RPC."),
            _counter(
                "unfinished_dropped",
                "streams",
                "Streams that the node ended because unfinished RPCs of all peers took too much memory.",
            ),
            _counter("rpc_empty", "RPCs", "RPCs of no bytes. The node makes no frame of an empty RPC."),
            _counter("rpc_oversized", "RPCs", "RPCs over `bridge.max_rpc_bytes`. The frame keeps the first 64 KiB."),
            _counter("rpc_malformed", "RPCs", "RPCs that are no protobuf message. The frame keeps the bytes."),
            _counter("dropped", "RPCs", "RPCs that the node dropped, because too much waited for the peer."),
            _counter("peer_stuck", "peers", "Peers that took nothing for 30 s. The node hung up."),
            _counter(
                "peer_control_overflow",
                "peers",
                "Peers for which too much mesh upkeep waited. The node hung up.",
            ),
            _counter(
                "over_budget", "times", "Times that the node did not read a peer for a while, because of a budget."
            ),
            _counter(
                "over_budget_left",
                "bytes",
                "Bytes that waited of peers that hung up while they were over a budget. They are in no frame.",
            ),
            _counter(
                "over_budget_out",
                "times",
                "Times that the node sent nothing to a peer for a while, because of a budget of what it sends.",
            ),
            _counter("kept_out", "peers", "Peers that the node hung up on for their conduct."),
            _counter("refused_kept_out", "connections", "Connections of such peers that the node refused."),
            _counter(
                "over_budget_cpu", "times", "Times that a peer was over its budget of CPU, and was read more slowly."
            ),
            _counter("paused", "times", "Times that a stream waited, because the spool was full."),
            _counter("delivered", "messages", "First good copies of messages on a joined topic."),
            _counter("duplicate", "messages", "Further good copies of a message."),
            _counter("own_message", "messages", "Messages of the bridge's own that came back."),
            _counter("published", "messages", "Messages that the bridge published."),
            _counter("forwarded", "messages", "Messages that the router passed on, once for each peer."),
            _counter(
                "unknown_topic",
                "messages",
                "Messages on no joined topic, or of no topic. The router does not check such messages.",
            ),
            _counter("bad_signature", "messages", "Messages whose signature is not the author's."),
            _counter("against_policy", "messages", "Messages that break the signature policy of the network."),
            _counter("not_checked", "messages", "Messages on which there is no verdict."),
            _counter(
                "message_too_large",
                "messages",
                "Messages that fit in no RPC of `bridge.max_rpc_bytes_out`. The router relays none, and their sender's "
                "score falls.",
            ),
            _counter(
                "left_out",
                "items",
                "Control items that fit in no RPC of `bridge.max_rpc_bytes_out`, and were not sent.",
            ),
            _counter(
                "graylisted",
                "RPCs",
                "RPCs of which the router left the rest unread, because the peer's score was very bad.",
            ),
            _counter("unknown_peer", "RPCs", "RPCs of a peer that the router does not know."),
            _counter("dropped_rpcs", "RPCs", "RPCs that a full queue did not take."),
            _counter("dropped_messages", "messages", "Messages in RPCs that a full queue did not take."),
            _counter("subscriptions_over_limit", "subscriptions", "Subscriptions over the limit of one RPC."),
            _counter("subscription_flood", "subscriptions", "Subscriptions for which their sender's score paid."),
            _counter(
                "topics_over_limit",
                "topics",
                "Subscriptions to more topics than the router remembers of a peer.",
            ),
            _counter("bad_topic", "subscriptions", "Subscriptions to no topic, or to one whose name is too long."),
            _counter("extensions", "peers", "Hellos with extensions."),
            _counter(
                "extensions_repeated",
                "RPCs",
                "Extensions in a later RPC than the first. The router ignores these.",
            ),
            _counter("control_from_floodsub", "RPCs", "Control messages of a peer that speaks floodsub."),
            _counter("control_over_limit", "items", "Control items over the limit of one RPC."),
            _counter(
                "messages_over_limit", "messages", "Messages over the limit of one RPC. The node reads no such message."
            ),
            _counter(
                "messages_over_cost",
                "messages",
                "Messages of an RPC whose first messages were too expensive to check. The node relays no such message.",
            ),
            _counter(
                "key_algorithm", "messages", "Messages whose key is made to be expensive. Their senders are banned."
            ),
            _counter("id_too_long", "ids", "Message ids that are too long to be any."),
            _counter("ihave_sent", "ids", "Ids that the router told to peers outside the mesh."),
            _counter("ihave_low_score", "RPCs", "IHAVE of a peer whose score is too low."),
            _counter("ihave_flood", "RPCs", "RPCs with IHAVE over the limit of a heartbeat."),
            _counter("ihave_over_limit", "ids", "Ids of IHAVE over the limits."),
            _counter("ihave_unknown_topic", "items", "IHAVE for a topic that the node is not on."),
            _counter("iwant_sent", "ids", "Ids that the router asked a peer for."),
            _counter("iwant_answered", "messages", "Messages that the router sent for an IWANT."),
            _counter("iwant_unknown", "ids", "Ids of IWANT that the router does not have."),
            _counter("iwant_low_score", "RPCs", "IWANT of a peer whose score is too low."),
            _counter("iwant_over_limit", "ids", "Ids of IWANT over the limits."),
            _counter("broken_promise", "ids", "Ids that a peer announced, and did not bring when asked."),
            _counter("idontwant_sent", "ids", "Ids that the router told peers not to send."),
            _counter(
                "idontwant_honoured",
                "messages",
                "Messages that the router did not send, because the peer has them.",
            ),
            _counter("idontwant_over_limit", "ids", "Ids of IDONTWANT over the limit."),
            _counter("idontwant_wrong_version", "RPCs", "IDONTWANT of a peer whose protocol does not have it."),
            _counter("graft_unknown_topic", "items", "GRAFT for a topic that the node is not on."),
            _counter("graft_backoff", "items", "GRAFT refused: the peer is in back-off."),
            _counter("graft_low_score", "items", "GRAFT refused: the peer's score is below 0."),
            _counter("graft_mesh_full", "items", "GRAFT refused: the mesh is full."),
            _counter(
                "graft_discovered_full",
                "items",
                "GRAFT refused: half of the mesh are peers that strangers named.",
            ),
            _counter("opportunistic_graft", "peers", "Peers that the router took into a poor mesh."),
            _counter("prune_sent", "items", "PRUNE that the router sent."),
            _counter("pruned_by_peer", "items", "PRUNE that peers sent."),
            _counter("prune_unknown_topic", "items", "PRUNE for a topic that the node is not on."),
            _counter("px_ignored", "items", "PRUNE that named other peers. The node does not dial these."),
            _counter("backoff_evicted", "entries", "Back-offs that the router forgot early, for want of room."),
            _counter("seen_evicted", "ids", "Message ids that the router forgot early, for want of room."),
            _counter("mcache_evicted", "messages", "Messages that the router forgot early, for want of room."),
            _counter("hello_taken", "hellos", "Hellos with a topic table that the node took."),
            _counter("hello_again", "hellos", "A second topic table of a peer. The node ignores it."),
            _counter("hello_late", "hellos", "A topic table in a later RPC than the first. The node ignores it."),
            _counter("hello_unexpected", "hellos", "A topic table of a peer whose protocol has no extensions."),
            _counter("hello_malformed", "hellos", "A topic table refused: no protobuf message."),
            _counter("hello_too_many_bundles", "hellos", "A topic table refused: more than 256 bundles."),
            _counter("hello_hash_length", "hellos", "A topic table refused: a bundle hash is not 4 bytes long."),
            _counter("hello_repeats", "hellos", "A topic table refused: a bundle hash is there twice."),
            _counter("index_resolved", "references", "Topic indices that the node read."),
            _counter("index_written", "references", "Topic indices that the node wrote in place of names."),
            _counter(
                "index_left_out",
                "references",
                "Items that the node did not send, because they have an index and no name.",
            ),
            _counter("index_out_of_range", "references", "Topic indices that the table does not have."),
            _counter("no_table_agreed", "references", "Topic indices of a peer with which no table is agreed."),
            _counter(
                "unknown_bundle_hash",
                "references",
                "Topic indices in or after a bundle whose topics Kiln does not know.",
            ),
            _counter("name_and_index", "references", "Items with a name and an index. The name counts."),
            _counter("topic_not_utf8", "references", "Topic names that are not UTF-8."),
            _counter("topic_missing", "references", "Items with neither a name nor an index."),
            _counter("discovery_looked_up", "look-ups", "Look-ups of a topic in the DHT."),
            _counter("discovery_asked", "questions", "Questions that the node asked DHT servers."),
            _counter("discovery_unanswered", "questions", "Questions that no answer came to."),
            _counter("discovery_announced", "servers", "DHT servers that took an announcement of the node."),
            _counter(
                "discovery_unreachable",
                "servers",
                "DHT servers to which none of the node's addresses means anything. The node does not announce "
                "itself there.",
            ),
            _counter("discovery_named", "peers", "Peers that DHT servers named for a topic."),
            _counter("discovery_refused", "addresses", "Addresses, or peers without one, that the node does not dial."),
            _counter("discovery_dialled", "dials", "Peers that the DHT named, reached by dialling."),
            _counter("discovery_dial_failed", "dials", "Dials of such peers that failed."),
            _counter("discovery_found", "peers", "Such peers that turned out to be on a topic of the node."),
            _counter(
                "discovery_not_on_topic",
                "peers",
                "Such peers that were on no topic of the node within 10 s. The node hung up.",
            ),
            _counter("discovery_answered", "questions", "Questions of others that the node answered."),
            _counter(
                "discovery_streams_refused",
                "streams",
                "DHT streams of others that the node refused, because too many were open.",
            ),
            _counter("discovery_streams_broken", "streams", "DHT streams of others that broke."),
        ),
    ),
)

METRICS: Final[dict[str, Metric]] = {
    f"{group.path}{metric.name}": metric for group in GROUPS for metric in group.metrics
}
"""By the path in the status."""


def is_declared(path: str) -> bool:
    """Return true if a path in the status is that of a declared metric."""
    return path in METRICS or f"{path.rpartition('.')[0]}.*" in METRICS


_HEAD: Final = f"""# Metrics

Kiln shows numbers in two ways. `/metrics` is for Prometheus. `status.json` has all that the bridge counts. This page is
made from `schemas/exposition.py` and `schemas/metrics.py`.

## /metrics

`kiln run` serves these at `monitor.listen` (default: http://127.0.0.1:4814/metrics). [Watch Kiln](monitoring.md)
says what other processes serve, and how to point Prometheus and Grafana at Kiln. A name that ends in
`_seconds` or `_bytes` has that unit. A family with no value yet has its name and its sentence alone.
{exposed()}
## status.json

The numbers in `STATE/bridge/status.json`, which the bridge writes each second. A name is a path in that file: `[]`
stands for each entry of a list, `*` for any key. Counters count since the bridge started. A counter that is absent
is 0.
"""


def markdown() -> str:
    """The page docs/METRICS.md."""
    parts = [_HEAD]
    for group in GROUPS:
        note = f" ({group.note})" if group.note else ""
        path = f": `{group.path}…`" if group.path else ""
        parts.append(f"\n### {group.title}\n\n" + (f"Path{path}{note}\n\n" if path else ""))
        parts.append("| name | kind | unit | what it says |\n| --- | --- | --- | --- |\n")
        parts += [f"| `{m.name}` | {m.kind} | {m.unit} | {m.says} |\n" for m in group.metrics]
    return "".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
