"""Settings model: keys, types, defaults and constraints. `conf/kiln.toml` describes each key.

`Settings` reads no file or environment; `kiln.conf.settings.reading` does. An unknown key is an error in any section,
so that a misspelt setting is noticed.
"""

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kiln.conf.process.errors import SettingsError
from kiln.conf.process.location import STORE, Location, expand_path, parse_location
from kiln.conf.process.logs import Format, Level
from kiln.conf.settings.addresses import (
    check_author,
    check_file_name,
    check_interest,
    check_listener,
    check_peer,
    check_protocol,
    check_servers,
    check_tcp,
    check_tcp_at_ip,
    check_tcp_of_peer,
    check_topic,
    check_url,
)
from kiln.conf.settings.durations import Duration, duration_text
from kiln.conf.settings.values import (
    FileName,
    Folder,
    Memory,
    Names,
    StorageUri,
    Switch,
    like,
    mask_secrets,
    split_items,
    within_megabytes,
    zero_or,
)
from kiln.schemas.delta.layout import EXPIRING
from kiln.schemas.kafka.topics import MAX_OTHER_PARTITIONS, MAX_PARTITIONS, Partitions
from kiln.schemas.queries import CERAMIC_QUERIES, QUERIES
from kiln.schemas.wire.signing_policy import Policy

if TYPE_CHECKING:
    JobName = str
    """The name of a query, one of `kiln.schemas.queries.QUERIES`."""
else:
    JobName = Literal[tuple(QUERIES)]
EMBEDDED_USER = "kiln"
"""User name of the embedded broker's only user."""

_FOR_GOSSIP = {
    "bridge.interests": "name the topics in network.topics",
    "jobs.queries": f"leave out {' and '.join(sorted(CERAMIC_QUERIES))}",
}


_LONGEST = timedelta(days=36_500)
_MAX_BYTES = 1 << 50
_MAX_HEAP = 1 << 20  # MB

_Interval = Annotated[Duration, zero_or(timedelta(seconds=1))]


