"""Every family of metrics that `/metrics` shows (Prometheus text format): name, kind, labels, a sentence.

Units are the base units that the names end in. A label takes few values, whatever comes from the network: what
strangers name is counted under the most frequent names, the rest under `other`. docs/METRICS.md is made from this list
too.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple


class MetricFamily(NamedTuple):
    """Metrics of one name."""

    name: str
    """without the `_total` that the format adds to counters"""
    kind: Literal["counter", "gauge", "histogram"]
    says: str
    labels: tuple[str, ...] = ()
    where: str = ""
    """when there is the family at all; empty: always"""


class FamilyGroup(NamedTuple):
    """Families of one part of Kiln."""

    title: str
    families: tuple[MetricFamily, ...]


_RUN: Final = "since this run began"
_BRIDGE: Final = "where the run has a bridge"
_BEP50: Final = "where `bep50.enabled`"
FETCHES: Final = "where `ipfs.api` is set"
CHECKS: Final = "once the run has checked its tables, as `quality.interval` says"

LATENESS_BUCKETS: Final = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds, seconds."""

MESH_SIZES: Final = ((0, "0"), (3, "1-3"), (5, "4-5"), (12, "6-12"))
"""Greatest number of peers, and the label; more: `over 12`. gossipsub keeps 6 to 12 (D_low is 4 or 5)."""

SCORES: Final = ("graylisted", "negative", "zero", "positive")

QUALITY_RESULTS: Final = ("passed", "warn", "error")
"""What becomes of an expectation: a level is that of one that failed."""

