"""A peer's score: what lifts it, what lowers it, and how it fades."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.gossipsub.score import Score, ScoreOptions, decay_for_half_life


def test_a_stranger_has_zero() -> None:
    assert Score(ScoreOptions()).compute() == 0


def test_time_in_the_mesh_counts_up_to_a_cap_and_is_lost_outside() -> None:
    score = Score(ScoreOptions())
    for _ in range(10):
        score.tick(1, in_mesh=True)
    assert score.value == pytest.approx(10 / 3600)
    score.tick(1e6, in_mesh=True)
    assert score.value == pytest.approx(1)
    score.tick(1, in_mesh=False)
    assert score.value == 0


def test_first_deliveries_lift_up_to_a_cap() -> None:
    score = Score(ScoreOptions())
    for _ in range(1000):
        score.deliver()
    assert score.compute() == pytest.approx(50)


def test_what_a_peer_brought_does_not_buy_forgeries() -> None:
    score = Score(ScoreOptions())
    for _ in range(1000):
        score.deliver()
    forged = 0
    while score.value >= ScoreOptions().graylist_threshold:
        score.reject()
        forged += 1
    assert forged <= 20


def test_a_few_slips_are_forgiven_and_a_habit_is_not() -> None:
    score = Score(ScoreOptions())
    score.penalize(6)
    assert score.value == 0
    score.penalize()
    assert score.value == -10
    score.penalize(2)
    assert score.value == -90


def test_many_peers_on_one_address_pay_for_it() -> None:
    score = Score(ScoreOptions())
    score.colocate(10)
    assert score.value == 0
    score.colocate(13)
    assert score.value == -900


def test_penalties_halve_with_their_half_life_and_end() -> None:
    score = Score(ScoreOptions(behaviour_decay=decay_for_half_life(100), behaviour_threshold=0))
    score.penalize(4)
    assert score.value == -160
    score.tick(100, in_mesh=False)
    assert score.value == pytest.approx(-40)
    for _ in range(20):
        score.tick(100, in_mesh=False)
    assert score.value == 0


@given(st.lists(st.sampled_from(["reject", "penalize", "deliver", "tick"]), max_size=60))
def test_only_time_and_deliveries_lift_a_score(events: list[str]) -> None:
    score = Score(ScoreOptions())
    for event in events:
        before = score.compute()
        if event == "tick":
            score.tick(1, in_mesh=False)
        else:
            getattr(score, event)()
        after = score.compute()
        if event in ("reject", "penalize"):
            assert after <= before
        if event == "deliver":
            assert after >= before
