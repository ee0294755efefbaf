"""kiln.deploy.stack.spark: a JVM that does not start is one sentence with its cause. A script stands for Java."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyspark import SparkContext

from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.settings.model import Settings
from kiln.deploy.stack.java import JavaError
from kiln.deploy.stack.spark import JvmStartError, spark_session
from kiln.pipelines.runtime.spark_environment import isolate_spark

JAVA = """#!/bin/sh
if [ "$1" = -version ]; then echo 'openjdk version "17.0.1"' >&2; exit 0; fi
echo 'Exception in thread "main" java.lang.ExceptionInInitializerError' >&2
echo 'Caused by: java.net.UnknownHostException: box: Name or service not known' >&2
exit 1
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No JVM of another test, and an environment that is put back."""
    monkeypatch.setattr(SparkContext, "_gateway", None)
    monkeypatch.setattr(os, "environ", os.environ.copy())


def start(folder: Path) -> PrerequisiteError:
    with pytest.raises(PrerequisiteError) as error, spark_session(Settings(state=folder)):
        pass
    assert error.value.exit_code == 3
    return error.value


def test_a_jvm_that_ends_at_its_start_is_told_with_its_cause(tmp_path: Path) -> None:
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(JAVA)
    java.chmod(0o755)
    os.environ["JAVA_HOME"] = str(tmp_path / "java")
    error = start(tmp_path)
    assert isinstance(error, JvmStartError)
    assert "did not start: java.net.UnknownHostException: box: Name or service not known. " in str(error)


def test_a_missing_java_is_told_with_the_way_to_install_it(tmp_path: Path) -> None:
    os.environ["JAVA_HOME"] = str(tmp_path / "nowhere")
    assert isinstance(start(tmp_path), JavaError)


def test_a_local_spark_needs_no_name_of_the_machine() -> None:
    os.environ["SPARK_LOCAL_IP"] = "10.9.8.7"
    isolate_spark()
    assert (os.environ["SPARK_LOCAL_IP"], os.environ["SPARK_LOCAL_HOSTNAME"]) == ("127.0.0.1", "localhost")
