"""Waiting in tests ends in time, one way or the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from kit.awaiting import awaited, until, wait_until


def at_look(number: int) -> Callable[[], bool]:
    """True once it was looked at so many times."""
    looks = iter(range(number))
    return lambda: next(looks, None) is None


def test_what_comes_is_awaited() -> None:
    assert awaited(at_look(3), 10)
    wait_until(at_look(3), "the third look", 10)
    trio.run(until, at_look(3), "the third look", 10)


def test_what_is_true_already_needs_no_time() -> None:
    assert awaited(lambda: True, 0)
    wait_until(lambda: True, "truth", 0)
    trio.run(until, lambda: True, "truth", 0)


def test_what_never_comes_is_named() -> None:
    assert not awaited(lambda: False, 0.01)
    with pytest.raises(AssertionError, match=r"^not within 0\.01 s: spring$"):
        wait_until(lambda: False, "spring", 0.01)
    with pytest.raises(AssertionError, match=r"^not within 0\.01 s: spring$"):
        trio.run(until, lambda: False, "spring", 0.01)


def test_words_that_must_be_found_are_found_at_the_end() -> None:
    said: list[str] = []

    def look() -> bool:
        said.append("no")
        return False

    with pytest.raises(AssertionError, match=r"(no){2,}$"):
        wait_until(look, lambda: "".join(said), 0.01)
