"""What a load needs in bridges, brokers, executors, disks and money, by the costs that `bench.scaling` measured.

    python -m bench.capacity docs/scaling.md                    makes the table of the page anew
    python -m bench.capacity --messages 25000 --core-hour 0.03  prints the needs of a load and prices of yours

Costs are in `bench/scaling.json`, as `make bench ARGS="scaling --json bench/scaling.json"` writes them. Loads, prices
and what nobody measured are assumptions: each is an option.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final, TypeVar

from bench.report import number

COSTS: Final = Path(__file__).with_name("scaling.json")
LOADS: Final = (10_000, 100_000, 1_000_000)
"""messages a second"""
BEGIN: Final = "<!-- made by bench/capacity.py -->"
END: Final = "<!-- the end of what is made -->"

MICRO_BATCH, TASK, FRAME_IN = "micro-batch", "task", "frame in"
WINDOWS: Final = "batch: time in the one task of the windows, each update"

_DAY, _MONTH_DAYS, _MONTH_HOURS = 86_400, 30.4, 730
_STAGES: Final = ("archive", "updates", "batch", "sink")


def cost_name(stage: str, thing: str) -> str:
    """The name of a series: µs of CPU that each thing costs a stage."""
    return f"{stage}: CPU, each {thing}"


def read_name(query: str) -> str:
    """The name of a series: µs of the broker's CPU for each record that a query reads."""
    return cost_name("broker", f"record for {query}")


def _told(default: float, told: str) -> float:
    """A field with what it says, for the command line."""
    value: float = field(default=default, metadata={"told": told})
    return value


@dataclass(frozen=True)
class Load:
    """Traffic, and how Kiln is set for it."""

    messages: float = _told(10_000, "messages a second, each counted once")
    frames: float = _told(6.4, "frames that a bridge hears and sends for a message, with 4 peers in its mesh")
    updates: float = _told(0.6, "share of the messages that announce a new tip")
    separators: float = _told(10_000, "separators that have updates, equally many each")
    window: float = _told(1, "T, s (batch.window)")
    bridge: float = _told(400, "µs of a bridge's CPU for a message, in so many frames (docs/performance.md)")
    network_topic: float = _told(0, "share of the messages on the topic of the network, which every bridge hears")
    busiest: float = _told(0.02, "share of the messages on the busiest topic of a separator")
    remembered: float = _told(24, "hours for which a message is known (dedupe.signed_ttl)")
    kafka_days: float = _told(7, "days that Kafka keeps frames and updates (kafka.retention)")
    lake_days: float = _told(30, "days that the tables keep rows (lake.retention)")
    fast: float = _told(1, "s between two micro-batches of updates and of batch")
    slow: float = _told(10, "s between two micro-batches of archive and of sink")
    partitions: float = _told(1, "MB/s that a partition of frames is to take at most")


@dataclass(frozen=True)
class Machines:
    """What is taken for granted of machines: assumptions, not measured."""

    busy: float = _told(0.6, "share of a core that is to be busy at most")
    broker_cores: float = _told(8, "cores of a broker")
    broker_disk: float = _told(200, "MB/s that a broker writes at most")
    replicas: float = _told(3, "copies of each record in Kafka")
    executor_cores: float = _told(4, "cores of an executor")


@dataclass(frozen=True)
class Prices:
    """In dollars: assumptions, to be replaced by yours."""

    core_hour: float = _told(0.05, "a core with 4 GB of memory for an hour")
    disk_gb: float = _told(0.08, "a GB of a broker's or an executor's disk for a month")
    store_gb: float = _told(0.023, "a GB in the object store for a month")
    thousand_puts: float = _told(0.005, "a thousand writes into the object store")


@dataclass(frozen=True)
class Needs:
    """What a load needs. Cores are busy cores over the share that may be busy. Sizes in GB."""

    bridges: float
    """processes, of a core each; infinite: no number is enough"""
    frames: float
    """a second"""
    batches: float
    """a second"""
    cores: Mapping[str, float]
    """by stage"""
    executors: int
    partitions: int
    brokers: int
    kafka_mb: float
    """MB/s that come in, before copies"""
    kafka_gb: float
    state_gb: float
    lake_gb: float
    puts: float
    """a second"""
    month: Mapping[str, float]
    """dollars, by what they are for"""


