"""Who of several bridges has a topic."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.cluster.rendezvous import compute_weight, find_owner

MEMBERS = st.sets(st.text(max_size=8), min_size=1, max_size=8)
THINGS = st.lists(st.text(max_size=8), max_size=30)


@given(MEMBERS, THINGS)
def test_all_who_know_the_same_members_name_the_same_owner(members: set[str], things: list[str]) -> None:
    for thing in things:
        assert find_owner(thing, sorted(members)) == find_owner(thing, sorted(members, reverse=True))
        assert find_owner(thing, members) in members


@given(MEMBERS, st.text(max_size=8), THINGS)
def test_who_comes_or_goes_moves_nothing_between_the_others(members: set[str], other: str, things: list[str]) -> None:
    others = members - {other}
    for thing in things if others else ():
        assert find_owner(thing, others | {other}) in (find_owner(thing, others), other)


def test_each_has_an_equal_part_and_gives_an_equal_part_to_who_comes() -> None:
    members = [f"12D3KooW{number}" for number in range(5)]
    things = [f"/ceramic/local-test/sep/model/k{number}" for number in range(10_000)]
    before = {thing: find_owner(thing, members[:4]) for thing in things}
    after = {thing: find_owner(thing, members) for thing in things}
    # 2,500 and 2,000 each, and the standard deviation is 43 and 40
    assert all(abs(count - 2_500) < 200 for count in Counter(before.values()).values())
    assert all(abs(count - 2_000) < 200 for count in Counter(after.values()).values())
    moved = Counter(before[thing] for thing in things if after[thing] == members[4])
    assert all(abs(count - 500) < 100 for count in moved.values())
    assert all(after[thing] == before[thing] for thing in things if after[thing] != members[4])


def test_the_weight_is_the_one_that_is_written_down() -> None:
    data = b"\0\0\0\x01a\0\0\0\x02bc"
    assert compute_weight("a", "bc") == int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
    assert compute_weight("a", "bc") != compute_weight("ab", "c")


def test_nobody_is_no_owner() -> None:
    with pytest.raises(ValueError, match="empty"):
        find_owner("x", [])
