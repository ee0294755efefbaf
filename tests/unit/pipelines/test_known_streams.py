"""kiln.pipelines.updates.separators against a dict of the whole topic: nothing is forgotten, whoever reads the
topic, and whoever dies meanwhile."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.pipelines.updates.separators import KnownStreams, StreamsFile
from kiln.schemas.kafka.records import SeparatorRecord, StreamRecord, WaitedTip, encode

Answers = dict[tuple[str, str], SeparatorRecord | None]

NOT_KNOWN = SeparatorRecord("model", "what a caller gives for a stream that nobody knows")
NETWORKS, STREAMS = ("mainnet", "testnet-clay"), ("s1", "s2", "s3", "s1\ns2")
AT = 1_700_000_000_000_000  # µs
SEPARATORS = (SeparatorRecord("model", "ka"), SeparatorRecord("model", "kb"), SeparatorRecord("controller", "ka"), None)


def record(network: str, stream: str, separator: SeparatorRecord | None) -> StreamRecord:
    return StreamRecord(network, stream, separator, AT, without=None if separator else "no_separator")


class Log:
    """A topic of two partitions: values by offset, None where compaction left nothing."""

    def __init__(self) -> None:
        self.parts: tuple[list[bytes | None], list[bytes | None]] = ([], [])
        self.read = 0
        """records that went out to consumers"""

    def reader(self) -> Reader:
        return Reader(self)


class Reader:
    """One worker's view of the log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def read_ends(self) -> dict[int, int]:
        return {number: len(part) for number, part in enumerate(self._log.parts)}

    def read(self, offsets: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[bytes | None]:
        for number, end in ends.items():
            for value in self._log.parts[number][offsets[number] : end]:
                if value is not None:
                    self._log.read += 1
                    yield value


said = st.tuples(st.sampled_from(NETWORKS), st.sampled_from(STREAMS), st.sampled_from(SEPARATORS))
written = st.lists(said | st.sampled_from((b"garbage", b"", None)), max_size=12)


def answers(known: KnownStreams | StreamsFile) -> Answers:
    asked = {(network, stream): known.get((network, stream), NOT_KNOWN) for network in NETWORKS for stream in STREAMS}
    return {stream: answer for stream, answer in asked.items() if answer is not NOT_KNOWN}


def write(log: Log, what: Iterable[tuple[str, str, SeparatorRecord | None] | bytes | None], all_of_it: Answers) -> None:
    """Puts records into the log, by the stream's partition, and into the dict."""
    for each in what:
        if isinstance(each, tuple):
            network, stream, separator = each
            log.parts[STREAMS.index(stream) % 2].append(encode(record(network, stream, separator)))
            all_of_it[network, stream] = separator
        else:
            log.parts[0].append(each)


@settings(max_examples=40)
@given(st.lists(st.tuples(written, st.integers(0, 2)), max_size=6))
def test_each_worker_knows_all_that_the_topic_holds(turns: list[tuple[list[object], int]]) -> None:
    """Workers that share a file, and one that comes later; each knows what was there at its last refresh."""
    log, all_of_it = Log(), Answers()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "streams.sqlite"
        workers = [KnownStreams(log.reader(), StreamsFile(path)) for _ in range(2)]
        for what, turn in turns:
            write(log, what, all_of_it)  # type: ignore[arg-type]  # the kinds of the parameters
            if turn == 2:
                workers.append(KnownStreams(log.reader(), StreamsFile(path)))
            workers[turn].refresh()
            assert answers(workers[turn]) == all_of_it
        for worker in workers:
            worker.refresh()
            assert answers(worker) == all_of_it


TIPS = [WaitedTip("LIVE", "t1"), WaitedTip("LIVE", "t2"), WaitedTip("REPLAY", "t1")]
tips_of_a_stream = st.tuples(
    st.sampled_from(NETWORKS), st.sampled_from(STREAMS), st.lists(st.sampled_from(TIPS), max_size=3)
)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.lists(tips_of_a_stream, max_size=4), st.integers(0, 1)), max_size=5))
def test_each_worker_knows_which_tips_waited(turns: list[tuple[list[tuple[str, str, list[WaitedTip]]], int]]) -> None:
    """A later record of a stream takes nothing back: its tips waited beside those of the earlier one."""
    log, waited = Log(), set[tuple[str, str, WaitedTip]]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "streams.sqlite"
        workers = [KnownStreams(log.reader(), StreamsFile(path)) for _ in range(2)]
        for said, turn in turns:
            for network, stream, tips in said:
                log.parts[0].append(encode(StreamRecord(network, stream, SEPARATORS[0], AT, waited=tuple(tips))))
                waited |= {(network, stream, tip) for tip in tips}
            workers[turn].refresh()
            assert waited == {
                (network, stream, tip)
                for network in NETWORKS
                for stream in STREAMS
                for tip in TIPS
                if workers[turn].has_waited((network, stream), tip)
            }


