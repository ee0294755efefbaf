"""Bridge and jobs out of their images, in a pod without any network but loopback: on the broker that the jobs embed.

`make images` builds the images, and KILN_TEST_IMAGES=1 has this test run them, with podman and runc.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any  # what a command prints as JSON

import pytest

from kit.awaiting import wait_until

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.timeout(900),
    pytest.mark.skipif("KILN_TEST_IMAGES" not in os.environ, reason="KILN_TEST_IMAGES is not set"),
]

_CONFINED = (
    "--read-only",
    "--tmpfs",
    "/tmp:rw,exec,size=2g",
    "--cap-drop",
    "all",
    "--security-opt",
    "no-new-privileges",
)
_OF_THE_BROKER = {
    "KILN_KAFKA__BOOTSTRAP": "127.0.0.1:29092",
    "KILN_KAFKA__SECURITY_PROTOCOL": "SASL_PLAINTEXT",
    "KILN_KAFKA__SASL_MECHANISM": "PLAIN",
    "KILN_KAFKA__SASL_USERNAME": "kiln",
    "KILN_KAFKA__SASL_PASSWORD_FILE": "/jobs/state/broker/password",
}
_GET = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)"


@pytest.fixture(scope="module", autouse=True)
def _limits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Podman's default limits are above those that a root without the right to raise limits may give."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    conf = tmp_path_factory.mktemp("podman") / "containers.conf"
    conf.write_text(f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc=4096:4096"]\n')
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CONTAINERS_CONF", str(conf))
        yield


def podman(*arguments: str, check: bool = True) -> str:
    """What podman prints."""
    done = subprocess.run(["podman", "--runtime", "runc", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"podman {arguments}: {done.stdout}{done.stderr}"
    return done.stdout


class Pod:
    """Containers that share loopback. All that is made goes with the pod."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._volumes: set[str] = set()
        podman("pod", "create", "--name", name, "--network", "none")

    def start(self, part: str, image: str, *words: str, volumes: dict[str, str], **environment: str) -> None:
        """Starts a container named `part`; `volumes`: place by name."""
        options = [option for name, value in environment.items() for option in ("--env", f"{name}={value}")]
        for volume, place in volumes.items():
            self._volumes.add(f"{self.name}-{volume}")
            options += ["--volume", f"{self.name}-{volume}:{place}"]
        podman("run", "--detach", "--pod", self.name, "--name", self.of(part), *_CONFINED, *options, image, *words)

    def of(self, part: str) -> str:
        return f"{self.name}-{part}"

    def run(self, part: str, *words: str) -> str:
        """What a command in a container prints."""
        return podman("exec", self.of(part), *words)

    def await_ready(self, port: int) -> None:
        """Until the monitor at a port says that its part is ready. The container `jobs` asks."""
        command = ["podman", "--runtime", "runc", "exec", self.of("jobs"), "python3", "-c", _GET]

        def ready() -> bool:
            done = subprocess.run([*command, f"http://127.0.0.1:{port}/ready"], capture_output=True, check=False)
            return done.returncode == 0

        wait_until(ready, lambda: f"the part at {port}\n{self.logs()}", 240)

    def logs(self) -> str:
        return "\n".join(
            podman("logs", "--tail", "20", name, check=False)
            for name in podman("ps", "--all", "--format", "{{.Names}}", "--filter", f"pod={self.name}").split()
        )

    def end(self) -> None:
        podman("pod", "rm", "--force", "--time", "60", self.name, check=False)
        for volume in self._volumes:
            podman("volume", "rm", "--force", volume, check=False)


@pytest.fixture
def pod() -> Iterator[Pod]:
    if shutil.which("podman") is None or not podman("images", "--quiet", "localhost/kiln-jobs"):
        pytest.fail("KILN_TEST_IMAGES is set: install podman and runc, and make images")
    pod = Pod(f"kiln-test-{os.getpid()}")
    try:
        yield pod
    finally:
        pod.end()


def test_bridge_and_jobs_run_from_their_images_without_rights_or_network(pod: Pod) -> None:
    pod.start("jobs", "localhost/kiln-jobs:latest", volumes={"jobs": "/var/lib/kiln"})
    pod.await_ready(4814)
    # Two bridges that speak with each other; the second has topics of its own.
    for number, part in enumerate(("bridge", "peer")):
        pod.start(
            part,
            "localhost/kiln-bridge:latest",
            volumes={part: "/var/lib/kiln", "jobs": "/jobs:ro"},
            KILN_MONITOR__LISTEN=f"127.0.0.1:{4815 + number}",
            KILN_BRIDGE__LISTEN=json.dumps([f"/ip4/127.0.0.1/tcp/{4811 + number}"]),
            KILN_BRIDGE__BOOTSTRAP=json.dumps(
                [f"/ip4/127.0.0.1/tcp/4811/p2p/{peer_id(pod)}"] if part == "peer" else []
            ),
            KILN_KAFKA__PREFIX="kiln." if part == "bridge" else "other.",
            **_OF_THE_BROKER,
        )
        pod.await_ready(4815 + number)
    pod.run("jobs", "kiln", "generate", "/tmp/made.rpc.gz", "--for", "5s")
    pod.run("jobs", "kiln", "replay", "/tmp/made.rpc.gz")

    def rows(question: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(pod.run("jobs", "kiln", "sql", "--json", question))
        return found

    wait_until(lambda: rows("SELECT count(*) AS n FROM batches")[0]["n"] > 0, lambda: f"a batch\n{pod.logs()}", 180)
    heard = f"SELECT count(*) AS n FROM frames WHERE local_peer = '{peer_id(pod)}' AND direction = 'IN'"
    wait_until(lambda: rows(heard)[0]["n"] > 0, lambda: f"a frame that the bridge heard\n{pod.logs()}", 120)
    print(rows(heard), rows("SELECT count(*) AS batches FROM batches"))

    for part in ("jobs", "bridge", "peer"):
        assert pod.run(part, "python3", "-c", "import os; print(os.getuid())").strip() == "65532"
        (told,) = json.loads(podman("inspect", pod.of(part)))
        assert told["HostConfig"]["ReadonlyRootfs"] is True
        assert not told["EffectiveCaps"]
        with pytest.raises(AssertionError, match="Read-only file system"):
            pod.run(part, "python3", "-c", "open('/opt/kiln/x', 'w')")
    with pytest.raises(AssertionError):
        pod.run("bridge", "java", "-version")
    print(podman("stats", "--no-stream", "--format", "{{.Name}} {{.CPUPerc}} {{.MemUsage}}"))
    print(podman("images", "--format", "{{.Repository}} {{.Size}}"))


def peer_id(pod: Pod) -> str:
    """The bridge's, as the bridge tells."""
    status = json.loads(pod.run("bridge", "cat", "/var/lib/kiln/state/bridge/status.json"))
    return str(status["peer"])
