"""The kept corpus of the fuzzer: no exception, no hang, no decoder above its bound of CPU."""

from __future__ import annotations

import pytest

from fuzz.measuring import KEPT, LONGEST, MOST, MOST_PER_BYTE, corpus, cost
from fuzz.targets import STEPS, TARGETS
from kit.cpu_time import measure_step

pytestmark = pytest.mark.timeout(300)

NOISE = 3
"""times that a cost may exceed its bound: `make fuzz` compares it with the bound itself"""


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_the_kept_corpus_costs_what_it_may(name: str) -> None:
    inputs = corpus(KEPT / name)
    assert inputs, "no corpus"
    step = measure_step()
    found = cost(TARGETS[name], [b"", *inputs], 2)
    step = max(step, measure_step())
    assert name in STEPS or found.per_byte <= NOISE * MOST_PER_BYTE * step, found.worst[:200]
    assert found.longest <= NOISE * MOST * step


def test_no_corpus_is_left_of_a_target_that_went() -> None:
    assert {folder.name for folder in KEPT.iterdir()} == TARGETS.keys()


def test_a_slow_decoder_is_found() -> None:
    steps = 0

    def quadratic(data: bytes) -> None:
        nonlocal steps
        steps += len(data) ** 2

    found = cost(quadratic, [b"x"], 0, clock=lambda: steps)
    assert found.worst == b"x" * len(found.worst)
    assert found.per_byte == len(found.worst) > NOISE * MOST_PER_BYTE
    assert found.longest == LONGEST**2 > NOISE * MOST


def test_a_decoder_of_constant_cost_per_byte_passes() -> None:
    steps = 0

    def linear(data: bytes) -> None:
        nonlocal steps
        steps += len(data) * MOST_PER_BYTE

    found = cost(linear, [b"x"], 0, clock=lambda: steps)
    assert (found.per_byte, found.longest) == (MOST_PER_BYTE, LONGEST * MOST_PER_BYTE)


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
