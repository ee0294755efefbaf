"""kiln.pipelines.backfill without Spark: chunks, terms, the account of runs, and a frame out of its row (decision
21)."""

from __future__ import annotations

import io
import signal
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from kiln.conf.settings.durations import parse_micros
from kiln.conf.settings.reading import load
from kiln.pipelines.app.backfill_run import build_terms, parse_source, save_input
from kiln.pipelines.backfill.run import RunError, RunInputs, RunResources, StoppedError, run
from kiln.pipelines.backfill.run_log import RunNameError, append_event, check_name, find_run, read_runs
from kiln.pipelines.backfill.terms import (
    RunTerms,
    TimeRange,
    count_pieces,
    describe_differences,
    split_range,
)
from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.decode.frame_row import FrameRow, build_frame_row, parse_frame_row
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.kafka.frames import BEP50
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import peer_text, raw_peer

TERMS = RunTerms("a-run", TimeRange(10, 20), DecodeConfig())


@given(st.integers(0, 100), st.integers(1, 100), st.lists(st.integers(-10, 210)))
def test_chunks_are_the_whole_once(low: int, length: int, inner: list[int]) -> None:
    chunks = split_range(TimeRange(low, low + length), inner)
    assert [at for chunk in chunks for at in range(*chunk)] == list(range(low, low + length))
    assert all(chunk.low < chunk.high for chunk in chunks)


def test_pieces_and_reach() -> None:
    assert [count_pieces(count, 10) for count in (0, 1, 10, 11, 20, 21)] == [1, 1, 1, 2, 2, 3]
    assert replace(TERMS, batching=BatchConfig(5, 2)).margin == 600_000_007


def test_a_run_reads_what_was_said_before_where_the_live_tables_do_not_say() -> None:
    terms = replace(TERMS, batching=BatchConfig(5, 2), signed_horizon=1_000)
    assert terms.read_span == TimeRange(10 - 600_000_007, 20 + 600_000_007)
    assert replace(terms, source="kafka").read_span == TimeRange(10 - 600_001_007, 20 + 600_000_007)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batching": BatchConfig(5)}, "its window length in µs is 1000000, not 5"),
        ({"span": TimeRange(10, 21)}, "it has another time range"),
        ({"source": "kafka"}, "its source is frames, not kafka"),
        ({"network": "n"}, "its network is none, not n"),
        ({"as_of": 7}, "its --as-of in µs is none, not 7"),
        ({"fetch": True}, "its setting ipfs is False, not True"),
        ({"decoding": DecodeConfig(default_policy="none")}, "its setting policy.default is strict, not none"),
        (
            {"decoding": DecodeConfig(topic_policies={"/a/*": "none"})},
            "its setting policy.topics is none, not {'/a/*': 'none'}",
        ),
    ],
)
def test_other_terms_are_told(change: dict[str, object], words: str) -> None:
    assert describe_differences(TERMS.to_details(), TERMS.span, TERMS) == []
    others = replace(TERMS, **change)  # type: ignore[arg-type]  # fields of Terms
    assert describe_differences(TERMS.to_details(), TERMS.span, others) == [words]
    assert describe_differences(TERMS.to_details(), TERMS.span, replace(TERMS, chunk=1)) == [], (
        "how a run is cut changes no row"
    )


