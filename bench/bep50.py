"""The BEP 50 overlay in simulated time: contacts per node, delay until all nodes have an item, and duplicates from
flooding."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from nacl.signing import SigningKey

from bench.report import Aim, Finding, Note, Ratio, Series
from bench.runs import Extent, Say, in_turn
from kiln.bridge.bep50 import ItemTransfer, OverlaySettings
from kiln.schemas.dht import bencode
from kiln.schemas.dht.items import compute_target, sign
from kiln.schemas.dht.krpc import DhtAddress
from kit.overlay_simulation import Network

UPDATES = 5

_KEY, _SALT = SigningKey(b"\x01" * 32), b"salt"
_JOINING, _PATIENCE, _STEP = 30.0, 5.0, 0.05  # simulated s


class Trial(NamedTuple):
    """Results of a prototype: the range and median of the contacts of a node, and duplicates per node and update."""

    least: int
    median: int
    most: int
    duplicates: float


class Case(NamedTuple):
    """An overlay to simulate. `loss` is the share of lost datagrams. `trial` is shown for comparison."""

    nodes: int
    named: int
    """maximum number of nodes in a response"""
    loss: float
    trial: Trial

    @property
    def name(self) -> str:
        named = "" if self.named == 8 else ", 1 named"
        return f"{self.nodes} nodes{named}, {self.loss:.0%} lost"


CASES = (
    Case(5, 8, 0.0, Trial(4, 4, 4, 2.4)),
    Case(20, 8, 0.0, Trial(12, 12, 15, 11.2)),
    Case(20, 8, 0.2, Trial(11, 12, 15, 7.9)),
    Case(100, 8, 0.0, Trial(12, 15, 18, 12.9)),
    Case(100, 1, 0.0, Trial(5, 11, 17, 9.5)),
    Case(100, 8, 0.2, Trial(12, 17, 18, 13.0)),
)


class CaseResult(NamedTuple):
    """Result of one run of a case."""

    sizes: list[int]
    """number of contacts of each node"""
    delays: list[float]
    """simulated seconds until all nodes had an update, one per update"""
    sent: float
    """items sent per node and update"""
    duplicates: float
    """items received again per node and update"""
    missed: int
    """sum over the updates of the nodes that an update never reached"""


def measure(extent: Extent, say: Say) -> Finding:
    """Simulate all cases. The seed of a run is its number, so its result is the same on any machine."""
    updates = extent.of(UPDATES)
    runs: dict[tuple[Case, int], CaseResult] = {}

    def side(case: Case) -> Callable[[int], float]:
        def once(run: int) -> float:
            runs[case, run] = seen = simulate(case, run, updates)
            return seen.duplicates

        return once

    duplicates = in_turn({case.name: side(case) for case in CASES}, extent.runs, "duplicates", say)
    series: list[Series] = []
    notes: dict[str, Note] = {"updates": updates}
    for case, copies in zip(CASES, duplicates, strict=True):
        results, trial = [runs[case, run] for run in range(1, extent.runs + 1)], case.trial
        entries, each_update = "entries (trial {})", "a node and update"
        series += [
            Series(
                f"{case.name}: table, least",
                entries.format(trial.least),
                tuple(min(result.sizes) for result in results),
            ),
            Series(
                f"{case.name}: table, median",
                entries.format(trial.median),
                tuple(median(result.sizes) for result in results),
            ),
            Series(
                f"{case.name}: table, most", entries.format(trial.most), tuple(max(result.sizes) for result in results)
            ),
            Series(f"{case.name}: everywhere after", "s simulated", tuple(max(result.delays) for result in results)),
            Series(f"{case.name}: items sent", each_update, tuple(result.sent for result in results)),
            Series(f"{case.name}: duplicates", f"{each_update} (trial {trial.duplicates})", copies.values),
        ]
        missed = sum(result.missed for result in results)
        if missed:
            notes[f"{case.name}, nodes missed"] = missed
    by_name = {one_series.name: one_series for one_series in series}
    worst = by_name[f"{CASES[-1].name}: everywhere after"]
    bound = Series("bound", "s simulated", tuple(_PATIENCE for _ in worst.values))
    return Finding(
        "bep50",
        "the overlay in simulated time (10 to 100 ms a datagram)",
        tuple(series),
        (Ratio("slowest update over 5 s, 100 nodes, 20% lost", worst, bound, Aim(most=1.0)),),
        notes,
    )


def simulate(case: Case, seed: int, updates: int) -> CaseResult:
    """Simulate nodes that join one after another, each through an earlier one. The first node then publishes."""
    network, public = Network(seed, loss=case.loss), _KEY.verify_key.encode()
    topic, settings = compute_target(public, _SALT), OverlaySettings(nodes=case.named)
    places = [DhtAddress.parse(f"10.0.{number >> 8}.{number & 255}", 6881) for number in range(1, case.nodes + 1)]
    for number, place in enumerate(places):
        contacts = [places[network.random.randrange(number)]] if number else []
        overlay = network.add(place, settings)
        network.apply(place, overlay.subscribe(public, _SALT, network.now, contacts=contacts))
    network.run(_JOINING)
    sizes = [len(overlay.topics[topic].contacts) for overlay in network.overlays.values()]
    for events in network.events.values():
        events.clear()
    delays: list[float] = []
    missed = 0
    for sequence in range(1, updates + 1):
        item = sign(_KEY, _SALT, sequence, bencode.encode(b"v%d" % sequence))
        began = network.now
        network.apply(places[0], network.overlays[places[0]].publish(item, network.now))
        lacking = case.nodes
        while lacking and network.now - began <= _PATIENCE:
            network.run(_STEP)
            lacking = sum(overlay.topics[topic].item != item for overlay in network.overlays.values())
        delays.append(network.now - began)
        missed += lacking
        network.run(max(0.0, began + _PATIENCE - network.now))
    carried = [event for events in network.events.values() for event in events if isinstance(event, ItemTransfer)]
    came = sum(datagram.direction == "in" for datagram in carried)
    share = case.nodes * updates
    needed = (case.nodes - 1) * updates - missed
    return CaseResult(sizes, delays, (len(carried) - came) / share, (came - needed) / share, missed)