EXPOSED: Final = (
    FamilyGroup(
        "The run",
        (
            MetricFamily("kiln_info", "gauge", "1. The labels say what runs.", ("version", "network", "mode")),
            MetricFamily("kiln_run_seconds", "gauge", "How long the run has lasted."),
            MetricFamily(
                "kiln_problems", "gauge", "What is wrong now, as the screen and the status page say in words."
            ),
            MetricFamily("kiln_broker_up", "gauge", "1: the broker answers. 0: it does not, and the bridge spools."),
            MetricFamily("kiln_frames", "counter", f"Frames that came into Kafka {_RUN}."),
            MetricFamily("kiln_messages", "counter", f"First good copies of messages {_RUN}.", ("type",)),
            MetricFamily("kiln_copies", "counter", f"Copies of good messages {_RUN}."),
            MetricFamily(
                "kiln_quarantined", "counter", f"Records that went to quarantine {_RUN}.", ("stage", "reason")
            ),
        ),
    ),
    FamilyGroup(
        "Windows and batches",
        (
            MetricFamily("kiln_windows_open", "gauge", "Separators with an open window."),
            MetricFamily("kiln_batches", "counter", f"Batches in `kiln.batches` {_RUN}."),
            MetricFamily("kiln_batch_tips", "counter", f"Tips in these batches {_RUN}."),
            MetricFamily(
                "kiln_batch_lateness_seconds",
                "histogram",
                "How much later than T after its first update was heard the broker had a batch, of live batches "
                f"{_RUN}.",
            ),
        ),
    ),
    FamilyGroup(
        "Queries",
        (
            MetricFamily("kiln_query_up", "gauge", "1: the query runs. 0: it starts, or has failed.", ("query",)),
            MetricFamily(
                "kiln_query_tripped",
                "gauge",
                "1: the breaker tripped, and the query is held until Kiln starts again.",
                ("query",),
            ),
            MetricFamily("kiln_query_restarts", "counter", f"Starts of the query after a failure {_RUN}.", ("query",)),
            MetricFamily("kiln_query_batch", "gauge", "Number of the newest micro-batch.", ("query",)),
            MetricFamily("kiln_query_records", "counter", f"Records that the query read {_RUN}.", ("query",)),
            MetricFamily("kiln_query_lag_records", "gauge", "Records that the query has not read yet.", ("query",)),
            MetricFamily(
                "kiln_query_lag_seconds",
                "gauge",
                "For how long the oldest record that the query has not read has been in Kafka, to about a second.",
                ("query",),
            ),
            MetricFamily(
                "kiln_query_phase_seconds",
                "gauge",
                "How long the phases of the newest micro-batch took, by Spark's names; triggerExecution is the whole.",
                ("query", "phase"),
            ),
            MetricFamily(
                "kiln_query_state_rows",
                "gauge",
                "Windows, or digests of what the query has let through.",
                ("query",),
            ),
            MetricFamily(
                "kiln_query_state_bytes",
                "gauge",
                "Bytes of these rows, in memory or on the disk.",
                ("query",),
            ),
        ),
    ),
    FamilyGroup(
        "The bridge",
        (
            MetricFamily("kiln_bridge_up", "gauge", "1: the bridge told of itself in the last seconds.", where=_BRIDGE),
            MetricFamily(
                "kiln_bridge_peers",
                "gauge",
                "Peers that speak pubsub, by the name of their agent and their protocol.",
                ("agent", "protocol"),
                _BRIDGE,
            ),
            MetricFamily(
                "kiln_bridge_peer_scores",
                "gauge",
                "Peers by what the router thinks of them.",
                ("score",),
                _BRIDGE,
            ),
            MetricFamily(
                "kiln_bridges",
                "gauge",
                "Bridges of the network that live, this one included. 0: Kafka has not told yet.",
                where=_BRIDGE,
            ),
            MetricFamily("kiln_bridge_leads", "gauge", "1: this bridge publishes and fetches for all.", where=_BRIDGE),
            MetricFamily(
                "kiln_bridge_kept_out", "gauge", "Peers that the node keeps out for their conduct.", where=_BRIDGE
            ),
            MetricFamily("kiln_bridge_topics", "gauge", "Topics that the node has joined.", where=_BRIDGE),
            MetricFamily(
                "kiln_bridge_topics_left", "gauge", "Topics that another bridge hears for this one.", where=_BRIDGE
            ),
            MetricFamily(
                "kiln_bridge_topics_refused", "gauge", "Topics of the interests that lack room.", where=_BRIDGE
            ),
            MetricFamily("kiln_bridge_meshes", "gauge", "Meshes by how many peers they have.", ("peers",), _BRIDGE),
            MetricFamily("kiln_bridge_frames", "counter", "Frames captured.", ("direction",), _BRIDGE),
            MetricFamily("kiln_bridge_bytes", "counter", "Bytes captured.", ("direction",), _BRIDGE),
            MetricFamily(
                "kiln_bridge_events",
                "counter",
                "What the node and the router counted: the names under Node and router below.",
                ("event",),
                _BRIDGE,
            ),
            MetricFamily("kiln_bridge_spool_frames", "gauge", "Frames that Kafka does not have yet.", where=_BRIDGE),
            MetricFamily("kiln_bridge_spool_memory_bytes", "gauge", "Memory of waiting frames.", where=_BRIDGE),
            MetricFamily("kiln_bridge_spool_disk_bytes", "gauge", "Size of the spool's files.", where=_BRIDGE),
            MetricFamily("kiln_bridge_spool_free_bytes", "gauge", "Room on the disk of the spool.", where=_BRIDGE),
            MetricFamily("kiln_bridge_spool_full", "gauge", "1: the spool is full, and peers wait.", where=_BRIDGE),
        ),
    ),
    FamilyGroup(
        "Publishing and fetching",
        (
            MetricFamily(
                "kiln_publications",
                "counter",
                "Batches that the bridge published, or could not publish, or that Kafka had let go.",
                ("transport", "result"),
                _BRIDGE,
            ),
            MetricFamily("kiln_fetcher_waiting", "gauge", "Records that wait for a block.", where=FETCHES),
            MetricFamily("kiln_fetcher_fetching", "gauge", "Blocks that the bridge asks for now.", where=FETCHES),
            MetricFamily("kiln_fetcher_claims", "gauge", "Geneses to be held against claims.", where=FETCHES),
            MetricFamily(
                "kiln_fetcher_records",
                "counter",
                "What became of records: the names under What became of the fetcher's records below.",
                ("outcome",),
                FETCHES,
            ),
            MetricFamily("kiln_ipfs_connections", "gauge", "Peers of the IPFS node.", where=FETCHES),
            MetricFamily("kiln_ipfs_provided", "counter", "Blocks that the routing was told of.", where=FETCHES),
        ),
    ),
    FamilyGroup(
        "BEP 50",
        (
            MetricFamily("kiln_bep50_topics", "gauge", "Topics of the overlay.", where=_BEP50),
            MetricFamily("kiln_bep50_contacts", "gauge", "Contacts of all topics.", where=_BEP50),
            MetricFamily("kiln_bep50_frames", "counter", "Datagrams captured.", ("direction",), _BEP50),
            MetricFamily("kiln_bep50_gaps", "counter", "Batches of others that the overlay missed.", where=_BEP50),
            MetricFamily(
                "kiln_bep50_dropped", "counter", "Datagrams that changed nothing, by reason.", ("reason",), _BEP50
            ),
        ),
    ),
    FamilyGroup(
        "The lake",
        (
            MetricFamily("kiln_table_rows", "gauge", "Rows of a table.", ("table",)),
            MetricFamily("kiln_table_files", "gauge", "Files of a table's newest version.", ("table",)),
            MetricFamily("kiln_table_bytes", "gauge", "Size of these files.", ("table",)),
            MetricFamily("kiln_table_version", "gauge", "Newest version of a table.", ("table",)),
            MetricFamily("kiln_table_age_seconds", "gauge", "Time since the newest commit to a table.", ("table",)),
        ),
    ),
    FamilyGroup(
        "Quality",
        (
            MetricFamily(
                "kiln_quality_expectations",
                "gauge",
                "Expectations that the last check of this run held against a table, by what became of them.",
                ("table", "result"),
                CHECKS,
            ),
            MetricFamily("kiln_quality_age_seconds", "gauge", "Time since the last check.", where=CHECKS),
        ),
    ),
)

FAMILIES: Final[dict[str, MetricFamily]] = {family.name: family for part in EXPOSED for family in part.families}


def markdown() -> str:
    """The tables of families, for docs/METRICS.md."""
    parts = []
    for part in EXPOSED:
        parts.append(f"\n### {part.title}\n\n| name | kind | labels | what it says |\n| --- | --- | --- | --- |\n")
        for family in part.families:
            name = f"{family.name}_total" if family.kind == "counter" else family.name
            labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
            where = f" Only {family.where}." if family.where else ""
            parts.append(f"| `{name}` | {family.kind} | {labels} | {family.says}{where} |\n")
    return "".join(parts)
