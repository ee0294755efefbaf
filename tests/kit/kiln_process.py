"""The `kiln` command as a user runs it: in its own process, with its own state folder and ports."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from unittest import mock

from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import load_settings
from kiln.deploy.query.answer import write_json
from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.lake import Lake
from kit import kept_jvm
from kit.log_model import UNFOUNDED_REPEATS, read_records

_RARE: Final = {"KILN_JOBS__BATCH__TRIGGER": "2s"}
"""settings of kept commands, whose duration does not matter: fewer micro-batches while windows are open"""


class Kiln:
    """A Kiln with one state folder. `environment` overrides settings (KILN_…). Its commands run in `folder`."""

    def __init__(
        self,
        state: Path,
        ports: Sequence[int],
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.state = state
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KILN_")},
            "KILN_STATE": str(state),
            "KILN_KAFKA__EMBEDDED_PORT": str(ports[0]),
            "KILN_KAFKA__EMBEDDED_CONTROLLER_PORT": str(ports[1]),
            "KILN_MONITOR__LISTEN": "",
            "KILN_DURABILITY": "process",  # no test loses power, and syncing files takes time
            **(environment or {}),
        }
        self.jvm: kept_jvm.KeptJvm | None = None
        """the process of `run_kept`, if it is not the shared one"""
        self.servers = (environment or {}).get("KILN_KAFKA__BOOTSTRAP", f"127.0.0.1:{ports[0]}")

    @property
    def lake(self) -> Path:
        return self.state / "lake"

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "kiln.deploy.cli", *arguments]

    def run(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command, and assert that it succeeds. The error shows the log."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, (
            f"kiln {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.log()}"
        )
        return done

    def run_kept(self, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a command as `run` does, but in the process of `kit.kept_jvm`, which keeps its JVM.

        Use this for tests of tables, not of a command's process. With an object store, set `jvm`, because the shared
        JVM lacks the store's jars.
        """
        done = self.attempt_kept(*arguments, timeout=timeout)
        assert done.returncode == 0, (
            f"kiln {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.log()}"
        )
        return done

    def attempt_kept(self, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a command as `run_kept` does. The command may fail."""
        assert self.folder is None
        jvm = self.jvm or kept_jvm.shared()
        return subprocess.CompletedProcess(arguments, *jvm.run(arguments, _RARE | self.environment, timeout))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command in its own session, so that `kill_all` also kills all its children."""
        self.state.mkdir(parents=True, exist_ok=True)
        with (self.state / "started.out").open("ab") as out:
            return subprocess.Popen(
                self.command(*arguments),
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def sql(self, query: str) -> list[dict[str, object]]:
        """Return the rows that `kiln sql --json` prints, without starting a process, which takes a second or two."""
        printed = io.StringIO()
        write_json(query_lake(Lake.from_location(self.settings().lake_root), query), printed)
        answer = json.loads(printed.getvalue())
        assert isinstance(answer, list)
        return answer

    def check_updates_are_new_once(self) -> None:
        """Assert that each announced tip has an update, and that no update repeats another unless the author announced
        another tip in between (decision 5)."""
        announced = "select network, stream, tip from messages where type = 'UPDATE'"
        assert self.sql(f"{announced} except select network, stream, tip from updates") == []
        assert self.sql(f"{UNFOUNDED_REPEATS} LIMIT 3") == []

    def check_tables_hold_each_thing_once(self) -> None:
        """Assert that each table has rows, and no two rows with the same key. Control tables may be empty."""
        for table, key in {
            "frames": "connection, direction, sequence",
            "messages": "network, message_id",
            "updates": "network, origin, message_id",
            "batch_tips": "batch_cid, stream, tip",
            "tips": "network, stream, tip",
            "copies": "kafka_partition, kafka_offset, message_index",
            "subscriptions": "kafka_partition, kafka_offset, entry_index",
            "controls": "kafka_partition, kafka_offset, entry_index",
            "quarantine": "kafka_partition, kafka_offset, message_index, stage",
        }.items():
            twice = self.sql(f"select {key}, count(*) as n from {table} group by all having n > 1 limit 3")
            assert not twice, f"{table}: {twice}"
            assert self.count(table) > 0 or table in ("subscriptions", "controls")  # traffic may have none

    def check_no_frame_or_tip_is_lost(self, address: str, prefix: str) -> None:
        """Assert that each frame in Kafka is in the tables, and that each tip with a separator is in a batch."""
        records = read_records(address, f"{prefix}frames").values()
        frames = {value for part in records for _, _, value in part}
        assert self.count("frames") == len(frames) - self.count("quarantine", "stage = 'frame'")
        missed = (
            "select stream, tip from updates where separator_key is not null except select stream, tip from batch_tips"
        )
        assert self.sql(missed) == []

    def settings(self) -> Settings:
        """Load the settings that this Kiln's commands use."""
        with mock.patch.dict(os.environ, self.environment, clear=True):
            return load_settings()

    def count(self, table: str, where: str = "true") -> int:
        number = self.sql(f"select count(*) as n from {table} where {where}")[0]["n"]
        assert isinstance(number, int)
        return number

    def log(self) -> str:
        """Return the last lines of Spark's log, and of the output of commands that `start` ran."""
        files = [self.state / "logs" / "spark.log", self.state / "started.out"]
        return "\n".join(
            line for file in files if file.exists() for line in file.read_text(errors="replace").splitlines()[-60:]
        )


def end(process: subprocess.Popen[str]) -> None:
    """Stop a started Kiln by SIGTERM, so that it also stops its broker, which `kill_all` would not reach."""
    process.terminate()
    try:
        process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        kill_all(process)
        raise


def kill_all(process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to a started Kiln and to its children, the JVM and the Python workers."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
