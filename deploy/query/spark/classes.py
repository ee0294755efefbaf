"""Compilation of the `*.scala` files here with the Scala compiler that ships in pyspark, so that no JDK is needed.

Layout: a folder per version of the source and of pyspark, next to the jars: `.jars/guard/<digest>/kiln/*.class`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from kiln.conf.process.errors import PrerequisiteError
from kiln.deploy.stack.jars import default_root
from kiln.deploy.stack.java import find_java
from kiln.pipelines.runtime.spark_environment import find_spark_home

SOURCES = sorted(Path(__file__).parent.glob("*.scala"))
FUNCTIONS = Path(__file__).with_name("functions.txt")
"""copied to the folder of the classes"""
_PATIENCE = 300.0  # s


class ClassesError(PrerequisiteError):
    """The classes cannot be compiled; the message has the compiler's output."""


def compile_classes(progress: Callable[[str], None], root: Path | None = None) -> Path:
    """Compile the classes, unless they exist.

    Args:
        progress: Called with progress messages.
        root: Folder of the jars.

    Returns:
        The folder of the classes.

    Raises:
        ClassesError: The compilation fails.
        JavaError: There is no usable Java.
    """
    jars = find_spark_home() / "jars"
    texts = b"".join(path.read_bytes() for path in (*SOURCES, FUNCTIONS))
    digest = hashlib.sha256(texts + str(sorted(jar.name for jar in jars.glob("spark-sql_*"))).encode())
    parent = (default_root() if root is None else root) / "guard"
    folder = parent / digest.hexdigest()[:16]
    if folder.is_dir():
        return folder
    progress("compiling the read-only checks of queries (once) …")
    parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="compiling-", dir=parent))
    try:
        _compile(jars, fresh)
        shutil.copy(FUNCTIONS, fresh)
        try:
            fresh.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _compile(jars: Path, into: Path) -> None:
    command = [str(find_java().executable), "-XX:TieredStopAtLevel=1", "-cp", f"{jars}/*", "scala.tools.nsc.Main"]
    try:
        done = subprocess.run(
            [*command, "-usejavacp", "-nowarn", "-d", str(into), *map(str, SOURCES)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClassesError(
            f"compiling the JVM classes that check a query takes more than {_PATIENCE:.0f} s. Retry"
        ) from None
    if done.returncode != 0:
        raise ClassesError(
            "the JVM classes that check a query do not compile with this pyspark. Install the version in "
            f"requirements.lock:\n{(done.stdout + done.stderr)[:2000]}"
        )
