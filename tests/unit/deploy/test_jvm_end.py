"""kiln.deploy.stack.spark: the end of Spark's JVM is known and said, without a JVM."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from kiln.deploy.stack.spark import check_jvm, stop_session


@pytest.fixture
def jvm(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the JVM."""
    with subprocess.Popen(["sleep", "infinity"]) as process:
        monkeypatch.setattr(
            SparkContext, "_gateway", SimpleNamespace(proc=process, shutdown_callback_server=lambda: None)
        )
        yield process
        process.kill()


def test_nothing_is_said_of_a_jvm_that_runs(jvm: subprocess.Popen[bytes]) -> None:
    assert check_jvm() is None


def test_the_words_for_a_killed_jvm_say_what_to_do(jvm: subprocess.Popen[bytes]) -> None:
    jvm.kill()
    ended = check_jvm(patience=60)
    assert "the JVM of Spark exited with code -9" in str(ended)
    assert "spark.driver_memory" in str(ended)


def test_a_jvm_that_somebody_else_started_is_not_ours_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)
    assert check_jvm() is None


class Unreachable:
    """A session, or its context, of a JVM that refuses connections. As PySpark's, it asks the JVM only once."""

    def __init__(self, dying: subprocess.Popen[bytes] | None = None) -> None:
        self._dying = dying
        self.stops = 0

    @property
    def sparkContext(self) -> Unreachable:  # noqa: N802 – the name is Spark's
        return self

    def stop(self) -> None:
        self.stops += 1
        if self._dying is not None:
            self._dying.kill()
        if self.stops == 1:
            raise ConnectionRefusedError


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_session_whose_jvm_was_killed_stops(jvm: subprocess.Popen[bytes], when: str) -> None:
    if when == "before":
        jvm.kill()
        jvm.wait()
    session = Unreachable(jvm)
    stop_session(cast(SparkSession, session))
    assert session.stops == 2
    assert SparkContext._gateway is None, "so that the next session starts another JVM"


def test_what_else_goes_wrong_at_a_stop_is_told(jvm: subprocess.Popen[bytes]) -> None:
    with pytest.raises(ConnectionRefusedError):
        stop_session(cast(SparkSession, Unreachable()))
