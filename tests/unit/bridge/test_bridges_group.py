"""Who leads, and what bridges learn of each other."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.cluster.group import GroupView, Member, build_round, interests_digest, read_member, read_round

TEXT = st.text(max_size=6)


def members(least: int = 1) -> st.SearchStrategy[list[Member]]:
    one = st.builds(Member, TEXT, TEXT, TEXT, st.booleans(), st.integers(0, 4), st.lists(TEXT, max_size=2).map(tuple))
    return st.lists(one, min_size=least, max_size=5, unique_by=lambda member: member.peer)


def member(peer: str, fetches: bool = True, led: int = 0) -> Member:
    return Member(peer, "host", "", fetches, led, (f"author of {peer}",))


@given(members())
def test_one_leads_whoever_makes_the_round(those: list[Member]) -> None:
    view = build_round(those)
    assert view == build_round(sorted(those, key=lambda each: each.peer, reverse=True))
    (leader,) = (each for each in those if each.peer == view.leader)
    assert leader.fetches == any(each.fetches for each in those)
    assert set(view.authors) == {author for each in those for author in each.authors}
    assert {bridge.peer for bridge in view.bridges} == {each.peer for each in those}


@given(members(least=2))
def test_who_leads_goes_on_when_others_come_and_go(those: list[Member]) -> None:
    first, *others = [msgspec.structs.replace(each, led=0, fetches=True) for each in those]
    assert build_round([msgspec.structs.replace(first, led=3), *others]).leader == first.peer


def test_of_two_that_led_the_later_one_leads() -> None:
    # one was cut off from Kafka, and comes back
    view = build_round([member("b", led=3), member("a", led=7), member("c")])
    assert view.leader == "a"


def test_who_does_not_fetch_leaves_the_lead() -> None:
    view = build_round([member("a", fetches=False, led=3), member("b")])
    assert view.leader == "b"


@given(members())
def test_what_is_told_is_read(those: list[Member]) -> None:
    assert [read_member(msgspec.json.encode(each)) for each in those] == those
    view = build_round(those)
    assert read_round(msgspec.json.encode(view)) == view


@given(st.binary(max_size=20))
def test_another_layout_is_refused(data: bytes) -> None:
    for read in (read_member, read_round):
        with pytest.raises(msgspec.DecodeError):
            read(data)


def test_unknown_fields_of_a_later_kiln_are_passed_over() -> None:
    view = msgspec.json.encode({"leader": "a", "authors": [], "bridges": [], "later": 1})
    assert read_round(view) == GroupView("a", (), ())


def test_the_order_of_interests_says_nothing() -> None:
    assert interests_digest(["model", "a/b"]) == interests_digest(["a/b", "model", "model"])
    assert interests_digest(["model"]) != interests_digest(["*"])
