"""A real Kubo on loopback: `ipfs` on the PATH, or the program that KILN_TEST_KUBO names."""

from __future__ import annotations

import base64
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from libp2p.crypto.pb.crypto_pb2 import KeyType, PrivateKey

from conftest import free_ports
from kiln.bridge.ipfs import BlockStoreUnavailableError
from kiln.bridge.ipfs.kubo import Kubo
from kiln.schemas.wire.identity import compute_peer_id, peer_text
from kit.awaiting import wait_until
from kit.foreign_peer import BUILT, built_with_go

PATIENCE = 60.0  # s
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""TLS context of clients that use no TLS. Without it, each client reads all root certificates, which blocks trio's
loop: a hundred clients take seconds, and Kubo opens no pubsub stream to a peer that does not answer for 5 s."""


def build(built: Path = BUILT) -> Path:
    """Build Kubo 0.43 in `.peers` if its pins have changed, and return its binary. The first build takes minutes."""
    return built_with_go(Path(__file__).with_name("kubo"), "kubo", "github.com/ipfs/kubo/cmd/ipfs", built)


def program() -> str:
    """Return the path of the program `ipfs`, or skip the test if there is none."""
    found = os.environ.get("KILN_TEST_KUBO") or shutil.which("ipfs")
    if found is None:
        pytest.skip("no `ipfs` program (Kubo) on the PATH")
    return found


class Daemon:
    """An `ipfs daemon` with its own repository, without bootstrap peers, routing and mDNS."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._environment = {**os.environ, "IPFS_PATH": str(folder), "IPFS_TELEMETRY": "off"}
        rpc, gateway, swarm = free_ports(3)
        self.url = f"http://127.0.0.1:{rpc}"
        self.swarm = f"/ip4/127.0.0.1/tcp/{swarm}"
        self._ipfs("init", "--profile=test")
        for key, value in {
            "Bootstrap": "[]",
            "AutoConf.Enabled": "false",
            "Discovery.MDNS.Enabled": "false",
            "Routing": '{"Type": "none"}',
            "DNS.Resolvers": "{}",
            "Pubsub.Enabled": "true",
            "Ipns.DelegatedPublishers": "[]",
            "Addresses.API": f'"/ip4/127.0.0.1/tcp/{rpc}"',
            "Addresses.Gateway": f'"/ip4/127.0.0.1/tcp/{gateway}"',
            "Addresses.Swarm": f'["{self.swarm}"]',
        }.items():
            self._ipfs("config", "--json", key, value)
        self._child: subprocess.Popen[bytes] | None = None

    def route(self) -> None:
        """Configure the daemon as a DHT server, before its start. The DHT has only the peers that you connect."""
        self._ipfs("config", "--json", "Routing", '{"Type": "dhtserver"}')

    def log(self, system: str) -> None:
        """Turn on the debug log of a subsystem of Kubo, as JSON, before the daemon's start."""
        self._environment |= {"GOLOG_LOG_LEVEL": f"error,{system}=debug", "GOLOG_LOG_FMT": "json"}

    def lines(self) -> list[str]:
        """Return the lines of the daemon's log."""
        return (self._folder / "daemon.log").read_text().splitlines()

    def take_identity(self, key: EllipticCurvePrivateKey) -> None:
        """Set the daemon's identity key, before its start."""
        file = self._folder / "config"
        config = json.loads(file.read_text())
        data = key.private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        encoded = PrivateKey(key_type=KeyType.ECDSA, data=data).SerializeToString()
        config["Identity"] = {
            "PeerID": peer_text(compute_peer_id(key)),
            "PrivKey": base64.b64encode(encoded).decode(),
        }
        file.write_text(json.dumps(config))

    def say(self, topic: str, data: bytes) -> None:
        """Publish a message."""
        httpx.post(
            f"{self.url}/api/v0/pubsub/pub", params={"arg": _encode_topic(topic)}, files={"file": data}, timeout=60
        ).raise_for_status()

    async def publish(self, client: httpx.AsyncClient, topic: str, data: bytes) -> None:
        """Publish without blocking trio's loop; otherwise like `say`."""
        answer = await client.post(
            f"{self.url}/api/v0/pubsub/pub", params={"arg": _encode_topic(topic)}, files={"file": data}
        )
        answer.raise_for_status()

    async def fetch(self, client: httpx.AsyncClient, cid: str, seconds: int) -> bytes | None:
        """Return a block, which the daemon fetches if necessary; `None` if the block does not arrive in time."""
        answer = await client.post(f"{self.url}/api/v0/block/get", params={"arg": cid, "timeout": f"{seconds}s"})
        return answer.content if answer.status_code == 200 else None

    @property
    def pid(self) -> int:
        """Process id of the running daemon."""
        assert self._child is not None
        return self._child.pid

    def _ipfs(self, *arguments: str) -> None:
        done = subprocess.run(
            [self._program, *arguments], env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, (arguments, done.stderr)

    def start(self) -> Kubo:
        with (self._folder / "daemon.log").open("ab") as log:
            self._child = subprocess.Popen([self._program, "daemon"], env=self._environment, stdout=log, stderr=log)
        kubo = Kubo(self.url)

        def answers() -> bool:
            try:
                kubo.identity(1.0)
            except BlockStoreUnavailableError:
                return False
            return True

        wait_until(answers, lambda: f"Kubo answers\n{(self._folder / 'daemon.log').read_text()}")
        return kubo

    def stop(self) -> None:
        if self._child is not None:
            self._child.terminate()
            self._child.wait(PATIENCE)
            self._child = None

    def connect(self, address: str) -> None:
        """Connect to a peer, by its multiaddr with /p2p/."""
        httpx.post(f"{self.url}/api/v0/swarm/connect", params={"arg": address}, timeout=60).raise_for_status()

    @property
    def address(self) -> str:
        """Multiaddr of the daemon, with /p2p/."""
        who = httpx.post(f"{self.url}/api/v0/id", timeout=60).json()
        return f"{self.swarm}/p2p/{who['ID']}"

    async def hear(self, topic: str) -> AsyncIterator[bytes]:
        """Subscribe to a topic, and yield the data of its messages until the daemon ends."""
        async with (
            httpx.AsyncClient(timeout=None, verify=_NO_TLS) as client,
            client.stream("POST", f"{self.url}/api/v0/pubsub/sub", params={"arg": _encode_topic(topic)}) as answer,
        ):
            async for line in answer.aiter_lines():
                data = json.loads(line)["data"][1:]
                yield base64.urlsafe_b64decode(data + "=" * (-len(data) % 4))


def _encode_topic(topic: str) -> str:
    return "u" + base64.urlsafe_b64encode(topic.encode()).decode().rstrip("=")
