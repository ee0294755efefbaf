"""kiln.deploy.cli.app: arguments, answers, errors in words and exit codes, as a shell sees them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pytest

from kiln.conf.process.errors import KilnError, PrerequisiteError
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import DEFAULT_FILE
from kiln.deploy.cli.app import run_command
from kiln.deploy.cli.run import command_line
from kiln.deploy.stack.java import JavaError
from kiln.schemas.captures.kiln_capture import open_capture, read_capture
from kit.kiln_table import append_rows
from kit.traffic_ledger import read_ledger

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("KILN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KILN_STATE", str(tmp_path / "state"))


def complaint(capsys: Capture, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command that must say nothing on stdout."""
    code = run_command(arguments)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kiln: ")
    assert "Traceback" not in said.err
    return code, said.err


# ---------------------------------------------------------------- the command line


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kiln.deploy.cli.app import run_command; code = run_command(['--help'])\n"
        "heavy = {'pyspark', 'duckdb', 'kafka', 'deltalake', 'pyarrow', 'pandas', 'pydantic_settings'}\n"
        "sys.exit(code or ', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("run", "job", "replay", "generate", "sql", "estimate", "status", "doctor", "config"):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize("command", ["run", "job", "replay", "generate", "sql", "estimate", "status", "doctor"])