@dataclass(frozen=True)
class Limit:
    """Where Kiln stops to scale: at so many messages a second, whatever is added."""

    what: str
    messages: float
    change: str


Costs = Mapping[str, float]
"""Medians by name of the series."""


@dataclass(frozen=True)
class Measured:
    """What `make bench ARGS=scaling` found."""

    costs: Costs
    units: Mapping[str, str]
    held: Mapping[str, tuple[float, float, float]]
    """of each point that no cost was fitted to: what was foretold, what was measured, and the one over the other"""
    circumstances: Mapping[str, str]


def read_measured(file: Path = COSTS) -> Measured:
    """The medians of the finding `scaling`. ValueError: there is no such finding."""
    content = json.loads(file.read_text(encoding="utf-8"))
    for finding in content["findings"]:
        if finding["name"] == "scaling":
            medians = {each["name"]: float(each["median"]) for each in finding["series"]}
            return Measured(
                medians,
                {each["name"]: str(each["unit"]) for each in finding["series"]},
                {
                    each["name"].partition(":")[0]: (medians[each["of"]], medians[each["to"]], float(each["value"]))
                    for each in finding["ratios"]
                },
                {str(name): str(value) for name, value in {**content["circumstances"], **finding["notes"]}.items()},
            )
    raise ValueError(f"{file} has no finding of the name scaling")


def batches_a_second(updates: float, separators: float, window: float) -> float:
    """Windows that close, where the updates come at random to equal separators.

    A window opens with an update and lasts for T; the next update then comes after separators / updates on the average.
    """
    return separators / (window + separators / updates) if updates > 0 else 0.0


def needs(costs: Costs, load: Load, machines: Machines, prices: Prices) -> Needs:
    """KeyError: a cost is not there."""
    bridges = _bridges(load, machines)
    heard = load.messages * load.frames
    # what every bridge hears comes into Kafka from each of them
    frames = heard * (1 + load.network_topic * (min(bridges, 1e6) - 1))
    updates = load.messages * load.updates
    batches = batches_a_second(updates, load.separators, load.window)
    partitions = max(2, math.ceil(frames * costs["Kafka: each frame"] / 1e6 / load.partitions))
    rates = {"frame": frames, "update": updates, "batch": batches}
    every = {"archive": load.slow, "updates": load.fast, "batch": load.fast, "sink": load.slow}
    cores = {
        stage: sum(_rate(thing, rates, every[stage], partitions) * cost for thing, cost in _each(costs, stage))
        / 1e6
        / machines.busy
        for stage in _STAGES
    }
    kafka = (
        frames * costs["Kafka: each frame"]
        + updates * (costs["Kafka: each update"] + costs["Kafka: each update in a batch"])
        + batches * costs["Kafka: each batch"]
    )
    broker_cores = _broker_cores(costs, rates, machines)
    brokers = max(
        3,
        math.ceil(broker_cores / machines.broker_cores),
        math.ceil(kafka * machines.replicas / 1e6 / machines.broker_disk),
    )
    lake = (
        (
            frames * costs["lake: each frame"]
            + updates * costs["lake: each update"]
            + batches * costs["lake: each batch"]
        )
        * load.lake_days
        * _DAY
    )
    # three queries know what came before: archive, updates and sink, of which sink sees only updates and batches
    known = 2 * load.messages + updates + batches
    state = known * load.remembered * 3600 * costs["state: each message remembered"]
    kept = kafka * machines.replicas * load.kafka_days * _DAY
    tasks = {stage: max(1, math.ceil(cores[stage])) for stage in ("archive", "sink")}
    puts = (3 * tasks["archive"] + 6 * tasks["sink"] + 10) / load.slow
    executors = sum(math.ceil(each / machines.executor_cores) for each in cores.values())
    month = {
        "cores": (executors * machines.executor_cores + bridges + brokers * machines.broker_cores)
        * _MONTH_HOURS
        * prices.core_hour,
        "disks": (kept + state) / 1e9 * prices.disk_gb,
        "store": lake / 1e9 * prices.store_gb + puts * _DAY * _MONTH_DAYS / 1000 * prices.thousand_puts,
    }
    return Needs(
        bridges,
        frames,
        batches,
        cores,
        executors,
        partitions,
        brokers,
        kafka / 1e6,
        kept / 1e9,
        state / 1e9,
        lake / 1e9,
        puts,
        month,
    )


