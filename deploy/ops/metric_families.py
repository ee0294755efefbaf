"""Pure functions from a snapshot of a run to its health, its readiness, and the metrics that `/metrics` serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kiln.bridge.gossipsub.protocols import VERSIONS
from kiln.bridge.gossipsub.score import ScoreOptions
from kiln.conf.process.bridge_status import BridgeStatus, OverlayStatus, PeerStatus
from kiln.deploy.ops.snapshot import BATCH_DELAY_BUCKETS, Snapshot
from kiln.pipelines.runtime.query_status import RUNS, build_query_metrics
from kiln.schemas.metrics import FAMILIES, Values, build_family
from kiln.schemas.printable import printable

if TYPE_CHECKING:
    from kiln.deploy.ops.status import TableStatus

_MAX_SNAPSHOT_AGE = 30.0
"""Age of the newest snapshot, in seconds, above which the run counts as hanging."""


@dataclass(frozen=True)
class MonitorInputs:
    """State of a run at the time of an HTTP request: the newest snapshot, and the state of the tables.

    Attributes:
        at: Time of the snapshot, in Unix seconds.
        read_at: Time of the request, in Unix seconds.
    """

    snapshot: Snapshot
    at: float
    read_at: float
    version: str
    """version of Kiln"""
    tables: tuple[TableStatus, ...] = ()


def why_dead(facts: MonitorInputs | None) -> list[str]:
    """Return the reason why the process hangs; empty if it does not. A starting process passes `None`."""
    age = 0.0 if facts is None else facts.read_at - facts.at
    if age <= _MAX_SNAPSHOT_AGE:
        return []
    return [f"kiln run has not checked its queries for {age:.0f} s, so it may hang. If this persists, restart it"]


def why_not_ready(facts: MonitorInputs | None) -> list[str]:
    """Return the reasons why the run does not process records now; empty if it does."""
    if facts is None:
        return ["starting"]
    snapshot = facts.snapshot
    bridge = snapshot.bridge
    reasons = [f"the query {line.name} is {line.phase}" for line in snapshot.queries if line.phase not in RUNS]
    if snapshot.broker:
        reasons.append(snapshot.broker)
    if bridge is not None and bridge.status is None:
        reasons.append(SILENT_BRIDGE)
    if bridge is not None and bridge.status is not None and bridge.status.spool.full:
        reasons.append(FULL_SPOOL)
    return [*why_dead(facts), *reasons]


SILENT_BRIDGE: Final = "the bridge does not report its status. See its log (with kiln run: logs/bridge.log)"
FULL_SPOOL: Final = (
    "the bridge's spool is full, so the bridge does not read from peers. Start the broker, or free disk space"
)
_AGENTS: Final = 10
"""Number of agent names with a label of their own: those with the most peers."""
_LONGEST: Final = 40
_OTHER: Final = "other"
_MESH_SIZES: Final = ((0, "0"), (3, "1-3"), (5, "4-5"), (12, "6-12"))
"""Buckets of mesh sizes, each with its greatest number of peers and its label. Larger meshes are `over 12`.

