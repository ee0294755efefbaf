"""The model of docs/scaling.md: costs out of points, needs out of costs, and the page that holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.capacity import (
    BEGIN,
    END,
    LOADS,
    WINDOWS,
    Costs,
    Load,
    Machines,
    Measured,
    Prices,
    batches_a_second,
    cost_name,
    limits,
    main,
    markdown,
    needs,
    read_measured,
    read_name,
    with_tables,
)
from bench.fitting import Cost, CostSample, fit
from bench.scaling import MicroBatchCost, ScalingFindings, stretch

ROOT = Path(__file__).resolve().parents[3]


# ---------------------------------------------------------------- costs out of points


parts = st.lists(st.floats(1e-6, 10), min_size=3, max_size=3)
many = st.lists(st.tuples(st.integers(1, 8), st.integers(1_000, 200_000)), min_size=4, max_size=8, unique=True)


@given(parts, many)
def test_a_cost_that_is_made_of_parts_is_found(each: list[float], sizes: list[tuple[int, int]]) -> None:
    true = Cost({"micro-batch": each[0], "task": each[1] / 10, "frame": each[2] / 1000})
    points = [
        CostSample(counts, true.of(counts))
        for tasks, frames in sizes
        for counts in [{"micro-batch": 1.0, "task": float(tasks), "frame": float(frames)}]
    ]
    found = fit(points)
    for point in points:
        assert found.of(point.counts) == pytest.approx(point.took, rel=1e-3)


def test_a_part_is_never_below_nothing() -> None:
    """A straight line through these would have a micro-batch take less than nothing."""
    points = [CostSample({"micro-batch": 1, "frame": frames}, took) for frames, took in ((10, 1), (20, 4), (30, 6))]
    found = fit(points)
    assert found.each["micro-batch"] == 0
    assert 0.1 < found.each["frame"] < 0.25


def test_small_points_weigh_as_much_as_large_ones() -> None:
    points = [CostSample({"micro-batch": 1, "frame": frames}, took) for frames, took in ((0, 2.0), (1_000_000, 51.0))]
    assert fit([*points, CostSample({"micro-batch": 1, "frame": 500_000}, 26.0)]).each["micro-batch"] == pytest.approx(
        2, 0.1
    )


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="1 points cannot say what each of 2 parts takes"):
        fit([CostSample({"micro-batch": 1, "frame": 5}, 1.0)])
    with pytest.raises(ValueError, match="took nothing"):
        fit([CostSample({"frame": 5}, 0.0)])
    with pytest.raises(KeyError):
        Cost({"frame": 1.0}).of({"update": 1})


def test_micro_batches_become_a_point() -> None:
    ran = [
        MicroBatchCost(
            {"updates": 100, "batches": 4},
            7,
            2.0,
            {"kiln run": 0.1, "Spark's JVM": 0.5, "Python workers": 0.2, "broker": 9.0},
            0.3,
        ),
        MicroBatchCost(
            {"updates": 200}, 9, 4.0, {"kiln run": 0.1, "Spark's JVM": 0.7, "Python workers": 0.4, "broker": 7.0}, 0.5
        ),
    ]
    one = stretch(ran, tasks=4, made="batch")
    assert one.counts == {"micro-batch": 1, "task": 4, "update": 150, "batch": 8}
    assert (one.spark, one.broker, one.seconds, one.stateful) == pytest.approx((1.0, 8.0, 3.0, 0.4))
    assert stretch(ran).counts == {"micro-batch": 1, "update": 150, "batch": 2}


def test_a_miss_by_more_than_a_fifth_is_said() -> None:
    found = ScalingFindings()
    for foretold in (1.0, 1.1, 1.3):
        found.check("archive, afar", "s of CPU", foretold, 1.0)
    found.see("archive: CPU, each frame", "µs", 30.0, times=3)
    (ratio,) = found.finding({}).ratios
    assert ratio.value == pytest.approx(1.1)
    assert ratio.met is True
    found.check("archive, afar", "s of CPU", 1.3, 1.0)
    found.check("archive, afar", "s of CPU", 1.3, 1.0)
    (ratio,) = found.finding({}).ratios
    assert ratio.value == pytest.approx(1.3)
    assert ratio.met is False


# ---------------------------------------------------------------- needs out of costs


def costs(**changed: float) -> Costs:
    """Round figures, of no measurement."""
    stages = {
        "archive": {"micro-batch": 200_000, "task": 20_000, "frame": 40},
        "updates": {"micro-batch": 100_000, "task": 10_000, "frame": 30},
        "batch": {"micro-batch": 50_000, "update": 20, "batch": 100},
        "sink": {"micro-batch": 300_000, "update": 30, "batch": 50},
    }
    made = {cost_name(stage, thing): float(each) for stage, things in stages.items() for thing, each in things.items()}
    made |= {read_name(query): 5.0 for query in stages} | {cost_name("broker", "frame in"): 10.0, WINDOWS: 5.0}
    made |= {"Kafka: each frame": 500, "Kafka: each update": 600, "Kafka: each batch": 400}
    made |= {"Kafka: each update in a batch": 100, "state: each message remembered": 80}
    made |= {"lake: each frame": 300, "lake: each update": 150, "lake: each batch": 200, "lake: rows, each frame": 2}
    return made | changed


def need(messages: float = 10_000, **changed: float) -> Mapping[str, float]:
    found = needs(costs(), replace(Load(messages=messages), **changed), Machines(), Prices())
    return {
        "bridges": found.bridges,
        "frames": found.frames,
        "kafka": found.kafka_mb,
        "gb": found.kafka_gb,
        **found.cores,
    }


def test_needs_are_what_the_costs_say() -> None:
    found = need(10_000, frames=4, separators=1, bridge=300, updates=0.5)
    # 40,000 frames a second at 40 µs, and each 10 s a micro-batch of 20 tasks; no core over 0.6 busy
    assert found["frames"] == 40_000
    assert found["archive"] == pytest.approx((40_000 * 40e-6 + (0.2 + 20 * 0.02) / 10) / 0.6)
    # half of the messages are updates; one separator closes a window a second
    assert found["batch"] == pytest.approx((5_000 * 20e-6 + 100e-6 + 0.05) / 0.6, rel=0.01)
    assert found["bridges"] == 5  # 10,000 × 300 µs = 3 cores, of which 0.6 may be busy
    assert found["kafka"] == pytest.approx((40_000 * 500 + 5_000 * 700 + 400) / 1e6, rel=0.01)
    assert found["gb"] == pytest.approx(found["kafka"] * 3 * 7 * 86_400 / 1000)


def test_no_number_of_bridges_is_enough_for_a_topic_that_each_must_hear() -> None:
    assert need(10_000, network_topic=0.5)["bridges"] == float("inf")
    small = need(2_000, network_topic=0.5)
    assert small["bridges"] == 2
    assert small["frames"] == pytest.approx(
        1.5 * need(2_000)["frames"]
    )  # what every bridge hears is on Kafka from each


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0.1, 60))
def test_batches_are_never_more_than_updates_nor_than_windows(updates: float, separators: float, window: float) -> None:
    found = batches_a_second(updates, separators, window)
    assert found <= min(updates, separators / window) * 1.000001
    assert found >= min(updates, separators / window) / 2.000001


def test_the_nearest_limit_comes_first_and_moves_with_its_cause() -> None:
    found = limits(costs(), Load(network_topic=0.5), Machines())
    assert [before.messages <= after.messages for before, after in pairwise(found)] == [True] * 3
    assert found[0].what.startswith("one bridge process hears the topic of the network")
    assert found[0].messages == pytest.approx(0.6 / (400e-6 * 0.5))
    assert limits(costs(), Load(), Machines())[-1].messages == float("inf")


def test_more_traffic_needs_no_less_of_anything_and_other_prices_another_sum() -> None:
    told = [needs(costs(), Load(messages=load), Machines(), Prices()) for load in LOADS]
    for less, more in pairwise(told):
        assert more.bridges > less.bridges
        assert more.executors > less.executors
        assert more.brokers >= less.brokers
        assert all(more.month[name] > less.month[name] for name in less.month)
    cheap = needs(costs(), Load(messages=LOADS[0]), Machines(), replace(Prices(), core_hour=0.025))
    assert cheap.month["cores"] == pytest.approx(told[0].month["cores"] / 2)


# ---------------------------------------------------------------- the page


def test_the_page_has_the_tables_that_the_measured_costs_make() -> None:
    page = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    made = markdown(read_measured(), Load(), Machines(), Prices())
    assert page == with_tables(page, made), "docs/scaling.md: .venv/bin/python -m bench.capacity docs/scaling.md"
    assert with_tables(page, made.replace("brokers", "breakers")) != page


def test_a_load_and_prices_of_yours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    series = [{"name": name, "median": value, "unit": "µs"} for name, value in costs().items()]
    finding = {"name": "scaling", "series": series, "ratios": [], "notes": {}}
    file.write_text(json.dumps({"findings": [finding], "circumstances": {}}), encoding="utf-8")
    assert main(["--costs", str(file), "--messages", "10000", "--core-hour", "0"]) == 0
    out = capsys.readouterr().out
    assert "dollars a month for cores                 0" in out
    assert "one task of `batch` has all windows" in out
    file.write_text('{"findings": [], "circumstances": {}}', encoding="utf-8")
    with pytest.raises(ValueError, match="no finding of the name scaling"):
        read_measured(file)


def test_a_miss_and_a_cost_are_on_the_page() -> None:
    held = {"archive, a micro-batch afar": (2.0, 1.0, 2.0)}
    seen = dict.fromkeys(
        (
            "at",
            "runs",
            "cores",
            "scale",
            "load at the start",
            "master",
            "separators",
            "partitions",
            "records of a micro-batch",
        ),
        "7",
    )
    found = Measured(costs(), dict.fromkeys(costs(), "µs"), held, seen)
    page = markdown(found, Load(), Machines(), Prices())
    assert "| archive, a micro-batch afar | 2.00 s | 1.00 s | 2.00 |" in page
    assert "| archive: CPU, each frame | 40.0 µs |" in page
    for each in fields(Prices):
        assert f"`--{each.name.replace('_', '-')}`" in page
    assert with_tables(f"above\n{BEGIN}\nold\n{END}\nbelow\n", page) == f"above\n{page}\nbelow\n"
    with pytest.raises(ValueError, match="once each"):
        with_tables("nothing", page)
