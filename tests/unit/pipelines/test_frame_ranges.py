"""kiln.pipelines.delta.frame_ranges against a plain set of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.pipelines.delta.frame_ranges import (
    FrameRanges,
    Ranges,
    StoredFrameRanges,
    build_range_key,
    contains,
    insert,
    merge,
    overlap,
)

numbers = st.integers(1, 40)
spans = st.tuples(numbers, st.integers(0, 8)).map(lambda span: (span[0], span[0] + span[1]))
A, B = b"a" * 16, b"b" * 16


def numbers_in(ranges: Ranges) -> set[int]:
    return {number for low, high in ranges for number in range(low, high + 1)}


def ranges_of(numbers: set[int]) -> Ranges:
    """Ascending closed ranges that do not touch: the only way to write a set so."""
    lows = sorted(number for number in numbers if number - 1 not in numbers)
    highs = sorted(number for number in numbers if number + 1 not in numbers)
    return list(zip(lows, highs, strict=True))


@given(st.lists(spans, max_size=20))
def test_ranges_are_the_set_of_what_was_inserted(inserted: list[tuple[int, int]]) -> None:
    ranges: Ranges = []
    held: set[int] = set()
    for low, high in inserted:
        insert(ranges, low, high)
        held |= set(range(low, high + 1))
        assert ranges == ranges_of(held)
    assert {number for number in range(60) if contains(ranges, number)} == held


@given(st.lists(spans, max_size=20))
def test_insert_tells_whether_anything_was_new(inserted: list[tuple[int, int]]) -> None:
    ranges: Ranges = []
    held: set[int] = set()
    for low, high in inserted:
        span = set(range(low, high + 1))
        assert insert(ranges, low, high) == (not span <= held)
        held |= span


@pytest.mark.parametrize("low", [3, 4, 5])
def test_nothing_is_new_in_a_range_that_is_held(low: int) -> None:
    """Its first number as well as those after it."""
    ranges = [(3, 5)]
    assert not insert(ranges, low, low)
    assert ranges == [(3, 5)]


def test_a_connection_without_loss_is_one_range() -> None:
    ranges: Ranges = []
    assert all(insert(ranges, sequence, sequence) for sequence in range(1, 1_001))
    assert ranges == [(1, 1_000)]


def test_the_largest_sequence_is_inserted_once() -> None:
    ranges: Ranges = []
    assert insert(ranges, 2**63 - 1, 2**63 - 1)
    assert not insert(ranges, 2**63 - 1, 2**63 - 1)
    assert contains(ranges, 2**63 - 1)


held = st.dictionaries(
    st.sampled_from((build_range_key(A, "IN"), build_range_key(A, "OUT"), build_range_key(B, "IN"))),
    st.sets(numbers).map(ranges_of),
)


@given(st.lists(held, max_size=5))
def test_what_tasks_took_is_brought_together_as_a_union(parts: list[FrameRanges]) -> None:
    total: FrameRanges = {}
    for part in (*parts, *parts[:1]):  # a task may run twice
        total = merge(total, part)
    for key in {key for part in parts for key in part}:
        assert total[key] == ranges_of({number for part in parts for number in numbers_in(part.get(key, []))})


@given(held, held)
def test_merging_leaves_what_is_merged_alone(into: FrameRanges, taken: FrameRanges) -> None:
    before = {key: list(ranges) for key, ranges in taken.items()}
    merged = merge(into, taken)
    assert merged is into
    for ranges in merged.values():  # were a list shared, this would show in `taken`
        insert(ranges, 100, 100)
    assert taken == before


@given(held, held)
def test_two_overlap_if_they_share_a_frame(one: FrameRanges, other: FrameRanges) -> None:
    def frames(ranges: FrameRanges) -> set[tuple[bytes, int]]:
        return {(key, number) for key, each in ranges.items() for number in numbers_in(each)}

    assert overlap(one, other) == bool(frames(one) & frames(other))


@pytest.mark.parametrize(
    ("taken", "shared"),
    [((1, 2), False), ((2, 3), True), ((5, 6), True), ((4, 4), True), ((6, 9), False), ((1, 9), True)],
)
def test_two_overlap_from_their_first_frame_to_their_last(taken: tuple[int, int], shared: bool) -> None:
    assert overlap({build_range_key(A, "IN"): [(3, 5), (20, 22)]}, {build_range_key(A, "IN"): [taken]}) == shared
    assert not overlap({build_range_key(A, "IN"): [(3, 5)]}, {build_range_key(A, "OUT"): [taken]})


# ---------------------------------------------------------------- on disk


@given(st.lists(held, max_size=8), held)
def test_ranges_on_disk_are_those_in_memory(parts: list[FrameRanges], asked: FrameRanges) -> None:
    """Of what touches or adjoins the frames that are asked for; nothing is forgotten, and nothing made up."""
    on_disk, all_of_it = StoredFrameRanges(), FrameRanges()
    for part in parts:
        on_disk.add(part)
        merge(all_of_it, part)
    expected = {
        key: [
            (low, high)
            for low, high in all_of_it[key]
            if any(low <= last + 1 and high >= first - 1 for first, last in ranges)
        ]
        for key, ranges in asked.items()
        if key in all_of_it
    }
    assert on_disk.find_near(asked) == {key: ranges for key, ranges in expected.items() if ranges}
    everything = {key: [(0, 2**62)] for key in all_of_it}
    assert on_disk.find_near(everything) == {key: ranges for key, ranges in all_of_it.items() if ranges}


def test_the_largest_sequence_is_held_on_disk() -> None:
    largest: FrameRanges = {build_range_key(A, "IN"): [(2**63 - 1, 2**63 - 1)]}
    on_disk = StoredFrameRanges()
    on_disk.add(largest)
    on_disk.add(largest)
    assert on_disk.find_near(largest) == largest
