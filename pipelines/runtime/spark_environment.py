"""Environment variables of Spark in local mode, which always uses the Spark inside the package pyspark.

SPARK_HOME, SPARK_CONF_DIR, HADOOP_CONF_DIR and PYSPARK_PYTHON of a user belong to another installation. With them,
Spark would load other jars, settings, file systems and interpreters. So Kiln removes them in local mode, and keeps them
on a cluster.
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
"""variable from which PySpark reads Spark's master"""


def is_local(master: str) -> bool:
    """Return true if this URL of Spark's master means local mode, in which the driver's JVM runs the tasks."""
    return master.startswith("local")


def find_foreign_variables(names: Iterable[str]) -> list[str]:
    """Select the names of environment variables that configure a Spark or Hadoop installation."""
    return sorted(name for name in names if name.startswith(_PREFIXES) or name == _MASTER)


def isolate_spark() -> None:
    """Make this process use the Spark inside the package pyspark, listening only on the loopback address.

    Removes the environment variables of other Spark and Hadoop installations. Call it before the JVM starts.

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
    """Check that the user of this process has a name. Without a name, Hadoop's classes fail in the JVM.

    Raises:
        PrerequisiteError: The user has no name, as in a container that runs under an arbitrary user id.
    """
    number = os.geteuid()
    try:
        pwd.getpwuid(number)
    except KeyError:
        raise PrerequisiteError(
            f"the user id {number} has no entry in /etc/passwd, and Spark does not start without an entry. Run Kiln as "
            f"another user, or add the line kiln:x:{number}:{os.getegid()}::/tmp:/bin/sh to /etc/passwd. In a "
            "container, mount a file with this line over /etc/passwd"
        ) from None


def find_spark_home() -> Path:
    """Find the folder of the package pyspark, which contains a complete Spark.

    Raises:
        PrerequisiteError: PySpark is not installed, or Python imports a copy of it without Spark's jars.
    """
    spec = find_spec("pyspark")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or () if spec else ())]
    for folder in folders:
        if (folder / "jars").is_dir():
            return folder
    if folders:
        raise PrerequisiteError(
            f"the package pyspark in {folders[0]} contains no jars of Spark. If PYTHONPATH names that folder, unset "
            f"it; else install the package again: {format_install_command('spark')}"
        )
    raise PrerequisiteError(f"pyspark is not installed: {format_install_command('spark')}")
