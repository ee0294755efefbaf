"""Counters and gauges that the bridge reports in its status: name, unit and description.

The name is the path in `STATE/bridge/status.json`: `[]` stands for each entry of a list, `*` for any key. Counters
start at 0 with the bridge unless a group says otherwise. tests/unit/schemas/test_metrics.py fails for a number that
this list lacks. `markdown()` is docs/METRICS.md; regenerate it with
`python -m kiln.schemas.metrics > docs/METRICS.md`.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from kiln.schemas.exposition import markdown as exposed

Kind = Literal["counter", "gauge"]


class Metric(NamedTuple):
    """A metric that the bridge reports."""

    name: str
    kind: Kind
    """`counter` only grows while the bridge runs; `gauge` is the current value"""
    unit: str
    says: str


class MetricGroup(NamedTuple):
    """Metrics with the same path prefix."""

    title: str
    path: str
    """prefix of each name in the status"""
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
            _gauge("kept_out", "peers", "Peers disconnected for bad conduct and banned for `bridge.ban`."),
            _gauge("topics_refused", "topics", "Topics of interest that are over a limit and not joined."),
            _counter("topic_refusals", "topics", "Refusals to join a topic, once per subscription."),
            _gauge("mesh.*", "peers", "Peers in the mesh of a topic."),
        ),
    ),
    MetricGroup(
        "A peer",
        "peers[].",
        "since the stream opened",
        (
            _gauge("score", "points", "Gossipsub score. Peers below 0 enter no mesh."),
            _counter("frames_in", "frames", "Frames that the peer sent."),
            _counter("frames_out", "frames", "Frames that the node sent to the peer."),
            _counter(
                "dropped",
                "RPCs",
                "RPCs to the peer dropped because its send queue was full.",
            ),
            _gauge("topics", "topics", "Subscriptions of the peer that the router tracks."),
            _gauge("queued", "bytes", "Bytes in the send queue of the peer."),
            _counter("bytes_in", "bytes", "Bytes of captured frames that the peer sent."),
            _counter("bytes_out", "bytes", "Bytes of captured frames that the node sent to the peer."),
        ),
    ),
    MetricGroup(
        "Topics sent by index",
        "savings[].",
        "over all peers of this run; `peers[].savings[]` has the same per peer",
        (
            _counter("references", "references", "References to a topic by index."),
            _counter("as_names", "bytes", "Bytes that the references would take as names."),
            _counter("as_indices", "bytes", "Bytes that the references take as indices."),
        ),
    ),
    MetricGroup(
        "The spool",
        "spool.",
        "",
        (
            _counter("put", "frames", "Frames that the bridge captured."),
            _counter("acknowledged", "frames", "Frames acknowledged by Kafka, including the spool of an earlier run."),
            _gauge(
                "waiting",
                "frames",
                "Frames not yet acknowledged by Kafka; an upper bound for the spool of an earlier run.",
            ),
            _gauge("memory_bytes", "bytes", "Memory used by waiting frames."),
            _gauge("disk_bytes", "bytes", "Size of the spool files."),
            _counter("spooled", "frames", "Frames written to the spool."),
            _gauge("free_bytes", "bytes", "Free space on the disk of the spool."),
            _counter("torn_bytes", "bytes", "Bytes of the spool that could not be read back."),
        ),
    ),
    MetricGroup(
        "Other bridges of the network",
        "sharing.",
        "",
        (
            _gauge(
                "round",
                "number",
                "Generation of the Kafka consumer group of the bridges. Each change of membership starts a new one.",
            ),
            _gauge("topics_left", "topics", "Topics of interest that another bridge subscribes to."),
        ),
    ),
    MetricGroup(
        "The IPFS node",
        "ipfs_node.",
        "if `ipfs.api` is set",
        (
            _gauge("connections", "peers", "Peers that the IPFS node is connected to."),
            _gauge("gossip_peers", "peers", "Gossip peers in good standing that speak bitswap."),
            _gauge(
                "gossip_connected", "peers", "Gossip peers that speak bitswap and that the IPFS node is connected to."
            ),
            _gauge("gossip_left_out", "peers", "Gossip peers that speak bitswap beyond the limit of 64 connections."),
            _counter("provided", "blocks", "Blocks provided to the routing."),
            _counter(
                "unprovided",
                "blocks",
                "Blocks not provided to the routing because the queue was full or the node failed. Connected peers can "
                "still fetch them.",
            ),
        ),
    ),
    MetricGroup(
        "The publisher",
        "publisher.",
        "",
        (
            _counter("published", "batches", "Publications that reached a peer."),
            _counter("failed", "batches", "Publications that failed: no peer in time, too old, or refused by IPFS."),
            _counter("lost", "records", "Records of `kiln.batches` that Kafka deleted before the publisher read them."),
            _counter(
                "places_lost", "times", "Times that Kafka lost the committed offset of the publisher for a partition."
            ),
        ),
    ),
    MetricGroup(
        "The fetcher",
        "fetcher.",
        "",
        (
            _gauge("waiting", "records", "Records of `kiln.wanted` that wait for a block."),
            _gauge("fetching", "blocks", "Block fetches in flight."),
            _counter(
                "places_lost", "times", "Times that Kafka lost the committed offset of the fetcher for a partition."
            ),
            _gauge("claimed", "geneses", "Claimed separators that are not yet verified by a genesis."),
        ),
    ),
    MetricGroup(
        "Outcomes of the fetcher",
        "fetcher.counts.",
        "",
        (
            _counter("released", "updates", "Updates written to `kiln.updates` with the separator of their genesis."),
            _counter("blocks", "batches", "Announced batches whose block was written to `kiln.blocks`."),
            _counter("streams", "streams", "Records written to `kiln.streams`."),
            _counter("quarantined", "records", "Records written to quarantine."),
            _counter("own", "batches", "Batches that this bridge published itself."),
            _counter("not_of_interest", "batches", "Announced batches whose separator matches no interest."),
            _counter("already_fetched", "batches", "Announced batches that were fetched recently."),
            _counter("other_network", "records", "Records of another network."),
            _counter("lost", "records", "Records that Kafka deleted before the fetcher finished them."),
            _counter("claims", "updates", "Updates released under a claimed, unverified separator."),
            _counter("claims_checked", "geneses", "Claimed separators that were verified against a genesis."),
            _counter(
                "claims_unchecked",
                "geneses",
                "Claimed separators given up: the genesis was malformed, or six fetches failed.",
            ),
            _counter(
                "claims_dropped",
                "geneses",
                "Claimed separators evicted because the fetcher tracks at most 10,000.",
            ),
            _counter(
                "claims_unreported",
                "updates",
                "Claims that are not reported to quarantine if false, because four others of their genesis came first.",
            ),
            _counter(
                "contradicts_genesis",
                "updates",
                "False claims written to quarantine: the first of each genesis, and all that waited.",
            ),
            _counter(
                "already_released",
                "updates",
                "Waiting updates that were already in `kiln.updates` under the same separator.",
            ),
            _counter("wanted_malformed", "records", "Records of `kiln.wanted` that are malformed."),
            _counter(
                "genesis_unavailable",
                "records",
                "Updates given up: the genesis block was not fetched in time.",
            ),
            _counter("block_unavailable", "records", "Batches given up: the block was not fetched in time."),
            _counter("block_malformed", "records", "Batches given up: the block is not a batch."),
            _counter("block_too_large", "records", "Records given up: the block is too large."),
            _counter(
                "block_hash_mismatch",
                "records",
                "Records given up: the hash of the block does not match its CID.",
            ),
            _counter(
                "block_cid_mismatch",
                "records",
                "Records given up: the IPFS node stores the block under another CID.",
            ),
            _counter("cid_malformed", "records", "Records given up: a CID is malformed."),
            _counter(
                "cid_hash_unsupported",
                "records",
                "Records given up: the hash function of the CID is not sha2-256.",
            ),
            _counter(
                "cid_codec_unsupported",
                "records",
                "Records given up: the codec of the CID is not supported.",
            ),
            _counter("genesis_malformed", "records", "Updates given up: the block is not an event."),
            _counter(
                "genesis_not_init",
                "records",
                "Updates given up: the event is not an init event.",
            ),
            _counter(
                "fetch_fault",
                "records",
                "Records given up: reading the block failed unexpectedly. The log has the error.",
            ),
            _counter("sep_missing", "streams", "Streams without a separator: the header of the genesis has no `sep`."),
            _counter("sep_not_text", "streams", "Streams without a separator: `sep` is not a string."),
            _counter(
                "value_missing",
                "streams",
                "Streams without a separator: the header lacks the field that `sep` names.",
            ),
            _counter("value_not_bytes", "streams", "Streams without a separator: that field is not a byte string."),
            _counter("value_empty", "streams", "Streams without a separator: that field is empty."),
            _counter(
                "bad_separator",
                "streams",
                "Streams without a separator: the key or the value is not valid in a topic name.",
            ),
        ),
    ),
    MetricGroup(
        "BEP 50",
        "bep50.",
        "if `bep50.enabled`",
        (
            _gauge("joined", "topics", "Joined topics of the overlay."),
            _gauge("contacts", "contacts", "Contacts of all joined topics."),
            _counter("items", "items", "New items, the bridge's own included."),
            _counter("stored", "nodes", "Nodes of the BitTorrent DHT that stored an item of the bridge."),
            _counter("frames_in", "frames", "Received datagrams with an item."),
            _counter("frames_out", "frames", "Sent datagrams with an item."),
            _counter(
                "gaps",
                "items",
                "Items that do not link to the previous item: announcements in between are lost.",
            ),
        ),
    ),
    MetricGroup(
        "A topic of BEP 50",
        "bep50.topics[].",
        "",
        (
            _gauge("contacts", "contacts", "Contacts of the topic."),
            _gauge("sequence", "number", "Sequence number of the latest item."),
        ),
    ),
    MetricGroup(
        "The publisher to BEP 50",
        "bep50.publisher.",
        "",
        (
            _counter("published", "batches", "Publications that reached a peer."),
            _counter("failed", "batches", "Publications that failed: no peer in time, too old, or refused by IPFS."),
            _counter("lost", "records", "Records of `kiln.batches` that Kafka deleted before the publisher read them."),
            _counter(
                "places_lost", "times", "Times that Kafka lost the committed offset of the publisher for a partition."
            ),
        ),
    ),
    MetricGroup(
        "Dropped datagrams",
        "bep50.dropped.",
        "",
        (
            _counter("unusable_source", "datagrams", "The source address is not usable."),
            _counter("not_asked_for", "datagrams", "Response without a query."),
            _counter("too_many_queries", "datagrams", "Queries over the rate limit of an address."),
            _counter("bad_item", "datagrams", "The signature, key or salt of the item does not match the topic."),
            _counter("too_big", "datagrams", "Datagram over the size limit."),
            _counter("not_bencoded", "datagrams", "Not a canonical bencoded dictionary."),
            _counter("bad_transaction", "datagrams", "`t` is missing, not a string, or too long."),
            _counter("bad_topic", "datagrams", "`c` is not 20 bytes."),
            _counter("bad_message", "datagrams", "`y` is unknown, or a field that it requires is missing."),
            _counter("bad_id", "datagrams", "The node id is missing or not 20 bytes."),
            _counter(
                "refused_203",
                "datagrams",
                "Refused queries: malformed, bad token, unknown topic, another item.",
            ),
            _counter(
                "refused_204",
                "datagrams",
                "Refused queries: the method is unknown, or prohibited on a topic.",
            ),
            _counter("refused_205", "datagrams", "Refused queries: the value is too big."),
            _counter("refused_206", "datagrams", "Refused queries: the signature is invalid."),
            _counter("refused_207", "datagrams", "Refused queries: the salt is too big."),
            _counter(
                "refused_301",
                "datagrams",
                "Refused queries: `cas` is not the sequence number of the item.",
            ),
            _counter(
                "refused_302",
                "datagrams",
                "Refused queries: the sequence number is less than the item's.",
            ),
        ),
    ),
    MetricGroup(
        "Unsent datagrams",
        "bep50.unsent.",
        "",
        (
            _counter("no_socket", "datagrams", "No listening socket of that address family."),
            _counter(
                "*",
                "datagrams",
                "The operating system refused the datagram; the name is that of the error, such as `OSError`.",
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
            _counter("dialled", "dials", "Successful dials of bootstrap peers."),
            _counter("dial_failed", "dials", "Failed dials of bootstrap peers."),
            _counter(
                "stream_not_opened",
                "streams",
                "Pubsub streams that could not be opened to a connected peer.",
            ),
            _counter("stream_replaced", "streams", "Streams that a peer replaced by a new one."),
            _counter("stream_ended", "streams", "Streams that were closed or reset."),
            _counter("stream_unreadable", "streams", "Streams on which the length of an RPC could not be read."),
            _counter("stream_broken_off", "streams", "Streams that ended within an RPC."),
            _counter(
                "unfinished_dropped",
                "streams",
                "Streams reset because incomplete RPCs of all peers took too much memory.",
            ),
            _counter("rpc_empty", "RPCs", "Empty RPCs, which are not captured."),
            _counter("rpc_oversized", "RPCs", "RPCs over `bridge.max_rpc_bytes`. The frame keeps the first 64 KiB."),
            _counter("rpc_malformed", "RPCs", "RPCs that are not valid protobuf. The frame keeps the bytes."),
            _counter("dropped", "RPCs", "RPCs dropped because the send queue of the peer was full."),
            _counter("peer_stuck", "peers", "Peers disconnected because they read nothing for 30 s."),
            _counter(
                "peer_control_overflow",
                "peers",
                "Peers disconnected because too many control messages were queued for them.",
            ),
            _counter("over_budget", "times", "Times that reading from a peer was paused because of a budget."),
            _counter(
                "over_budget_unread",
                "bytes",
                "Unread bytes of peers that disconnected while over a budget. They are not captured.",
            ),
            _counter(
                "over_budget_out",
                "times",
                "Times that sending to a peer was paused because of a budget.",
            ),
            _counter("peers_banned", "peers", "Peers disconnected and banned for bad conduct."),
            _counter("banned_refused", "connections", "Refused connections of banned peers."),
            _counter(
                "over_budget_cpu", "times", "Times that reading from a peer was slowed because of its CPU budget."
            ),
            _counter(
                "reads_paused", "times", "Times that reading from a stream was paused because the spool was full."
            ),
            _counter("delivered", "messages", "Valid messages on a joined topic, without duplicates."),
            _counter("duplicate", "messages", "Duplicates of valid messages."),
            _counter("own_message", "messages", "Own messages received from peers."),
            _counter("published", "messages", "Messages that the bridge published."),
            _counter("forwarded", "messages", "Forwarded messages, counted per peer."),
            _counter(
                "unknown_topic",
                "messages",
                "Messages without a topic or on a topic that is not joined. They are not validated.",
            ),
            _counter("bad_signature", "messages", "Messages with an invalid signature."),
            _counter("against_policy", "messages", "Messages that violate the signature policy of the network."),
            _counter("not_checked", "messages", "Messages that were not validated."),
            _counter(
                "message_too_large",
                "messages",
                "Messages too large for an RPC of `bridge.max_rpc_bytes_out`. They are not forwarded, and lower the "
                "score of their sender.",
            ),
            _counter(
                "control_too_large",
                "items",
                "Control items too large for an RPC of `bridge.max_rpc_bytes_out`. They are not sent.",
            ),
            _counter(
                "graylisted",
                "RPCs",
                "RPCs ignored in part because the sender is graylisted.",
            ),
            _counter("unknown_peer", "RPCs", "RPCs of an unknown peer."),
            _counter("dropped_rpcs", "RPCs", "RPCs dropped by a full queue."),
            _counter("dropped_messages", "messages", "Messages in RPCs dropped by a full queue."),
            _counter("subscriptions_over_limit", "subscriptions", "Subscriptions over the limit of one RPC."),
            _counter("subscription_flood", "subscriptions", "Subscriptions that lowered the score of their sender."),
            _counter(
                "topics_over_limit",
                "topics",
                "Subscriptions over the number of topics tracked per peer.",
            ),
            _counter("bad_topic", "subscriptions", "Subscriptions whose topic is missing or too long."),
            _counter("extensions", "peers", "Hellos with extensions."),
            _counter(
                "extensions_repeated",
                "RPCs",
                "Extensions after the first RPC, which are ignored.",
            ),
            _counter("control_from_floodsub", "RPCs", "Control messages of a peer that speaks floodsub."),
            _counter("control_over_limit", "items", "Control items over the limit of one RPC."),
            _counter("messages_over_limit", "messages", "Messages over the limit of one RPC, which are not read."),
            _counter(
                "messages_over_cost",
                "messages",
                "Messages over the validation cost of one RPC, which are not forwarded.",
            ),
            _counter(
                "key_algorithm", "messages", "Messages whose key is crafted to be expensive. Their senders are banned."
            ),
            _counter("id_too_long", "ids", "Message ids over the length limit."),
            _counter("ihave_sent", "ids", "Message ids sent in IHAVE."),
            _counter("ihave_low_score", "RPCs", "IHAVE of a peer whose score is too low."),
            _counter("ihave_flood", "RPCs", "RPCs with IHAVE over the limit of a heartbeat."),
            _counter("ihave_over_limit", "ids", "Ids of IHAVE over the limits."),
            _counter("ihave_unknown_topic", "items", "IHAVE for a topic that is not joined."),
            _counter("iwant_sent", "ids", "Message ids requested with IWANT."),
            _counter("iwant_answered", "messages", "Messages sent in response to IWANT."),
            _counter("iwant_unknown", "ids", "Message ids in IWANT that are not in the cache."),
            _counter("iwant_low_score", "RPCs", "IWANT of a peer whose score is too low."),
            _counter("iwant_over_limit", "ids", "Ids of IWANT over the limits."),
            _counter(
                "broken_promise", "ids", "Message ids that a peer announced with IHAVE and did not deliver on IWANT."
            ),
            _counter("idontwant_sent", "ids", "Message ids sent in IDONTWANT."),
            _counter(
                "idontwant_honoured",
                "messages",
                "Messages not sent because of an IDONTWANT.",
            ),
            _counter("idontwant_over_limit", "ids", "Ids of IDONTWANT over the limit."),
            _counter("idontwant_wrong_version", "RPCs", "IDONTWANT of a peer whose protocol version lacks it."),
            _counter("graft_unknown_topic", "items", "GRAFT for a topic that is not joined."),
            _counter("graft_backoff", "items", "GRAFT refused: the peer is in back-off."),
            _counter("graft_low_score", "items", "GRAFT refused: the peer's score is below 0."),
            _counter("graft_mesh_full", "items", "GRAFT refused: the mesh is full."),
            _counter(
                "graft_discovered_full",
                "items",
                "GRAFT refused: peers found by discovery are half of the mesh.",
            ),
            _counter("opportunistic_graft", "peers", "Peers added by opportunistic grafting."),
            _counter("prune_sent", "items", "Sent PRUNE."),
            _counter("pruned_by_peer", "items", "Received PRUNE."),
            _counter("prune_unknown_topic", "items", "PRUNE for a topic that is not joined."),
            _counter("px_ignored", "items", "PRUNE with peer exchange, which is ignored."),
            _counter("backoff_evicted", "entries", "Back-offs evicted early because the table was full."),
            _counter("seen_evicted", "ids", "Message ids evicted early from the seen cache."),
            _counter("mcache_evicted", "messages", "Messages evicted early from the message cache."),
            _counter("hello_accepted", "hellos", "Accepted topic tables."),
            _counter("hello_repeated", "hellos", "Second topic table of a peer, which is ignored."),
            _counter("hello_late", "hellos", "Topic table after the first RPC, which is ignored."),
            _counter("hello_unexpected", "hellos", "Topic table of a peer whose protocol version lacks extensions."),
            _counter("hello_malformed", "hellos", "Topic table refused: invalid protobuf."),
            _counter("hello_too_many_bundles", "hellos", "Topic table refused: more than 256 bundles."),
            _counter("hello_hash_length", "hellos", "Topic table refused: a bundle hash is not 4 bytes long."),
            _counter("hello_repeats", "hellos", "Topic table refused: duplicate bundle hash."),
            _counter("index_resolved", "references", "Topic indices read."),
            _counter("index_written", "references", "Topic indices written instead of names."),
            _counter(
                "index_left_out",
                "references",
                "Items not forwarded because they have an index and no name.",
            ),
            _counter("index_out_of_range", "references", "Topic indices outside the table."),
            _counter("no_table_agreed", "references", "Topic indices of a peer without an agreed table."),
            _counter(
                "unknown_bundle_hash",
                "references",
                "Topic indices in or after an unknown bundle.",
            ),
            _counter("name_and_index", "references", "Items with a name and an index. The name is used."),
            _counter("topic_not_utf8", "references", "Topic names that are not UTF-8."),
            _counter("topic_missing", "references", "Items with neither a name nor an index."),
            _counter("discovery_lookups", "lookups", "Lookups of a topic in the DHT."),
            _counter("discovery_queries", "queries", "Queries sent to DHT servers."),
            _counter("discovery_queries_unanswered", "queries", "Queries without a response."),
            _counter("discovery_provided", "servers", "DHT servers that accepted a provider record of the node."),
            _counter(
                "discovery_unreachable",
                "servers",
                "DHT servers that cannot reach any address of the node, so no provider record is sent to them.",
            ),
            _counter("discovery_providers", "peers", "Providers of a topic returned by DHT servers."),
            _counter("discovery_refused", "addresses", "Addresses, or peers without an address, that are not dialled."),
            _counter("discovery_dialled", "dials", "Successful dials of peers found in the DHT."),
            _counter("discovery_dial_failed", "dials", "Failed dials of peers found in the DHT."),
            _counter("discovery_found", "peers", "Peers found in the DHT that share a topic with the node."),
            _counter(
                "discovery_not_on_topic",
                "peers",
                "Peers found in the DHT that shared no topic within 10 s and were disconnected.",
            ),
            _counter("discovery_queries_answered", "queries", "Answered queries of other nodes."),
            _counter(
                "discovery_streams_refused",
                "streams",
                "Incoming DHT streams refused because too many were open.",
            ),
            _counter("discovery_streams_broken", "streams", "Incoming DHT streams that broke."),
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

Kiln exposes metrics at `/metrics` in the Prometheus text format. The bridge also writes its counters to `status.json`.
This page is generated from `schemas/exposition.py` and `schemas/metrics.py`.

## /metrics

`kiln run` serves these at `monitor.listen` (default: http://127.0.0.1:4814/metrics). See [monitoring.md](monitoring.md)
for the endpoints of other processes and for the setup of Prometheus and Grafana. A name that ends in `_seconds` or
`_bytes` has that unit. A family without a value has only its HELP and TYPE lines.
{exposed()}
## status.json

The bridge writes `STATE/bridge/status.json` every second. A name is a path in that file: `[]` stands for each entry of
a list, `*` for any key. Counters start at 0 with the bridge. A missing counter is 0.
"""


def markdown() -> str:
    """The page docs/METRICS.md."""
    parts = [_HEAD]
    for group in GROUPS:
        note = f" ({group.note})" if group.note else ""
        path = f": `{group.path}…`" if group.path else ""
        parts.append(f"\n### {group.title}\n\n" + (f"Path{path}{note}\n\n" if path else ""))
        parts.append("| name | kind | unit | description |\n| --- | --- | --- | --- |\n")
        parts += [f"| `{m.name}` | {m.kind} | {m.unit} | {m.says} |\n" for m in group.metrics]
    return "".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