class Section(BaseModel):
    """Base of the sections of the settings file: frozen, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @classmethod
    def _check_each(cls, value: tuple[str, ...], info: ValidationInfo, check: Callable[[str], object]) -> None:
        """Check each item of a list with `check`, which raises ValueError. The error names the first invalid item.

        The default is not checked: most checks import modules that would slow down every start.
        """
        if value == cls.model_fields[str(info.field_name)].default:
            return
        for text in value:
            try:
                check(text)
            except ValueError as error:
                said = {"item": json.dumps(text, ensure_ascii=False), "problem": str(error)}
                raise PydanticCustomError("item", "{item}: {problem}", said) from error


class Network(Section):
    """The network that the bridge joins: a Ceramic network, or any other network of gossipsub."""

    name: Annotated[str, like(r"[^/\s]{1,256}", "a name without slash and space")] = "local-demo"
    kind: Literal["ceramic", "gossip"] = "ceramic"
    topics: Names = ("*",)
    protocols: Names = ("/meshsub/1.3.0", "/meshsub/1.2.0", "/meshsub/1.1.0", "/meshsub/1.0.0", "/floodsub/1.0.0")
    message_id: str = "author_seqno"
    max_message_bytes: int = Field(default=0, ge=0, le=_MAX_BYTES)
    decoder: Annotated[str, like(r"[\w.:-]{0,256}", "the name of an entry point in the group kiln.decoders")] = ""

    @field_validator("topics", "protocols")
    @classmethod
    def _readable(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not value:
            raise ValueError("expected at least one item")
        cls._check_each(value, info, check_topic if info.field_name == "topics" else check_protocol)
        return value

    @field_validator("message_id")
    @classmethod
    def _known_rule(cls, value: str) -> str:
        if value != cls.model_fields["message_id"].default:
            from kiln.schemas.wire.message_id import parse_message_id_rule  # not at the top: protobuf is slow to import

            parse_message_id_rule(value)
        return value

    @model_validator(mode="after")
    def _of_kind(self) -> Self:
        if self.kind == "ceramic":
            fields = {"topics", "protocols", "message_id", "max_message_bytes", "decoder"}
            for name in sorted(fields):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f'{name} is only for network.kind = "gossip": remove it')
        return self


class Kafka(Section):
    """Broker connection and topic configuration. Without `bootstrap`, Kiln runs an embedded broker."""

    bootstrap: str = ""
    prefix: Annotated[str, like(r"[A-Za-z0-9._-]{0,100}", "at most 100 letters, digits, dots, - and _")] = "kiln."
    embedded_port: int = Field(default=29092, ge=1, le=65535)
    embedded_controller_port: int = Field(default=29093, ge=1, le=65535)
    embedded_heap: Annotated[Memory, within_megabytes(128, _MAX_HEAP)] = "384m"
    frames_partitions: int = Field(default=2, ge=1, le=MAX_PARTITIONS)
    updates_partitions: int = Field(default=2, ge=1, le=MAX_PARTITIONS)
    other_partitions: int = Field(default=1, ge=1, le=MAX_OTHER_PARTITIONS)
    retention: Duration = Field(default=timedelta(days=7), ge=timedelta(hours=1), le=_LONGEST)
    frames_retention_bytes: Annotated[int, zero_or(64 << 20)] = Field(default=32 << 30, ge=0, le=_MAX_BYTES)
    updates_retention_bytes: Annotated[int, zero_or(64 << 20)] = Field(default=8 << 30, ge=0, le=_MAX_BYTES)
    other_retention_bytes: Annotated[int, zero_or(64 << 20)] = Field(default=8 << 30, ge=0, le=_MAX_BYTES)
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    sasl_username: str = ""
    sasl_password: SecretStr = SecretStr("")
    sasl_password_file: FileName = ""
    ssl_cafile: FileName = ""
    ssl_certfile: FileName = ""

    @field_validator("bootstrap")
    @classmethod
    def _servers(cls, value: str) -> str:
        if value:
            try:
                check_servers(value)
            except ValueError as error:  # without the value, which may have a password
                raise PydanticCustomError("item", "{problem}", {"problem": str(error)}) from error
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.embedded and self.security_protocol != "PLAINTEXT":
            raise ValueError(
                "security_protocol is only for a broker named in bootstrap, not for the embedded broker. Remove it, or "
                "set bootstrap"
            )
        if self.embedded and self.embedded_port == self.embedded_controller_port:
            raise ValueError("embedded_port and embedded_controller_port must differ")
        passwords = bool(self.sasl_password.get_secret_value()) + bool(self.sasl_password_file)
        if self.security_protocol.startswith("SASL") and not (self.sasl_username and passwords):
            raise ValueError(
                f"security_protocol {self.security_protocol} needs sasl_username, and sasl_password or "
                "sasl_password_file"
            )
        if passwords > 1:
            raise ValueError("sasl_password and sasl_password_file: choose one")
        return self

    def of_state(self, broker_dir: Path) -> Self:
        """Return these settings, with the credentials of the embedded broker if Kiln runs it.

        Args:
            broker_dir: Folder in which the embedded broker stores its password.
        """
        if not self.embedded:
            return self
        how = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_username": EMBEDDED_USER}
        return self.model_copy(update={**how, "sasl_password_file": str(broker_dir / "password")})

    def partitions(self, of: Partitions) -> int:
        """Return the number of partitions of a topic of this kind."""
        counts = {"frames": self.frames_partitions, "updates": self.updates_partitions, "other": self.other_partitions}
        return counts[of]

    def retention_bytes(self, of: Partitions) -> int:
        """Return the retention size in bytes of a topic of this kind, over all partitions; 0 for no limit."""
        return {
            "frames": self.frames_retention_bytes,
            "updates": self.updates_retention_bytes,
            "other": self.other_retention_bytes,
        }[of]

    @property
    def embedded(self) -> bool:
        """True if Kiln runs the broker itself."""
        return not self.bootstrap

    @property
    def servers(self) -> str:
        """Bootstrap servers as `host:port,host:port`: those of `bootstrap`, or the embedded broker."""
        return self.bootstrap or f"127.0.0.1:{self.embedded_port}"

    def topic(self, name: str) -> str:
        """Return the full name of a topic of Kiln: `topic("frames")` is `kiln.frames` by default."""
        return f"{self.prefix}{name}"

    def client_options(self) -> dict[str, str | list[str]]:
        """Return keyword arguments for a kafka-python client. They contain the password: never print them.

        Raises:
            SettingsError: The password file cannot be read.
        """
        return {"bootstrap_servers": self.server_list(), **self.security_options()}

    def server_list(self) -> list[str]:
        """Return `servers` as a list."""
        return [server.strip() for server in self.servers.split(",") if server.strip()]

    def security_options(self) -> dict[str, str]:
        """Return the options of `client_options` that concern authentication and TLS.

        Raises:
            SettingsError: The password file cannot be read.
        """
        options: dict[str, str] = {"security_protocol": self.security_protocol}
        if self.security_protocol.startswith("SASL"):
            options["sasl_mechanism"] = self.sasl_mechanism
            options["sasl_plain_username"] = self.sasl_username
            options["sasl_plain_password"] = self._password()
        if self.security_protocol.endswith("SSL"):
            options |= {"ssl_cafile": self.ssl_cafile} if self.ssl_cafile else {}
            options |= {"ssl_certfile": self.ssl_certfile} if self.ssl_certfile else {}
        return options

    def spark_options(self) -> dict[str, str]:
        """Return the options of Spark's Kafka sink (`kafka.…`). They contain the password: never print them.

        Raises:
            SettingsError: The password file cannot be read.
        """
        options = {"kafka.bootstrap.servers": self.servers}
        if self.security_protocol != "PLAINTEXT":
            options["kafka.security.protocol"] = self.security_protocol
        if self.security_protocol.startswith("SASL"):
            module = "plain.PlainLoginModule" if self.sasl_mechanism == "PLAIN" else "scram.ScramLoginModule"
            options["kafka.sasl.mechanism"] = self.sasl_mechanism
            options["kafka.sasl.jaas.config"] = (
                f"org.apache.kafka.common.security.{module} required username={_jaas(self.sasl_username)} "
                f"password={_jaas(self._password())};"
            )
        if self.security_protocol.endswith("SSL") and self.ssl_cafile:
            options |= {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.location": self.ssl_cafile}
        if self.security_protocol.endswith("SSL") and self.ssl_certfile:
            options |= {"kafka.ssl.keystore.type": "PEM", "kafka.ssl.keystore.location": self.ssl_certfile}
        return options

    def _password(self) -> str:
        """Return the password, read from the password file if one is set."""
        if not self.sasl_password_file:
            return self.sasl_password.get_secret_value()
        try:
            password = Path(self.sasl_password_file).read_bytes().decode().rstrip("\r\n")
        except FileNotFoundError:
            password = ""
        except (OSError, UnicodeDecodeError) as error:
            why = f"{error.strerror}. Make it readable" if isinstance(error, OSError) else "not UTF-8. Save it as UTF-8"
            raise SettingsError([f"kafka.sasl_password_file: cannot read {self.sasl_password_file}: {why}"]) from None
        if not password:
            none = (
                "the embedded broker has not run yet. Start it with kiln run"
                if self.embedded
                else "the file does not exist or is empty. Write the password to it"
            )
            raise SettingsError([f"kafka.sasl_password_file: {self.sasl_password_file}: {none}"])
        return password


def _jaas(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


class Batch(Section):
    """Windows and blocks of CIP-123 batches."""

    window: Duration = Field(default=timedelta(seconds=1), ge=timedelta(milliseconds=1), le=timedelta(days=1))
    grace: Duration = Field(default=timedelta(), ge=timedelta(), le=timedelta(days=1))
    tick: Duration = Field(default=timedelta(milliseconds=100), ge=timedelta(milliseconds=10), le=timedelta(hours=1))
    max_block_bytes: int = Field(default=256_000, ge=1_000, le=2 << 20)  # bitswap's largest block
    typ: int = Field(default=3, ge=3, le=(1 << 31) - 1)
    authors: Names = ("*",)
    only_verified: bool = False

    @field_validator("authors")
    @classmethod
    def _peer_ids(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        cls._check_each(value, info, check_author)
        return value


class SignaturePolicy(Section):
    """Signature policy by topic and network (decision 5). Replayed frames always use `either`."""

    default: Policy = "strict"
    networks: dict[str, Policy] = {}
    topics: dict[str, Policy] = {}

    def of(self, network: str) -> Policy:
        """Return the policy of a network, for topics that `topics` does not list."""
        return self.networks.get(network, self.default)


class Dedupe(Section):
    """Retention of the deduplication state."""

    signed_ttl: Duration = Field(default=timedelta(hours=24), ge=timedelta(minutes=1), le=_LONGEST)
    unsigned_ttl: Duration = Field(default=timedelta(minutes=2), ge=timedelta(seconds=1), le=timedelta(days=1))


class TopicTable(Section):
    """Topic Table Extension of gossipsub, by which peers send indices in place of topic names (docs/design)."""

    bundles: dict[str, list[str]] = {}
    send: Literal["cautious", "eager", "off"] = "cautious"

    @field_validator("bundles")
    @classmethod
    def _usable(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        if value:
            from kiln.schemas.wire.topic_table import (  # not at the top: protobuf slows every start
                BundleSet,
                write_hello,
            )

            write_hello(BundleSet(value))
        return value


class Spark(Section):
    """The Spark application."""

    master: str = Field(default="local[4]", min_length=1)
    driver_memory: Annotated[Memory, within_megabytes(768, _MAX_HEAP)] = "2g"
    java_options: str = (
        "-XX:+UseParallelGC -Xmn192m -XX:MaxHeapFreeRatio=40 -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"
    )
    shuffle_partitions: int = Field(default=2, ge=1, le=MAX_PARTITIONS)
    ui: bool = False
    conf: dict[str, str] = {}

    @model_validator(mode="after")
    def _nothing_secret_on_a_command_line(self) -> Self:
        options = {"spark.java_options": self.java_options}
        options |= {f"spark.conf.{key}": value for key, value in self.conf.items() if key.endswith("JavaOptions")}
        for name, value in options.items():
            if mask_secrets(value) != value:
                raise ValueError(
                    f"{name} contains a secret, but every user of the machine can read it on a command line. Move this "
                    "option to the environment variable JDK_JAVA_OPTIONS"
                )
        return self


class Lake(Section):
    """Location and row retention of the Delta tables."""

    uri: StorageUri = ""
    storage_options: dict[str, str] = {}
    retention: dict[str, Duration] = {}

    @field_validator("retention")
    @classmethod
    def _of_tables(cls, value: dict[str, timedelta]) -> dict[str, timedelta]:
        for table, kept in value.items():
            if table not in EXPIRING:
                raise ValueError(f"{table}: retention applies only to {', '.join(EXPIRING)}")
            if kept < timedelta(days=1):
                raise ValueError(f"{table}: expected at least 1d")
            if kept > _LONGEST:
                raise ValueError(f"{table}: expected at most {duration_text(_LONGEST)}")
        return value


class Checkpoints(Section):
    """Location of the checkpoints, with offsets and deduplication state."""

    uri: StorageUri = ""


class Maintenance(Section):
    """Maintenance of the Delta tables."""

    interval: _Interval = Field(default=timedelta(minutes=10), ge=timedelta(), le=_LONGEST)
    history_retention: Duration = Field(default=timedelta(hours=12), ge=timedelta(hours=1), le=_LONGEST)
    target_file_bytes: int = Field(default=128 << 20, ge=1 << 20, le=1 << 30)


class Monitor(Section):
    """HTTP endpoint of metrics, health checks and status page."""

    listen: Annotated[
        str, like(r"([^\s:/]+|\[[0-9a-fA-F:]+\]):\d{1,5}|", 'host and port, such as "127.0.0.1:4814"')
    ] = "127.0.0.1:4814"
    hosts: Names = ()

    @field_validator("listen")
    @classmethod
    def _port(cls, value: str) -> str:
        if value:
            check_listener(value)
        return value

    @property
    def host_and_port(self) -> tuple[str, int] | None:
        """Host and port, or `None` if the endpoint is disabled."""
        host, _, port = self.listen.rpartition(":")
        return (host.strip("[]"), int(port)) if self.listen else None


class Log(Section):
    """Log format and levels of Kiln's processes."""

    format: Format = "text"
    level: Level = "info"
    levels: dict[str, Level] = {}


