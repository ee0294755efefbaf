"""Byte budgets of peers, and peers that are kept out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.libp2p.budget import BanList, CaptureBudget

MIB = 1 << 20
A, B, C = b"a", b"b", b"c"


def test_an_hours_bytes_may_come_at_once_and_then_the_rate_holds() -> None:
    budget = CaptureBudget(per_peer=36 * MIB, total=1000 * MIB)
    assert budget.spend(A, 36 * MIB, (A, B), 0.0) == 0
    assert budget.spend(A, MIB, (A, B), 0.0) == 100
    assert budget.spend(B, MIB, (A, B), 0.0) == 0
    assert budget.spend(A, 0, (A, B), 100.0) == 0
    assert budget.spend(A, MIB, (A, B), 100.0) == 100


def held(
    budget: CaptureBudget, connected: Collection[bytes], flooding: Iterable[bytes], seconds: int
) -> tuple[int, int]:
    """B says 6 kB a second, in 20 messages; others as much as they may, 256 KiB at a time. How often B waits; bytes."""
    flooding, until = list(flooding), dict.fromkeys(flooding, 0.0)
    waits = taken = 0
    for tick in range(20 * seconds):
        now = 100 + tick / 20
        for peer in flooding:
            if until[peer] <= now:
                pause = budget.spend(peer, 0, connected, now) or budget.spend(peer, 256 << 10, connected, now)
                taken += 0 if until[peer] else 256 << 10
                until[peer] = now + min(1.0, pause)
        waits += budget.spend(B, 300, connected, now) > 0
    return waits, taken


def test_while_all_are_over_floods_do_not_hold_back_who_says_little() -> None:
    """300 peers are connected and silent: an equal part of the rate for each would be a half of what B says."""
    crowd = [b"%d" % number for number in range(300)]
    for flooding in ((A,), tuple(crowd[:40])):
        budget = CaptureBudget(per_peer=1 << 40, total=1 << 30)
        connected = (A, B, *crowd)
        assert budget.spend(B, 300, connected, 0.0) == 0
        budget.spend(A, 1 << 30, connected, 90.0)
        assert held(budget, connected, flooding, 120)[0] == 0


def test_new_keys_bring_nothing() -> None:
    """While all are over, five strangers a second come, and each goes after its first bytes."""
    budget = CaptureBudget(per_peer=1 << 40, total=1 << 30)
    budget.spend(B, 300, (A, B), 0.0)
    budget.spend(A, 1 << 30, (A, B), 90.0)
    taken = 0
    here: dict[bytes, None] = {B: None}
    for tick in range(600):
        now = 100 + tick / 5
        stranger = b"s%d" % tick
        here[stranger] = None
        budget.spend(stranger, 256 << 10, here, now)
        if len(here) > 10:
            gone = next(peer for peer in here if peer != B)
            del here[gone]
            if pause := budget.spend(gone, 0, here, now):
                budget.spend(gone, -256 << 10, here, now)
            taken += 0 if pause else 256 << 10
        assert budget.spend(B, 1200, here, now) == 0
    assert taken < (1 << 30) / 3600 * 130


def test_who_comes_again_finds_the_account_as_it_was() -> None:
    budget = CaptureBudget(per_peer=MIB, total=1000 * MIB)
    assert budget.spend(A, 2 * MIB, (A,), 0.0) == 3600
    assert budget.spend(A, 0, (A,), 1800.0) == 1800


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 8 * MIB)), max_size=60))
def test_whoever_waits_as_told_keeps_every_budget(said: list[tuple[bytes, int]]) -> None:
    """Over any time: at most an hour's bytes, what comes with the time, and one portion of each peer."""
    budget, now = CaptureBudget(per_peer=36 * MIB, total=72 * MIB), 0.0
    until = dict.fromkeys((A, B, C), 0.0)
    taken = dict.fromkeys((A, B, C), 0)
    for peer, size in said:
        now = max(now, until[peer])
        while pause := budget.spend(peer, 0, (A, B, C), now):
            now += min(1.0, pause)
        taken[peer] += size
        until[peer] = now + budget.spend(peer, size, (A, B, C), now)
        assert taken[peer] <= 36 * MIB + now / 100 * MIB + 8 * MIB
        # each peer may have saved a minute of its share
        assert sum(taken.values()) <= 72 * MIB + now / 50 * MIB + 3 * 8 * MIB + 60 / 50 * MIB


def test_who_is_kept_out_may_come_again_after_the_time_and_the_table_is_bounded() -> None:
    banned = BanList(60.0, limit=2)
    banned.add(A, 0.0)
    banned.add(B, 10.0)
    assert (banned.remaining(A, 50.0), banned.remaining(C, 50.0), banned.count(50.0)) == (10.0, 0.0, 2)
    assert banned.remaining(A, 60.0) == 0
    assert banned.count(60.0) == 1
    banned.add(A, 61.0)
    banned.add(C, 62.0)
    assert (banned.remaining(B, 63.0), banned.count(63.0)) == (0.0, 2)  # the oldest gave way
    assert banned.count(200.0) == 0
