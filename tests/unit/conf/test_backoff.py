"""kiln.conf.process.backoff: a pause that doubles."""

from __future__ import annotations

import pytest

from kiln.conf.process.backoff import pause_after


@pytest.mark.parametrize(
    ("failures", "pause"),
    [(0, 0.0), (1, 1.5), (2, 3.0), (3, 6.0), (5, 24.0), (6, 30.0), (7, 30.0), (10_000, 30.0)],
)
def test_the_pause_doubles_from_the_least_to_the_most(failures: int, pause: float) -> None:
    assert pause_after(failures, 1.5, 30.0) == pause


def test_the_least_is_never_more_than_the_most() -> None:
    assert pause_after(1, 5.0, 2.0) == 2.0
