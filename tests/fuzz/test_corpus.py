"""What fuzzing found worth keeping, run again: no exception, no hang, no decoder that costs more than it may."""

from __future__ import annotations

import pytest

from fuzz.measuring import KEPT, MOST, MOST_PER_BYTE, corpus, cost
from fuzz.targets import STEPS, TARGETS

pytestmark = pytest.mark.timeout(300)

BUSY = 3
"""JVMs of other tests run beside these, and make all slower; `make fuzz` has the figures themselves."""


@pytest.mark.parametrize("name", TARGETS)
def test_the_kept_corpus_costs_what_it_may(name: str) -> None:
    inputs = corpus(KEPT / name)
    assert inputs, "no corpus"
    found = cost(TARGETS[name], [b"", *inputs], 2)
    assert name in STEPS or found.per_byte <= BUSY * MOST_PER_BYTE, found.worst[:200]
    assert found.longest <= BUSY * MOST


def test_no_corpus_is_left_of_a_target_that_went() -> None:
    assert {folder.name for folder in KEPT.iterdir()} == TARGETS.keys()


def test_a_slow_decoder_is_found() -> None:
    def quadratic(data: bytes) -> None:
        for at in range(0, len(data) if len(data) < 40_000 else 0, 2):
            data[at:].hex()

    assert cost(quadratic, [b"x"], 0).per_byte > BUSY * MOST_PER_BYTE


def test_a_fault_is_found_without_atheris(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from fuzz import __main__ as fuzzing

    def faulty(data: bytes) -> None:
        if len(data) > 3 and data[0] == ord("d"):
            raise ZeroDivisionError

    folder = tmp_path_factory.mktemp("found")
    monkeypatch.setattr(fuzzing, "FOUND", folder)
    monkeypatch.setitem(TARGETS, "bencoded", faulty)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ZeroDivisionError):
        fuzzing.fuzz_here("bencoded", 20, folder / "told.json")
    assert [path.read_bytes()[:1] for path in folder.glob("bencoded-crash-*")] == [b"d"]