def limits(costs: Costs, load: Load, machines: Machines) -> list[Limit]:
    """What no further machine mends, the nearest first."""
    core = 1e6 * machines.busy  # µs a second
    found = [
        Limit(
            "one bridge process hears the topic of the network, which no bridge leaves to another",
            core / load.bridge / load.network_topic if load.network_topic else math.inf,
            "move updates to the topics of separators (CIP-120), or split the topic of the network by author",
        ),
        Limit(
            "one bridge process hears the busiest topic of a separator",
            core / load.bridge / load.busiest if load.busiest else math.inf,
            "a node in a compiled language, or several processes on one topic that split its messages by id",
        ),
        Limit(
            "one task of `batch` has all windows",
            core / costs[WINDOWS] / load.updates,
            "a state partition for each group of Kafka partitions, in place of one",
        ),
        Limit(
            "one process cares for the tables",
            core / (_ROW_CARED_FOR * _rows_a_message(costs, load)),
            "a job of Spark that cares for the tables, or tables by day and network with a process each",
        ),
    ]
    return sorted(found, key=lambda each: each.messages)


_ROW_CARED_FOR: Final = 5.0
"""µs of CPU to make few files of many, a row (docs/performance.md, Tables over time)."""


def _rows_a_message(costs: Costs, load: Load) -> float:
    return load.frames * costs["lake: rows, each frame"] + 3 * load.updates


def _bridges(load: Load, machines: Machines) -> float:
    """A bridge hears all of the topic of the network, and its part of the others."""
    one = machines.busy * 1e6 / load.bridge  # messages a second
    every = load.messages * load.network_topic
    if every >= one:
        return math.inf
    return max(1, math.ceil((load.messages - every) / (one - every)))


def _rate(thing: str, rates: Mapping[str, float], every: float, partitions: int) -> float:
    if thing == MICRO_BATCH:
        return 1 / every
    return partitions / every if thing == TASK else rates[thing]


def _each(costs: Costs, stage: str) -> Iterable[tuple[str, float]]:
    things = (MICRO_BATCH, TASK, "frame", "update", "batch")
    return [(thing, costs[name]) for thing in things if (name := cost_name(stage, thing)) in costs]


def _broker_cores(costs: Costs, rates: Mapping[str, float], machines: Machines) -> float:
    """Each copy of a record is taken to cost what the first one does."""
    come = sum(rates.values()) * costs[cost_name("broker", FRAME_IN)] * machines.replicas
    read = (
        rates["frame"] * (costs[read_name("archive")] + costs[read_name("updates")])
        + rates["update"] * (costs[read_name("batch")] + costs[read_name("sink")])
        + rates["batch"] * 2 * costs[read_name("sink")]
    )
    return (come + read) / 1e6 / machines.busy


# ---------------------------------------------------------------- the page


def markdown(found: Measured, load: Load, machines: Machines, prices: Prices) -> str:
    """Costs, what they foretold, assumptions, the needs of LOADS and the limits, between the markers of the page."""
    seen = found.circumstances
    circumstances = ", ".join(
        f"{name} {seen[name]}" for name in ("runs", "cores", "scale", "load at the start", "master")
    )
    afar = ", ".join(f"{name} {seen[name]}" for name in ("records of a micro-batch", "partitions", "separators"))
    told = [needs(found.costs, replace(load, messages=many), machines, prices) for many in LOADS]
    costs = [
        (name, [f"{number(value)} {found.units[name]}"])
        for name, value in found.costs.items()
        if not name.endswith((", foretold", ", measured"))
    ]
    held = [
        (name, [f"{before:.2f} s", f"{after:.2f} s", f"{ratio:.2f}"])
        for name, (before, after, ratio) in found.held.items()
    ]
    assumed = [
        (each.metadata["told"], [f"{getattr(given, each.name):g}", f"`--{each.name.replace('_', '-')}`"])
        for given in (load, machines, prices)
        for each in fields(given)
        if each.name != "messages"
    ]
    # as on a network that has no topics of separators yet, where the load names no share
    today = replace(load, network_topic=load.network_topic or 1.0)
    limited = [(each.what, [_shown(each.messages), each.change]) for each in limits(found.costs, today, machines)]
    lines = [
        BEGIN,
        "",
        "## What each thing costs",
        "",
        f"Medians, measured on {seen['at'][:10]}: {circumstances}.",
        "",
        *_table(("cost", "median"), costs),
        "## What the costs foretell",
        "",
        f"No cost was fitted to these micro-batches: {afar}. The aim is 0.8 to 1.2.",
        "",
        *_table(("micro-batch", "CPU foretold", "CPU measured", "ratio"), held),
        "## What is assumed",
        "",
        *_table(("assumption", "value", "option"), assumed),
        "## What loads need",
        "",
        *_table(("what", *(f"{many:,} messages/s" for many in LOADS)), _rows(told)),
        "## Where it breaks",
        "",
        f"Share of the messages on the topic of the network: {today.network_topic:g}.",
        "",
        *_table(("what does not scale", "ends at, messages/s", "what would have to change"), limited),
        END,
    ]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    made = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return [*made, *(f"| {' | '.join((name, *values))} |" for name, values in rows), ""]


