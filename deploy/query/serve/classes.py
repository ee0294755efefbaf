"""The classes of the `*.scala` here, compiled once by the Scala compiler that ships in pyspark: no JDK, no jar of ours.

Layout: a folder for each state of the source and of pyspark, beside the jars: `.jars/serve/<digest>/kiln/*.class`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from kiln.conf.process.errors import PrerequisiteError
from kiln.deploy.stack.jars import default_root
from kiln.deploy.stack.java import find_java

SOURCES = sorted(Path(__file__).parent.glob("*.scala"))
FUNCTIONS = Path(__file__).with_name("functions.txt")
"""is in the folder of the classes too"""
_PATIENCE = 300.0  # s


class ClassesError(PrerequisiteError):
    """The classes cannot be made; the message has what the compiler said."""


def compile_classes(progress: Callable[[str], None], root: Path | None = None) -> Path:
    """The folder of the classes, which is made where it is missing. `root`: the folder of the jars.

    ClassesError, JavaError.
    """
    jars = find_spark_home() / "jars"
    texts = b"".join(path.read_bytes() for path in (*SOURCES, FUNCTIONS))
    digest = hashlib.sha256(texts + str(sorted(jar.name for jar in jars.glob("spark-sql_*"))).encode())
    place = (default_root() if root is None else root) / "serve"
    folder = place / digest.hexdigest()[:16]
    if folder.is_dir():
        return folder
    progress("compiling what keeps the server read only, once …")
    place.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="compiling-", dir=place))
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
        raise ClassesError(f"the check of queries was not compiled within {_PATIENCE:.0f} s: try again") from None
    if done.returncode != 0:
        raise ClassesError(
            f"the check of queries does not compile against this pyspark:\n{(done.stdout + done.stderr)[:2000]}"
        )


def find_spark_home() -> Path:
    """The folder of pyspark, which is a whole Spark. ClassesError."""
    spec = find_spec("pyspark")
    for folder in list(spec.submodule_search_locations or []) if spec else []:
        if Path(folder, "jars").is_dir():
            return Path(folder)
    raise ClassesError("pyspark, whose Scala compiles them, is not installed here: make setup")
