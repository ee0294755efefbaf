"""Start and stop the embedded Kafka broker; create and check Kiln's topics on it, or on the broker in the settings.

Source: docs/design/contracts.md, Kafka topics.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from kiln.conf.process.backoff import Backoff
from kiln.conf.process.errors import KilnError, PrerequisiteError
from kiln.conf.process.files import ensure_password
from kiln.conf.process.kafka_clients import describe_kafka_error
from kiln.conf.process.location import Location
from kiln.conf.process.state_folder import StateInUseError, lock_state
from kiln.conf.settings.model import Kafka, Settings
from kiln.deploy.stack import jars
from kiln.deploy.stack.embedded_broker import (
    OWNER,
    BrokerError,
    BrokerRunningError,
    EmbeddedBroker,
    await_broker,
    find_running_broker,
    stop_running,
)
from kiln.deploy.stack.java import JavaError
from kiln.deploy.stack.ports import is_listening
from kiln.pipelines.runtime.checkpoint import Checkpoint, read_topic_ids
from kiln.pipelines.runtime.topics import KafkaTopics, find_mismatches
from kiln.schemas.kafka.topics import MAX_RECORD, TOPICS
from kiln.schemas.queries import QUERIES

if TYPE_CHECKING:
    from kafka.admin import KafkaAdminClient


class TopicsError(PrerequisiteError):
    """Topics cannot be used or created. The message has a line with a remedy for each problem."""


class BrokerAwayError(TopicsError):
    """The broker does not answer a request about topics."""


def build_topic_settings(name: str, retention: timedelta | None, partition_bytes: int = 0) -> dict[str, str]:
    """Build Kafka's configuration of a topic.

    Args:
        name: Name in `TOPICS`.
        retention: Retention time; `None` keeps records forever.
        partition_bytes: Maximum size of a partition; 0 for no limit.
    """
    settings = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(MAX_RECORD)}
    if TOPICS[name].compacted:
        settings["cleanup.policy"] = "compact"
    else:
        settings["cleanup.policy"] = "delete"
        settings["retention.ms"] = "-1" if retention is None else str(retention // timedelta(milliseconds=1))
        settings["retention.bytes"] = str(partition_bytes or -1)
    return settings


def find_problems(
    topic: str, name: str, partitions: int, actual_partitions: int, config: Mapping[str, str], bootstrap: str
) -> Iterable[str]:
    """Find the problems of an existing topic, each with a remedy.

    Args:
        topic: Full name.
        name: Name in `TOPICS`.
        partitions: Number of partitions by the settings.
        actual_partitions: Number of partitions of the topic.
        config: Kafka's configuration of the topic, including defaults.
        bootstrap: Address of the broker, for the commands in the remedies.
    """
    entity = f"--entity-type topics --entity-name {topic}"
    alter = f"kafka-configs.sh --bootstrap-server {bootstrap} --alter {entity} --add-config "
    if TOPICS[name].for_life and actual_partitions != partitions:
        yield (
            f"{topic} has {actual_partitions} partitions, but the settings have {partitions}. The number cannot "
            "change, because open windows are stored by partition. Set "
            f"kafka.{name}_partitions = {actual_partitions}, or start with new topics under another kafka.prefix"
        )
    if config.get("message.timestamp.type") != "LogAppendTime":
        yield (
            f"{topic}: message.timestamp.type is {config.get('message.timestamp.type')}, but windows need the broker's "
            f"timestamps, LogAppendTime. If the topic has no records yet, run:\n"
            f"    {alter}message.timestamp.type=LogAppendTime\n"
            "If it has records, their timestamps stay wrong: set another kafka.prefix, to start with new topics"
        )
    if int(config.get("max.message.bytes", "0")) < MAX_RECORD:
        yield (
            f"{topic}: max.message.bytes is {config.get('max.message.bytes')}, but records can have {MAX_RECORD} "
            f"bytes. Run:\n    {alter}max.message.bytes={MAX_RECORD}"
        )
    compacted = "compact" in config.get("cleanup.policy", "").split(",")
    if compacted != TOPICS[name].compacted:
        policy = "compact" if TOPICS[name].compacted else "delete"
        effect = "deletes old streams" if TOPICS[name].compacted else "keeps only the newest record of each key"
        yield (
            f"{topic}: cleanup.policy is {config.get('cleanup.policy')}, so Kafka {effect}. "
            f"Run:\n    {alter}cleanup.policy={policy}"
        )


_NO_RIGHT = 29  # TOPIC_AUTHORIZATION_FAILED
RIGHTS = ("DESCRIBE", "DESCRIBE_CONFIGS", "READ", "WRITE")
"""Rights that Kiln's user needs on each of Kiln's topics."""


def find_missing_rights(topic: Mapping[str, object]) -> Iterable[str]:
    """Describe the missing rights on a topic in one line, or in none if no right is missing.

    A broker that does not report the user's rights counts as granting all.

    Args:
        topic: Description of the topic from kafka-python's `describe_topics`.
    """
    allowed = topic["authorized_operations"]
    if topic["error_code"] != _NO_RIGHT and not allowed:
        return
    missing = [right for right in RIGHTS if not isinstance(allowed, list) or right not in allowed]
    if missing:
        yield f"{topic['name']}: {', '.join(missing)}"


def ensure_topics(
    bootstrap: str,
    prefix: str,
    partitions: Mapping[str, int],
    retention: Mapping[str, timedelta | None],
    *,
    retention_bytes: Mapping[str, int] | None = None,
    client_options: Mapping[str, object] | None = None,
) -> list[str]:
    """Create the missing topics, and check the existing ones.

    Args:
        bootstrap: Address of the broker; overrides `bootstrap_servers` in `client_options`.
        prefix: Prefix of the topic names.
        partitions: Number of partitions by name in `TOPICS`; the default is 1.
        retention: Retention time by name; the default is forever.
        retention_bytes: Maximum size by name, shared equally by the partitions; 0 for no limit.
        client_options: kafka-python's options for TLS and SASL.

    Returns:
        The full names of the created topics.

    Raises:
        TopicsError: An existing topic has wrong settings, or the broker rejects a new one.
        BrokerAwayError: The broker does not answer.
    """
    from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient
    from kafka.errors import KafkaError

    from kiln.conf.process.kafka_clients import open_client

    names = {f"{prefix}{name}": name for name in TOPICS}
    options = {**(client_options or {}), "bootstrap_servers": [server.strip() for server in bootstrap.split(",")]}
    try:
        with open_client(KafkaAdminClient, **options) as admin:
            missing = sorted(names.keys() - set(admin.list_topics()))
            new_topics: dict[str, dict[str, object]] = {}
            for topic in missing:
                name = names[topic]
                count = partitions.get(name, 1)
                partition_bytes = (retention_bytes or {}).get(name, 0) // count
                configs = build_topic_settings(name, retention.get(name), partition_bytes)
                new_topics[topic] = {"num_partitions": count, "replication_factor": -1, "configs": configs}
            created = _create_topics(admin, new_topics, bootstrap) if missing else []
            descriptions = {topic["name"]: topic for topic in admin.describe_topics(list(names))}
            missing_rights = [line for topic in descriptions.values() for line in find_missing_rights(topic)]
            if missing_rights:
                user = options.get("sasl_plain_username", "")
                head = f"{bootstrap}: kafka.sasl_username ({user}) lacks these rights. Grant them:"
                raise TopicsError("\n".join([head, *missing_rights]))
            resources = admin.describe_configs(
                [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in names], config_filter="all"
            )["topic"]
    except (OSError, KafkaError) as error:
        raise BrokerAwayError(
            f"cannot read the topics of the broker at {bootstrap}: {describe_kafka_error(error, options)}"
        ) from error
    problems = [
        line
        for topic, name in names.items()
        for line in find_problems(
            topic,
            name,
            partitions.get(name, 1),
            len(descriptions[topic]["partitions"]),
            {key: str(entry["value"]) for key, entry in resources[topic].items()},
            bootstrap,
        )
    ]
    if problems:
        raise TopicsError("\n".join(problems))
    return sorted(created)


def _create_topics(admin: KafkaAdminClient, topics: Mapping[str, Mapping[str, object]], bootstrap: str) -> list[str]:
    """Create topics, and wait for them.

    Returns:
        The names of the topics that this call created. Another process may have created some of `topics` meanwhile.

    Raises:
        TopicsError: The broker rejects a topic.
    """
    from kafka.errors import AuthorizationError, TopicAlreadyExistsError, for_code

    created, failures = [], []
    for topic in admin.create_topics(topics, raise_errors=False)["topics"]:
        error = for_code(topic["error_code"])
        if not topic["error_code"]:
            created.append(topic["name"])
        elif error is not TopicAlreadyExistsError:
            right = "the user lacks the right CREATE, or DESCRIBE if the topic exists: "
            prefix = right if issubclass(error, AuthorizationError) else ""
            failures.append(f"{topic['name']}: {prefix}{topic['error_message'] or error.__name__}")
    if failures:
        raise TopicsError("\n".join([f"cannot create topics on the broker {bootstrap}:", *failures]))
    admin.wait_for_topics(list(topics))
    return created


Say = Callable[[str], None]


class TruncatedTopicError(KilnError):
    """A topic ends before the offset up to which a query has read it, for example because old data was restored."""


_CHECK_EVERY = 0.25  # s
_RETRY_EVERY = 2.0


class LaunchedBroker:
    """A broker that may not answer yet. This base class is for your own Kafka, which Kiln does not start."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka
        self.error = ""
        """reason why the broker is unavailable; empty if it is available or the reason is unknown"""

    def await_ready(self) -> str:
        """Wait until the broker answers, and create Kiln's topics.

        Returns:
            The address of the broker, `host:port,…`.

        Raises:
            BrokerError: The broker does not start.
            TopicsError: A topic cannot be created or used.
        """
        make_topics(self._kafka, self._kafka.servers)
        return self._kafka.servers

    def check_topics(self) -> None:
        """Check an embedded broker that this process has started: no topic may end before the offset in a checkpoint.

        Call this before anything is written to the topics, because new records would hide that the topic is too short.

        Raises:
            TruncatedTopicError: A topic ends before the offset in a checkpoint.
        """


