"""The broker of the settings, with Kiln's topics on it. An embedded broker is started, and stopped after use."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kiln.conf.process.backoff import Backoff
from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import Location
from kiln.conf.process.state_folder import claim_state_folder
from kiln.conf.settings.broker_password import ensure_password
from kiln.conf.settings.model import Kafka, Settings
from kiln.deploy.stack import jars
from kiln.deploy.stack.embedded_broker import (
    BrokerError,
    BrokerOwnership,
    BrokerRunningError,
    EmbeddedBroker,
    await_broker,
    find_running_broker,
    stop_running,
)
from kiln.deploy.stack.java import JavaError
from kiln.deploy.stack.kafka_topics import BrokerAwayError, TopicsError, ensure_topics
from kiln.pipelines.runtime.checkpoint import Checkpoint, read_topic_ids
from kiln.pipelines.runtime.topics import KafkaTopics, find_mismatches
from kiln.schemas.kafka.topics import TOPICS
from kiln.schemas.queries import QUERIES

Say = Callable[[str], None]


class TruncatedTopicError(KilnError):
    """A topic ends before the offset up to which a query has read it."""


_CHECK_EVERY = 0.25  # s
_RETRY_EVERY = 2.0


class LaunchedBroker:
    """A broker that may still be starting."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka

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
        """Check that the topics of a broker that was just started in the state folder are not older than the
        checkpoints there. Call it before anything is written to them.

        Raises:
            TruncatedTopicError: A topic is older.
        """

    @property
    def error(self) -> str:
        """Reason why the broker is unavailable; empty if it is available or the reason is unknown."""
        return ""


