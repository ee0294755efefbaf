"""Turns of a queue with several levels."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.fair_queue import FairQueue

Path = tuple[int, bool, int]
PATHS = st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 6))


@given(events=st.lists(st.tuples(st.sampled_from(["add", "add", "pop", "remove"]), PATHS), max_size=100))
def test_each_item_comes_once_and_in_the_order_of_its_path(events: list[tuple[str, Path]]) -> None:
    queue: FairQueue[tuple[Path, int]] = FairQueue()
    model: defaultdict[Path, list[int]] = defaultdict(list)
    for number, (what, path) in enumerate(events):
        if what == "add":
            queue.extend(path, [(path, number)])
            model[path].append(number)
        elif what == "remove":
            assert list(queue.remove(path)) == [(path, item) for item in model.pop(path, [])]
        elif any(model.values()):
            popped, item = queue.pop()
            assert model[popped].pop(0) == item
        else:
            with pytest.raises(IndexError):
                queue.pop()
        assert len(queue) == sum(map(len, model.values()))
        for each, items in model.items():
            assert queue.count(each) == len(items)
            assert queue.peek(each) == ((each, items[0]) if items else None)
            assert queue.count(each[:1]) == sum(len(other) for key, other in model.items() if key[0] == each[0])


@given(sizes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=5))
def test_of_n_successive_turns_each_of_n_branches_has_one(sizes: list[list[int]]) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for owner, flows in enumerate(sizes):
        for flow, count in enumerate(flows):
            queue.extend((owner, flow), [(owner, flow)] * count)
    left = Counter({owner: sum(flows) for owner, flows in enumerate(sizes)})
    while queue:
        owners = [owner for owner, count in left.items() if count]
        turn = [queue.pop() for _ in owners]
        assert sorted(owner for owner, _ in turn) == owners
        left.subtract(owner for owner, _ in turn)


def test_a_branch_with_thousands_of_flows_delays_another_by_one_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(5_000):
        queue.extend(("stranger", number), ["stranger"])
    queue.extend(("honest", 0), ["honest"])
    assert "honest" in [queue.pop(), queue.pop()]
