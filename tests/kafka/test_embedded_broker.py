"""The embedded broker of a run: started again when it dies, and ended by the Kiln that owns it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from conftest import free_ports
from kafka import KafkaProducer
from kiln.conf.settings.model import Kafka, Settings
from kiln.deploy.cli.app import run_command
from kiln.deploy.stack.embedded_broker import (
    BrokerError,
    EmbeddedBroker,
    await_broker,
    find_running_broker,
    read_owner,
    stop_running,
)
from kiln.deploy.stack.kafka_broker import launch_broker
from kit.awaiting import wait_until
from kit.broker_access import client, security
from kit.kiln_process import Kiln, end

pytestmark = pytest.mark.kafka


def test_a_broker_that_was_found_is_started_again_on_its_data(
    tmp_path: Path, new_broker: Callable[..., EmbeddedBroker]
) -> None:
    found = new_broker(tmp_path)
    settings = Settings(
        state=tmp_path, kafka=Kafka(embedded_port=found.port, embedded_controller_port=found.controller_port)
    )
    found.start()
    with launch_broker(settings, lambda words: None) as launched:
        servers = launched.await_ready()
        producer = KafkaProducer(**client(servers), acks="all")
        first = producer.send("kiln.frames", value=b"before", partition=0).get(timeout=60)
        for _ in range(2):
            assert not launched.error
            killed = _pid(tmp_path)
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: launched.error == "the broker has ended, and is being restarted", "its end is told")
            wait_until(partial(_another, tmp_path, killed), "another broker")
            wait_until(lambda: not launched.error, lambda: f"no error, but {launched.error}")
        await_broker(servers, security(servers))
        second = producer.send("kiln.frames", value=b"after", partition=0).get(timeout=60)
        assert second.offset == first.offset + 1
        producer.close()
    assert find_running_broker(tmp_path) is None


# ---------------------------------------------------------------- who ends it


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two captures, `long.rpc.gz` of ten minutes and `short.rpc.gz`."""
    folder = tmp_path_factory.mktemp("captures")
    for name, length, rate in (("long", "600s", "1"), ("short", "1s", "5")):
        capture = str(folder / f"{name}.rpc.gz")
        assert run_command(("generate", capture, "--for", length, "--rate", rate, "--network", "mine")) == 0
    return folder


@pytest.fixture
def kiln(tmp_path: Path, captures: Path, broker_classpath: list[Path]) -> Iterator[Kiln]:
    """A state folder of its own, which the locale cannot write, and links to the captures beside it. No broker outlives
    the test."""
    kiln = Kiln(tmp_path / "Straße ☃", free_ports(2), {"LC_ALL": "C"})
    for capture in captures.iterdir():
        (tmp_path / capture.name).symlink_to(capture)
    yield kiln
    stop_running(kiln.state)


def start_replay(kiln: Kiln) -> subprocess.Popen[str]:
    """A Kiln with a broker and without Spark, which takes ten minutes; returned when its broker answers."""
    process = kiln.start("replay", str(kiln.state.parent / "long.rpc.gz"), "--speed", "1")
    wait_until(lambda: read_owner(kiln.state) == process.pid, "the Kiln owns its broker")
    wait_until(lambda: find_running_broker(kiln.state) is not None, "the broker runs")
    await_broker(kiln.servers, _settings(kiln).broker.security_options())
    return process


def replay_shortly(kiln: Kiln) -> None:
    kiln.run("replay", str(kiln.state.parent / "short.rpc.gz"))


def test_the_broker_ends_with_its_kiln_when_the_terminal_is_closed(kiln: Kiln) -> None:
    ended = start_replay(kiln)
    ended.send_signal(signal.SIGHUP)
    assert ended.wait(timeout=60) == -signal.SIGTERM
    wait_until(lambda: find_running_broker(kiln.state) is None, "the broker has ended")


def test_a_broker_that_is_ending_is_awaited(kiln: Kiln) -> None:
    killed = start_replay(kiln)
    killed.kill()
    killed.wait()
    replay_shortly(kiln)
    assert find_running_broker(kiln.state) is None