class SupervisedBroker(LaunchedBroker):
    """The embedded broker of a state folder: started if none runs, and restarted after it died.

    One Kiln process at a time owns the broker (`BrokerOwnership`). The owner starts it, and it ends with the owner,
    even a killed one. The next Kiln process that checks then becomes the owner, and starts it again. Other
    processes use the broker and leave it running.
    """

    def __init__(self, settings: Settings, say: Say) -> None:
        super().__init__(settings.broker)
        self._checkpoints = settings.checkpoints_root
        self._state = settings.state
        self._say = say
        self._durable = settings.durability == "power"
        self._ownership = BrokerOwnership(settings.state)
        self._launched = False
        self._embedded: EmbeddedBroker | None = None  # a child of this process
        self._backoff = Backoff()
        self._error = ""
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
                f"the broker of {self._state} runs at {address}, but the settings have {servers}. Stop it (kiln broker "
                f"stop), or set kafka.embedded_port = {str(address).rpartition(':')[2]}"
            )
        ensure_password(self._state / "broker")
        if owned:
            classpath = jars.list_broker_jars(jars.ensure_jars(progress=self._say))
            self._say("starting the broker")
            self._start(classpath)
        else:
            self._say(f"using the broker at {servers}, which {'runs' if address else 'another Kiln is starting'}")
            self._thread.start()
        self._launched = True

    def await_ready(self) -> str:
        """Wait as `LaunchedBroker.await_ready`. From then on, the broker is restarted when it dies."""
        if self._embedded is not None and not self._thread.is_alive():
            self._embedded.start()  # raises if the broker does not come up
            self._thread.start()
        await_broker(self._kafka.servers, self._kafka.client_options())
        return super().await_ready()

    def check_topics(self) -> None:
        if self._embedded is not None:  # the process that started the broker has checked them
            check_topic_ends(self._kafka, self._checkpoints)

    @property
    def error(self) -> str:
        return self._error

    def stop(self) -> None:
        """Stop the broker, if this process owns it or its owner is gone."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._embedded is not None:
            self._embedded.stop()
        if self._launched and self._claim():
            stop_running(self._state)
        self._ownership.release()

    def _claim(self) -> bool:
        try:
            claim_state_folder(self._state)
            return self._ownership.claim()
        except OSError as error:
            raise BrokerError(f"cannot use the state folder: {error}") from None

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
            with suppress(OSError):
                self._ownership.claim()  # the owner may have been killed
            if self._error:
                self._restart()
            elif find_running_broker(self._state) is None:
                self._backoff.record_death()
                self._error = "the broker has ended, and is being restarted"

    def _restart(self) -> None:
        if find_running_broker(self._state) is not None:
            if is_reachable(self._kafka.servers):
                self._backoff.reset()
                self._error = ""
        elif self._ownership.is_held and self._backoff.is_due:
            self._backoff.record_death()  # reset once it answers
            try:
                self._start(jars.list_broker_jars())
            except BrokerRunningError:
                return  # another process has just started it
            except (JavaError, jars.JarsError, BrokerError) as error:
                self._error = f"the broker has ended, and cannot be restarted: {error}"


@contextmanager
def start_broker(settings: Settings, say: Say, *, check_topics: bool = True) -> Iterator[str]:
    """Provide a broker that answers and has Kiln's topics while the context is open.

    An embedded broker is started if it does not run, restarted when it dies, and stopped at the end, unless another
    live Kiln process owns it (`SupervisedBroker`).

    Args:
        settings: The settings.
        say: Called with progress messages.
        check_topics: Check the topics as `LaunchedBroker.check_topics`.

    Yields:
        The address of the broker, `host:port,…`.

    Raises:
        JavaError: There is no usable Java.
        JarsError: The jars cannot be fetched.
        BrokerError: The broker does not start.
        TopicsError: A topic cannot be created or used.
        TruncatedTopicError: A topic is older than a checkpoint.
    """
    with launch_broker(settings, say) as launched:
        servers = launched.await_ready()
        if check_topics:
            launched.check_topics()
        yield servers


@contextmanager
def launch_broker(settings: Settings, say: Say) -> Iterator[LaunchedBroker]:
    """Launch a broker as `start_broker`, without waiting for its answer: call `await_ready` for that."""
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
    """Start a broker as `start_broker`, but do not wait for a broker that is down.

    For processes that can work without a broker for a while. The topics are created or checked once a broker answers.

    Args:
        settings: The settings.
        say: Called with progress messages, and with the reason for waiting.
    """
    with launch_broker(settings, say) as launched:
        kafka = settings.kafka
        if kafka.embedded or any(map(is_reachable, kafka.server_list())):  # kafka-python tries for half a minute
            launched.await_ready()
            try:
                launched.check_topics()
            except TruncatedTopicError as error:
                say(str(error))  # a bridge captures in any case: what it misses is lost
            yield
            return
        say(f"no broker at {kafka.servers}: records wait in {settings.bridge_dir / 'spool'} until one answers")
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
    """Check that no topic ends before the offset up to which a query has read it, as if an older copy of the broker's
    data was put back. With new records, the topic would soon be longer, and the query would skip them.

    A topic that was deleted and created again is recognised by its id at any later time.

    Raises:
        TruncatedTopicError: A topic ends before.
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
        except (OSError, ValueError, IndexError):  # torn, which the start of the query reports
            continue
        for mismatch in mismatches.values():
            raise TruncatedTopicError(
                f"{query} cannot start: {mismatch.description}. Restore the newest copy of the whole state folder, or "
                "run kiln recover, which lists the repairs"
            )


def is_reachable(server: str) -> bool:
    """Return true if `host:port` accepts connections."""
    host, _, port = server.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except (OSError, ValueError):
        return False
    return True


def make_topics(kafka: Kafka, servers: str) -> None:
    """Create the missing topics, and check the existing ones.

    Raises:
        TopicsError: See `ensure_topics`.
    """
    ensure_topics(
        servers,
        kafka.prefix,
        {topic.name: kafka.partitions(topic.partitions) for topic in TOPICS.values()},
        dict.fromkeys(TOPICS, kafka.retention),
        retention_bytes={topic.name: kafka.retention_bytes(topic.partitions) for topic in TOPICS.values()},
        client_options=kafka.security_options(),
    )
