"""Metric families of `/metrics`, as objects of prometheus_client, and their tables in docs/METRICS.md.

Names end in their base unit. Labels have a bounded number of values: if peers choose the names, the most frequent ones
are label values, and the rest count as `other`. `python -m kiln.schemas.metrics docs/METRICS.md` regenerates the
tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from copy import copy
from pathlib import Path
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily as Histogram


class MetricGroup(NamedTuple):
    """Families of one part of Kiln. A group is exposed only while its condition holds."""

    title: str
    condition: str
    families: tuple[Counter | Gauge | Histogram, ...]


FETCHES: Final = "if `ipfs.api` is set"
CHECKS: Final = "after the first quality check of the run"
_BRIDGE: Final = "if the run has a bridge"

_TABLE: Final = ("table",)
_QUERY: Final = ("query",)
_DIRECTION: Final = ("direction",)

GROUPS: Final = (
    MetricGroup(
        "The run",
        "",
        (
            Gauge("kiln_info", "Always 1. The labels describe the run.", labels=("version", "network", "mode")),
            Gauge("kiln_uptime_seconds", "Time since the run started."),
            Gauge("kiln_problems", "Number of current problems, as listed on the screen and the status page."),
            Gauge("kiln_broker_up", "1 if the broker answers, else 0."),
            Counter("kiln_frames", "Frames written to Kafka since the run started."),
            Counter("kiln_messages", "Valid messages, without duplicates, since the run started.", labels=("type",)),
            Counter("kiln_copies", "Copies of valid messages, duplicates included, since the run started."),
            Counter(
                "kiln_core_differences",
                "Records that the native core and Python decoded into different rows, since the run started. "
                "Python's rows are stored.",
            ),
            Counter(
                "kiln_control_entries",
                "SUBSCRIBEs, UNSUBSCRIBEs and entries of control messages, in both directions, since the run started.",
                labels=("kind",),
            ),
            Counter(
                "kiln_quarantined_records",
                "Records written to quarantine since the run started.",
                labels=("stage", "reason"),
            ),
        ),
    ),
    MetricGroup(
        "Windows and batches",
        "",
        (
            Gauge("kiln_open_windows", "Open windows, at most one per separator."),
            Counter("kiln_batches", "Batches written to `kiln.batches` since the run started."),
            Counter("kiln_batch_tips", "Tips in the batches written to `kiln.batches` since the run started."),
            Histogram(
                "kiln_batch_delay_seconds",
                "Delay of live batches: time from the event time of the first update plus T until the broker has the "
                "batch, since the run started.",
            ),
        ),
    ),
    MetricGroup(
        "Queries",
        "",
        (
            Gauge("kiln_query_up", "1 if the query is running; 0 while it starts or after it failed.", labels=_QUERY),
            Gauge(
                "kiln_query_breaker_tripped",
                "1 if the breaker stopped the query until the next start of Kiln.",
                labels=_QUERY,
            ),
            Counter(
                "kiln_query_restarts", "Restarts of the query after a failure since the run started.", labels=_QUERY
            ),
            Gauge("kiln_query_micro_batch_id", "Id of the latest micro-batch.", labels=_QUERY),
            Counter("kiln_query_records", "Records read by the query since the run started.", labels=_QUERY),
            Gauge(
                "kiln_query_lag_records",
                "Consumer lag in records: records that the query has not read yet.",
                labels=_QUERY,
            ),
            Gauge(
                "kiln_query_lag_seconds",
                "Consumer lag in time: age of the oldest unread record in Kafka, to about a second.",
                labels=_QUERY,
            ),
            Gauge(
                "kiln_query_phase_duration_seconds",
                "Duration of each phase of the latest micro-batch, by Spark's names; triggerExecution is the total.",
                labels=("query", "phase"),
            ),
            Gauge(
                "kiln_query_state_rows",
                "Rows in the query's state: open windows, or digests of emitted rows.",
                labels=_QUERY,
            ),
            Gauge("kiln_query_state_bytes", "Size of the query's state, in memory or on disk.", labels=_QUERY),
        ),
    ),
    MetricGroup(
        "The bridge",
        _BRIDGE,
        (
            Gauge("kiln_bridge_up", "1 if the bridge reported its status within the last few seconds."),
            Gauge(
                "kiln_bridge_peers",
                "Connected pubsub peers by agent name and protocol.",
                labels=("agent", "protocol"),
            ),
            Gauge("kiln_bridge_peer_scores", "Connected pubsub peers by gossipsub score.", labels=("score",)),
            Gauge(
                "kiln_bridges",
                "Live bridges of the network, including this one; 0 until the group membership is known.",
            ),
            Gauge("kiln_bridge_leader", "1 if this bridge is the leader, which fetches blocks for all bridges."),
            Gauge("kiln_bridge_banned_peers", "Peers that are banned for misbehavior."),
            Gauge("kiln_bridge_topics", "Joined topics."),
            Gauge(
                "kiln_bridge_topics_on_other_bridges",
                "Topics of interest that another bridge of the network subscribes to.",
            ),
            Gauge(
                "kiln_bridge_topics_over_limit",
                "Topics of interest that exceed `bridge.max_topics` or `bridge.max_topics_per_peer`.",
            ),
            Gauge("kiln_bridge_meshes", "Topic meshes by number of peers.", labels=("peers",)),
            Counter("kiln_bridge_frames", "Captured frames.", labels=_DIRECTION),
            Counter("kiln_bridge_bytes", "Captured bytes.", labels=_DIRECTION),
            Counter(
                "kiln_bridge_events",
                "Events of node and router, as listed in the section Node and router below.",
                labels=("event",),
            ),
            Gauge("kiln_bridge_spool_frames", "Frames that Kafka has not acknowledged yet."),
            Gauge("kiln_bridge_spool_memory_bytes", "Memory used by unacknowledged frames."),
            Gauge("kiln_bridge_spool_disk_bytes", "Size of the spool files."),
            Gauge("kiln_bridge_spool_disk_free_bytes", "Free space on the disk of the spool."),
            Gauge("kiln_bridge_spool_full", "1 if the spool is full and reading from peers is paused."),
            Counter(
                "kiln_publications",
                "Batches by result: published, failed, or lost because Kafka deleted them first.",
                labels=("transport", "result"),
            ),
        ),
    ),
    MetricGroup(
        "Fetching",
        FETCHES,
        (
            Gauge("kiln_fetcher_waiting_records", "Records waiting for a block."),
            Gauge("kiln_fetcher_fetches_in_flight", "Block fetches in flight."),
            Gauge("kiln_fetcher_pending_claim_checks", "Claimed separators not yet verified against a genesis."),
            Counter(
                "kiln_fetcher_records",
                "Outcomes of records, as listed in the section Outcomes of the fetcher below.",
                labels=("outcome",),
            ),
            Gauge("kiln_ipfs_connected_peers", "Peers that the IPFS node is connected to."),
            Counter("kiln_ipfs_provided_blocks", "Blocks announced to content routing."),
            Counter("kiln_ipfs_sent_blocks", "Blocks that the bridge itself sent over bitswap."),
            Counter("kiln_ipfs_sent_bytes", "Bytes of the blocks that the bridge itself sent over bitswap."),
            Counter("kiln_ipfs_received_blocks", "Wanted blocks that peers sent to the bridge itself."),
        ),
    ),
    MetricGroup(
        "BEP 50",
        "if `bep50.enabled` is true",
        (
            Gauge("kiln_bep50_topics", "Joined topics of the overlay."),
            Gauge("kiln_bep50_contacts", "Contacts of all joined topics."),
            Counter("kiln_bep50_frames", "Captured datagrams.", labels=_DIRECTION),
            Counter("kiln_bep50_gaps", "Gaps in the sequence of another publisher's announcements."),
            Counter("kiln_bep50_dropped_datagrams", "Dropped datagrams by reason.", labels=("reason",)),
        ),
    ),
    MetricGroup(
        "The lake",
        "",
        (
            Gauge("kiln_table_rows", "Rows in the table.", labels=_TABLE),
            Gauge("kiln_table_files", "Data files in the latest version of the table.", labels=_TABLE),
            Gauge("kiln_table_bytes", "Size of the data files in the latest version of the table.", labels=_TABLE),
            Gauge("kiln_table_version", "Latest version of the table.", labels=_TABLE),
            Gauge("kiln_table_commit_age_seconds", "Time since the latest commit to the table.", labels=_TABLE),
        ),
    ),
    MetricGroup(
        "Quality",
        CHECKS,
        (
            Gauge(
                "kiln_quality_expectations",
                "Expectations in the last quality check of the run, by table and result.",
                labels=("table", "result"),
            ),
            Gauge("kiln_quality_check_age_seconds", "Time since the last quality check."),
        ),
    ),
)
FAMILIES: Final = {family.name: family for group in GROUPS for family in group.families}
"""Families without samples, by name without the `_total` of counters."""

Values = Iterable[tuple[tuple[str, ...], float]]
"""For each sample its label values, in the order of the family's labels, and its value."""


def build_family(name: str, values: Values) -> Counter | Gauge:
    """Build a declared counter or gauge with samples."""
    family = copy(FAMILIES[name])
    assert not isinstance(family, Histogram)
    family.samples = []
    for labels, value in values:
        family.add_metric(labels, value)
    return family


BEGIN: Final = "<!-- made from schemas/metrics.py -->"
END: Final = "<!-- end of what is made from schemas/metrics.py -->"


def insert_tables(page: str) -> str:
    """Replace the tables of families in docs/METRICS.md."""
    before, _, rest = page.partition(BEGIN)
    parts = [before, BEGIN, "\n"]
    for group in GROUPS:
        condition = f"Kiln exposes these metrics only {group.condition}.\n\n" if group.condition else ""
        parts.append(f"\n### {group.title}\n\n{condition}| name | kind | labels | description |\n")
        parts.append("| --- | --- | --- | --- |\n")
        for family in group.families:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = ", ".join(f"`{label}`" for label in family._labelnames) or "–"  # has no public name
            parts.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n")
    return "".join([*parts, "\n", END, rest.partition(END)[2]])


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(insert_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