def test_the_account_knows_runs_until_they_are_dropped(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    assert read_runs(lake) == []
    for at, name in ((1, "one"), (2, "two")):
        append_event(lake, name, "begun", at, range_from=10, range_to=20, details={"window_us": at})
    append_event(lake, "one", "chunk", 3, range_from=10, range_to=15, rows=7, details={"step": "decoding", "number": 0})
    one, two = read_runs(lake)
    assert (one.name, one.range_from, one.range_to, one.details, one.is_done) == (
        "one",
        10,
        20,
        {"window_us": 1},
        False,
    )
    assert [(each.range_to, each.rows) for each in one.chunks] == [(15, 7)]
    assert two.chunks == []
    append_event(lake, "one", "done", 4)
    append_event(lake, "two", "dropped", 5)
    (one,) = read_runs(lake)
    assert one.is_done
    assert find_run(lake, "two") is None
    append_event(lake, "two", "begun", 6, range_from=1, range_to=2)
    again = find_run(lake, "two")
    assert again is not None
    assert again.range_to == 2
    assert len(again.events) == 1


def test_a_run_out_of_kafka_goes_on_in_the_topic_in_which_it_began_alone(tmp_path: Path) -> None:
    """Its offsets mean nothing in a topic of the same name that was created since."""
    lake = Lake(str(tmp_path / "lake"))
    terms, inputs = replace(TERMS, source="kafka"), RunInputs({}, kafka={"0": (0, 5)}, topic_id="one")
    ids = iter(["another", "another", "one", ""])
    no_spark = cast(SparkSession, None)
    means = RunResources(no_spark, lake, "kiln.frames", lambda: 1, "0", topic_id=lambda: next(ids))
    for _ in range(2):  # the id is kept with the run
        with pytest.raises(
            RunError, match=r"^backfill run a-run cannot continue: .* is another, .*backfill drop a-run"
        ):
            run(terms, means, lambda: inputs)
    for _ in range(2):  # it reads on; a broker before Kafka 2.8 tells no id
        with pytest.raises(AttributeError, match="NoneType"):
            run(terms, means, lambda: inputs)


@pytest.mark.parametrize("member", [[None, ""], [3, "a.log"]], ids=["file", "file in an archive"])
def test_a_run_out_of_files_that_another_version_began_is_refused_in_words(
    member: list[int | str | None], tmp_path: Path
) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.create(("backfill_runs",))
    terms = replace(TERMS, source="files", files=("/logs",))
    part = ["/logs", "kubo-sub", "aaaa", "n", 0, [0, None, 1], *member, 500]
    details = terms.to_details() | {"inputs": {"live": {}, "files": [part]}}
    append_event(lake, terms.name, "begun", 1, range_from=terms.span.low, range_to=terms.span.high, details=details)
    means = RunResources(cast(SparkSession, None), lake, "kiln.frames", lambda: 1, "0")
    with pytest.raises(RunError, match=r"another version of Kiln began it, and stored .*: kiln backfill drop a-run"):
        run(terms, means, lambda: RunInputs({}))


@pytest.mark.parametrize("name", ["", "-a", "A", "a/b", "..", "a b", "a" * 64, "ü", "a\n"])
def test_names_that_no_run_can_have(name: str) -> None:
    with pytest.raises(RunNameError, match="is not a valid name of a backfill run"):
        check_name(name)
    assert check_name("a" * 63) == "a" * 63


def test_times_and_sources_of_a_command_line() -> None:
    assert parse_micros("1970-01-02") == 86_400_000_000
    assert parse_micros("1970-01-01T01:00:00+01:00") == 0
    with pytest.raises(ValueError, match="a time such as"):
        parse_micros("tomorrow")
    assert parse_source(()) == ("frames", ())
    assert parse_source(["kafka"]) == ("kafka", ())
    assert parse_source(["a", "b"]) == ("files", (Path("a"), Path("b")))
    with pytest.raises(ValueError, match="cannot be combined"):
        parse_source(["frames", "a"])


@given(st.one_of(st.binary(max_size=80), st.binary(min_size=1020, max_size=1030)))
def test_a_peer_out_of_its_text(raw: bytes) -> None:
    assert raw_peer(peer_text(raw)) == raw


_small = st.binary(max_size=20)


@given(
    st.builds(
        Frame,
        network=st.text("abc", min_size=1),
        connection=st.binary(min_size=16, max_size=16),
        direction=st.sampled_from([Frame.IN, Frame.OUT]),
        local_peer=_small,
        remote_peer=_small,
        protocol=st.sampled_from([BEP50, "/meshsub/1.2.0"]),
        observed_at=st.integers(0, 2**53).map(lambda at: at * 1000),
        payload=_small,
        hello_in=_small,
        hello_out=_small,
        sequence=st.integers(1, 2**63 - 1),
        verdicts=_small,
        origin=st.sampled_from([Frame.LIVE, Frame.REPLAY]),
        remote_address=_small,
        declared_length=st.integers(0, 2**40),
    ),
    st.none() | st.builds(Frame, agent=st.text(max_size=9), end_reason=st.text(max_size=9), dialled=st.booleans()),
)
def test_a_frame_out_of_its_row(frame: Frame, record: Frame | None) -> None:
    if record is not None and not frame.payload:
        frame.MergeFrom(record)
    assert parse_frame_row(FrameRow._make(build_frame_row(3, 4, 5, frame))) == frame


class StreamWithSignal(io.RawIOBase):
    """A log that goes on for ever, during which SIGTERM arrives."""

    reads = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer in typeshed
        self.reads += 1
        if self.reads == 3:
            signal.raise_signal(signal.SIGTERM)
        line = b"[Thu, 15 Jul 2021 13:24:33 GMT] service=pubsub event=x\n"
        buffer[: len(line)] = line
        return len(line)


def test_a_signal_while_input_is_saved_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(state=tmp_path / "state").settings
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(StreamWithSignal())))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StoppedError, match="run z was stopped before it began"):
        save_input(settings, build_terms(settings, "z", 0, 1, source="files", files=[Path("-")]))
    assert not (tmp_path / "state" / "backfill" / "z").exists()
    assert signal.getsignal(signal.SIGTERM) is before
