"""kiln.pipelines.updates.repeats: a tip to which its author returns is an update, and any other repeat is none; the
same for the deduplication file, Spark's state and a backfill (decision 5)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.pipelines.backfill.deduplication import StreamHistory
from kiln.pipelines.decode.decoder import MessageRef
from kiln.pipelines.runtime.dedup_store import DedupStore, DedupStoreConfig
from kiln.pipelines.updates.repeats import Announcement, select_updates
from kiln.pipelines.updates.row_builder import UpdateRow
from kiln.pipelines.updates.transform import MAX_DIGESTS, UPDATE_RULE, StreamState
from kit.log_model import Announced, updates_among

SPAN = 1_000_000


def copy_of(said: Announced, offset: int, at: int | None = None) -> UpdateRow:
    """A copy of a message, as the query decodes it without an IPFS node."""
    author = None if said.author is None else f"author {said.author}".encode()
    announcement = Announcement(
        update=f"{said.tip} of {said.separator}".encode(),
        tip=said.tip.encode(),
        at=said.heard if at is None else at,
        message=None if author is None else said.message.encode(),
        author=author,
        bare=None if said.separator is None else f"{said.tip} of None".encode(),
    )
    ref = MessageRef(0, offset, 0)
    value = said.message.encode()
    return UpdateRow(b"stream", announcement.update, ref, "updates", b"", value, announcement.at, announcement)


def say(*said: str) -> list[Announced]:
    """Announcements in their order, each "author:tip" or "author:tip:separator"; ":tip" is of nobody."""
    found = []
    for at, text in enumerate(said):
        author, tip, *separator = text.split(":")
        found.append(Announced(author or None, tip, separator[0] if separator else "S", at, f"message {at}"))
    return found


def numbers(rows: Iterable[UpdateRow]) -> list[int]:
    return [int(row.value.split()[1]) for row in rows]


def select(said: list[Announced]) -> list[int]:
    passed, _ = select_updates([copy_of(each, at) for at, each in enumerate(said)], {})
    return numbers(passed)


@pytest.mark.parametrize(
    ("said", "updates"),
    [
        (("x:A", "x:B", "x:A"), [0, 1, 2]),
        (("x:A", "x:B", "x:A", "x:A", "x:B", "x:A"), [0, 1, 2, 4, 5]),
        (("x:A", "y:B", "x:A", "y:B", "x:A"), [0, 1]),
        (("x:A", "x:B", "y:A", "x:A", "y:A"), [0, 1, 3]),
        (("x:A", "y:B", "x:B", "x:A", "y:B"), [0, 1, 3]),
        (("x:A", "y:A", "x:B", "y:B", "x:A", "y:A"), [0, 2, 4]),
        ((":A", ":B", ":A"), [0, 1]),
        (("x:A", "x:B", ":A"), [0, 1]),
        (("x:A:S", "x:A:T"), [0, 1]),
    ],
    ids=[
        "a return",
        "two returns",
        "two authors who differ",
        "the return is told although another repeated the tip",
        "a repeat counts as the author's word",
        "two authors who return together",
        "nobody returns",
        "nobody returns to a tip of an author",
        "a false separator hides nothing",
    ],
)
def test_a_return_of_the_same_author_is_an_update(said: tuple[str, ...], updates: list[int]) -> None:
    assert select(say(*said)) == updates == updates_among(say(*said), SPAN)


def test_an_announcement_without_separator_repeats_one_that_has_one() -> None:
    bare = Announced("cas", "A", None, 0, "message 0")
    named = Announced("x", "A", "S", 1, "message 1")
    assert select([named._replace(heard=0), bare._replace(heard=1)]) == [1]
    assert select([bare, named]) == [0, 1], "the second has the separator, so it alone is batched"
    assert select([bare, named, bare._replace(heard=2, message="message 2")]) == [0, 1]


def test_a_late_copy_of_a_message_is_no_return() -> None:
    """Also if its first copy was a repeat itself."""
    first, repeat, other = say("x:A", "x:A", "x:B")
    copies = [copy_of(first, 0), copy_of(repeat, 1), copy_of(other, 2), copy_of(first, 3, 10), copy_of(repeat, 4, 11)]
    passed, _ = select_updates(copies, {})
    assert [row.position for row in passed] == ["0/0/0", "0/2/0"]


def test_what_is_read_out_of_order_is_no_return_and_hides_none_for_long() -> None:
    a, again, between, back = say("x:A", "x:A", "x:B", "x:A")
    late = [a._replace(heard=0), again._replace(heard=20), between._replace(heard=10), back._replace(heard=30)]
    assert select(late) == [0, 2, 3]
    assert select([a._replace(heard=0), between._replace(heard=10), again._replace(heard=5)]) == [0, 2]


authors = st.sampled_from(("x", "y", "z", None))
sayings = st.lists(st.tuples(authors, st.sampled_from("ABC"), st.sampled_from(("S", "T", None))), max_size=30)


@settings(deadline=None)
@given(sayings, st.data())
def test_all_ways_agree_with_the_model_however_micro_batches_are_cut_and_repeated(
    said: list[tuple[str | None, str, str | None]], data: st.DataObject
) -> None:
    """The file after crashes at any micro-batch, Spark's state, and a backfill; copies of earlier messages lie
    between."""
    log = [Announced(*each, heard=at, message=f"message {at}") for at, each in enumerate(said)]
    expected = updates_among(log, SPAN)
    copies: list[UpdateRow] = []
    for number, each in enumerate(log):
        copies.append(copy_of(each, len(copies)))
        signed = [earlier for earlier in log[: number + 1] if earlier.author is not None]
        if signed:
            copies += [
                copy_of(again, len(copies) + place, each.heard)
                for place, again in enumerate(data.draw(st.lists(st.sampled_from(signed), max_size=2)))
            ]
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(copies)), max_size=4))), len(copies)]
    repeated = data.draw(st.integers(0, len(cuts) - 2))
    state = StreamState(b"", SPAN)
    by_file: list[UpdateRow] = []
    by_spark: list[UpdateRow] = []
    with TemporaryDirectory() as folder:
        config = DedupStoreConfig(f"{folder}/file", SPAN)
        for number, (first, end) in enumerate(pairwise(cuts)):
            with DedupStore(config) as store:  # another process each time
                passed = store.filter_by(UPDATE_RULE, copies[first:end], number)
                assert number != repeated or store.filter_by(UPDATE_RULE, copies[first:end], number) == passed
            by_file += passed
            by_spark += state.select(copies[first:end], number)
            state = StreamState(state.dump(), SPAN)
        with DedupStore(config) as store:
            assert store.filter_by(UPDATE_RULE, copies[cuts[repeated] :], len(cuts)) == [
                row for row in by_file if row.ref.offset >= cuts[repeated]
            ], "a checkpoint that was rolled back has the same outcome"
    history = StreamHistory(SPAN)
    by_backfill = [
        number
        for number, each in enumerate(log)
        if history.offer(each.heard, "LIVE", each.separator, each.tip, each.author, is_live=False)
    ]
    assert numbers(by_file) == numbers(by_spark) == by_backfill == expected


@given(sayings, st.data())
def test_a_backfill_in_chunks_gives_what_it_gives_at_once(
    said: list[tuple[str | None, str, str | None]], data: st.DataObject
) -> None:
    """A chunk knows the updates of the earlier ones, and the announcements from the table `messages`."""
    log = [Announced(*each, heard=at, message=f"message {at}") for at, each in enumerate(said)]
    cut = data.draw(st.integers(0, len(log)))
    expected = updates_among(log, SPAN)
    history = StreamHistory(SPAN)
    for number, each in enumerate(log[:cut]):
        if number in expected:
            history.add_update("LIVE", each.separator, each.tip, each.heard)
        if each.author is not None:
            history.add_announcement("LIVE", each.author, each.tip, each.heard)
    later = [
        number
        for number, each in enumerate(log[cut:], cut)
        if history.offer(each.heard, "LIVE", each.separator, each.tip, each.author, is_live=False)
    ]
    assert later == [number for number in expected if number >= cut]


# ---------------------------------------------------------------- what it costs


def test_a_message_costs_few_digests_and_a_return_one(tmp_path: Path) -> None:
    """So an author who alternates two tips costs less than one who announces new ones."""
    names = DedupStoreConfig(str(tmp_path / "file"), SPAN)
    turns = say(*(f"x:{'AB'[at % 2]}" for at in range(500)))
    with DedupStore(names) as store:
        assert len(store.filter_by(UPDATE_RULE, [copy_of(each, at) for at, each in enumerate(turns)], 0)) == 500
    assert count_digests(tmp_path / "file") == 500 + 2 * 2 + 1
    fresh = say(*(f"y:T{at}" for at in range(500)))
    with DedupStore(names) as store:
        rows = [copy_of(each._replace(message=f"{each.message} of y"), at) for at, each in enumerate(fresh)]
        assert len(store.filter_by(UPDATE_RULE, rows, 0)) == 500
    assert count_digests(tmp_path / "file") == 505 + 3 * 500 + 1


def test_the_state_of_a_stream_in_spark_is_bounded() -> None:
    state = StreamState(b"", SPAN)
    for number in range(3):
        said = say(*(f"x:{number}/{at}" for at in range(1_000)))
        state.select(
            [copy_of(each._replace(message=f"{number} {each.message}"), at) for at, each in enumerate(said)], 1
        )
    assert len(StreamState(state.dump(), SPAN).select([], 1)) == 0
    assert len(msgspec.msgpack.decode(state.dump())) == MAX_DIGESTS
    state.expire(SPAN + 1)
    assert state.newest_time is None


def count_digests(path: Path) -> int:
    with closing(sqlite3.connect(path)) as file:
        (count,) = file.execute("SELECT count(*) FROM digests").fetchone()
        assert (count,) == file.execute("SELECT digest_count FROM progress").fetchone()
        return int(count)
