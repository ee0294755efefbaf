"""The Prometheus metrics that Kiln exposes at `/metrics`, and their tables in docs/METRICS.md.

A metric's name ends in its unit. Labels have a bounded number of values: if peers choose the values, only the most
frequent ones become labels, and the rest count as `other`. `python -m kiln.schemas.metrics docs/METRICS.md` regenerates
the tables.
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
    """Metrics of one part of Kiln, which are exposed only while the condition of the group is met."""

    title: str
    condition: str
    """end of the sentence "Kiln exposes these metrics only …"; empty for always"""
    families: tuple[Counter | Gauge | Histogram, ...]


FETCHES: Final = "if `ipfs.api` is set"
CHECKS: Final = "after the first data quality check"

_TABLE: Final = ("table",)
_QUERY: Final = ("query",)
_DIRECTION: Final = ("direction",)

GROUPS: Final = (
    MetricGroup(
        "The run",
        "",
        (
            Gauge(
                "kiln_info",
                "Always 1. The labels are Kiln's version, the network and the source of frames.",
                labels=("version", "network", "mode"),
            ),
            Gauge("kiln_uptime_seconds", "Time since Kiln started."),
            Gauge("kiln_problems", "Number of current problems, as listed on the screen and the status page."),
            Gauge("kiln_broker_up", "1 if the Kafka broker answers, else 0."),
            Counter("kiln_frames", "Frames (captured RPCs) written to Kafka since Kiln started."),
            Counter(
                "kiln_messages",
                "Valid messages since Kiln started. Repeated copies of a message do not count.",
                labels=("type",),
            ),
            Counter(
                "kiln_copies",
                "Received copies of valid messages since Kiln started. The first copy of a message counts too.",
            ),
            Counter(
                "kiln_core_differences",
                "Records that Kiln's Rust decoder and its Python decoder decoded differently, since Kiln started. "
                "The result of the Python decoder is stored.",
            ),
            Counter(
                "kiln_control_entries",
                "SUBSCRIBEs, UNSUBSCRIBEs and control entries such as GRAFT, sent and received, since Kiln started.",
                labels=("kind",),
            ),
            Counter(
                "kiln_quarantined_records",
                "Rejected inputs written to the topic `kiln.quarantine` since Kiln started.",
                labels=("stage", "reason"),
            ),
        ),
    ),
    MetricGroup(
        "Windows and batches",
        "",
        (
            Gauge("kiln_open_windows", "Windows that collect tips for a batch: at most one per separator."),
            Counter("kiln_batches", "Batches written to the topic `kiln.batches` since Kiln started."),
            Counter("kiln_batch_tips", "Tips in the batches written to the topic `kiln.batches` since Kiln started."),
            Histogram(
                "kiln_batch_delay_seconds",
                "Time from the end of a batch's window, in event time, until Kafka has the batch. Batches of replayed "
                "captures do not count.",
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
                "1 if Kiln stopped the query because validly signed messages no longer decode. Restart Kiln to resume.",
                labels=_QUERY,
            ),
            Counter("kiln_query_restarts", "Restarts of the query after a failure, since Kiln started.", labels=_QUERY),
            Gauge("kiln_query_micro_batch_id", "Id of the query's latest micro-batch.", labels=_QUERY),
            Counter("kiln_query_records", "Kafka records that the query has read since Kiln started.", labels=_QUERY),
            Gauge(
                "kiln_query_lag_records",
                "Consumer lag: number of Kafka records that the query has not read yet.",
                labels=_QUERY,
            ),
            Gauge(
                "kiln_query_lag_seconds",
                "Consumer lag: age of the oldest Kafka record that the query has not read yet, to about a second.",
                labels=_QUERY,
            ),
            Gauge(
                "kiln_query_phase_duration_seconds",
                "Duration of each phase of the latest micro-batch, by Spark's names. triggerExecution is the total.",
                labels=("query", "phase"),
            ),
            Gauge(
                "kiln_query_state_rows",
                "Rows in the query's state: digests for deduplication. batch has one row for each Kafka partition.",
                labels=_QUERY,
            ),
            Gauge("kiln_query_state_bytes", "Size of the query's state, in memory or on disk.", labels=_QUERY),
        ),
    ),
    MetricGroup(
        "The bridge",
        "if a bridge runs",
        (
            Gauge("kiln_bridge_up", "1 if the bridge reported its status within the last few seconds."),
            Gauge(
                "kiln_bridge_peers",
                "Connected pubsub peers by agent name and pubsub protocol.",
                labels=("agent", "protocol"),
            ),
            Gauge("kiln_bridge_peer_scores", "Connected pubsub peers by gossipsub score.", labels=("score",)),
            Gauge(
                "kiln_bridges",
                "Running bridges of the network, including this one. 0 until Kafka reports the consumer group.",
            ),
            Gauge("kiln_bridge_leader", "1 if this bridge is the leader: it alone fetches blocks for all bridges."),
            Gauge("kiln_bridge_banned_peers", "Peers that the bridge has banned for misbehavior."),
            Gauge("kiln_bridge_topics", "Gossipsub topics that the bridge subscribes to."),
            Gauge(
                "kiln_bridge_topics_on_other_bridges",
                "Topics of interest that this bridge leaves to another bridge of the network.",
            ),
            Gauge(
                "kiln_bridge_topics_over_limit",
                "Topics of interest not joined yet, or left out because of `bridge.max_topics` or "
                "`bridge.max_topics_per_peer`.",
            ),
            Gauge("kiln_bridge_meshes", "Topics by the number of peers in their gossipsub mesh.", labels=("peers",)),
            Counter("kiln_bridge_frames", "Captured frames (RPCs).", labels=_DIRECTION),
            Counter("kiln_bridge_bytes", "Bytes of captured frames.", labels=_DIRECTION),
            Counter(
                "kiln_bridge_events",
                "Events of the bridge's libp2p node and router, as listed under Node and router in METRICS.md.",
                labels=("event",),
            ),
            Gauge("kiln_bridge_spool_frames", "Captured frames that Kafka has not acknowledged yet."),
            Gauge("kiln_bridge_spool_memory_bytes", "Memory of captured frames that Kafka has not acknowledged yet."),
            Gauge(
                "kiln_bridge_spool_disk_bytes",
                "Size of the spool files, which hold frames on disk while Kafka is unavailable.",
            ),
            Gauge("kiln_bridge_spool_disk_free_bytes", "Free space on the disk of the spool."),
            Gauge("kiln_bridge_spool_full", "1 if the spool is full and reading from peers is paused."),
            Counter(
                "kiln_publications",
                "Batches by result: published, failed, or lost (deleted by Kafka before the bridge read them).",
                labels=("transport", "result"),
            ),
        ),
    ),
    MetricGroup(
        "Fetching",
        FETCHES,
        (
            Gauge("kiln_fetcher_waiting_records", "Records of `kiln.wanted` that wait for a block."),
            Gauge("kiln_fetcher_fetches_in_flight", "Block requests in flight."),
            Gauge(
                "kiln_fetcher_pending_claim_checks",
                "Geneses still to fetch for checking the separators that updates claim.",
            ),
            Counter(
                "kiln_fetcher_records",
                "Results of the block fetcher, as listed under Outcomes of the fetcher in METRICS.md.",
                labels=("outcome",),
            ),
            Gauge("kiln_ipfs_connected_peers", "Peers that the IPFS node is connected to."),
            Counter("kiln_ipfs_provided_blocks", "Blocks announced to content routing, so that peers find them."),
            Counter("kiln_ipfs_sent_blocks", "Blocks that the bridge's own IPFS node sent to peers over bitswap."),
            Counter(
                "kiln_ipfs_sent_bytes",
                "Bytes of the blocks that the bridge's own IPFS node sent to peers over bitswap.",
            ),
            Counter(
                "kiln_ipfs_received_blocks", "Requested blocks that the bridge's own IPFS node received from peers."
            ),
        ),
    ),
    MetricGroup(
        "BEP 50",
        "if `bep50.enabled` is true",
        (
            Gauge("kiln_bep50_topics", "Topics that the bridge has joined in the BEP 50 overlay."),
            Gauge(
                "kiln_bep50_contacts", "Known nodes of the joined topics in the BEP 50 overlay, summed over the topics."
            ),
            Counter("kiln_bep50_frames", "Captured BEP 50 datagrams.", labels=_DIRECTION),
            Counter(
                "kiln_bep50_gaps",
                "Gaps in the announcements of other publishers: Kiln missed some, or the publisher lost its state.",
            ),
            Counter(
                "kiln_bep50_dropped_datagrams",
                "Received BEP 50 datagrams that were dropped or refused, by reason.",
                labels=("reason",),
            ),
        ),
    ),
    MetricGroup(
        "The lake",
        "",
        (
            Gauge("kiln_table_rows", "Rows in the Delta table.", labels=_TABLE),
            Gauge("kiln_table_files", "Data files in the latest version of the Delta table.", labels=_TABLE),
            Gauge(
                "kiln_table_bytes", "Size of the data files in the latest version of the Delta table.", labels=_TABLE
            ),
            Gauge("kiln_table_version", "Latest version of the Delta table.", labels=_TABLE),
            Gauge("kiln_table_commit_age_seconds", "Time since the latest commit to the Delta table.", labels=_TABLE),
        ),
    ),
    MetricGroup(
        "Quality",
        CHECKS,
        (
            Gauge(
                "kiln_quality_expectations",
                "Data quality expectations in the last check, by table and result.",
                labels=("table", "result"),
            ),
            Gauge("kiln_quality_check_age_seconds", "Time since the last data quality check."),
        ),
    ),
)
FAMILIES: Final = {family.name: family for group in GROUPS for family in group.families}
"""Metric families without samples, by name. Names of counters lack the suffix `_total`."""

Values = Iterable[tuple[tuple[str, ...], float]]
"""Samples of a metric family: label values, in the order of the family's labels, and the value."""


def build_family(name: str, values: Values) -> Counter | Gauge:
    """Add samples to a copy of the declared counter or gauge with this name."""
    family = copy(FAMILIES[name])
    assert not isinstance(family, Histogram)
    family.samples = []
    for labels, value in values:
        family.add_metric(labels, value)
    return family


BEGIN: Final = "<!-- made from schemas/metrics.py -->"
END: Final = "<!-- end of what is made from schemas/metrics.py -->"


def insert_tables(page: str) -> str:
    """Replace the tables of metrics in the text of docs/METRICS.md."""
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
