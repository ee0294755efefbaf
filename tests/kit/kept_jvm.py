"""A process that runs several `kiln` commands in turn and keeps its JVM, because a start of Spark takes longer than
most commands.

The process of the tests starts this process with the first command, and stops it at its own end.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Final, Self

_TESTS: Final = Path(__file__).resolve().parents[1]
_ENDS: Final = 60.0
"""s to wait for the end of the process"""


class KeptJvm:
    """The process that runs the commands. It ends with the process of the tests, or with the context."""

    def __init__(self, store: Mapping[str, str] | None = None) -> None:
        """Start the process.

        Args:
            store: Settings and credentials of an object store that commands use.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="kiln-kept-jvm-")
        path = os.pathsep.join(map(str, (_TESTS.parent, _TESTS)))  # as workers may want modules of the tests
        with (Path(self._folder.name) / "out").open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                env={name: value for name, value in os.environ.items() if not name.startswith("KILN_")}
                | {"PYTHONPATH": path, "KILN_STATE": self._folder.name, **(store or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                start_new_session=True,
            )
        atexit.register(self.end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def logs(self) -> Path:
        """The folder of the JVM's logs."""
        return Path(self._folder.name) / "logs"

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], timeout: float) -> tuple[int, str, str]:
        """Run a command, and return its exit status, stdout and stderr."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        json.dump({"arguments": arguments, "environment": environment}, self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        timer = Timer(timeout, self._process.kill)
        timer.start()
        answer = self._process.stdout.readline()
        timer.cancel()
        if not answer:
            shared.cache_clear()  # the next command has a new process
            raise AssertionError(f"no answer in {timeout:.0f} s: {(Path(self._folder.name) / 'out').read_text()}")
        code, out, err = json.loads(answer)
        return code, out, err

    def end(self) -> None:
        atexit.unregister(self.end)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._folder.cleanup()


@cache
def shared() -> KeptJvm:
    """Return the process that all tests share."""
    return KeptJvm()


def _serve() -> None:
    """Run the commands from stdin, and write the results to stdout."""
    from kiln.conf.settings.reading import load_settings
    from kiln.deploy.stack.spark import spark_session

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = load_settings()
    with spark_session(settings):  # a JVM keeps the settings of its first session
        pass
    environment = dict(os.environ)
    for line in sys.stdin:
        asked = json.loads(line)
        os.environ.clear()
        os.environ.update(asked["environment"])
        json.dump(_run(asked["arguments"], settings.logs / "spark.log"), answers)
        answers.write("\n")
        answers.flush()
        os.environ.clear()
        os.environ.update(environment)


def _run(arguments: list[str], log: Path) -> tuple[int, str, str]:
    from kiln.conf.settings.reading import load_settings
    from kiln.deploy.cli.app import run_command

    known = log.stat().st_size if log.exists() else 0
    originals = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            code = run_command(arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, original in zip((1, 2), originals, strict=True):
                os.dup2(original, number)
                os.close(original)
        for file in (out, err):
            file.seek(0)
        said = (code, out.read().decode(), err.read().decode())
    with log.open("rb") as whole:  # the JVM has one file for all its sessions
        whole.seek(known)
        ours = load_settings().logs
        ours.mkdir(parents=True, exist_ok=True)
        with (ours / log.name).open("ab") as copy:
            copy.write(whole.read())
    return said


if __name__ == "__main__":
    _serve()
