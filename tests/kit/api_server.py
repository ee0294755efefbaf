"""A Kubernetes control plane without real nodes: API server, etcd, controllers and scheduler, and a node that kwok
simulates. Pods of this node are ready at once.

`make tools ARGS=api-server` builds the programs with Go, which takes ten minutes or more, and keeps them for all
checkouts. Tests that need the programs are skipped until they are built.
"""

from __future__ import annotations

import json
import secrets
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # what an object of Kubernetes may hold

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from conftest import free_ports
from kit.awaiting import wait_until
from kit.foreign_peer import CACHE, ROOT, digest_files, run_tool

SOURCE = ROOT / "tests" / "kit" / "api_server"
FOLDER = CACHE / f"api_server-{digest_files(SOURCE)[:16]}"

VERSION = "1.34.2"

_KWOK, _KWOK_VERSION = "sigs.k8s.io/kwok", "v0.8.0"
_VERSION = "k8s.io/component-base/version.git"
_TOLD = " ".join(
    f"-X {_VERSION}{part}={value}" for part, value in {"Version": f"v{VERSION}", "Major": "1", "Minor": "34"}.items()
)
"""Linker flags that set the server's version. Without them, helm takes the server for an old one."""

_PROGRAMS = {
    "kwok": f"{_KWOK}/cmd/kwok",
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
}
_DEFINITIONS = {
    "github.com/kubeflow/spark-operator/v2@v2.4.0": ("config/crd/bases", ["sparkoperator.k8s.io_sparkapplications"]),
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": (
        "example/prometheus-operator-crd",
        ["monitoring.coreos.com_prometheusrules", "monitoring.coreos.com_servicemonitors"],
    ),
}
"""Folder and file names of the operators' CustomResourceDefinitions, by Go module."""

Document = Mapping[str, object]


def built() -> bool:
    """Return true if all programs are built."""
    return all((FOLDER / name).exists() for name in _PROGRAMS)


def build() -> None:
    """Build the programs that are missing.

    Raises:
        ForeignPeerError: Go failed.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, package in _PROGRAMS.items():
        if not (FOLDER / name).exists():
            unfinished = FOLDER / f"{name}.new"
            command: list[str | Path] = [
                "go",
                "build",
                "-mod=readonly",
                "-trimpath",
                f"-ldflags=-s -w {_TOLD}",
                "-o",
                unfinished,
                package,
            ]
            # kwok is made with a newer Kubernetes than the one that is tried
            source = SOURCE / "kwok" if name == "kwok" else SOURCE
            run_tool(command, source, {"CGO_ENABLED": "0"})
            unfinished.replace(FOLDER / name)


def definitions() -> Iterator[Path]:
    """Yield the files with the CustomResourceDefinitions of the operators whose kinds the chart uses."""
    for module, (folder, names) in _DEFINITIONS.items():
        yield from (_module(module) / folder / f"{name}.yaml" for name in names)


def _stages() -> list[Path]:
    """List kwok's stage files, which make nodes and pods ready at once."""
    return sorted((_module(f"{_KWOK}@{_KWOK_VERSION}") / "kustomize" / "stage").glob("*/fast/*-*.yaml"))


def _module(name: str) -> Path:
    """Download a Go module, and return its folder."""
    told = subprocess.run(["go", "mod", "download", "-json", name], capture_output=True, text=True, check=True)
    return Path(json.loads(told.stdout)["Dir"])