def test_a_kiln_beside_the_owner_leaves_the_broker_running(kiln: Kiln) -> None:
    first = start_replay(kiln)
    broker = _pid(kiln.state)
    replay_shortly(kiln)
    assert (read_owner(kiln.state), _pid(kiln.state)) == (first.pid, broker)
    first.send_signal(signal.SIGINT)
    first.wait(timeout=60)
    assert find_running_broker(kiln.state) is None


def test_a_kiln_that_uses_a_broker_starts_it_again_once_the_owner_is_killed(kiln: Kiln) -> None:
    first = start_replay(kiln)
    broker = _pid(kiln.state)
    with launch_broker(_settings(kiln), lambda words: None) as launched:
        launched.await_ready()
        assert read_owner(kiln.state) == first.pid
        first.kill()
        first.wait()
        wait_until(lambda: read_owner(kiln.state) == os.getpid(), "another owner")
        wait_until(partial(_another, kiln.state, broker), "another broker")
    assert (read_owner(kiln.state), find_running_broker(kiln.state)) == (None, None)


def test_a_broker_at_another_address_is_named_and_left(kiln: Kiln) -> None:
    first = start_replay(kiln)
    elsewhere = Settings(state=kiln.state, kafka=Kafka(embedded_port=free_ports(1)[0]))
    with (
        pytest.raises(BrokerError, match=f"runs at {kiln.servers}, but the settings have"),
        launch_broker(elsewhere, print),
    ):
        pass
    assert find_running_broker(kiln.state) == kiln.servers
    end(first)


Capture = pytest.CaptureFixture[str]


def test_kiln_broker_stop(kiln: Kiln, capsys: Capture) -> None:
    stop = ("broker", "stop", "--state", str(kiln.state))
    assert run_command(stop) == 0
    assert capsys.readouterr().out == f"no embedded broker runs in {kiln.state}\n"
    first = start_replay(kiln)
    assert run_command(stop) == 1
    assert f"belongs to a running Kiln (process {first.pid})" in capsys.readouterr().err
    await_broker(kiln.servers, _settings(kiln).broker.security_options(), timeout=60)
    end(first)


def test_kiln_broker_stop_ends_a_broker_without_a_kiln(
    tmp_path: Path, new_broker: Callable[..., EmbeddedBroker], capsys: Capture
) -> None:
    """On systems without PR_SET_PDEATHSIG, a broker outlives its Kiln."""
    address = new_broker(tmp_path).start()
    assert run_command(("broker", "stop", "--state", str(tmp_path))) == 0
    assert capsys.readouterr().out == f"stopped the embedded broker of {tmp_path}, which was at {address}\n"
    assert find_running_broker(tmp_path) is None


def test_a_broker_stopped_by_force_is_started_again_by_its_kiln(kiln: Kiln, capsys: Capture) -> None:
    with launch_broker(_settings(kiln), lambda words: None) as launched:
        launched.await_ready()
        broker = _pid(kiln.state)
        assert run_command(("broker", "stop", "--state", str(kiln.state), "--force")) == 0
        assert f"the running Kiln (process {os.getpid()}) restarts the broker" in capsys.readouterr().out
        wait_until(partial(_another, kiln.state, broker), "another broker")


def test_no_broker_is_started_for_files_that_cannot_be_replayed(kiln: Kiln, tmp_path: Path) -> None:
    broken = tmp_path / "broken.rpc.gz"
    broken.write_bytes((tmp_path / "short.rpc.gz").read_bytes()[:-20])
    for file, expected in ((broken, "the compressed file is cut off"), (tmp_path, "is a folder")):
        done = subprocess.run(
            kiln.command("replay", str(tmp_path / "short.rpc.gz"), str(file)),
            env=kiln.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        assert str(file) in done.stderr
        assert expected in done.stderr
    assert not (kiln.state / "broker").exists()


def _settings(kiln: Kiln) -> Settings:
    ports = [int(kiln.environment[f"KILN_KAFKA__EMBEDDED_{name}"]) for name in ("PORT", "CONTROLLER_PORT")]
    return Settings(state=kiln.state, kafka=Kafka(embedded_port=ports[0], embedded_controller_port=ports[1]))


def _pid(state: Path) -> int:
    told = state / "broker" / "address.json"
    return int(json.loads(told.read_bytes())["pid"]) if find_running_broker(state) and told.exists() else 0


def _another(state: Path, killed: int) -> bool:
    return _pid(state) not in (0, killed)
