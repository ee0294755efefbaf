"""What the dashboards show: rows of panels, with their queries. `deploy/packaging/grafana/files.py` makes Grafana's
JSON of it.

`$instance` stands for the Kilns that a user chooses, `$__rate_interval` for what Grafana makes of the scrape interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

_KILN: Final = 'instance=~"$instance"'
_RATE: Final = "[$__rate_interval]"


class PanelQuery(NamedTuple):
    """A query of a panel. `legend`: with labels in braces."""

    expression: str
    legend: str = ""


class Panel(NamedTuple):
    """A plot, or the newest value in large figures. `unit`: an id of Grafana's."""

    title: str
    says: str
    unit: str
    lines: Sequence[PanelQuery]
    stacked: bool = False
    figure: bool = False
    bad_from: float | None = None
    """a figure of that much or more is red"""


class PanelRow(NamedTuple):
    """Panels side by side."""

    title: str
    panels: Sequence[Panel]


def gauge(name: str, labels: str = "") -> str:
    """The series of a gauge, of the chosen Kilns."""
    return f"{name}{{{_KILN}{', ' if labels else ''}{labels}}}"


def per_second(name: str, labels: str = "", *, suffix: str = "total") -> str:
    """How much a counter grows a second."""
    return f"rate({gauge(f'{name}_{suffix}', labels)}{_RATE})"


def _sum(expression: str, by: str = "") -> str:
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def _lateness(quantile: float) -> str:
    buckets = _sum(per_second("kiln_batch_delay_seconds", suffix="bucket"), "le")
    return f"histogram_quantile({quantile}, {buckets})"


_EVENTS: Final = per_second("kiln_bridge_events", 'event!~"bytes_.+"')
_SPAN: Final = Panel(
    "Lateness of batches",
    "How much later than T after its first update was heard the broker had a batch.",
    "s",
    [PanelQuery(_lateness(0.5), "p50"), PanelQuery(_lateness(0.99), "p99")],
)
_LAG: Final = Panel(
    "Behind, in seconds",
    "For how long the oldest record that a query has not read has been in Kafka.",
    "s",
    [PanelQuery(gauge("kiln_query_lag_seconds"), "{{query}}")],
)
_BAD: Final = f"({_sum(per_second('kiln_quarantined_records'))} or vector(0))"
_GOOD: Final = _sum(per_second("kiln_messages"))
_QUARANTINE_SHARE: Final = f"{_BAD} / ({_BAD} + {_GOOD})"
_EXPECTATIONS: Final = _sum(gauge("kiln_quality_expectations"))
_FAILED: Final = _sum(gauge("kiln_quality_expectations", 'result="error"'))

