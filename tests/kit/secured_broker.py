"""A Kafka broker with TLS, SCRAM users and ACLs, as in a user's cluster. It runs from the embedded broker's jars.

The broker listens on loopback. openssl creates the certificates in the broker's folder.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from kafka.admin import KafkaAdminClient

from kiln.deploy.stack.embedded_broker import LOG4J, PROPERTIES, await_broker
from kiln.deploy.stack.java import find_java

ADMIN = "admin"


class SecuredBroker:
    """The broker at `address`. `passwords` has the password of each user, including the broker's admin."""

    def __init__(self, folder: Path, ports: tuple[int, int], classpath: Iterable[Path], **passwords: str) -> None:
        self.folder = folder
        self.address = f"localhost:{ports[0]}"
        self.passwords = {ADMIN: "admins own", **passwords}
        self._ports = ports
        self._java = [str(find_java().executable), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
        self._java += [f"-Dlog4j2.configurationFile={LOG4J.as_uri()}", f"-Dkiln.logs={folder}"]
        self._java += ["-cp", ":".join(map(str, classpath))]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def authority(self) -> Path:
        """Path of the certificate of the authority that signed the broker's certificate."""
        return self.folder / "authority.pem"

    def __enter__(self) -> SecuredBroker:
        self._make_certificates()
        (self.folder / "server.properties").write_text(self._properties())
        users = [f"SCRAM-SHA-512=[name={name},password={password}]" for name, password in self.passwords.items()]
        scram = [word for user in users for word in ("--add-scram", user)]
        tool = ["kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c", "server.properties", *scram]
        self._run([*self._java, *tool])
        with (self.folder / "out").open("wb") as out:
            self._process = subprocess.Popen(
                [*self._java, "kafka.Kafka", "server.properties"],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            await_broker(self.address, self.client(ADMIN), process=self._process)
        except BaseException:  # whatever it is: raised again
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def client(self, user: str) -> dict[str, object]:
        """Return keyword arguments of kafka-python clients that log in as this user."""
        return {
            "bootstrap_servers": [self.address],
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_plain_username": user,
            "sasl_plain_password": self.passwords[user],
            "ssl_cafile": str(self.authority),
        }

    def admin(self) -> KafkaAdminClient:
        return KafkaAdminClient(**self.client(ADMIN))

    def _properties(self) -> str:
        port, controller_port = self._ports
        own: Mapping[str, object] = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "CLIENTS",
            "listeners": f"CLIENTS://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
            "advertised.listeners": f"CLIENTS://localhost:{port}",
            "listener.security.protocol.map": "CLIENTS:SASL_SSL,CONTROLLER:PLAINTEXT",
            "log.dirs": "data",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": "broker.pem",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": "authority.pem",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
            "listener.name.clients.scram-sha-512.sasl.jaas.config": (
                f'org.apache.kafka.common.security.scram.ScramLoginModule required username="{ADMIN}" '
                f'password="{self.passwords[ADMIN]}";'
            ),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{ADMIN};User:ANONYMOUS",  # ANONYMOUS: the broker itself, on the controller's port
        }
        return "\n".join([PROPERTIES.read_text(), *(f"{key}={value}" for key, value in own.items()), ""])

    def _make_certificates(self) -> None:
        make_authority(self.folder, "authority")
        (self.folder / "extensions").write_text("subjectAltName=DNS:localhost\n")
        new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
        self._run([*new, "-keyout", "broker.key", "-out", "broker.csr"])
        sign = ["openssl", "x509", "-req", "-in", "broker.csr", "-CA", "authority.pem", "-CAkey", "authority.key"]
        self._run([*sign, "-CAcreateserial", "-days", "2", "-extfile", "extensions", "-out", "broker.crt"])
        both = (self.folder / "broker.key").read_text() + (self.folder / "broker.crt").read_text()
        (self.folder / "broker.pem").write_text(both)

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def make_authority(folder: Path, name: str) -> Path:
    """Create a self-signed certificate, and return its path."""
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    files = ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
    subprocess.run([*new, *files], cwd=folder, capture_output=True, check=True)
    return folder / f"{name}.pem"