def test_every_command_has_help(command: str, capsys: Capture) -> None:
    assert run_command([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "--config" in text
    assert "--state" in text or command == "generate"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["qsl"], "No such command 'qsl'"),
        (["trace"], "Missing argument 'ID'"),
        (["sql", "select 1", "--jsn"], "No such option: --jsn"),
        (["run", "--for", "soon"], '--for soon: expected a duration such as "100ms"'),
        (["run", "--for", "0s"], "must be greater than zero"),
        (["run", "--for", "1s", "--catch-up"], "--for and --catch-up cannot be combined"),
        (["run", "--bootstrap", ""], '--bootstrap "": expected a multiaddr'),
        (["run", "--bootstrap", "/ip4/192.0.2.1/tcp/1"], "has no peer id. Append /p2p/<peer id>"),
        (["job", "archiv"], "there is no query archiv; did you mean archive?"),
        (["replay", "no-such.rpc.gz"], "no-such.rpc.gz: no such capture file"),
        (["replay", "."], ". is a folder. Name the capture files in it: kiln replay ./*.rpc.gz"),
        (["replay", "/dev/null"], "/dev/null is a pipe or a device, but a capture is read twice"),
        (["replay", "x", "--speed", "0"], "--speed 0: must be greater than zero"),
        (["generate", "x.rpc.gz", "--start", "noon"], "--start noon: expected a time"),
        (["generate", "x.rpc.gz", "--rate", "0"], "rate"),
        (["status", "--config", "no-such.toml"], "no-such.toml: no such settings file"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], expected: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = complaint(capsys, *arguments)
    assert code == 2
    assert expected in said
    assert len(said.splitlines()) == 1


def test_wrong_settings_are_exit_code_2_with_every_fault(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[batch]\nwindwo = "1s"\ntick = 3\n', encoding="utf-8")
    monkeypatch.setenv("KILN_CONFIG", str(path))
    for arguments in (["status"], ["config", "check"], ["config", "show"], ["sql", "select 1"]):
        code, said = complaint(capsys, *arguments)
        assert code == 2
        assert f"{path}:2: batch.windwo: no such setting; did you mean batch.window?" in said
        assert f"{path}:3: batch.tick = 3" in said


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (KilnError("it failed"), 1, "kiln: it failed\n"),
        (PrerequisiteError("no broker\nstart one"), 3, "kiln: no broker\n      start one\n"),
        (JavaError("no java"), 3, "kiln: no java\n"),
        (PermissionError(13, "Permission denied", "/nowhere/x"), 1, "kiln: /nowhere/x: Permission denied\n"),
    ],
)
def test_what_ends_a_command(
    error: BaseException, code: int, said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(settings: Settings, patience: float = 3.0) -> None:
        raise error

    monkeypatch.setattr("kiln.deploy.ops.status.read_status", fail)
    assert run_command(["status"]) == code
    assert capsys.readouterr().err == said


def test_a_fault_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(settings: Settings, patience: float = 3.0) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kiln.deploy.ops.status.read_status", fail)
    with pytest.raises(ZeroDivisionError):
        run_command(["status"])


# ---------------------------------------------------------------- config


def test_config_show_prints_what_is_in_force(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KILN_KAFKA__SASL_PASSWORD", "hunter2")
    assert run_command(["config", "show", "--state", str(tmp_path / "other")]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text)["state"] == str(tmp_path / "other")
    assert "hunter2" not in text
    assert "# environment KILN_KAFKA__SASL_PASSWORD" in text


def test_config_show_diff_prints_what_is_changed_and_by_what(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KILN_STATE")
    path = tmp_path / "mine.toml"
    path.write_text('[batch]\nwindow = "2s"\ntick = "100ms"\n[spark]\nui = true\n', encoding="utf-8")
    monkeypatch.setenv("KILN_SPARK__SHUFFLE_PARTITIONS", "8")
    monkeypatch.setenv("KILN_KAFKA__SASL_PASSWORD", "hunter2")
    assert run_command(["config", "show", "--diff", "--config", str(path)]) == 0
    text = capsys.readouterr().out
    assert "hunter2" not in text
    said = {"window": "2s"}, {"shuffle_partitions": 8, "ui": True}, {"sasl_password": "**********"}
    assert tomllib.loads(text) == dict(zip(("batch", "spark", "kafka"), said, strict=True))
    assert f'window = "2s"  # {path}; default: "1s"\n' in text
    assert "shuffle_partitions = 8  # environment KILN_SPARK__SHUFFLE_PARTITIONS; default: 2\n" in text
    for name in ("KILN_SPARK__SHUFFLE_PARTITIONS", "KILN_KAFKA__SASL_PASSWORD"):
        monkeypatch.delenv(name)
    assert run_command(["config", "show", "--diff"]) == 0
    assert capsys.readouterr().out == "# all values are defaults\n"


@pytest.mark.parametrize("path", sorted(DEFAULT_FILE.parent.glob("*.toml")), ids=lambda path: path.name)
def test_each_file_of_settings_is_fine(capsys: Capture, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.delenv("KILN_STATE")
    assert run_command(["config", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: fine\n"
    assert run_command(["config", "show", "--diff", "--config", str(path)]) == 0
    changed = tomllib.loads(capsys.readouterr().out)
    told = tomllib.loads(path.read_text(encoding="utf-8"))
    assert changed == ({} if path == DEFAULT_FILE else told), "the file repeats a default"


def test_config_check(capsys: Capture, tmp_path: Path) -> None:
    assert run_command(["config", "check"]) == 0
    assert capsys.readouterr().out == f"{DEFAULT_FILE}: fine\n"
    path = tmp_path / "mine.toml"
    path.write_text("tpyo = 1\n", encoding="utf-8")
    assert complaint(capsys, "config", "check", str(path))[0] == 2


# ---------------------------------------------------------------- looking


def test_sql_prints_a_table_and_json(capsys: Capture, tmp_path: Path) -> None:
    append_rows(tmp_path / "state" / "lake" / "tips", pa.table({"stream": ["s1"], "batch_cid": [b"\x01"]}))
    assert run_command(["sql", "select * from tips"]) == 0
    assert "s1" in capsys.readouterr().out
    assert run_command(["sql", "--json", "select * from tips"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"stream": "s1", "batch_cid": "01"}]


def test_sql_of_a_table_that_is_not_there_is_exit_code_1(capsys: Capture) -> None:
    code, said = complaint(capsys, "sql", "select * from frames")
    assert code == 1
    assert "there is no table frames" in said


def test_sql_into_a_pipe_that_closes_early_is_no_error(tmp_path: Path) -> None:
    append_rows(tmp_path / "state" / "lake" / "tips", pa.table({"stream": ["x" * 100] * 20_000}))
    script = f"{sys.executable} -m kiln.deploy.cli sql --json 'select * from tips' | head -1; exit ${{PIPESTATUS[0]}}"
    root = Path(__file__).parents[3]
    done = subprocess.run(["bash", "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "[\n")


def test_status_without_anything(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("KILN_KAFKA__EMBEDDED_PORT", str(probe.getsockname()[1]))
        assert run_command(["status", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["broker"]["reachable"] is False
        assert run_command(["status"]) == 0
        assert "no tables in the lake yet" in capsys.readouterr().out


def test_doctor_exits_3_when_something_is_in_the_way(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert run_command(["doctor"]) == 3
    assert "problem" in capsys.readouterr().out
    assert run_command(["doctor", "--json"]) == 3
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["java"]["level"] == "fail"
    assert "JAVA_HOME" in checks["java"]["what_to_do"]


def test_the_sql_to_paste_names_the_state_folder_where_that_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KILN_STATE")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    program = str(tmp_path / ".venv" / "bin" / "kiln")
    assert command_line(program, Settings(state=tmp_path / "state")) == ".venv/bin/kiln sql"
    assert command_line(program, Settings(state=Path("/data/a b"))) == ".venv/bin/kiln sql --state '/data/a b'"


# ---------------------------------------------------------------- generate


def test_generated_traffic_is_a_capture_with_its_ledger_and_the_same_every_time(tmp_path: Path) -> None:
    one, two, ledger = tmp_path / "one.rpc.gz", tmp_path / "two.rpc.gz", tmp_path / "truth.jsonl"
    options = ["--for", "3s", "--rate", "50", "--seed", "7", "--network", "local-test"]
    assert run_command(["generate", str(one), *options, "--ledger", str(ledger)]) == 0
    assert run_command(["generate", str(two), *options]) == 0
    assert one.read_bytes() == two.read_bytes()
    with open_capture(one) as stream:
        records = list(read_capture(stream))
    assert len(records) > 100
    assert max(record.observed_at for record in records) - min(record.observed_at for record in records) < 4e9
    with ledger.open("rb") as lines:
        truth = read_ledger(lines)
    assert any(network == "local-test" for network, _ in truth.messages)
    assert run_command(["generate", str(two), *options, "--seed", "8"]) == 0
    assert one.read_bytes() != two.read_bytes()


# ---------------------------------------------------------------- the process


def run_in(shell: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which `$KILN` is the command."""
    kiln = f"{sys.executable} -m kiln.deploy.cli"
    return subprocess.run(
        ["bash", "-c", shell.replace("$KILN", kiln)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=60,
        check=False,
    )


FULL = "cannot write the output: No space left on device. Redirect it to another file"


@pytest.mark.parametrize(
    ("shell", "said"),
    [
        ("$KILN config show >/dev/full", FULL),
        ("$KILN sql --csv 'select * from range(10000)' >/dev/full", FULL),
        ("$KILN sql 'select 1' >/dev/full", FULL),
        ("$KILN config show >&-", "stdout is closed. Redirect it to a file, such as >/dev/null"),
        ("$KILN generate /dev/full --for 1s", "/dev/full: No space left on device"),
        ("$KILN generate ${KILN_STATE}.gz --for 1s --ledger /dev/full", "/dev/full: No space left on device"),
    ],
)
def test_output_that_cannot_be_written_is_a_sentence_and_exit_code_1(shell: str, said: str) -> None:
    done = run_in(shell)
    assert (done.returncode, done.stderr) == (1, f"kiln: {said}\n")


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_a_command_runs_without_stdin_and_stderr(closed: str) -> None:
    done = run_in(f"$KILN sql --csv 'select 1 as one' {closed}")
    assert (done.returncode, done.stdout) == (0, "one\n1\n")


def test_output_never_fails_because_of_a_character() -> None:
    done = run_in("$KILN sql \"select 'é→☃' as x\"", PYTHONIOENCODING="iso-8859-1")
    assert done.returncode == 0, done.stderr
    assert r"\xe9\u2192\u2603" in done.stdout  # é is a byte of this encoding


@pytest.fixture
def german(tmp_path: Path) -> dict[str, str]:
    """The environment of a locale with another encoding."""
    name = "de_DE.ISO-8859-1"
    command = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", str(tmp_path / name)]
    if shutil.which("localedef") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no localedef, or no source of the locale")
    return {"LOCPATH": str(tmp_path), "LC_ALL": name}


def test_paths_are_the_same_in_every_locale(tmp_path: Path, german: dict[str, str]) -> None:
    state = tmp_path / "Straße ☃"
    append_rows(state / "lake" / "tips", pa.table({"stream": ["s1"]}))
    query = f"$KILN sql --csv --state '{state}' 'select stream from tips'"
    for environment in ({"LC_ALL": "C"}, german, {"LC_ALL": "C.UTF-8"}):
        done = run_in(query, **environment)
        assert (done.stdout, done.stderr) == ("stream\ns1\n", "")


PREPARED = """
import os, signal, subprocess, sys
from kiln.deploy.cli.app import prepare_process
assert prepare_process() == ""
"""


def test_java_gets_utf8(german: dict[str, str]) -> None:
    script = shlex.quote(f"{PREPARED}subprocess.run(['env'], check=True)")
    for environment in ({"LC_ALL": "C"}, german):
        done = run_in(f"{sys.executable} -c {script}", **environment)
        assert "LC_ALL=C.UTF-8\n" in done.stdout, done.stderr
        assert "PYTHONIOENCODING" not in done.stdout


def test_a_closed_terminal_ends_a_command_as_sigterm_does() -> None:
    """Its later output is discarded."""
    script = f"""import signal
{PREPARED}
def end(number, frame):
    print("still here", flush=True)
    os._exit(7)
signal.signal(signal.SIGTERM, end)
os.write(int(sys.argv[1]), b"ready")
while True:
    signal.pause()
"""
    terminal, end_of_kiln = os.openpty()
    ready, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", script, str(write)],
        cwd=Path(__file__).parents[3],
        stdout=end_of_kiln,
        stderr=end_of_kiln,
        pass_fds=(write,),
    ) as process:
        os.close(end_of_kiln)
        assert os.read(ready, 5) == b"ready"
        os.close(terminal)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=60) == 7
    os.close(ready)
    os.close(write)


def test_nohup_keeps_a_command_running() -> None:
    script = shlex.quote(f"{PREPARED}signal.raise_signal(signal.SIGHUP); print('alive')")
    done = run_in(f"trap '' HUP; {sys.executable} -c {script}")
    assert done.stdout == "alive\n"


def test_a_store_on_loopback_is_reached_without_the_proxy(tmp_path: Path) -> None:
    """The other addresses go through it."""
    store, proxy = Recorder(), Recorder()
    with store, proxy:
        for endpoint in (store.address, "http://store.invalid"):
            done = run_in(
                "$KILN sql 'select * from tips'",
                http_proxy=proxy.address,
                NO_PROXY="example.org",
                KILN_LAKE__URI="s3://bucket/lake",
                KILN_LAKE__STORAGE_OPTIONS=json.dumps(
                    {"endpoint_url": endpoint, "region": "us-east-1", "access_key_id": "a", "secret_access_key": "b"}
                ),
            )
            assert done.returncode == 1
            assert "Traceback" not in done.stderr
    assert store.requests
    assert all(request.startswith("GET /bucket?") for request in store.requests)
    assert proxy.requests
    assert all(request.startswith("GET http://store.invalid/bucket?") for request in proxy.requests)


class Recorder:
    """An HTTP server that refuses every request and keeps its first line."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        requests = self.requests

        class Refuse(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.requestline)
                self.send_error(403)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> None:
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
