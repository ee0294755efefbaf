"""The wheel without extras in an empty environment: what it can do, and what it says about what it cannot.

One environment serves all tests; uv fills it from its cache. With `-s`, the tests print its size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kiln.conf.process.extras import list_requirements
from kiln.deploy.query.sample import copy_sample
from kit.built_wheel import build_wheel
from kit.locked_packages import list_dependencies, select_locked

pytestmark = pytest.mark.slow

MOST_BYTES = 300_000_000
ABSENT = ("confluent_kafka", "great_expectations", "kafka", "libp2p", "numpy", "pandas", "pyarrow", "pyspark", "scipy")


COMMANDS = """
import json, os, sys, tempfile
from kiln.deploy.cli.app import run_command

answers, done = os.fdopen(os.dup(1), "w"), []
for arguments in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        code = run_command(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        for file in (out, err):
            file.seek(0)
        done.append((code, out.read().decode(), err.read().decode()))
json.dump(done, answers)
"""
"""Program that runs `kiln` commands in turn, because the imports take longer than most commands."""


class BaseInstall:
    """An environment with the wheel and the packages that it needs without extras."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.wheel = wheel
        self._environment = folder / "environment"
        self._place = folder / "place"
        self._place.mkdir()
        self.state = self._place / "state"
        self._uv("venv", "--quiet", "--python", sys.executable, str(self._environment))
        lock = folder / "base.lock"
        lock.write_text(select_locked(list_dependencies(list_requirements())), encoding="utf-8")
        into = ("pip", "install", "--quiet", "--python", str(self.python), "--no-deps")
        began = time.monotonic()
        self._uv(*into, "--require-hashes", "-r", str(lock))
        self._uv(*into, str(wheel))
        self.seconds = time.monotonic() - began

    @property
    def python(self) -> Path:
        return self._environment / "bin" / "python"

    @property
    def size(self) -> int:
        """Bytes of the environment, without links."""
        files = (path for path in self._environment.rglob("*") if path.is_file() and not path.is_symlink())
        return sum(path.stat().st_size for path in files)

    def check(self) -> None:
        """Fail if a package lacks a requirement."""
        self._uv("pip", "check", "--python", str(self.python))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        variables = {"HOME": str(self._place), "PATH": os.environ["PATH"], "KILN_STATE": str(self.state)}
        return subprocess.run(
            command, cwd=self._place, env=variables, capture_output=True, text=True, check=False, timeout=120
        )

    def kiln(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self._environment / "bin" / "kiln"), *arguments)

    def commands(self, *commands: Sequence[str]) -> list[tuple[int, str, str]]:
        """Run commands in one process, and return exit code, stdout and stderr of each."""
        done = self.run(str(self.python), "-c", COMMANDS, json.dumps(commands))
        assert done.returncode == 0, done.stderr
        return [(code, out, error) for code, out, error in json.loads(done.stdout)]

    def answers(self, *commands: Sequence[str]) -> list[str]:
        """Run commands that have to succeed, and return their outputs."""
        done = self.commands(*commands)
        assert {(code, error) for code, _, error in done} == {(0, "")}, done
        return [out for _, out, _ in done]

    @staticmethod
    def _uv(*arguments: str) -> None:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("uv")), *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseInstall:
    folder = tmp_path_factory.mktemp("base")
    made = BaseInstall(folder, build_wheel(folder / "source"))
    made.state.mkdir(mode=0o700)
    copy_sample(made.state)
    return made


def test_the_base_is_small_and_complete(base: BaseInstall) -> None:
    print(f"{base.size / 1e6:.0f} MB, {base.seconds:.1f} s")
    base.check()
    assert base.size <= MOST_BYTES
    found = f"import importlib.util as u; print([name for name in {ABSENT!r} if u.find_spec(name)])"
    assert base.run(str(base.python), "-c", found).stdout == "[]\n"


def test_it_answers_queries(base: BaseInstall) -> None:
    done = base.kiln("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert "kiln 0." in done.stdout
    printed = base.answers(
        ["--help"],
        ["sql", "\\d"],
        ["estimate", "--json"],
        ["status", "--json"],
        ["sql", "--json", "SELECT count(*) AS n FROM messages"],
        ["sql", "--json", "SELECT INTERVAL '1 month 2 days 250 ms' AS d, NULL::INTERVAL AS e"],
        ["sql", "--json", "SELECT stream FROM updates LIMIT 1"],
        ["sql", "--sample", "--json", "SELECT count(*) AS n FROM messages"],
    )
    assert "quarantine" in printed[0]
    assert "messages" in printed[1]
    estimate, status, (messages,), (intervals,), (update,), (of_sample,) = map(json.loads, printed[2:])
    assert estimate["totals"]
    assert {each["name"] for each in status["tables"]} >= {"messages", "batches"}
    assert messages["n"] > 0
    assert intervals == {"d": "PT2764800.25S", "e": None}
    assert of_sample["n"] > 0
    done = base.kiln("trace", "--json", update["stream"])
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)


def test_a_program_queries_the_sample(base: BaseInstall) -> None:
    program = "import kiln; print(kiln.sample().sql('SELECT count(*) FROM batches').rows()[0][0] > 0)"
    assert base.run(str(base.python), "-c", program).stdout == "True\n"


def test_it_makes_captures_and_reads_settings(base: BaseInstall) -> None:
    capture = base.state.parent / "traffic.rpc.gz"
    (made, *_), *others = base.commands(
        ["generate", str(capture), "--for", "2s"], ["config", "show"], ["config", "check"], ["interests"]
    )
    assert made == 0
    assert capture.stat().st_size > 0
    assert {(code, error) for code, _, error in others} == {(0, "")}
    shown, checked, interests = (out for _, out, _ in others)
    assert "[kafka]" in shown
    assert "fine" in checked
    assert interests == "*\n"


def test_the_doctor_names_what_is_not_installed(base: BaseInstall) -> None:
    done = base.kiln("doctor", "--json")
    checks = json.loads(done.stdout)
    assert done.returncode == 0, [check for check in checks if check["level"] == "fail"]
    missing = {check["group"]: check["what_to_do"] for check in checks if check["name"].startswith("extra ")}
    extras = {
        "maintain a lake": "lake",
        "capture from a network": "bridge",
        "run the queries": "spark",
        "check quality": "quality",
        "run the demo network": "demo",
    }
    assert missing == {group: f"pip install '{base.wheel}[{extra}]'" for group, extra in extras.items()}
    assert {check["group"] for check in checks if check["level"] == "ok"} == {"query a lake"}


NEEDED = {
    "run": "bridge,spark",
    "bridge": "bridge",
    "job archive": "bridge,spark",
    "sql --spark SELECT": "spark",
    "quality": "quality",
    "maintain": "lake",
    "recover": "spark",
    "backfill list": "lake",
    "backfill run --from 2026-01-01 --to 2026-01-02 --run r": "spark",
    "quarantine list": "lake",
    "quarantine replay --reason x": "spark",
}
"""Extras that commands need."""


def test_a_command_of_an_extra_says_what_to_install(base: BaseInstall) -> None:
    done = base.commands(*(command.split() for command in NEEDED))
    for extras, (code, out, error) in zip(NEEDED.values(), done, strict=True):
        assert (code, out) == (3, "")
        (line,) = error.splitlines()
        assert line.endswith(f": pip install '{base.wheel}[{extras}]'")