def test_a_record_is_read_once_for_all_workers_of_a_machine(tmp_path: Path) -> None:
    log, all_of_it = Log(), Answers()
    write(log, [("mainnet", "s1", SEPARATORS[0]), ("mainnet", "s2", None)], all_of_it)
    workers = [KnownStreams(log.reader(), StreamsFile(tmp_path / "streams.sqlite")) for _ in range(3)]
    for _ in range(2):
        for worker in workers:
            worker.refresh()
            assert answers(worker) == all_of_it
    assert log.read == 2


def test_a_topic_that_was_made_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    log, all_of_it = Log(), Answers()
    write(log, [("mainnet", "s1", SEPARATORS[0])] * 3, all_of_it)
    known = KnownStreams(log.reader(), StreamsFile(tmp_path / "streams.sqlite"))
    known.refresh()
    for part in log.parts:
        part.clear()
    write(log, [("mainnet", "s3", SEPARATORS[1])], all_of_it)
    known.refresh()
    assert answers(known) == all_of_it


def test_records_that_are_cut_short_are_taken_wholly_later(tmp_path: Path) -> None:
    """The broker went away in the midst: nothing of it counts, and the next refresh has it all."""
    file = StreamsFile(tmp_path / "streams.sqlite")

    def cut() -> Iterator[bytes]:
        yield encode(record("mainnet", "s1", SEPARATORS[0]))
        raise ConnectionError("the broker is away")

    with pytest.raises(ConnectionError):
        file.add(cut(), {0: 2})
    assert (answers(file), file.read_offsets()) == ({}, {})
    values = [encode(record("mainnet", "s1", SEPARATORS[0])), encode(record("mainnet", "s2", SEPARATORS[1]))]
    file.add(values, {0: 2})
    assert answers(file) == {("mainnet", "s1"): SEPARATORS[0], ("mainnet", "s2"): SEPARATORS[1]}
    assert file.read_offsets() == {0: 2}


def test_a_worker_that_is_killed_leaves_what_was_there_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "streams.sqlite"
    file = StreamsFile(path)
    file.add([encode(record("mainnet", "s1", SEPARATORS[0]))], {0: 1})
    code = f"""
import os, signal
from pathlib import Path
from kiln.pipelines.updates.separators import StreamsFile, _lock_file
from kiln.schemas.kafka.records import StreamRecord, encode
def values():
    for n in range(20_000):
        yield encode(StreamRecord("mainnet", f"k{{n}}", None, {AT}, without="no_separator"))
    os.kill(os.getpid(), signal.SIGKILL)
path = Path({str(path)!r})
with _lock_file(path):
    StreamsFile(path).add(values(), {{0: 20_001}})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    log, all_of_it = Log(), Answers()
    write(log, [("mainnet", "s1", SEPARATORS[0]), ("mainnet", "s3", SEPARATORS[2])], all_of_it)
    assert (answers(file), file.read_offsets()) == ({("mainnet", "s1"): SEPARATORS[0]}, {0: 1})
    known = KnownStreams(log.reader(), StreamsFile(path))
    known.refresh()
    assert answers(known) == all_of_it
