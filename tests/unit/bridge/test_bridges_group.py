"""Members of a network's group of bridges: interests, authors and identity."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.cluster.group import GroupView, Member, build_round, interests_digest

TEXT = st.text(max_size=6)


def members() -> st.SearchStrategy[list[Member]]:
    one = st.builds(Member, TEXT, TEXT, TEXT, st.booleans(), st.booleans(), st.lists(TEXT, max_size=2).map(tuple))
    return st.lists(one, min_size=1, max_size=5, unique_by=lambda member: member.peer)


@given(members())
def test_all_see_the_same_whoever_makes_the_round(those: list[Member]) -> None:
    view = build_round(those)
    assert view == build_round(sorted(those, key=lambda each: each.peer, reverse=True))
    assert view.leader in {member.peer for member in those if member.leads} or not any(m.leads for m in those)
    assert set(view.authors) == {author for member in those for author in member.authors}
    assert {(b.peer, b.leads) for b in view.bridges} == {(member.peer, member.leads) for member in those}


def test_nobody_leads_where_nobody_fetches() -> None:
    assert build_round([Member("a", "host", "", fetches=True), Member("b", "host", "")]).leader == ""


@given(members())
def test_what_is_told_is_read(those: list[Member]) -> None:
    assert [msgspec.json.decode(msgspec.json.encode(each), type=Member) for each in those] == those
    view = build_round(those)
    assert msgspec.json.decode(msgspec.json.encode(view), type=GroupView) == view


@given(st.binary(max_size=20))
def test_another_layout_is_refused(data: bytes) -> None:
    for layout in (Member, GroupView):
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(data, type=layout)


def test_unknown_fields_of_a_later_kiln_are_passed_over() -> None:
    view = msgspec.json.encode({"leader": "a", "authors": [], "bridges": [], "later": 1})
    assert msgspec.json.decode(view, type=GroupView) == GroupView("a", (), ())


def test_the_order_of_interests_says_nothing() -> None:
    assert interests_digest(["model", "a/b"]) == interests_digest(["a/b", "model", "model"])
    assert interests_digest(["model"]) != interests_digest(["*"])