The bounds follow gossipsub: D_low is 4 or 5, D is 6, and D_high is 12.
"""


def build_families(facts: MonitorInputs) -> Iterator[Metric]:
    """Build the metric families for which the inputs have values."""
    yield from _run(facts)
    yield from build_query_metrics(facts.snapshot.queries)
    if facts.snapshot.bridge is not None:
        yield from build_bridge_families(facts.snapshot.bridge.status)
    yield from _build_table_families(facts.tables, facts.read_at)
    checked = facts.snapshot.quality
    if checked is not None:
        yield build_family("kiln_quality_expectations", checked.counts.items())
        yield build_family("kiln_quality_check_age_seconds", [((), facts.read_at - checked.at)])


def _run(facts: MonitorInputs) -> Iterator[Metric]:
    seen = facts.snapshot
    yield build_family("kiln_info", [((facts.version, seen.network, seen.mode), 1)])
    yield build_family("kiln_uptime_seconds", [((), seen.elapsed.total_seconds())])
    yield build_family("kiln_problems", [((), len(seen.errors))])
    yield build_family("kiln_broker_up", [((), float(not seen.broker))])
    yield build_family("kiln_frames", [((), seen.frames)])
    yield build_family("kiln_messages", _label(seen.messages))
    yield build_family("kiln_copies", [((), seen.copies or 0)])
    yield build_family("kiln_core_differences", [((), seen.core_differences)])
    yield build_family("kiln_control_entries", _label(seen.control_entries))
    yield build_family("kiln_quarantined_records", seen.quarantine.items())
    yield build_family("kiln_open_windows", [((), seen.open_separators or 0)])
    yield build_family("kiln_batches", [((), seen.batches)])
    yield build_family("kiln_batch_tips", [((), seen.tips)])
    yield _lateness(seen)


def _lateness(seen: Snapshot) -> Metric:
    declared = FAMILIES["kiln_batch_delay_seconds"]
    counts = list(accumulate(seen.late_by_bucket)) or [0] * (len(BATCH_DELAY_BUCKETS) + 1)
    bounds = [*map(str, BATCH_DELAY_BUCKETS), "+Inf"]
    buckets = [(bound, float(count)) for bound, count in zip(bounds, counts, strict=True)]
    return HistogramMetricFamily(declared.name, declared.documentation, buckets=buckets, sum_value=seen.late_sum)


def build_bridge_families(status: BridgeStatus | None) -> Iterator[Metric]:
    """Build the metric families of a bridge; `status` is `None` if the bridge does not report one."""
    yield build_family("kiln_bridge_up", [((), float(status is not None))])
    if status is None:
        return
    spool = status.spool
    yield build_family("kiln_bridge_peers", _count_by_agent(status.peers).items())
    yield build_family("kiln_bridge_peer_scores", _count_by_score(status.peers).items())
    yield build_family("kiln_bridges", [((), len(status.sharing.bridges))])
    yield build_family("kiln_bridge_leader", [((), float(status.sharing.leads))])
    yield build_family("kiln_bridge_banned_peers", [((), status.kept_out)])
    yield build_family("kiln_bridge_topics", [((), len(status.topics))])
    yield build_family("kiln_bridge_topics_on_other_bridges", [((), status.sharing.topics_left)])
    yield build_family("kiln_bridge_topics_over_limit", [((), status.topics_refused)])
    yield build_family("kiln_bridge_meshes", _count_by_mesh_size(status.mesh.values()).items())
    yield build_family("kiln_bridge_frames", [(("in",), status.frames_in), (("out",), status.frames_out)])
    yield build_family("kiln_bridge_bytes", [(("in",), status.bytes_in), (("out",), status.bytes_out)])
    yield build_family("kiln_bridge_events", _label(status.counters))
    yield build_family("kiln_bridge_spool_frames", [((), spool.waiting)])
    yield build_family("kiln_bridge_spool_memory_bytes", [((), spool.memory_bytes)])
    yield build_family("kiln_bridge_spool_disk_bytes", [((), spool.disk_bytes)])
    yield build_family("kiln_bridge_spool_disk_free_bytes", [((), spool.free_bytes)])
    yield build_family("kiln_bridge_spool_full", [((), float(spool.full))])
    overlay = status.bep50
    transports = [("gossipsub", status.publisher), *([("bep50", overlay.publisher)] if overlay is not None else [])]
    yield build_family(
        "kiln_publications",
        [
            ((transport, result), count)
            for transport, publisher in transports
            for result, count in (
                ("published", publisher.published),
                ("failed", publisher.failed),
                ("lost", publisher.lost),
            )
        ],
    )
    fetcher, node = status.fetcher, status.ipfs_node
    if fetcher is not None and fetcher.is_on:
        yield build_family("kiln_fetcher_waiting_records", [((), fetcher.waiting)])
        yield build_family("kiln_fetcher_fetches_in_flight", [((), fetcher.fetching)])
        yield build_family("kiln_fetcher_pending_claim_checks", [((), fetcher.claimed)])
        yield build_family("kiln_fetcher_records", _label(fetcher.counts))
        yield build_family("kiln_ipfs_connected_peers", [((), node.connections)])
        yield build_family("kiln_ipfs_provided_blocks", [((), node.provided)])
        yield build_family("kiln_ipfs_sent_blocks", [((), node.blocks_sent)])
        yield build_family("kiln_ipfs_sent_bytes", [((), node.bytes_sent)])
        yield build_family("kiln_ipfs_received_blocks", [((), node.blocks_received)])
    if overlay is not None:
        yield from _build_overlay_families(overlay)


def _build_overlay_families(overlay: OverlayStatus) -> Iterator[Metric]:
    yield build_family("kiln_bep50_topics", [((), overlay.joined)])
    yield build_family("kiln_bep50_contacts", [((), overlay.contacts)])
    yield build_family("kiln_bep50_frames", [(("in",), overlay.frames_in), (("out",), overlay.frames_out)])
    yield build_family("kiln_bep50_gaps", [((), overlay.gaps)])
    yield build_family("kiln_bep50_dropped_datagrams", _label(overlay.dropped))


def _label(counts: Mapping[str, int]) -> Values:
    """Convert counts by name to values of a metric, with the name as label. The names must be a closed set, which
    tests/unit/schemas/test_metrics.py checks."""
    return [((name,), number) for name, number in counts.items()]


def _build_table_families(tables: Iterable[TableStatus], now: float) -> Iterator[Metric]:
    there = [table for table in tables if not table.problem]
    versions = [((table.name,), table.version) for table in there if table.version is not None]
    yield build_family("kiln_table_rows", [((table.name,), table.rows) for table in there if table.rows is not None])
    yield build_family("kiln_table_files", [((table.name,), table.files) for table in there])
    yield build_family("kiln_table_bytes", [((table.name,), table.bytes) for table in there])
    yield build_family("kiln_table_version", versions)
    yield build_family(
        "kiln_table_commit_age_seconds",
        [((table.name,), now - table.committed_at.timestamp()) for table in there if table.committed_at is not None],
    )


def _count_by_agent(peers: Iterable[PeerStatus]) -> Mapping[tuple[str, str], int]:
    """Count peers by agent and protocol. Only the agents with most peers are named; all others count as `other`."""
    labels = [
        (
            printable(peer.agent.split("/")[0])[:_LONGEST] or _OTHER,  # without the version
            peer.protocol if peer.protocol in VERSIONS else _OTHER,
        )
        for peer in peers
    ]
    by_name = Counter(agent for agent, _ in labels)
    known = {agent for agent, _ in sorted(by_name.items(), key=lambda counted: (-counted[1], counted[0]))[:_AGENTS]}
    return Counter((agent if agent in known else _OTHER, protocol) for agent, protocol in labels)


def _count_by_score(peers: Iterable[PeerStatus]) -> Mapping[tuple[str, ...], int]:
    least = ScoreOptions().graylist_threshold
    return Counter(
        ("graylisted" if score < least else "negative" if score < 0 else "positive" if score else "zero",)
        for score in (peer.score for peer in peers)
    )


def _count_by_mesh_size(meshes: Iterable[int]) -> Mapping[tuple[str, ...], int]:
    return Counter((next((label for most, label in _MESH_SIZES if peers <= most), "over 12"),) for peers in meshes)
