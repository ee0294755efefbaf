"""Metric families that `/metrics` exposes in the Prometheus text format: name, kind, labels, HELP text.

Names end in their base unit. Labels have a bounded number of values: of names that peers choose, the most frequent are
label values and the rest count as `other`. docs/METRICS.md is generated from this list.
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


_RUN: Final = "since the run started"
_BRIDGE: Final = "if the run has a bridge"
_BEP50: Final = "if `bep50.enabled`"
FETCHES: Final = "if `ipfs.api` is set"
CHECKS: Final = "after the first quality check of the run"

BATCH_DELAY_BUCKETS: Final = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds, seconds."""

MESH_SIZES: Final = ((0, "0"), (3, "1-3"), (5, "4-5"), (12, "6-12"))
"""Upper bound of each bucket and its label; larger meshes are `over 12`.

gossipsub aims at 6 to 12 peers (D_low is 4 or 5).
"""

QUALITY_RESULTS: Final = ("passed", "warn", "error")
"""Results of an expectation: `passed`, or the level of a failed one."""

EXPOSED: Final = (
    FamilyGroup(
        "The run",
        (
            MetricFamily(
                "kiln_info", "gauge", "Always 1. The labels describe the run.", ("version", "network", "mode")
            ),
            MetricFamily("kiln_uptime_seconds", "gauge", "Time since the run started."),
            MetricFamily(
                "kiln_problems", "gauge", "Number of current problems, as listed on the screen and the status page."
            ),
            MetricFamily("kiln_broker_up", "gauge", "1 if the broker answers, else 0."),
            MetricFamily("kiln_frames", "counter", f"Frames written to Kafka {_RUN}."),
            MetricFamily("kiln_messages", "counter", f"Valid messages, without duplicates, {_RUN}.", ("type",)),
            MetricFamily("kiln_copies", "counter", f"Copies of valid messages, duplicates included, {_RUN}."),
            MetricFamily(
                "kiln_quarantined_records", "counter", f"Records written to quarantine {_RUN}.", ("stage", "reason")
            ),
        ),
    ),
    FamilyGroup(
        "Windows and batches",
        (
            MetricFamily("kiln_open_windows", "gauge", "Open windows, at most one per separator."),
            MetricFamily("kiln_batches", "counter", f"Batches written to `kiln.batches` {_RUN}."),
            MetricFamily("kiln_batch_tips", "counter", f"Tips in these batches {_RUN}."),
            MetricFamily(
                "kiln_batch_delay_seconds",
                "histogram",
                "Delay of live batches: time from the event time of the first update plus T until the broker has the "
                f"batch, {_RUN}.",
            ),
        ),
    ),
    FamilyGroup(
        "Queries",
        (
            MetricFamily(
                "kiln_query_up", "gauge", "1 if the query is running; 0 while it starts or after it failed.", ("query",)
            ),
            MetricFamily(
                "kiln_query_breaker_tripped",
                "gauge",
                "1 if the breaker stopped the query until the next start of Kiln.",
                ("query",),
            ),
            MetricFamily(
                "kiln_query_restarts", "counter", f"Restarts of the query after a failure {_RUN}.", ("query",)
            ),
            MetricFamily("kiln_query_micro_batch_id", "gauge", "Id of the latest micro-batch.", ("query",)),
            MetricFamily("kiln_query_records", "counter", f"Records read by the query {_RUN}.", ("query",)),
            MetricFamily(
                "kiln_query_lag_records",
                "gauge",
                "Consumer lag in records: records that the query has not read yet.",
                ("query",),
            ),
            MetricFamily(
                "kiln_query_lag_seconds",
                "gauge",
                "Consumer lag in time: age of the oldest unread record in Kafka, to about a second.",
                ("query",),
            ),
            MetricFamily(
                "kiln_query_phase_duration_seconds",
                "gauge",
                "Duration of each phase of the latest micro-batch, by Spark's names; triggerExecution is the total.",
                ("query", "phase"),
            ),
            MetricFamily(
                "kiln_query_state_rows",
                "gauge",
                "Rows in the query's state: open windows, or digests of emitted rows.",
                ("query",),
            ),
            MetricFamily(
                "kiln_query_state_bytes",
                "gauge",
                "Size of the query's state, in memory or on disk.",
                ("query",),
            ),
        ),
    ),
    FamilyGroup(
        "The bridge",
        (
            MetricFamily(
                "kiln_bridge_up", "gauge", "1 if the bridge reported its status in the last seconds.", where=_BRIDGE
            ),
            MetricFamily(
                "kiln_bridge_peers",
                "gauge",
                "Connected pubsub peers by agent name and protocol.",
                ("agent", "protocol"),
                _BRIDGE,
            ),
            MetricFamily(
                "kiln_bridge_peer_scores",
                "gauge",
                "Connected pubsub peers by gossipsub score.",
                ("score",),
                _BRIDGE,
            ),
            MetricFamily(
                "kiln_bridges",
                "gauge",
                "Live bridges of the network, including this one; 0 until the group membership is known.",
                where=_BRIDGE,
            ),
            MetricFamily(
                "kiln_bridge_leader",
                "gauge",
                "1 if this bridge is the leader, which publishes and fetches for all.",
                where=_BRIDGE,
            ),
            MetricFamily("kiln_bridge_banned_peers", "gauge", "Peers that are banned for bad conduct.", where=_BRIDGE),
            MetricFamily("kiln_bridge_topics", "gauge", "Joined topics.", where=_BRIDGE),
            MetricFamily(
                "kiln_bridge_topics_on_other_bridges",
                "gauge",
                "Topics of interest that another bridge of the network subscribes to.",
                where=_BRIDGE,
            ),
            MetricFamily(
                "kiln_bridge_topics_over_limit",
                "gauge",
                "Topics of interest that exceed `bridge.max_topics` or `bridge.max_topics_per_peer`.",
                where=_BRIDGE,
            ),
            MetricFamily("kiln_bridge_meshes", "gauge", "Topic meshes by number of peers.", ("peers",), _BRIDGE),
            MetricFamily("kiln_bridge_frames", "counter", "Captured frames.", ("direction",), _BRIDGE),
            MetricFamily("kiln_bridge_bytes", "counter", "Captured bytes.", ("direction",), _BRIDGE),
            MetricFamily(
                "kiln_bridge_events",
                "counter",
                "Events of node and router; the section Node and router below lists them.",
                ("event",),
                _BRIDGE,
            ),
            MetricFamily(
                "kiln_bridge_spool_frames", "gauge", "Frames that Kafka has not acknowledged yet.", where=_BRIDGE
            ),
            MetricFamily(
                "kiln_bridge_spool_memory_bytes", "gauge", "Memory used by unacknowledged frames.", where=_BRIDGE
            ),
            MetricFamily("kiln_bridge_spool_disk_bytes", "gauge", "Size of the spool files.", where=_BRIDGE),
            MetricFamily(
                "kiln_bridge_spool_disk_free_bytes", "gauge", "Free space on the disk of the spool.", where=_BRIDGE
            ),
            MetricFamily(
                "kiln_bridge_spool_full",
                "gauge",
                "1 if the spool is full and reading from peers is paused.",
                where=_BRIDGE,
            ),
        ),
    ),
    FamilyGroup(
        "Publishing and fetching",
        (
            MetricFamily(
                "kiln_publications",
                "counter",
                "Batches by result: published, failed, or lost because Kafka deleted them first.",
                ("transport", "result"),
                _BRIDGE,
            ),
            MetricFamily("kiln_fetcher_waiting_records", "gauge", "Records that wait for a block.", where=FETCHES),
            MetricFamily("kiln_fetcher_fetches_in_flight", "gauge", "Block fetches in flight.", where=FETCHES),
            MetricFamily(
                "kiln_fetcher_pending_claim_checks",
                "gauge",
                "Claimed separators that are not yet verified by a genesis.",
                where=FETCHES,
            ),
            MetricFamily(
                "kiln_fetcher_records",
                "counter",
                "Outcomes of records; the section Outcomes of the fetcher below lists them.",
                ("outcome",),
                FETCHES,
            ),
            MetricFamily(
                "kiln_ipfs_connected_peers", "gauge", "Peers that the IPFS node is connected to.", where=FETCHES
            ),
            MetricFamily("kiln_ipfs_provided_blocks", "counter", "Blocks provided to the routing.", where=FETCHES),
        ),
    ),
    FamilyGroup(
        "BEP 50",
        (
            MetricFamily("kiln_bep50_topics", "gauge", "Joined topics of the overlay.", where=_BEP50),
            MetricFamily("kiln_bep50_contacts", "gauge", "Contacts of all joined topics.", where=_BEP50),
            MetricFamily("kiln_bep50_frames", "counter", "Captured datagrams.", ("direction",), _BEP50),
            MetricFamily(
                "kiln_bep50_gaps", "counter", "Gaps in the sequence of another publisher's announcements.", where=_BEP50
            ),
            MetricFamily(
                "kiln_bep50_dropped_datagrams", "counter", "Dropped datagrams by reason.", ("reason",), _BEP50
            ),
        ),
    ),
    FamilyGroup(
        "The lake",
        (
            MetricFamily("kiln_table_rows", "gauge", "Rows in the table.", ("table",)),
            MetricFamily("kiln_table_files", "gauge", "Data files in the latest version of the table.", ("table",)),
            MetricFamily(
                "kiln_table_bytes", "gauge", "Size of the data files in the latest version of the table.", ("table",)
            ),
            MetricFamily("kiln_table_version", "gauge", "Latest version of the table.", ("table",)),
            MetricFamily(
                "kiln_table_commit_age_seconds", "gauge", "Time since the latest commit to the table.", ("table",)
            ),
        ),
    ),
    FamilyGroup(
        "Quality",
        (
            MetricFamily(
                "kiln_quality_expectations",
                "gauge",
                "Expectations in the last quality check of the run, by table and result.",
                ("table", "result"),
                CHECKS,
            ),
            MetricFamily("kiln_quality_check_age_seconds", "gauge", "Time since the last quality check.", where=CHECKS),
        ),
    ),
)

FAMILIES: Final[dict[str, MetricFamily]] = {family.name: family for part in EXPOSED for family in part.families}


def markdown() -> str:
    """The tables of families, for docs/METRICS.md."""
    parts = []
    for part in EXPOSED:
        parts.append(f"\n### {part.title}\n\n| name | kind | labels | description |\n| --- | --- | --- | --- |\n")
        for family in part.families:
            name = f"{family.name}_total" if family.kind == "counter" else family.name
            labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
            where = f" Only {family.where}." if family.where else ""
            parts.append(f"| `{name}` | {family.kind} | {labels} | {family.says}{where} |\n")
    return "".join(parts)
