"""A local Spark session, as `kiln run` opens it, with its own state folder.

A test module enables the fixture with `pytest_plugins = ["kit.local_spark"]`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from kiln.conf.settings.model import Settings
from kiln.deploy.query.spark_sql import compile_classes
from kiln.deploy.stack.spark import spark_session

_FOREIGN = str(Path(__file__).with_name("foreign_hadoop"))
_ANOTHER_SPARK = {
    "HADOOP_CONF_DIR": _FOREIGN,
    "PYSPARK_PYTHON": "/nowhere/python3",
    "PYSPARK_SUBMIT_ARGS": "--master spark://nowhere.invalid:7077 pyspark-shell",
    "SPARK_CONF_DIR": _FOREIGN,
    "SPARK_HOME": "/nowhere/spark",
}
"""Environment variables of another Spark. If Kiln did not ignore them, it could open no session or read no table."""


def open_session(settings: Settings, name: str = "kiln") -> AbstractContextManager[SparkSession]:
    """Open a session with the read-only guard of `kiln sql --spark`. All sessions of the process share a JVM."""
    os.environ |= _ANOTHER_SPARK
    return spark_session(settings, name, classes=[compile_classes(print)])


@pytest.fixture(scope="module")
def spark(broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session that the tests of a module share."""
    settings = Settings(state=tmp_path_factory.mktemp("spark"))
    with open_session(settings) as session:
        session.conf.set("spark.sql.shuffle.partitions", str(settings.spark.shuffle_partitions))  # as the queries do
        yield session
