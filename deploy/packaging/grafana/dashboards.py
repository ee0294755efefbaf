"""Dashboards as rows of panels with their queries. `deploy/packaging/grafana/files.py` writes Grafana's JSON.

Grafana replaces `$instance` by the instances that a user selects, and `$__rate_interval` by a multiple of the scrape
interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

_KILN: Final = 'instance=~"$instance"'
_RATE: Final = "[$__rate_interval]"


class PanelQuery(NamedTuple):
    """A query of a panel; `legend` has labels in braces."""

    expression: str
    legend: str = ""


class Panel(NamedTuple):
    """A plot, or the latest value as a large number; `unit` is an id of Grafana."""

    title: str
    says: str
    unit: str
    lines: Sequence[PanelQuery]
    stacked: bool = False
    figure: bool = False
    bad_from: float | None = None
    """threshold from which a number is red"""


class PanelRow(NamedTuple):
    """Panels next to each other."""

    title: str
    panels: Sequence[Panel]


def select_gauge(name: str, labels: str = "") -> str:
    """Select a gauge for the chosen instances."""
    return f"{name}{{{_KILN}{', ' if labels else ''}{labels}}}"


def compute_rate(name: str, labels: str = "", *, suffix: str = "total") -> str:
    """Compute the rate of a counter."""
    return f"rate({select_gauge(f'{name}_{suffix}', labels)}{_RATE})"


def _sum(expression: str, by: str = "") -> str:
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def _delay(quantile: float) -> str:
    buckets = _sum(compute_rate("kiln_batch_delay_seconds", suffix="bucket"), "le")
    return f"histogram_quantile({quantile}, {buckets})"


_EVENTS: Final = compute_rate("kiln_bridge_events", 'event!~"bytes_.+"')
_DELAY: Final = Panel(
    "Batch delay",
    "Time from the event time of the first update plus T until the broker has the batch.",
    "s",
    [PanelQuery(_delay(0.5), "p50"), PanelQuery(_delay(0.99), "p99")],
)
_LAG: Final = Panel(
    "Lag in seconds",
    "Age of the oldest record in Kafka that a query has not read.",
    "s",
    [PanelQuery(select_gauge("kiln_query_lag_seconds"), "{{query}}")],
)
_BAD: Final = f"({_sum(compute_rate('kiln_quarantined_records'))} or vector(0))"
_GOOD: Final = _sum(compute_rate("kiln_messages"))
_QUARANTINE_SHARE: Final = f"{_BAD} / ({_BAD} + {_GOOD})"
_EXPECTATIONS: Final = _sum(select_gauge("kiln_quality_expectations"))
_FAILED: Final = _sum(select_gauge("kiln_quality_expectations", 'result="error"'))

OVERVIEW: Final = (
    PanelRow(
        "Health",
        (
            Panel(
                "Firing alerts",
                "See docs/RUNBOOK.md, Alerts.",
                "none",
                [PanelQuery('count(ALERTS{alertname=~"Kiln.+", alertstate="firing"}) or vector(0)')],
                figure=True,
                bad_from=1,
            ),
            Panel(
                "Problems",
                "Problems that the screen and the status page list.",
                "none",
                [PanelQuery(_sum(select_gauge("kiln_problems")))],
                figure=True,
                bad_from=1,
            ),
            Panel(
                "Queries down",
                "Queries that are starting, failed, or stopped by the breaker.",
                "none",
                [PanelQuery(f"count({select_gauge('kiln_query_up')}) - {_sum(select_gauge('kiln_query_up'))}")],
                figure=True,
                bad_from=1,
            ),
            Panel(
                "Peers",
                "Pubsub peers of the bridge.",
                "none",
                [PanelQuery(_sum(select_gauge("kiln_bridge_peers")))],
                figure=True,
            ),
            Panel("Batch delay, p99", _DELAY.says, "s", [_DELAY.lines[1]], figure=True, bad_from=10),
            Panel(
                "Quarantine share",
                "Quarantined records as a share of all decoded records.",
                "percentunit",
                [PanelQuery(_QUARANTINE_SHARE)],
                figure=True,
                bad_from=0.2,
            ),
        ),
    ),
    PanelRow(
        "Throughput",
        (
            Panel(
                "Frames", "Frames written to Kafka.", "cps", [PanelQuery(_sum(compute_rate("kiln_frames")), "frames")]
            ),
            Panel(
                "Messages by type",
                "Valid messages, without duplicates.",
                "cps",
                [PanelQuery(_sum(compute_rate("kiln_messages"), "type"), "{{type}}")],
                stacked=True,
            ),
            Panel(
                "Batches and tips",
                "Batches in kiln.batches, and the tips in them.",
                "cps",
                [
                    PanelQuery(_sum(compute_rate("kiln_batches")), "batches"),
                    PanelQuery(_sum(compute_rate("kiln_batch_tips")), "tips"),
                ],
            ),
        ),
    ),
    PanelRow("Latency", (_DELAY, _LAG)),
    PanelRow(
        "Processes",
        (
            Panel(
                "Uptime",
                "Time since each run started. A drop is a restart.",
                "s",
                [PanelQuery(select_gauge("kiln_uptime_seconds"), "{{instance}}")],
            ),
            Panel(
                "Versions",
                "Version, network and mode of each process.",
                "none",
                [PanelQuery(select_gauge("kiln_info"), "{{version}} {{network}} {{mode}}")],
            ),
        ),
    ),
)

BRIDGE: Final = (
    PanelRow(
        "Peers",
        (
            Panel(
                "Up",
                "0 if the bridge reports no status.",
                "none",
                [PanelQuery(select_gauge("kiln_bridge_up"), "{{instance}}")],
                figure=True,
            ),
            Panel(
                "Peers by agent",
                "The ten most frequent names, without their versions.",
                "none",
                [PanelQuery(_sum(select_gauge("kiln_bridge_peers"), "agent"), "{{agent}}")],
                stacked=True,
            ),
            Panel(
                "Peers by protocol",
                "As negotiated for the pubsub stream.",
                "none",
                [PanelQuery(_sum(select_gauge("kiln_bridge_peers"), "protocol"), "{{protocol}}")],
                stacked=True,
            ),
            Panel(
                "Peers by score",
                "Connected peers by gossipsub score, and banned peers.",
                "none",
                [
                    PanelQuery(_sum(select_gauge("kiln_bridge_peer_scores"), "score"), "{{score}}"),
                    PanelQuery(_sum(select_gauge("kiln_bridge_banned_peers")), "banned"),
                ],
            ),
        ),
    ),
    PanelRow(
        "Frames",
        (
            Panel(
                "Frames",
                "Frames that the bridge captured.",
                "cps",
                [PanelQuery(_sum(compute_rate("kiln_bridge_frames"), "direction"), "{{direction}}")],
            ),
            Panel(
                "Bytes",
                "Bytes of these frames.",
                "Bps",
                [PanelQuery(_sum(compute_rate("kiln_bridge_bytes"), "direction"), "{{direction}}")],
            ),
            Panel(
                "Node and router events",
                "The ten fastest, without bytes. docs/METRICS.md describes each.",
                "cps",
                [PanelQuery(f"topk(10, {_sum(_EVENTS, 'event')})", "{{event}}")],
            ),
        ),
    ),
    PanelRow(
        "Topics",
        (
            Panel(
                "Bridges of the network",
                "Live bridges as seen by each bridge, and leaders, of which there is one.",
                "none",
                [
                    PanelQuery(f"max({select_gauge('kiln_bridges')})", "live"),
                    PanelQuery(_sum(select_gauge("kiln_bridge_leader")), "leading"),
                ],
            ),
            Panel(
                "Topics",
                "Topics that are joined, subscribed to by another bridge, or over the limit.",
                "none",
                [
                    PanelQuery(_sum(select_gauge("kiln_bridge_topics")), "joined"),
                    PanelQuery(_sum(select_gauge("kiln_bridge_topics_on_other_bridges")), "on other bridges"),
                    PanelQuery(_sum(select_gauge("kiln_bridge_topics_over_limit")), "over limit"),
                ],
            ),
            Panel(
                "Meshes by peers",
                "Topic meshes by number of peers. gossipsub aims at 6 to 12.",
                "none",
                [PanelQuery(_sum(select_gauge("kiln_bridge_meshes"), "peers"), "{{peers}}")],
                stacked=True,
            ),
        ),
    ),
    PanelRow(
        "Spool",
        (
            Panel(
                "Waiting frames",
                "Frames not yet acknowledged by Kafka; 1 if the broker answers; 1 if the spool is full.",
                "none",
                [
                    PanelQuery(_sum(select_gauge("kiln_bridge_spool_frames")), "frames"),
                    PanelQuery(f"min({select_gauge('kiln_broker_up')})", "broker answers"),
                    PanelQuery(f"max({select_gauge('kiln_bridge_spool_full')})", "full"),
                ],
            ),
            Panel(
                "Memory and disk",
                "Size of waiting frames in memory and of the spool on disk.",
                "bytes",
                [
                    PanelQuery(_sum(select_gauge("kiln_bridge_spool_memory_bytes")), "memory"),
                    PanelQuery(_sum(select_gauge("kiln_bridge_spool_disk_bytes")), "spool"),
                ],
            ),
            Panel(
                "Free disk",
                "Free space on the disk of the state folder.",
                "bytes",
                [PanelQuery(f"min({select_gauge('kiln_bridge_spool_disk_free_bytes')})", "free")],
            ),
        ),
    ),
    PanelRow(
        "Publishing",
        (
            Panel(
                "Publications",
                "Batches published, failed, or lost because Kafka deleted them first.",
                "cps",
                [PanelQuery(_sum(compute_rate("kiln_publications"), "transport, result"), "{{transport}} {{result}}")],
            ),
            Panel(
                "BEP 50",
                "Topics and contacts of the overlay.",
                "none",
                [
                    PanelQuery(_sum(select_gauge("kiln_bep50_topics")), "topics"),
                    PanelQuery(_sum(select_gauge("kiln_bep50_contacts")), "contacts"),
                ],
            ),
            Panel(
                "BEP 50, datagrams",
                "Captured and dropped datagrams, and gaps in announcements.",
                "cps",
                [
                    PanelQuery(_sum(compute_rate("kiln_bep50_frames"), "direction"), "{{direction}}"),
                    PanelQuery(_sum(compute_rate("kiln_bep50_dropped_datagrams"), "reason"), "dropped: {{reason}}"),
                    PanelQuery(_sum(compute_rate("kiln_bep50_gaps")), "gaps"),
                ],
            ),
        ),
    ),
    PanelRow(
        "Fetching, if ipfs.api is set",
        (
            Panel(
                "Fetcher queue",
                "Records that wait for a block, fetches in flight, and pending claim checks.",
                "none",
                [
                    PanelQuery(_sum(select_gauge("kiln_fetcher_waiting_records")), "waiting"),
                    PanelQuery(_sum(select_gauge("kiln_fetcher_fetches_in_flight")), "fetching"),
                    PanelQuery(_sum(select_gauge("kiln_fetcher_pending_claim_checks")), "claims"),
                ],
            ),
            Panel(
                "Outcomes",
                "By outcome.",
                "cps",
                [PanelQuery(_sum(compute_rate("kiln_fetcher_records"), "outcome"), "{{outcome}}")],
            ),
            Panel(
                "IPFS node",
                "Connected peers, and blocks provided to the routing.",
                "none",
                [
                    PanelQuery(_sum(select_gauge("kiln_ipfs_connected_peers")), "connections"),
                    PanelQuery(_sum(select_gauge("kiln_ipfs_provided_blocks_total")), "provided"),
                ],
            ),
        ),
    ),
)

STREAMS: Final = (
    PanelRow(
        "Queries",
        (
            Panel(
                "Up",
                "1 if the query is running; 0 while it starts, after it failed, or if the breaker stopped it.",
                "none",
                [PanelQuery(select_gauge("kiln_query_up"), "{{query}}")],
            ),
            Panel(
                "Breaker tripped",
                "1 if the breaker stopped the query until the next start of Kiln.",
                "none",
                [PanelQuery(select_gauge("kiln_query_breaker_tripped"), "{{query}}")],
            ),
            Panel(
                "Restarts in 30 minutes",
                "Restarts after a failure.",
                "none",
                [PanelQuery(f"increase({select_gauge('kiln_query_restarts_total')}[30m])", "{{query}}")],
            ),
        ),
    ),
    PanelRow(
        "Lag",
        (
            _LAG,
            Panel(
                "Lag in records",
                "Records that a query has not read yet.",
                "none",
                [PanelQuery(select_gauge("kiln_query_lag_records"), "{{query}}")],
            ),
            Panel(
                "Records",
                "Records that a query reads.",
                "cps",
                [PanelQuery(compute_rate("kiln_query_records"), "{{query}}")],
            ),
        ),
    ),
    PanelRow(
        "Micro-batches",
        (
            Panel(
                "Duration",
                "Duration of the latest micro-batch of each query.",
                "s",
                [
                    PanelQuery(
                        select_gauge("kiln_query_phase_duration_seconds", 'phase="triggerExecution"'), "{{query}}"
                    )
                ],
            ),
            Panel(
                "By phase",
                "Phases of the latest micro-batch, by Spark's names.",
                "s",
                [
                    PanelQuery(
                        select_gauge("kiln_query_phase_duration_seconds", 'phase!="triggerExecution"'),
                        "{{query}} {{phase}}",
                    )
                ],
                stacked=True,
            ),
            Panel(
                "Rate",
                "Micro-batches per second.",
                "cps",
                [PanelQuery(f"deriv({select_gauge('kiln_query_micro_batch_id')}[5m])", "{{query}}")],
            ),
        ),
    ),
    PanelRow(
        "Windows and state",
        (
            _DELAY,
            Panel(
                "Open windows",
                "Open windows, at most one per separator.",
                "none",
                [PanelQuery(_sum(select_gauge("kiln_open_windows")), "open")],
            ),
            Panel(
                "Tips per batch",
                "On average.",
                "none",
                [PanelQuery(f"{_sum(compute_rate('kiln_batch_tips'))} / {_sum(compute_rate('kiln_batches'))}", "tips")],
            ),
            Panel(
                "State rows",
                "Open windows, or digests of emitted rows.",
                "none",
                [PanelQuery(select_gauge("kiln_query_state_rows"), "{{query}}")],
            ),
            Panel(
                "State bytes",
                "Size of these rows.",
                "bytes",
                [PanelQuery(select_gauge("kiln_query_state_bytes"), "{{query}}")],
            ),
        ),
    ),
)

_SELDOM: Final = "backfill_runs|bundles|quality_results|quarantine_dropped|streams"
LAKE: Final = (
    PanelRow(
        "Freshness",
        (
            Panel(
                "Age of the latest commit",
                "Under ten seconds or so while rows arrive.",
                "s",
                # the others get rare commits, and would hide these
                [PanelQuery(select_gauge("kiln_table_commit_age_seconds", f'table!~"{_SELDOM}"'), "{{table}}")],
            ),
            Panel(
                "Commits",
                "Commits per minute.",
                "none",
                [PanelQuery(f"60 * deriv({select_gauge('kiln_table_version')}[5m])", "{{table}}")],
            ),
        ),
    ),
    PanelRow(
        "Size",
        (
            Panel("Rows", "Rows of each table.", "short", [PanelQuery(select_gauge("kiln_table_rows"), "{{table}}")]),
            Panel(
                "Bytes",
                "Size of the data files in the latest version.",
                "bytes",
                [PanelQuery(select_gauge("kiln_table_bytes"), "{{table}}")],
            ),
            Panel(
                "Files",
                "Data files in the latest version. Maintenance compacts them.",
                "none",
                [PanelQuery(select_gauge("kiln_table_files"), "{{table}}")],
            ),
            Panel(
                "Average file size",
                "On average.",
                "bytes",
                [
                    PanelQuery(
                        f"{select_gauge('kiln_table_bytes')} / clamp_min({select_gauge('kiln_table_files')}, 1)",
                        "{{table}}",
                    )
                ],
            ),
            Panel(
                "New rows",
                "Rows per second.",
                "cps",
                [PanelQuery(f"deriv({select_gauge('kiln_table_rows')}[5m])", "{{table}}")],
            ),
        ),
    ),
)

QUALITY: Final = (
    PanelRow(
        "Expectations",
        (
            Panel(
                "Failed, level error",
                "kiln quality lists the rows.",
                "none",
                [PanelQuery(f"{_FAILED} or 0 * {_EXPECTATIONS}")],
                figure=True,
                bad_from=1,
            ),
            Panel(
                "Last check",
                "Time since the last quality check of this run.",
                "s",
                [PanelQuery(f"max({select_gauge('kiln_quality_check_age_seconds')})")],
                figure=True,
            ),
            Panel(
                "By result",
                "Passed, or the level of a failed expectation.",
                "none",
                [PanelQuery(_sum(select_gauge("kiln_quality_expectations"), "result"), "{{result}}")],
                stacked=True,
            ),
            Panel(
                "By table",
                "Expectations of the last check, by table.",
                "none",
                [PanelQuery(_sum(select_gauge("kiln_quality_expectations"), "table, result"), "{{table}} {{result}}")],
            ),
        ),
    ),
    PanelRow(
        "Quarantine",
        (
            Panel(
                "By reason",
                "See docs/RUNBOOK.md, Quarantine.",
                "cps",
                [PanelQuery(_sum(compute_rate("kiln_quarantined_records"), "stage, reason"), "{{stage}}: {{reason}}")],
                stacked=True,
            ),
            Panel(
                "Share",
                "Quarantined records as a share of all decoded records.",
                "percentunit",
                [PanelQuery(_QUARANTINE_SHARE, "share")],
            ),
        ),
    ),
    PanelRow(
        "Traffic",
        (
            Panel(
                "Copies per message",
                "Average number of copies of a valid message.",
                "none",
                [PanelQuery(f"{_sum(compute_rate('kiln_copies'))} / {_sum(compute_rate('kiln_messages'))}", "copies")],
            ),
            Panel(
                "Message types",
                "Share of each message type.",
                "percentunit",
                [
                    PanelQuery(
                        f"{_sum(compute_rate('kiln_messages'), 'type')} / ignoring(type) group_left() "
                        f"{_sum(compute_rate('kiln_messages'))}",
                        "{{type}}",
                    )
                ],
                stacked=True,
            ),
            Panel(
                "Age of the tables",
                "Time since the latest commit.",
                "s",
                [
                    PanelQuery(
                        select_gauge("kiln_table_commit_age_seconds", 'table=~"frames|messages|updates|batches"'),
                        "{{table}}",
                    )
                ],
            ),
        ),
    ),
)

DASHBOARDS: Final = {"overview": OVERVIEW, "bridge": BRIDGE, "streams": STREAMS, "lake": LAKE, "quality": QUALITY}
"""By name."""


def list_expressions(rows: Sequence[PanelRow]) -> list[str]:
    """List the queries of a dashboard."""
    return [line.expression for row in rows for panel in row.panels for line in panel.lines]
