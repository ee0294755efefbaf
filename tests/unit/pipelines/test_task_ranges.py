"""Limits of a micro-batch, and the ranges of its tasks (kiln.pipelines.runtime.kafka)."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from kiln.pipelines.runtime.kafka import assign_ranges, limit_ranges
from kiln.pipelines.runtime.kafka_ranges import OffsetRange

ranges = st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**7)), max_size=8).map(
    lambda sizes: [OffsetRange("t", n, first, first + size) for n, (first, size) in enumerate(sizes)]
)


@given(ranges, st.integers(1, 10**6))
def test_a_limit_shortens_each_range_in_proportion(given: list[OffsetRange], limit: int) -> None:
    limited = limit_ranges(given, limit)
    assert [each._replace(end=0) for each in limited] == [each._replace(end=0) for each in given]
    total = sum(each.size for each in given)
    if total <= limit:
        assert limited == given
    for one, other in zip(limited, given, strict=True):
        assert one.size <= other.size
        assert (one.size > 0) == (other.size > 0)  # so none is starved
        if total > limit:
            assert 0 <= one.size - other.size * limit / total < 1.001
    assert sum(each.size for each in limited) < limit + len(given) + 1 or total <= limit


@given(ranges, st.integers(0, 10**7), st.integers(0, 5))
def test_each_range_is_of_one_task(given: list[OffsetRange], small: int, tasks: int) -> None:
    assigned = assign_ranges(given, small, tasks)
    assert sorted(chain.from_iterable(assigned)) == sorted(given)
    if given and sum(each.size for each in given) < small:
        assert len(assigned) == 1
    elif given:
        assert len(assigned) == min(tasks or len(given), len(given))
