"""What `make bench` says of its measurements, and the parts of it that need no broker."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from bench.__main__ import NAMES, Bench, main
from bench.batcher import update
from bench.bep50 import CASES, simulate
from bench.catch_up import MicroBatch
from bench.frames import Keyed, generated, live_options, stamped_anew
from bench.ground import LogRecord
from bench.growth import cost
from bench.hot_path import agreed, by_index, messages, with_messages
from bench.instead import run_within
from bench.lateness import lateness, lateness_by_log
from bench.peers.by_hand import read
from bench.plots import draw, plot
from bench.processes import Usage, kind_of
from bench.report import Aim, Finding, Note, Ratio, Series, as_json, number, table
from bench.runs import BenchError, Extent, in_turn
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, RejectedMessage, decode
from kiln.schemas.kafka.records import BatchRecord, SeparatorRecord, decode_update, encode
from kiln.schemas.wire.cid import cid_bytes
from kiln.schemas.wire.streamid import stream_text
from kiln.schemas.wire.topic_table import BundleSet
from kit.awaiting import wait_until


def shown(finding: Finding) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(table(finding))
    return out.getvalue()


def compared(of: Sequence[float], to: Sequence[float], aim: Aim | None = None) -> Finding:
    decoding, copying = Series("decode", "frames/s", tuple(of)), Series("copy", "frames/s", tuple(to))
    ratio = Ratio("decode over copy", decoding, copying, aim)
    return Finding("decode", "into Delta", (decoding, copying), (ratio,), {"frames": 300_000})


# ---------------------------------------------------------------- the report


def test_a_table_shows_median_range_and_ratio() -> None:
    text = shown(compared([70_000, 90_000, 80_000], [100_000, 100_000, 200_000], Aim(least=0.6)))
    assert "decode: into Delta" in text
    assert "frames 300,000" in text
    line = next(line for line in text.splitlines() if "frames/s" in line)
    assert "decode" in line
    assert "80,000" in line
    assert "70,000 – 90,000" in line
    line = next(line for line in text.splitlines() if "decode over copy" in line)
    assert "0.80" in line  # of the medians, and not of the means
    assert "0.40 – 0.90" in line  # of the runs, one by one
    assert "≥ 0.6" in line
    assert "missed" not in line


def test_a_missed_aim_is_said() -> None:
    assert "≥ 0.6: missed" in shown(compared([50], [100], Aim(least=0.6)))
    assert "≤ 1.2: missed" in shown(compared([130], [100], Aim(most=1.2)))
    assert "0.85 to 1.15: missed" in shown(compared([80], [100], Aim(least=0.85, most=1.15)))
    assert "missed" not in shown(compared([80], [100]))


@pytest.mark.parametrize(
    ("aim", "value", "met"),
    [
        (Aim(least=0.6), 0.6, True),
        (Aim(least=0.6), 0.59, False),
        (Aim(most=1.2), 1.2, True),
        (Aim(most=1.2), 1.21, False),
        (Aim(0.85, 1.15), 1.0, True),
        (Aim(0.85, 1.15), 1.2, False),
        (Aim(0.85, 1.15), 0.8, False),
        (Aim(), 99.0, True),
    ],
)
def test_aims(aim: Aim, value: float, met: bool) -> None:
    assert aim.met(value) is met


@given(st.lists(st.tuples(st.floats(1e-3, 1e9), st.floats(1e-3, 1e9)), min_size=1, max_size=9))
def test_a_ratio_lies_between_what_its_series_allow(pairs: list[tuple[float, float]]) -> None:
    of, to = (Series(name, "s", values) for name, values in zip("ab", zip(*pairs, strict=True), strict=True))
    ratio = Ratio("a over b", of, to)
    assert of.low <= of.median <= of.high
    assert of.low / to.high <= ratio.value <= of.high / to.low
    assert all(of.low / to.high <= each <= of.high / to.low for each in ratio.by_run)


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        Series("decode", "frames/s", ())
    with pytest.raises(ValueError, match="2 and 1 runs cannot be compared run by run"):
        compared([1, 2], [1])
    with pytest.raises(ValueError, match="copy is 0 in a run"):
        compared([1, 2], [1, 0])


def test_json_holds_every_run() -> None:
    content = as_json([compared([1, 3, 2], [4, 4, 4], Aim(least=0.6))], {"cores": 2})
    assert content == json.loads(json.dumps(content))
    assert content["circumstances"] == {"cores": 2}
    findings = content["findings"]
    assert isinstance(findings, list)
    found = findings[0]
    assert found["series"][0] == {
        "name": "decode",
        "unit": "frames/s",
        "median": 2,
        "min": 1,
        "max": 3,
        "values": [1, 3, 2],
    }
    assert found["ratios"][0]["value"] == 0.5
    assert found["ratios"][0]["aim"] == {"least": 0.6, "most": None}
    assert found["ratios"][0]["met"] is False


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.41234, "0.412"),
        (3.0, "3.00"),
        (56.78, "56.8"),
        (567.8, "568"),
        (1234.5, "1,234"),
        (1e6, "1,000,000"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


# ---------------------------------------------------------------- plots


def grown(
    names: Sequence[str] = ("archive, 1,000 frames", "archive, 10,000 frames", "updates, 1,000 frames"),
) -> Finding:
    values = ((9.0, 10.0, 30.0), (39.0, 40.0, 41.0), (5.0, 5.0, 5.0))
    return Finding("growth", "cost < 50", tuple(Series(n, "µs/frame", v) for n, v in zip(names, values, strict=False)))


def test_a_plot_shows_medians_over_sizes_and_the_span_of_the_runs(tmp_path: Path) -> None:
    other = Finding("decode", "not drawn", (Series("decode", "frames/s", (1.0,)),))
    seen: dict[str, Note] = {"runs": 3, "scale": 0.01, "load at the start": 0.1}
    content = json.loads(json.dumps(as_json([grown(), other], seen)))
    [file] = draw(content, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file.name] == ["cost-by-size.svg"]
    tree = ElementTree.parse(file).getroot()
    texts = [element.text for element in tree.findall("{*}text")]
    assert {"cost < 50", "µs/frame", "frames", "1,000", "10,000", "archive", "updates"} < set(texts)
    assert "runs 3, scale 0.01" in texts
    dots = [(float(each.get("cx", "")), float(each.get("cy", ""))) for each in tree.findall("{*}circle")]
    small, large, other_line = dots
    assert small[0] == other_line[0] < large[0]  # the same size at the same place, a larger one right of it
    assert other_line[1] > small[1] > large[1]  # SVG counts down from the top
    zero = small[1] + (small[1] - large[1]) / 3  # 10 and 40
    assert zero == pytest.approx(other_line[1] + (small[1] - large[1]) / 6, abs=0.2)
    ranges = [each.get("d", "") for each in tree.findall("{*}path") if "V" in each.get("d", "")]
    low, high = (float(end) for end in ranges[0].split(" ")[1].split("V"))
    assert (zero - low) / (zero - high) == pytest.approx(9 / 30, abs=0.01)


def test_a_plot_of_one_size_is_drawn_and_another_name_is_refused() -> None:
    [one] = json.loads(json.dumps(as_json([grown(["archive, 1,000 frames"])], {})))["findings"]
    assert plot(one, "").count("<circle") == 1
    [named] = json.loads(json.dumps(as_json([grown(["archive"])], {})))["findings"]
    with pytest.raises(ValueError, match="float"):
        plot(named, "")


# ---------------------------------------------------------------- programs of others


def runs(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # empty: ended, and nobody has asked how
    except FileNotFoundError:
        return False


def test_a_program_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    hangs = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '100']).pid, flush=True); time.sleep(100)"
    with pytest.raises(BenchError, match="did not end within 1"):
        run_within(1, [sys.executable, "-c", hangs], tmp_path)
    child = int((tmp_path / "out").read_text())
    wait_until(lambda: not runs(child), "the end of what the program started")


def test_what_a_program_says(tmp_path: Path) -> None:
    assert run_within(30, [sys.executable, "-c", "print(7)"], tmp_path) == "7\n"
    with pytest.raises(BenchError, match=r"exited with code 1\. Last line of its log: ValueError: no lake$"):
        run_within(30, [sys.executable, "-c", "raise ValueError('no lake')"], tmp_path)


def test_the_code_of_a_user_finds_what_kiln_finds() -> None:
    """So that all sides of the comparison do the same work; the few differences are those that `bench.peers` names."""
    found = generated(3_000, live_options())
    rows = [read(value, 0, offset, datetime.now(UTC)) for offset, (_, value) in enumerate(found)]
    good, faulty = content(found, DecodeConfig())
    assert sum(len(each["frames"]) for each in rows) == len(found)
    copies = sum(item.copy is not None for item in good) + sum(item.copy is not None for item in faulty)
    assert sum(len(each["copies"]) for each in rows) == pytest.approx(copies, rel=0.005)
    messages = {(str(row["network"]), str(row["message_id"])): row for each in rows for row in each["messages"]}
    expected = {(item.network, item.message_id): item for item in good}
    assert len(messages.keys() ^ expected.keys()) < 0.01 * len(expected)
    for key in messages.keys() & expected.keys():
        item = expected[key]
        assert messages[key]["type"] == item.content.type
        assert messages[key]["query_id"] == item.content.query_id
        assert messages[key]["topic"] == item.topic


# ---------------------------------------------------------------- runs


def test_sides_run_in_turn() -> None:
    ran: list[str] = []
    said: list[str] = []

    def side(name: str, value: float) -> float:
        ran.append(name)
        return value

    sides = {"A": lambda run: side("A", run), "B": lambda run: side("B", 10.0 * run)}
    first, second = in_turn(sides, 3, "s", said.append)
    assert "".join(ran) == "ABABAB"
    assert (first.values, second.values) == ((1, 2, 3), (10, 20, 30))
    assert said[-1] == "run 3 of 3: B: 30.0 s"


def test_extent() -> None:
    assert Extent(5, 0.02).of(300_000) == 6_000
    assert Extent(5, 0.02).of(40, least=5) == 5
    with pytest.raises(ValueError, match="must be above 0"):
        Extent(0, 1.0)
    with pytest.raises(ValueError, match="must be above 0"):
        Extent(5, 0.0)


def test_one_that_fails_does_not_keep_the_others_and_is_in_the_status(tmp_path: Path) -> None:
    out = io.StringIO()
    bench = Bench(Console(file=out, width=160), Extent(), tmp_path / "found.json")

    def fails() -> Finding:
        raise BenchError("no batch within 180 s")

    bench.measure("lateness", fails)
    bench.measure("decode", lambda: compared([1], [1]))
    assert bench.summary() == 1
    assert "lateness: no batch within 180 s" in out.getvalue()
    assert "Not measured: lateness" in out.getvalue()
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each["name"] for each in found["findings"]] == ["decode"]
    assert found["circumstances"]["runs"] == 5


def test_a_missed_aim_is_no_failure() -> None:
    bench = Bench(Console(file=io.StringIO()), Extent(), None)
    bench.measure("decode", lambda: compared([1], [2], Aim(least=0.6)))
    assert bench.summary() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dekode"], "'dekode' is not a measurement"),
        (["--runs", "0"], "above 0"),
        (["--scale", "-1"], "above 0"),
        (["--folder", "/nowhere"], "no such folder"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_smallest_bench_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hot-path" in NAMES
    assert main(["hot-path", "--runs", "1", "--scale", "0.005"]) == 0
    out = capsys.readouterr().out
    assert "judge, ed25519" in out
    assert "fewer than 5 runs" in out


def test_what_is_held_is_measured_in_small(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["held", "--runs", "1", "--scale", "0.01"]) == 0
    out = capsys.readouterr().out
    for each in ("windows: 2,000 open", "connections: 2,000 past", "streams: 10,000 known"):
        assert f"{each} over none" in out


# ---------------------------------------------------------------- what is measured with


@pytest.fixture(scope="module")
def frames() -> list[Keyed]:
    return generated(400, live_options())


def content(frames: Sequence[Keyed], how: DecodeConfig) -> tuple[list[DecodedMessage], list[RejectedMessage]]:
    items = [item for offset, (_, value) in enumerate(frames) for item in decode(value, 0, offset, 0, how)]
    good = [item for item in items if isinstance(item, DecodedMessage)]
    return good, [item for item in items if isinstance(item, RejectedMessage)]


def test_frames_stamped_anew_hold_as_much_that_is_new(frames: list[Keyed]) -> None:
    many = list(stamped_anew(frames, 1_000))
    assert len(many) == 1_000
    assert many[:400] == frames
    good, faulty = content(many[:400], DecodeConfig())
    again, faulty_again = content(many[400:800], DecodeConfig())
    assert [item.content for item in again] == [item.content for item in good]
    assert [item.reason for item in faulty_again] == [item.reason for item in faulty]
    first, second = {item.message_id for item in good}, {item.message_id for item in again}
    assert len(first) == len(second) > 50  # so copies of a message are still copies of one message
    assert not first & second
    assert not {key for key, _ in many[:400]} & {key for key, _ in many[400:800]}


def test_frames_are_of_the_same_messages_by_name_and_by_index(frames: list[Keyed]) -> None:
    found = list(with_messages(value for _, value in frames))
    bundles = BundleSet({"all": {message.topic for frame in found for message in messages(frame)}})
    how = DecodeConfig(bundles=bundles)
    named, indexed = (
        content([(frame.connection, change(frame, bundles).SerializeToString()) for frame in found], how)
        for change in (agreed, by_index)
    )
    assert {item.topic_source for item in named[0]} == {"name"}
    assert {item.topic_source for item in indexed[0]} == {"index"}
    for by_name, by_number in zip(named[0], indexed[0], strict=True):
        assert (by_name.topic, by_name.content, by_name.message_id) == (
            by_number.topic,
            by_number.content,
            by_number.message_id,
        )


def test_updates_for_the_batcher_are_such() -> None:
    records = [update(number, number // 100, separators=7) for number in range(300)]
    read = [decode_update(value) for _, value in records]
    assert len({each.message_id for each in read}) == len({each.tip for each in read}) == 300
    assert len({each.separator for each in read}) == 7
    for (key, _), each in zip(records, read, strict=True):
        assert each.separator is not None
        assert key == f"local-bench/model/{each.separator.value}".encode()
        assert stream_text(each.stream) == each.stream
        assert len(cid_bytes(each.tip)) == 36


AT, T = 1_700_000_000_000, 1_000_000
"""ms and µs: when a window begins, and how long it is."""


def test_lateness_is_beyond_the_end_of_the_window() -> None:
    record = BatchRecord("local-bench", "LIVE", SeparatorRecord("model", "k1"), "b", b"", AT * 1_000, AT * 1_000 + T)
    late = lateness([LogRecord(AT + 1_000 + late, b"", encode(record)) for late in (300, 100, 900, 200)])
    assert late.delays == (100, 200, 300, 900)
    assert late.percentile(0.5) == 300
    assert late.percentile(0.99) == 900
    with pytest.raises(BenchError, match="no batch came"):
        lateness([])


def test_lateness_by_the_log_counts_from_the_stamp_of_the_update_that_opened_the_window() -> None:
    first = structs.replace(decode_update(update(1, 1, separators=7)[1]), observed_at=AT * 1_000)
    assert first.separator is not None
    of_log = [LogRecord(AT + 60_000, b"", encode(first))]  # heard a minute before
    batch = BatchRecord("local-bench", "LIVE", first.separator, "b", b"", AT * 1_000, AT * 1_000 + T)
    other = BatchRecord("local-bench", "LIVE", first.separator, "c", b"", AT * 1_000 - 1, AT * 1_000 + T - 1)
    batches = [LogRecord(AT + 61_300, b"", encode(each)) for each in (batch, other)]
    assert lateness_by_log(batches, of_log).delays == (300,)
    with pytest.raises(BenchError, match="no batch came"):
        lateness_by_log(batches[1:], of_log)


def test_the_first_micro_batch_is_no_part_of_the_cost() -> None:
    assert cost([MicroBatch(1_000, 60.0), MicroBatch(1_000, 0.5), MicroBatch(500, 0.25)]) == pytest.approx(500)


# ---------------------------------------------------------------- the overlay


def test_an_overlay_is_measured_and_a_seed_gives_the_same_again() -> None:
    few = CASES[0]
    seen = simulate(few, 1, 2)
    assert seen.sizes == [few.nodes - 1] * few.nodes
    assert seen.missed == 0
    assert len(seen.delays) == 2
    assert seen.sent - seen.duplicates == pytest.approx((few.nodes - 1) / few.nodes)  # nothing lost: one each is needed
    assert simulate(few, 1, 2) == seen
    assert simulate(few._replace(loss=1.0), 1, 1).missed == few.nodes - 1


# ---------------------------------------------------------------- what processes take


def test_a_process_is_of_its_own_kind_or_of_its_parents() -> None:
    assert kind_of("python -m kiln.bridge.app.main", "kiln run") == "bridge"
    assert kind_of("java -cp x org.apache.spark.deploy.SparkSubmit pyspark-shell", "kiln run") == "Spark's JVM"
    assert kind_of("python -m kiln.pipelines.app.worker_daemon pyspark.worker", "Spark's JVM") == "Python workers"
    planner = "python -m pyspark.sql.streaming.python_streaming_source_runner"
    assert kind_of(planner, "Spark's JVM") == "Python planners"
    assert kind_of("ipfs daemon", "demo network") == "demo network"


def test_what_a_child_has_taken_counts_after_its_end() -> None:
    usage = Usage(psutil.Process())
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", burn, "kiln.bridge.app.main"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert usage.look()["bridge"] >= 0.25  # the system counts in hundredths
        assert usage.memory()["bridge"] > 1
        child.communicate("\n")
    assert usage.look()["bridge"] >= 0.25  # the system counts in hundredths
    assert "bridge" not in usage.memory()