@dataclass(frozen=True)
class ApiServer:
    """A running API server. With the file `kubeconfig`, helm and other clients reach the server with all rights."""

    address: str
    token: str
    certificate: Path
    kubeconfig: Path

    def ask(self, method: str, path: str, body: Document | None = None) -> tuple[int, dict[str, object]]:
        """Send a request, and return the HTTP status and the response."""
        request = urllib.request.Request(
            f"{self.address}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        context = ssl.create_default_context(cafile=str(self.certificate))
        try:
            with urllib.request.urlopen(request, timeout=60, context=context) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                said = error.read()
                return error.code, json.loads(said) if said.startswith(b"{") else {"message": said.decode()}

    def knows(self, path: str) -> bool:
        """Return true if the server has an object, or serves a kind, at this path."""
        return self.ask("GET", path)[0] == 200

    def make(self, path: str, body: Document) -> None:
        """Create an object."""
        status, answer = self.ask("POST", path, body)
        assert status == 201, answer

    def items(self, path: str) -> list[dict[str, Any]]:
        """List the objects of a kind."""
        status, answer = self.ask("GET", path)
        found = answer.get("items")
        assert status == 200, answer
        assert isinstance(found, list)
        return found


@contextmanager
def running(folder: Path) -> Iterator[ApiServer]:
    """Run a server with one node for the duration of the context. All programs keep their files in `folder`."""
    etcd, peers, secure = free_ports(3)
    token = secrets.token_hex(16)
    key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    accounts = folder / "accounts.pem"
    accounts.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    (folder / "tokens.csv").write_text(f'{token},test,test,"system:masters"\n')
    server = ApiServer(
        f"https://127.0.0.1:{secure}", token, folder / "certificates" / "apiserver.crt", folder / "kubeconfig"
    )
    with ExitStack() as parts:

        def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
            log = parts.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                [FOLDER / name, *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            parts.callback(_end, process)
            return process

        urls = (f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peers}")
        start(
            "etcd",
            *("--data-dir", str(folder / "etcd"), "--listen-client-urls", urls[0], "--advertise-client-urls", urls[0]),
            *("--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1]),
            *("--initial-cluster", f"default={urls[1]}", "--unsafe-no-fsync"),
        )
        api = start(
            "kube-apiserver",
            *(f"--etcd-servers={urls[0]}", "--bind-address=127.0.0.1", f"--secure-port={secure}"),
            *("--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none", "--authorization-mode=RBAC"),
            *(f"--cert-dir={folder / 'certificates'}", f"--token-auth-file={folder / 'tokens.csv'}"),
            *("--service-cluster-ip-range=10.96.0.0/16", "--service-account-issuer=https://kiln.test"),
            *(f"--service-account-key-file={accounts}", f"--service-account-signing-key-file={accounts}"),
        )

        def is_ready() -> bool:
            assert api.poll() is None, (folder / "kube-apiserver.log").read_text()[-4_000:]
            try:
                return server.knows("/api/v1/namespaces/default")
            except OSError:
                return False

        wait_until(is_ready, lambda: (folder / "kube-apiserver.log").read_text()[-4_000:], 120)
        _write_kubeconfig(server)
        told = (f"--kubeconfig={server.kubeconfig}", "--leader-elect=false", "--bind-address=127.0.0.1")
        start(
            "kube-controller-manager",
            *(*told, "--secure-port=0", f"--service-account-private-key-file={accounts}"),
            f"--root-ca-file={server.certificate}",
        )
        start("kube-scheduler", *told, f"--secure-port={free_ports(1)[0]}")
        stages = [f"--config={file}" for file in _stages()]
        start("kwok", f"--kubeconfig={server.kubeconfig}", "--manage-all-nodes=true", *stages)
        server.make("/api/v1/nodes", _node())
        yield server


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(60)


def _write_kubeconfig(server: ApiServer) -> None:
    told = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [
            {"name": "test", "cluster": {"server": server.address, "certificate-authority": str(server.certificate)}}
        ],
        "users": [{"name": "test", "user": {"token": server.token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    server.kubeconfig.write_text(json.dumps(told))
    server.kubeconfig.chmod(0o600)


def _node() -> Document:
    room = {"cpu": "32", "memory": "256Gi", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "node-0", "labels": {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}},
        "status": {"allocatable": room, "capacity": room},
    }
