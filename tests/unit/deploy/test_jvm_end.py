"""deploy.run.spark: the end of Spark's JVM is known and said, without a JVM."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from pyspark import SparkContext

from deploy.run.spark import jvm_end


@pytest.fixture
def jvm(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the JVM."""
    with subprocess.Popen(["sleep", "infinity"]) as process:
        monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
        yield process
        process.kill()


def test_nothing_is_said_of_a_jvm_that_runs(jvm: subprocess.Popen[bytes]) -> None:
    assert jvm_end() is None


def test_the_words_for_a_killed_jvm_say_what_to_do(jvm: subprocess.Popen[bytes]) -> None:
    jvm.kill()
    ended = jvm_end(patience=30)
    assert "the JVM of Spark ended with -9" in str(ended)
    assert "spark.driver_memory" in str(ended)


def test_a_jvm_that_somebody_else_started_is_not_ours_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)
    assert jvm_end() is None