class Quality(Section):
    """Data quality checks of the tables."""

    interval: _Interval = Field(default=timedelta(minutes=10), ge=timedelta(), le=_LONGEST)
    suites: Names = ()

    @field_validator("suites")
    @classmethod
    def _paths(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        cls._check_each(value, info, check_file_name)
        return value


class Job(Section):
    """Trigger and rate limit of one streaming query."""

    trigger: Duration = Field(ge=timedelta(), le=timedelta(hours=1))
    max_offsets_per_trigger: int = Field(ge=0, le=1_000_000_000)


class _Jobs(Section):
    """Queries that `kiln run` starts, and a section for each query."""

    queries: Annotated[tuple[JobName, ...], BeforeValidator(split_items)] = tuple(QUERIES)
    max_restarts: int = Field(default=5, ge=0, le=1_000_000)

    @field_validator("queries")
    @classmethod
    def _once_each(cls, value: tuple[JobName, ...]) -> tuple[JobName, ...]:
        if len(set(value)) < len(value):
            raise ValueError("expected each query at most once")
        return value

    def of(self, name: JobName) -> Job:
        """Return the settings of one query.

        Raises:
            KeyError: There is no such query.
        """
        job = getattr(self, QUERIES[name].name)
        assert isinstance(job, Job)
        return job


if TYPE_CHECKING:
    Jobs = _Jobs
else:  # a section for each query that `kiln.schemas.queries` declares
    Jobs = create_model(
        "Jobs",
        __base__=_Jobs,
        **{
            query.name: (Job, Job(trigger=query.every, max_offsets_per_trigger=query.at_most))
            for query in QUERIES.values()
        },
    )


class Run(Section):
    """Settings of `kiln run`."""

    drain: Duration = Field(default=timedelta(seconds=60), ge=timedelta(), le=timedelta(days=1))


class Breaker(Section):
    """Thresholds of the circuit breaker for decoding (decision 6)."""

    min_authors: int = Field(default=3, ge=1, le=1_000_000)
    consecutive_failures: int = Field(default=100, ge=1, le=1_000_000)


class Backfill(Section):
    """Backfill runs."""

    frames_per_chunk: int = Field(default=1_000_000, ge=1, le=1_000_000_000)


class Traffic(Section):
    """Synthetic traffic of the demo network and of `kiln generate`."""

    enabled: bool = True
    seed: int = Field(default=1, ge=0, le=(1 << 63) - 1)
    rate: int = Field(default=50, ge=1, le=100_000)
    separators: int = Field(default=40, ge=1, le=20_000)
    streams: int = Field(default=400, ge=1, le=1_000_000)
    peers: int = Field(default=5, ge=1, le=10_000)
    copies: int = Field(default=3, ge=1, le=10_000)
    garbage: float = Field(default=0.01, ge=0, le=1)
    forged: float = Field(default=0.01, ge=0, le=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.copies > self.peers:
            raise ValueError("copies cannot be more than peers: each copy of a message comes from a different peer")
        return self


class Bridge(Section):
    """Gossipsub node: addresses, bootstrap peers, interests and limits."""

    listen: Names = ("/ip4/127.0.0.1/tcp/4811",)
    bootstrap: Names = ()
    interests: Names = ("*",)
    spool_bytes: int = Field(default=1 << 30, ge=16 << 20, le=_MAX_BYTES)
    memory_bytes: int = Field(default=64 << 20, ge=1 << 20, le=1 << 40)
    max_rpc_bytes: int = Field(default=4 << 20, ge=64 << 10, le=4 << 20)
    max_rpc_bytes_out: int = Field(default=1 << 20, ge=64 << 10, le=4 << 20)
    min_free_bytes: int = Field(default=512 << 20, ge=0, le=_MAX_BYTES)
    max_peer_bytes_per_hour: int = Field(default=1 << 30, ge=1 << 20, le=_MAX_BYTES)
    max_bytes_per_hour: int = Field(default=4 << 30, ge=1 << 20, le=_MAX_BYTES)
    max_peer_bytes_per_hour_out: int = Field(default=1 << 30, ge=1 << 20, le=_MAX_BYTES)
    max_bytes_per_hour_out: int = Field(default=4 << 30, ge=1 << 20, le=_MAX_BYTES)
    max_topics: int = Field(default=2000, ge=1, le=1_000_000)
    max_topics_per_peer: int = Field(default=500, ge=1, le=1_000_000)
    ban: Duration = Field(default=timedelta(hours=1), ge=timedelta(), le=_LONGEST)

    @field_validator("listen", "bootstrap", "interests")
    @classmethod
    def _readable(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        checks = {"listen": check_tcp, "bootstrap": check_tcp_of_peer, "interests": check_interest}
        cls._check_each(value, info, checks[str(info.field_name)])
        return value


class Discovery(Section):
    """Peer discovery through the libp2p DHT (CIP-120, Peer discovery)."""

    enabled: bool = True
    server_mode: bool = True
    protocol_prefix: Annotated[str, like(r"(/[^/\s]+)+", 'the start of a protocol\'s name, such as "/ipfs"')] = "/ipfs"
    announce: Names = ()
    reprovide_interval: Duration = Field(default=timedelta(hours=12), ge=timedelta(minutes=1), le=timedelta(days=2))
    lookup_interval: Duration = Field(default=timedelta(minutes=5), ge=timedelta(seconds=1), le=timedelta(days=1))

    @field_validator("announce")
    @classmethod
    def _readable(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        cls._check_each(value, info, check_tcp_at_ip)
        return value


class Publish(Section):
    """Publishing of batches over gossipsub."""

    enabled: Switch = "auto"
    timeout: Duration = Field(default=timedelta(minutes=1), ge=timedelta(seconds=1), le=timedelta(days=1))
    min_interval: Duration = Field(default=timedelta(seconds=1), ge=timedelta(), le=timedelta(hours=1))
    author_keys: int = Field(default=160, ge=1, le=1024)


class Transition(Section):
    """Transition from the network topic to separator topics (CIP-120, Transition)."""

    mode: Literal["cutover", "duplicate"] = "cutover"
    at: str = ""
    height: int = Field(default=0, ge=0, le=(1 << 63) - 1)
    rpc_url: SecretStr = SecretStr("")
    phase_out: Duration = Field(default=timedelta(), ge=timedelta(), le=_LONGEST)

    @field_validator("at")
    @classmethod
    def _moment(cls, value: str) -> str:
        if value:
            try:
                known = datetime.fromisoformat(value).tzinfo is not None
            except ValueError:
                known = False
            if not known:
                raise ValueError('expected a time with its zone in RFC 3339, such as "2027-01-31T12:00:00Z"')
        return value

    @field_validator("rpc_url")
    @classmethod
    def _url(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value():
            check_url(value.get_secret_value())
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.height and self.at:
            raise ValueError("transition.at and transition.height: choose one")
        if self.height and not self.rpc_url.get_secret_value():
            raise ValueError("transition.height needs transition.rpc_url, which serves the height (eth_blockNumber)")
        if self.phase_out and not (self.at or self.height):
            raise ValueError("transition.phase_out counts from transition.at or transition.height: set one of them")
        return self

    @property
    def at_us(self) -> int | None:
        """`at` in µs since the epoch, or `None` if it is not set."""
        return round(datetime.fromisoformat(self.at).timestamp() * 1e6) if self.at else None


class Receive(Section):
    """Handling of batches that other nodes publish."""

    check_genesis: bool = True
    genesis_timeout: Duration = Field(default=timedelta(seconds=10), ge=timedelta(seconds=1), le=timedelta(days=1))
    implied_separator: Literal["", "model"] = ""


class Ipfs(Section):
    """IPFS: serving the blocks of our batches, and fetching blocks and geneses of other nodes."""

    api: str = "self"
    api_auth: SecretStr = SecretStr("")
    peers: Names = ()
    timeout: Duration = Field(default=timedelta(seconds=30), ge=timedelta(seconds=1), le=timedelta(hours=1))
    max_concurrent_fetches: int = Field(default=16, ge=1, le=256)
    give_up_after: Duration = Field(default=timedelta(hours=1), ge=timedelta(seconds=1), le=_LONGEST)
    retry_after: Duration = Field(default=timedelta(minutes=10), ge=timedelta(seconds=1), le=_LONGEST)
    pin_duration: Duration = Field(default=timedelta(hours=24), ge=timedelta(minutes=1), le=_LONGEST)
    fetch: Switch = "auto"
    max_bytes_per_second: int = Field(default=8 << 20, ge=64 << 10, le=1 << 40)

    @field_validator("peers")
    @classmethod
    def _peers(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        # the bridge dials over TCP only
        cls._check_each(value, info, check_tcp_of_peer if info.data.get("api") == "self" else check_peer)
        return value

    @field_validator("api")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ("", "self") and not value.startswith(("http://", "https://")):
            raise ValueError('expected "self", "", or the URL of Kubo\'s RPC, such as "http://127.0.0.1:5001"')
        if "@" in value:  # it is shown in the status
            raise ValueError("expected a URL without user and password. Set them in ipfs.api_auth")
        if value not in ("", "self"):
            check_url(value)
        return value

    @field_validator("api_auth")
    @classmethod
    def _as_kubo_writes_it(cls, value: SecretStr) -> SecretStr:
        if not re.fullmatch(r"(bearer:.+|basic:[^:]+:.+)?", value.get_secret_value()):
            raise ValueError('expected "bearer:TOKEN" or "basic:USER:PASSWORD"')
        return value


class Bep50(Section):
    """Batches over the BitTorrent DHT (BEP 50)."""

    enabled: bool = False
    listen: Names = ("127.0.0.1:4813",)
    bootstrap: Names = ()
    contacts: Names = ()
    follow: Names = ()
    publish: Switch = "auto"
    max_topics: int = Field(default=500, ge=1, le=100_000)

    @field_validator("listen", "bootstrap", "contacts", "follow")
    @classmethod
    def _readable(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if value == cls.model_fields[str(info.field_name)].default:
            return value
        from kiln.schemas.dht.announcement import parse_source  # not at the top: its codecs slow every start
        from kiln.schemas.dht.krpc import DhtAddress, parse_host_and_port

        checks: dict[str, Callable[[str], object]] = {"bootstrap": parse_host_and_port, "follow": parse_source}
        cls._check_each(value, info, checks.get(str(info.field_name), DhtAddress.from_text))
        if info.field_name == "listen":
            families = {DhtAddress.from_text(text).family for text in value}
            if not value or len(families) < len(value):
                raise ValueError("expected an IPv4 address, an IPv6 address, or one of each, with their ports")
        return value


class Settings(Section):
    """All settings of Kiln. `conf/kiln.toml` describes each."""

    state: Folder = Path("state")
    durability: Literal["power", "process"] = "power"
    network: Network = Network()
    kafka: Kafka = Kafka()
    batch: Batch = Batch()
    policy: SignaturePolicy = SignaturePolicy()
    dedupe: Dedupe = Dedupe()
    topic_table: TopicTable = TopicTable()
    spark: Spark = Spark()
    lake: Lake = Lake()
    checkpoints: Checkpoints = Checkpoints()
    maintenance: Maintenance = Maintenance()
    jobs: Jobs = Jobs()
    run: Run = Run()
    breaker: Breaker = Breaker()
    monitor: Monitor = Monitor()
    log: Log = Log()
    backfill: Backfill = Backfill()
    quality: Quality = Quality()
    traffic: Traffic = Traffic()
    bridge: Bridge = Bridge()
    discovery: Discovery = Discovery()
    publish: Publish = Publish()
    transition: Transition = Transition()
    receive: Receive = Receive()
    ipfs: Ipfs = Ipfs()
    bep50: Bep50 = Bep50()

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.checkpoints.uri.startswith(STORE) and not self.lake.uri.startswith(STORE):
            raise ValueError(
                "checkpoints.uri is in an object store, but the tables are on the disk of one machine. Set lake.uri to "
                "a location in the same store"
            )
        return self

    @model_validator(mode="after")
    def _of_kind(self) -> Self:
        """Reject settings that have no effect because the network is no Ceramic network."""
        if self.is_ceramic:
            return self
        wrong = {
            "publish.enabled": self.publish.enabled is True,
            "bep50.enabled": self.bep50.enabled,
            "ipfs.fetch": self.ipfs.fetch is True,
            "bridge.interests": self.bridge.interests != Bridge().interests,
            "transition": self.transition.mode == "duplicate" or bool(self.transition.at or self.transition.height),
            "jobs.queries": self.jobs.queries != tuple(QUERIES) and not CERAMIC_QUERIES.isdisjoint(self.jobs.queries),
        }
        for key, is_wrong in wrong.items():
            if is_wrong:
                instead = _FOR_GOSSIP.get(key, "remove it")
                raise ValueError(
                    f'{key} is for a Ceramic network, but network.kind is "gossip", where Kiln only captures: {instead}'
                )
        return self

    @property
    def is_ceramic(self) -> bool:
        """True if the network is a Ceramic one, with updates and batches."""
        return self.network.kind == "ceramic"

    @property
    def queries(self) -> tuple[JobName, ...]:
        """Queries that run: those in `jobs.queries`. `updates` and `batch` run only on a Ceramic network."""
        return tuple(name for name in self.jobs.queries if self.is_ceramic or name not in CERAMIC_QUERIES)

    @property
    def broker(self) -> Kafka:
        """The settings `kafka`, with the credentials of the embedded broker if Kiln runs it."""
        return self.kafka.of_state(self.broker_dir)

    @property
    def publishes(self) -> bool:
        """True if batches are published over gossipsub; always true on the demo network."""
        return self.is_ceramic and self.publish.enabled is True

    @property
    def fetches(self) -> bool:
        """True if the bridge fetches geneses of streams and blocks of other nodes' batches."""
        if not self.is_ceramic:
            return False
        if not self.ipfs.api or self.ipfs.fetch != "auto":
            return bool(self.ipfs.api) and bool(self.ipfs.fetch)
        # no node of the demo network has the geneses of its synthetic streams
        return self.ipfs.api != "self" or bool(self.bridge.bootstrap or self.bep50.enabled or self.ipfs.peers)

    @property
    def speaks_bitswap(self) -> bool:
        """True if the bridge itself serves and fetches blocks over bitswap."""
        return self.is_ceramic and self.ipfs.api == "self"

    @property
    def uses_kubo(self) -> bool:
        """True if a Kubo serves and fetches blocks for the bridge."""
        return self.is_ceramic and self.ipfs.api not in ("", "self")

    @property
    def announces(self) -> bool:
        """True if batches are announced over BEP 50; always true on the demo network."""
        return self.bep50.enabled and self.bep50.publish is True

    @property
    def lake_root(self) -> Location:
        """Folder of the Delta tables, with a subfolder for each. Its `options` may contain credentials: never print
        them."""
        return self._locate(self.lake.uri or self.state / "lake")

    @property
    def checkpoints_root(self) -> Location:
        """Folder of the checkpoints, with a subfolder for each query."""
        return self._locate(self.checkpoints.uri or self.state / "checkpoints")

    @property
    def locations(self) -> tuple[Location, ...]:
        """Locations of the tables and the checkpoints, which Spark reads and writes."""
        return self.lake_root, self.checkpoints_root

    @property
    def uses_store(self) -> bool:
        """True if the tables or the checkpoints are in an object store."""
        return any(location.folder is None for location in self.locations)

    def _locate(self, uri: str | Path) -> Location:
        if str(uri).startswith(STORE):
            return parse_location(str(uri), self.lake.storage_options)
        return parse_location(expand_path(uri))

    @property
    def logs(self) -> Path:
        """Folder of the log files."""
        return self.state / "logs"

    @property
    def bridge_dir(self) -> Path:
        """Folder of the bridge: key, seqno, spool and status."""
        return self.state / "bridge"

    @property
    def quality_dir(self) -> Path:
        """Folder of the state of `kiln quality`."""
        return self.state / "quality"

    @property
    def broker_dir(self) -> Path:
        """Folder of the embedded broker's data."""
        return self.state / "broker"