class SupervisedBroker(LaunchedBroker):
    """The embedded broker of a state folder. It is started if none runs, and restarted if it ends.

    One Kiln process at a time owns the broker, by holding the lock `OWNER`. The owner starts the broker, and the broker
    ends with the owner, even if the owner is killed. Then another Kiln process that uses the broker becomes the owner,
    and starts it again. Processes that are not the owner leave the broker running when they end.
    """

    def __init__(self, settings: Settings, say: Say) -> None:
        super().__init__(settings.broker)
        self._checkpoints = settings.checkpoints_root
        self._state = settings.state
        self._say = say
        self._durable = settings.durability == "power"
        self._locks = ExitStack()
        self._is_owner = False
        self._launched = False
        self._embedded: EmbeddedBroker | None = None  # a child of this process
        self._backoff = Backoff()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="broker", daemon=True)

    def launch(self) -> None:
        """Start the broker if none runs, and return at once.

        Raises:
            JavaError: There is no usable Java.
            JarsError: The jars cannot be fetched.
            BrokerError: The broker cannot be started, or runs with other settings.
        """
        servers = self._kafka.servers
        owned = self._claim()
        if owned:
            stop_running(self._state)  # on Linux, the broker of a killed Kiln is ending already
        address = find_running_broker(self._state)
        if address not in (None, servers):
            raise BrokerError(
                f"the broker of the state folder {self._state} runs at {address}, but the settings have {servers}. "
                f"Stop it (kiln broker stop), or set kafka.embedded_port = {str(address).rpartition(':')[2]}"
            )
        ensure_password(self._state / "broker")
        if owned:
            classpath = jars.list_jars("broker", jars.ensure_jars(progress=self._say))
            self._say("starting the broker")
            self._start(classpath)
        else:
            started = "is already running" if address else "another Kiln process is starting"
            self._say(f"using the broker at {servers}, which {started}")
            self._thread.start()
        self._launched = True

    def await_ready(self) -> str:
        """Wait as `LaunchedBroker.await_ready` does. From then on, the broker is restarted if it ends."""
        if self._embedded is not None and not self._thread.is_alive():
            self._embedded.start()  # raises if the broker does not come up
            self._thread.start()
        await_broker(self._kafka.servers, self._kafka.client_options())
        return super().await_ready()

    def check_topics(self) -> None:
        if self._embedded is not None:  # the process that started the broker has checked them
            check_topic_ends(self._kafka, self._checkpoints)

    def stop(self) -> None:
        """Stop the broker, if this process owns it or its owner is gone."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._embedded is not None:
            self._embedded.stop()
        if self._launched and self._claim():
            stop_running(self._state)
        self._locks.close()

    def _claim(self) -> bool:
        """Become the owner of the broker if it has none, and return true if this process owns it."""
        try:
            if not self._is_owner:
                self._locks.enter_context(lock_state(self._state, OWNER))
                self._is_owner = True
        except StateInUseError:
            pass
        except OSError as error:
            raise BrokerError(f"cannot use the state folder {self._state}: {error}") from None
        return self._is_owner

    def _start(self, classpath: Iterable[Path]) -> None:
        kafka = self._kafka
        embedded = EmbeddedBroker(
            self._state,
            kafka.embedded_port,
            kafka.embedded_controller_port,
            classpath,
            kafka.embedded_heap,
            settings={"log.flush.interval.messages": "1"} if self._durable else {},
        )
        embedded.launch()
        self._embedded = embedded

    def _supervise(self) -> None:
        while not self._stop.wait(_CHECK_EVERY):
            with suppress(BrokerError):
                self._claim()  # succeeds if the owner has ended
            if self.error:
                self._restart()
            elif find_running_broker(self._state) is None:
                self._backoff.record_death()
                self.error = "the broker has ended, and is being restarted"

    def _restart(self) -> None:
        if find_running_broker(self._state) is not None:
            if is_listening(self._kafka.servers):
                self._backoff.reset()
                self.error = ""
        elif self._is_owner and self._backoff.is_due:
            self._backoff.record_death()  # the back-off is reset once the broker answers
            try:
                self._start(jars.list_jars("broker"))
            except BrokerRunningError:
                return  # another process has just started it
            except (JavaError, jars.JarsError, BrokerError) as error:
                self.error = f"the broker has ended, and cannot be restarted: {error}"


@contextmanager
def start_broker(settings: Settings, say: Say, *, check_topics: bool = True) -> Iterator[str]:
    """Provide a broker that answers and has Kiln's topics while the context is open.

    An embedded broker is started if it does not run, and restarted if it ends. It is stopped when the context ends,
    unless another live Kiln process owns it (`SupervisedBroker`).

    Args:
        say: Called with progress messages.
        check_topics: True to call `LaunchedBroker.check_topics`.

    Yields:
        The address of the broker, `host:port,…`.

    Raises:
        JavaError: There is no usable Java.
        JarsError: The jars cannot be fetched.
        BrokerError: The broker does not start.
        TopicsError: A topic cannot be created or used.
        TruncatedTopicError: A topic ends before the offset in a checkpoint.
    """
    with launch_broker(settings, say) as launched:
        servers = launched.await_ready()
        if check_topics:
            launched.check_topics()
        yield servers


@contextmanager
def launch_broker(settings: Settings, say: Say) -> Iterator[LaunchedBroker]:
    """Launch a broker as `start_broker` does, but do not wait for it. Call `await_ready` of the result to wait."""
    if not settings.kafka.embedded:
        say(f"using the broker at {settings.kafka.servers}")
        yield LaunchedBroker(settings.broker)
        return
    supervised = SupervisedBroker(settings, say)
    try:
        supervised.launch()
        yield supervised
    finally:
        supervised.stop()


@contextmanager
def start_broker_eventually(settings: Settings, say: Say) -> Iterator[None]:
    """Start a broker as `start_broker` does, for a process that can work without a broker for a while.

    If your own broker does not answer, the context is entered at once. A thread waits until the broker answers, and
    then creates and checks the topics.

    Args:
        say: Called with progress messages, and with the reason for waiting.
    """
    with launch_broker(settings, say) as launched:
        kafka = settings.kafka
        if kafka.embedded or any(map(is_listening, kafka.server_list())):  # kafka-python tries for half a minute
            launched.await_ready()
            try:
                launched.check_topics()
            except TruncatedTopicError as error:
                say(str(error))  # a bridge captures in any case, because frames that it misses are lost
            yield
            return
        say(f"no broker at {kafka.servers} answers. Records wait in {settings.bridge_dir / 'spool'} until one does")
        stop = threading.Event()
        thread = threading.Thread(target=_await_topics, args=(launched, say, stop), name="broker", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()


def _await_topics(launched: LaunchedBroker, say: Say, stop: threading.Event) -> None:
    while not stop.wait(_RETRY_EVERY):
        try:
            say(f"using the broker at {launched.await_ready()}")
            return
        except BrokerAwayError:
            continue
        except TopicsError as error:
            say(str(error))  # retry: the user may fix the topics meanwhile


def check_topic_ends(kafka: Kafka, checkpoints: Location) -> None:
    """Check that no topic ends before the offset up to which a query has read it.

    A topic can be too short because an older backup of the broker's data was restored. The query would then skip new
    records up to that offset. Topics whose id is not the one in the checkpoint are left out here: they were deleted and
    created again, which the query detects from the id when it starts.

    Raises:
        TruncatedTopicError: A topic ends before that offset.
    """
    saved = {query: read_topic_ids(checkpoints / query) for query in QUERIES}
    topics = KafkaTopics(kafka.client_options)
    try:
        states = topics.read_states({topic for ids in saved.values() for topic in ids})
    finally:
        topics.close()
    for query, ids in saved.items():
        checkpoint = Checkpoint(checkpoints / query)
        same = {topic: states[topic] for topic, known in ids.items() if topic in states and states[topic].id == known}
        try:
            mismatches = find_mismatches(ids, checkpoint.ends(checkpoint.planned), same)
        except (OSError, ValueError, IndexError):  # the checkpoint is torn, which the start of the query reports
            continue
        for mismatch in mismatches.values():
            raise TruncatedTopicError(
                f"{query} cannot start: {mismatch.description}. Restore the newest backup of the whole state folder, "
                "or run kiln recover, which lists the repairs"
            )


def make_topics(kafka: Kafka, servers: str) -> None:
    """Create and check Kiln's topics with the partitions and retention in the settings.

    Raises:
        TopicsError: An existing topic has wrong settings, or the broker rejects a new one or does not answer.
    """
    ensure_topics(
        servers,
        kafka.prefix,
        {topic.name: kafka.partitions(topic.partitions) for topic in TOPICS.values()},
        dict.fromkeys(TOPICS, kafka.retention),
        retention_bytes={topic.name: kafka.retention_bytes(topic.partitions) for topic in TOPICS.values()},
        client_options=kafka.security_options(),
    )
