"""Environment of a local Spark: the Spark of PySpark, without the variables of another Spark or Hadoop.

A user's SPARK_HOME, SPARK_CONF_DIR, HADOOP_CONF_DIR or PYSPARK_PYTHON belong to another installation. With them,
Spark's scripts, its JVM and PySpark would use other jars, settings, file systems and interpreters. On a cluster these
variables apply.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.extras import format_install_command

_PREFIXES: Final = ("HADOOP_", "PYSPARK_", "SPARK_", "YARN_")
_MASTER: Final = "MASTER"
"""Spark's master, for PySpark"""


def is_local(master: str) -> bool:
    """Return true if this master runs Spark on this machine, in the driver's JVM."""
    return master.startswith("local")


def find_foreign_variables(names: Iterable[str]) -> list[str]:
    """Select the variables of another Spark or Hadoop among the names of variables."""
    return sorted(name for name in names if name.startswith(_PREFIXES) or name == _MASTER)


def isolate_spark() -> None:
    """Remove the variables of another Spark or Hadoop from this process's environment, and set those of PySpark's own
    Spark, which listens only on this machine.

    Call it before the JVM starts.

    Raises:
        PrerequisiteError: PySpark is not installed completely, or the user has no name.
    """
    check_user()
    for name in find_foreign_variables(os.environ):
        del os.environ[name]
    os.environ |= {
        "SPARK_HOME": str(find_spark_home()),
        "PYSPARK_PYTHON": sys.executable,
        # Spark resolves the machine's own name otherwise, which fails in many containers and VPNs
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_HOSTNAME": "localhost",
    }


def check_user() -> None:
    """Check that this process's user has a name, without which Hadoop's classes fail in the JVM.

    Raises:
        PrerequisiteError: The user has no name, as in a container that runs under an arbitrary user id.
    """
    number = os.geteuid()
    try:
        pwd.getpwuid(number)
    except KeyError:
        raise PrerequisiteError(
            f"the user {number} has no entry in /etc/passwd, and Spark does not start without one. Run Kiln as a user "
            f"with one, or add the line kiln:x:{number}:{os.getegid()}::/tmp:/bin/sh; in a container, mount a file "
            "with this line over /etc/passwd"
        ) from None


def find_spark_home() -> Path:
    """Find the folder of PySpark, which is a complete Spark.

    Raises:
        PrerequisiteError: PySpark is not installed, or PYTHONPATH names the PySpark of another Spark.
    """
    spec = find_spec("pyspark")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or () if spec else ())]
    for folder in folders:
        if (folder / "jars").is_dir():
            return folder
    if folders:
        raise PrerequisiteError(
            f"the package pyspark in {folders[0]} contains no Spark. Unset PYTHONPATH if it names that folder"
        )
    raise PrerequisiteError(f"pyspark is not installed: {format_install_command('spark')}")