def with_tables(page: str, made: str) -> str:
    """The page with its tables made anew. ValueError: the page has no markers."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have {BEGIN!r} and {END!r} once each")
    before, _, rest = page.partition(BEGIN)
    return before + made + rest.partition(END)[2]


def _rows(told: Sequence[Needs]) -> list[tuple[str, list[str]]]:
    return [
        ("bridges, of a core each", [_shown(each.bridges) for each in told]),
        ("frames a second into Kafka", [_shown(each.frames) for each in told]),
        ("batches a second", [_shown(each.batches) for each in told]),
        *((f"cores of `{stage}`", [_shown(each.cores[stage]) for each in told]) for stage in _STAGES),
        ("executors", [f"{each.executors:,}" for each in told]),
        ("partitions of `frames`", [f"{each.partitions:,}" for each in told]),
        ("MB/s into Kafka, before copies", [_shown(each.kafka_mb) for each in told]),
        ("brokers", [f"{each.brokers:,}" for each in told]),
        ("TB on the brokers' disks", [_shown(each.kafka_gb / 1000) for each in told]),
        ("TB of digests in the state of queries", [_shown(each.state_gb / 1000) for each in told]),
        ("TB in the tables", [_shown(each.lake_gb / 1000) for each in told]),
        *((f"dollars a month for {name}", [_shown(each.month[name]) for each in told]) for name in told[0].month),
        ("dollars a month in all", [_shown(sum(each.month.values())) for each in told]),
    ]


def _shown(value: float) -> str:
    """Two digits that count: the costs know no more."""
    if math.isinf(value):
        return "no number is enough"
    digits = 1 - math.floor(math.log10(value)) if value > 0 else 0
    rounded = round(value, digits)
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.{max(0, digits)}f}"


_OPTIONS: Final = (Load, Machines, Prices)


_Kind = TypeVar("_Kind", Load, Machines, Prices)


def _of(kind: type[_Kind], given: argparse.Namespace) -> _Kind:
    return kind(**{each.name: getattr(given, each.name) for each in fields(kind)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the tables of a page, or prints what one load needs."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.capacity", description="What a load needs, and what it costs."
    )
    parser.add_argument("page", nargs="?", type=Path, help="the page with the tables; else the needs are printed")
    parser.add_argument("--costs", type=Path, default=COSTS, help="default: %(default)s")
    for kind in _OPTIONS:
        for each in fields(kind):
            words = f"{each.metadata['told']} (default: {each.default:g})"
            parser.add_argument(f"--{each.name.replace('_', '-')}", type=float, default=each.default, help=words)
    given = parser.parse_args(arguments)
    load, machines, prices = _of(Load, given), _of(Machines, given), _of(Prices, given)
    found = read_measured(given.costs)
    if given.page is not None:
        page: Path = given.page
        made = markdown(found, load, machines, prices)
        page.write_text(with_tables(page.read_text(encoding="utf-8"), made), encoding="utf-8")
        return 0
    for name, (value,) in _rows([needs(found.costs, load, machines, prices)]):
        print(f"{name:40}  {value}")
    for limit in limits(found.costs, load, machines):
        if math.isinf(limit.messages):
            continue
        print(f"at {_shown(limit.messages)} messages/s: {limit.what}; {limit.change}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
