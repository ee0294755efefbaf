"""Which faults `make chaos` does: the same for a seed, over all kinds, and over all that a kind can do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from chaos.__main__ import plan
from chaos.check import Log
from chaos.faults import KINDS, Scene
from chaos.outcomes import Fault, Kept, outcomes
from chaos.whole_kiln import Stack


def test_a_seed_gives_the_same_faults_however_many_are_asked_for() -> None:
    names = list(KINDS)
    few, many = plan(7, 50, names, 0), plan(7, 200, names, 0)
    assert [fault.kind.name for fault in few] == [fault.kind.name for fault in many[:50]]
    assert [fault.number for fault in many] == list(range(200))
    assert [fault.kind.name for fault in plan(8, 50, names, 0)] != [fault.kind.name for fault in few]


@pytest.mark.parametrize("each", [1, 3])
def test_each_kind_comes_as_often_and_counts_its_turns(each: int) -> None:
    faults = plan(1, 20, list(KINDS), each)
    assert Counter(fault.kind.name for fault in faults) == dict.fromkeys(KINDS, each)
    for name in KINDS:
        assert [fault.turn for fault in faults if fault.kind.name == name] == list(range(each))


def test_faults_of_a_kind_take_every_choice_before_one_comes_again(tmp_path: Path) -> None:
    stack = Stack(tmp_path, 1, isolated=False)
    scenes = [Scene(stack, Log(stack), Random(turn), turn, 5) for turn in range(8)]
    taken = [scene.next_of(["a", "b", "c", "d"]) for scene in scenes]
    assert sorted(taken[:4]) == ["a", "b", "c", "d"]
    assert taken[4:] == taken[:4]


def test_a_fault_that_nothing_was_compared_after_is_no_outcome() -> None:
    def fault(wrong: list[str], checked: bool) -> Fault:
        return Fault("kill-bridge", "nothing is lost", 2.0, 0, wrong, checked)

    run = Kept(1, "2026-01-01T00:00:00Z", 60, [fault([], True), fault([], False), fault(["ended"], False)], [])
    assert "| all | 2 | 1 | 1 | 0 | 2 s | |" in outcomes([run])
