"""A Spark standalone cluster on loopback, to which tests submit the jobs of a release (`make dist`) as a user does."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pyspark

from conftest import free_ports
from kiln.deploy.stack.jars import IVY_S3, ensure_jars, list_jars, s3_root
from kiln.deploy.stack.java import find_java
from kiln.pipelines.runtime.session import LOCAL_FILES
from kit.awaiting import wait_until

SPARK_HOME = Path(pyspark.__file__).parent
WORKERS = 2


class _Application(msgspec.Struct):
    id: str
    name: str


class _Told(msgspec.Struct):
    """Fields of the page /json/ of a Spark master."""

    aliveworkers: int
    activeapps: list[_Application]


class SparkCluster:
    """A master and two workers, until `stop()`."""

    def __init__(self, folder: Path, credentials: Mapping[str, str] | None = None) -> None:
        """Create the cluster, without starting it.

        Args:
            folder: Folder of the cluster.
            credentials: Environment variables with the credentials of an object store that has tables and checkpoints.
                If `None`, these are in a folder that the machines share.
        """
        self._folder = folder
        self._stored = credentials is not None
        self._port, self._page, *self._pages = free_ports(2 + WORKERS)
        self._started: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("KILN_", "SPARK_", "PYSPARK_"))
            },
            "JAVA_HOME": str(find_java().executable.parents[1]),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1",
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
            **(credentials or {}),
        }

    @property
    def master(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def start(self) -> None:
        at = ("--host", "127.0.0.1")
        master = "org.apache.spark.deploy.master.Master"
        self._daemon("master", master, *at, "--port", str(self._port), "--webui-port", str(self._page))
        wait_until(lambda: self._told() is not None, "a master", 120)
        for number, page in enumerate(self._pages):
            place = ("--cores", "8", "--memory", "8g", "--work-dir", str(self._folder / f"work-{number}"))
            worker = "org.apache.spark.deploy.worker.Worker"
            self._daemon(f"worker-{number}", worker, *at, "--webui-port", str(page), *place, self.master)
        wait_until(lambda: (told := self._told()) is not None and told.aliveworkers == WORKERS, "two workers", 120)

    def unpack(self, dist: Path) -> None:
        """Unpack the Python environment of a release in the drivers' folder, under the name that executors use."""
        (self._folder / "environment").mkdir()
        command = ["tar", "xzf", str(dist / "environment.tar.gz"), "-C", str(self._folder / "environment")]
        subprocess.run(command, check=True)

    def submit(self, dist: Path, job: str, cores: int, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        """Submit a job of a release. The driver has its own session, so that `kill` ends its JVM and Python."""
        jars = sorted((dist / "jars").iterdir())
        files: list[str] = []
        if self._stored:
            jars += list_jars("spark", ensure_jars(s3_root(), ivy_xml=IVY_S3), IVY_S3)
        else:
            (jar,) = (jar for jar in jars if jar.name.startswith("hadoop-bare-naked-local-fs"))
            files += ["--driver-class-path", str(jar), "--conf", f"spark.executor.extraClassPath={jar}"]
            files += [part for key, value in LOCAL_FILES.items() for part in ("--conf", f"{key}={value}")]
        command = [
            str(SPARK_HOME / "bin" / "spark-submit"),
            *("--master", self.master, "--driver-memory", "512m", "--executor-memory", "640m"),
            *("--executor-cores", "1", "--total-executor-cores", str(cores)),
            *("--jars", ",".join(map(str, jars)), "--archives", f"{dist / 'environment.tar.gz'}#environment"),
            *files,
            *("--conf", "spark.pyspark.python=./environment/bin/python"),
            *("--conf", "spark.pyspark.driver.python=./environment/bin/python"),
            *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"),
            *("--conf", "spark.executor.extraJavaOptions=-XX:TieredStopAtLevel=1"),
            str(dist / "jobs" / f"{job}.py"),
        ]
        with (self._folder / f"{job}.out").open("ab") as out:
            self._started.append(
                subprocess.Popen(
                    command,
                    cwd=self._folder,
                    env={**self._environment, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return self._started[-1]

    def said(self, job: str) -> str:
        """Return the output of a job's drivers so far."""
        path = self._folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def executors(self, job: str) -> list[int]:
        """Return the process ids of a job's executors."""
        told = self._told()
        ids = {each.id for each in told.activeapps if each.name == f"kiln-{job}"} if told else set()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has ended
                continue
            if "--app-id" in words and words[words.index("--app-id") + 1] in ids:
                found.append(int(process.name))
        return found

    def stop(self) -> None:
        """Stop the jobs, then the workers and the master."""
        for process in reversed(self._started):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    kill(process)

    def _daemon(self, name: str, kind: str, *arguments: str) -> None:
        with (self._folder / f"{name}.out").open("ab") as out:
            self._started.append(
                subprocess.Popen(
                    [str(SPARK_HOME / "bin" / "spark-class"), kind, *arguments],
                    cwd=self._folder,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _told(self) -> _Told | None:
        """Read the master's state, or return `None` if the master does not answer yet."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._page}/json/", timeout=60) as answer:
                return msgspec.json.decode(answer.read(), type=_Told)
        except OSError:
            return None


def kill(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a job's driver, both JVM and Python."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