OVERVIEW: Final = (
    PanelRow(
        "Is all well?",
        (
            Panel(
                "Alerts that fire",
                "docs/RUNBOOK.md, Alerts, says of each what to do.",
                "none",
                [PanelQuery('count(ALERTS{alertname=~"Kiln.+", alertstate="firing"}) or vector(0)')],
                figure=True,
                bad_from=1,
            ),
            Panel(
                "What is wrong",
                "How many errors the screen and the status page say in words.",
                "none",
                [PanelQuery(_sum(gauge("kiln_problems")))],
                figure=True,
                bad_from=1,
            ),
            Panel(
                "Queries down",
                "Queries that start, have failed or are held.",
                "none",
                [PanelQuery(f"count({gauge('kiln_query_up')}) - {_sum(gauge('kiln_query_up'))}")],
                figure=True,
                bad_from=1,
            ),
            Panel(
                "Peers",
                "Peers that speak pubsub with the bridge.",
                "none",
                [PanelQuery(_sum(gauge("kiln_bridge_peers")))],
                figure=True,
            ),
            Panel("Late, p99", _SPAN.says, "s", [_SPAN.lines[1]], figure=True, bad_from=10),
            Panel(
                "In quarantine",
                "Share of what was decoded that went to quarantine.",
                "percentunit",
                [PanelQuery(_QUARANTINE_SHARE)],
                figure=True,
                bad_from=0.2,
            ),
        ),
    ),
    PanelRow(
        "The flow",
        (
            Panel(
                "Frames", "Frames that came into Kafka.", "cps", [PanelQuery(_sum(per_second("kiln_frames")), "frames")]
            ),
            Panel(
                "Messages by type",
                "First good copies.",
                "cps",
                [PanelQuery(_sum(per_second("kiln_messages"), "type"), "{{type}}")],
                stacked=True,
            ),
            Panel(
                "Batches and tips",
                "Batches in kiln.batches, and the tips in them.",
                "cps",
                [
                    PanelQuery(_sum(per_second("kiln_batches")), "batches"),
                    PanelQuery(_sum(per_second("kiln_batch_tips")), "tips"),
                ],
            ),
        ),
    ),
    PanelRow("How late", (_SPAN, _LAG)),
    PanelRow(
        "What runs",
        (
            Panel(
                "Runs",
                "How long each run has lasted. A fall is a start.",
                "s",
                [PanelQuery(gauge("kiln_uptime_seconds"), "{{instance}}")],
            ),
            Panel(
                "Versions",
                "What runs where.",
                "none",
                [PanelQuery(gauge("kiln_info"), "{{version}} {{network}} {{mode}}")],
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
                "0: the bridge says nothing.",
                "none",
                [PanelQuery(gauge("kiln_bridge_up"), "{{instance}}")],
                figure=True,
            ),
            Panel(
                "Peers by agent",
                "The ten most frequent names, without their versions.",
                "none",
                [PanelQuery(_sum(gauge("kiln_bridge_peers"), "agent"), "{{agent}}")],
                stacked=True,
            ),
            Panel(
                "Peers by protocol",
                "As negotiated for the pubsub stream.",
                "none",
                [PanelQuery(_sum(gauge("kiln_bridge_peers"), "protocol"), "{{protocol}}")],
                stacked=True,
            ),
            Panel(
                "Peers by score",
                "What the router thinks of the peers, and how many are kept out for their conduct.",
                "none",
                [
                    PanelQuery(_sum(gauge("kiln_bridge_peer_scores"), "score"), "{{score}}"),
                    PanelQuery(_sum(gauge("kiln_bridge_banned_peers")), "kept out"),
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
                [PanelQuery(_sum(per_second("kiln_bridge_frames"), "direction"), "{{direction}}")],
            ),
            Panel(
                "Bytes",
                "Bytes of these frames.",
                "Bps",
                [PanelQuery(_sum(per_second("kiln_bridge_bytes"), "direction"), "{{direction}}")],
            ),
            Panel(
                "What node and router count",
                "The ten that grow fastest, without bytes. docs/METRICS.md has a sentence on each.",
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
                "Bridges that live, as each one knows them, and those that publish and fetch: one, of all that run.",
                "none",
                [
                    PanelQuery(f"max({gauge('kiln_bridges')})", "live"),
                    PanelQuery(_sum(gauge("kiln_bridge_leader")), "leading"),
                ],
            ),
            Panel(
                "Topics",
                "Topics joined, those that another bridge hears, and those of the interests that lack room.",
                "none",
                [
                    PanelQuery(_sum(gauge("kiln_bridge_topics")), "joined"),
                    PanelQuery(_sum(gauge("kiln_bridge_topics_on_other_bridges")), "left to other bridges"),
                    PanelQuery(_sum(gauge("kiln_bridge_topics_over_limit")), "refused"),
                ],
            ),
            Panel(
                "Meshes by peers",
                "How many peers the meshes have. gossipsub keeps 6 to 12 where there are that many.",
                "none",
                [PanelQuery(_sum(gauge("kiln_bridge_meshes"), "peers"), "{{peers}}")],
                stacked=True,
            ),
        ),
    ),
    PanelRow(
        "Spool",
        (
            Panel(
                "Waiting frames",
                "Frames that Kafka does not have yet. 1: the broker answers; the spool is full, and peers wait.",
                "none",
                [
                    PanelQuery(_sum(gauge("kiln_bridge_spool_frames")), "frames"),
                    PanelQuery(f"min({gauge('kiln_broker_up')})", "broker answers"),
                    PanelQuery(f"max({gauge('kiln_bridge_spool_full')})", "full"),
                ],
            ),
            Panel(
                "Room they take",
                "In memory, and in the spool on the disk.",
                "bytes",
                [
                    PanelQuery(_sum(gauge("kiln_bridge_spool_memory_bytes")), "memory"),
                    PanelQuery(_sum(gauge("kiln_bridge_spool_disk_bytes")), "spool"),
                ],
            ),
            Panel(
                "Room left",
                "On the disk of the state folder.",
                "bytes",
                [PanelQuery(f"min({gauge('kiln_bridge_spool_disk_free_bytes')})", "free")],
            ),
        ),
    ),
    PanelRow(
        "Publishing",
        (
            Panel(
                "Publications",
                "Batches published, failed, or lost by Kafka before.",
                "cps",
                [PanelQuery(_sum(per_second("kiln_publications"), "transport, result"), "{{transport}} {{result}}")],
            ),
            Panel(
                "BEP 50",
                "Topics and contacts of the overlay.",
                "none",
                [
                    PanelQuery(_sum(gauge("kiln_bep50_topics")), "topics"),
                    PanelQuery(_sum(gauge("kiln_bep50_contacts")), "contacts"),
                ],
            ),
            Panel(
                "BEP 50, datagrams",
                "Captured, dropped, and batches of others that were missed.",
                "cps",
                [
                    PanelQuery(_sum(per_second("kiln_bep50_frames"), "direction"), "{{direction}}"),
                    PanelQuery(_sum(per_second("kiln_bep50_dropped_datagrams"), "reason"), "dropped: {{reason}}"),
                    PanelQuery(_sum(per_second("kiln_bep50_gaps")), "missed"),
                ],
            ),
        ),
    ),
    PanelRow(
        "Fetching, where ipfs.api is set",
        (
            Panel(
                "Wanted",
                "Records that wait for a block, blocks asked for, and geneses to be held against claims.",
                "none",
                [
                    PanelQuery(_sum(gauge("kiln_fetcher_waiting_records")), "waiting"),
                    PanelQuery(_sum(gauge("kiln_fetcher_fetches_in_flight")), "fetching"),
                    PanelQuery(_sum(gauge("kiln_fetcher_pending_claim_checks")), "claims"),
                ],
            ),
            Panel(
                "What became of them",
                "By outcome.",
                "cps",
                [PanelQuery(_sum(per_second("kiln_fetcher_records"), "outcome"), "{{outcome}}")],
            ),
            Panel(
                "IPFS node",
                "Its connections, and the blocks that the routing was told of.",
                "none",
                [
                    PanelQuery(_sum(gauge("kiln_ipfs_connected_peers")), "connections"),
                    PanelQuery(_sum(gauge("kiln_ipfs_provided_blocks_total")), "provided"),
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
                "1: the query runs. 0: the query starts, has failed, or is held.",
                "none",
                [PanelQuery(gauge("kiln_query_up"), "{{query}}")],
            ),
            Panel(
                "Held by the breaker",
                "1: most authors' messages no longer decode, and the query waits for a start of Kiln.",
                "none",
                [PanelQuery(gauge("kiln_query_breaker_tripped"), "{{query}}")],
            ),
            Panel(
                "Restarts in half an hour",
                "Starts after a failure.",
                "none",
                [PanelQuery(f"increase({gauge('kiln_query_restarts_total')}[30m])", "{{query}}")],
            ),
        ),
    ),
    PanelRow(
        "Behind",
        (
            _LAG,
            Panel(
                "Behind, in records",
                "Records that a query has not read yet.",
                "none",
                [PanelQuery(gauge("kiln_query_lag_records"), "{{query}}")],
            ),
            Panel(
                "Records",
                "Records that a query reads.",
                "cps",
                [PanelQuery(per_second("kiln_query_records"), "{{query}}")],
            ),
        ),
    ),
    PanelRow(
        "Micro-batches",
        (
            Panel(
                "How long they take",
                "The newest micro-batch of each query.",
                "s",
                [PanelQuery(gauge("kiln_query_phase_duration_seconds", 'phase="triggerExecution"'), "{{query}}")],
            ),
            Panel(
                "By phase",
                "The phases of the newest micro-batch, by Spark's names.",
                "s",
                [PanelQuery(gauge("kiln_query_phase_duration_seconds", 'phase!="triggerExecution"'), "{{query}} {{phase}}")],
                stacked=True,
            ),
            Panel(
                "How many",
                "Micro-batches a second.",
                "cps",
                [PanelQuery(f"deriv({gauge('kiln_query_micro_batch_id')}[5m])", "{{query}}")],
            ),
        ),
    ),
    PanelRow(
        "Windows and state",
        (
            _SPAN,
            Panel(
                "Open windows",
                "Separators with an open window.",
                "none",
                [PanelQuery(_sum(gauge("kiln_open_windows")), "open")],
            ),
            Panel(
                "Tips of a batch",
                "On average.",
                "none",
                [PanelQuery(f"{_sum(per_second('kiln_batch_tips'))} / {_sum(per_second('kiln_batches'))}", "tips")],
            ),
            Panel(
                "State rows",
                "Windows, or digests of what a query has let through.",
                "none",
                [PanelQuery(gauge("kiln_query_state_rows"), "{{query}}")],
            ),
            Panel(
                "State bytes",
                "Of these rows.",
                "bytes",
                [PanelQuery(gauge("kiln_query_state_bytes"), "{{query}}")],
            ),
        ),
    ),
)

_SELDOM: Final = "backfill_runs|bundles|quality_results|quarantine_dropped|streams"
LAKE: Final = (
    PanelRow(
        "Fresh",
        (
            Panel(
                "Age of the newest commit",
                "Every ten seconds where rows come.",
                "s",
                # others have a commit when somebody asks for one, and would hide these
                [PanelQuery(gauge("kiln_table_commit_age_seconds", f'table!~"{_SELDOM}"'), "{{table}}")],
            ),
            Panel(
                "Commits",
                "Versions a minute.",
                "none",
                [PanelQuery(f"60 * deriv({gauge('kiln_table_version')}[5m])", "{{table}}")],
            ),
        ),
    ),
    PanelRow(
        "Size",
        (
            Panel("Rows", "Rows of each table.", "short", [PanelQuery(gauge("kiln_table_rows"), "{{table}}")]),
            Panel(
                "Bytes",
                "Size of the newest version's files.",
                "bytes",
                [PanelQuery(gauge("kiln_table_bytes"), "{{table}}")],
            ),
            Panel(
                "Files",
                "Files of the newest version. Care for the tables makes few of many.",
                "none",
                [PanelQuery(gauge("kiln_table_files"), "{{table}}")],
            ),
            Panel(
                "Bytes of a file",
                "On average.",
                "bytes",
                [PanelQuery(f"{gauge('kiln_table_bytes')} / clamp_min({gauge('kiln_table_files')}, 1)", "{{table}}")],
            ),
            Panel(
                "New rows",
                "Rows a second.",
                "cps",
                [PanelQuery(f"deriv({gauge('kiln_table_rows')}[5m])", "{{table}}")],
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
                "kiln quality names the rows.",
                "none",
                [PanelQuery(f"{_FAILED} or 0 * {_EXPECTATIONS}")],
                figure=True,
                bad_from=1,
            ),
            Panel(
                "Last check",
                "Time since the last check of this run.",
                "s",
                [PanelQuery(f"max({gauge('kiln_quality_check_age_seconds')})")],
                figure=True,
            ),
            Panel(
                "By what became of them",
                "A level is that of an expectation that failed.",
                "none",
                [PanelQuery(_sum(gauge("kiln_quality_expectations"), "result"), "{{result}}")],
                stacked=True,
            ),
            Panel(
                "By table",
                "Expectations that the last check held against a table.",
                "none",
                [PanelQuery(_sum(gauge("kiln_quality_expectations"), "table, result"), "{{table}} {{result}}")],
            ),
        ),
    ),
    PanelRow(
        "Quarantine",
        (
            Panel(
                "By reason",
                "docs/RUNBOOK.md, Quarantine, says of each what to do.",
                "cps",
                [PanelQuery(_sum(per_second("kiln_quarantined_records"), "stage, reason"), "{{stage}}: {{reason}}")],
                stacked=True,
            ),
            Panel(
                "Share",
                "Of what was decoded.",
                "percentunit",
                [PanelQuery(_QUARANTINE_SHARE, "share")],
            ),
        ),
    ),
    PanelRow(
        "The traffic",
        (
            Panel(
                "Copies of a message",
                "How often a good message comes, on average.",
                "none",
                [PanelQuery(f"{_sum(per_second('kiln_copies'))} / {_sum(per_second('kiln_messages'))}", "copies")],
            ),
            Panel(
                "Mix",
                "Share of each type.",
                "percentunit",
                [
                    PanelQuery(
                        f"{_sum(per_second('kiln_messages'), 'type')} / ignoring(type) group_left() "
                        f"{_sum(per_second('kiln_messages'))}",
                        "{{type}}",
                    )
                ],
                stacked=True,
            ),
            Panel(
                "Age of the tables",
                "Time since the newest commit.",
                "s",
                [PanelQuery(gauge("kiln_table_commit_age_seconds", 'table=~"frames|messages|updates|batches"'), "{{table}}")],
            ),
        ),
    ),
)

DASHBOARDS: Final = {"overview": OVERVIEW, "bridge": BRIDGE, "streams": STREAMS, "lake": LAKE, "quality": QUALITY}
"""By name."""


def expressions(rows: Sequence[PanelRow]) -> list[str]:
    """Every query of a dashboard."""
    return [line.expression for row in rows for panel in row.panels for line in panel.lines]
