"""The broker that the settings name, with Kiln's topics on it. The embedded one is started, and stopped after use."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kiln.conf.process.state_version import claim_state_folder
from kiln.conf.settings.broker_password import ensure_password
from kiln.conf.settings.model import Kafka, Settings
from kiln.deploy.stack import jars
from kiln.deploy.stack.broker_owner import BrokerOwnership
from kiln.deploy.stack.embedded_broker import (
    BrokerError,
    BrokerRunningError,
    EmbeddedBroker,
    await_broker,
    find_running_broker,
    stop_running,
)
from kiln.deploy.stack.java import JavaError
from kiln.deploy.stack.kafka_topics import BrokerAwayError, TopicsError, ensure_topics
from kiln.deploy.stack.restart_backoff import Backoff
from kiln.schemas.kafka.topics import TOPICS

Say = Callable[[str], None]

_LOOK_EVERY = 0.25  # s
_ASK_EVERY = 2.0


class LaunchedBroker:
    """A broker that may still be starting."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka

    def await_ready(self) -> str:
        """`host:port,…` of the broker, once it answers and has Kiln's topics. BrokerError, TopicsError."""
        make_topics(self._kafka, self._kafka.servers)
        return self._kafka.servers

    @property
    def error(self) -> str:
        """In words why the broker is away, as far as that is known here; empty: it is there."""
        return ""


class SupervisedBroker(LaunchedBroker):
    """The embedded broker of a state folder: started where none runs, and started again whenever it has died.

    One Kiln at a time owns the broker (`BrokerOwnership`). The owner starts it, and ends it at the owner's own end. A broker
    whose owner is gone is owned by the next Kiln that looks, whether that Kiln is just starting or uses the broker
    already. A Kiln beside the owner uses the broker and leaves it running.
    """

    def __init__(self, settings: Settings, say: Say, *, die_with_parent: bool) -> None:
        super().__init__(settings.broker)
        self._state = settings.state
        self._say = say
        self._die_with_parent = die_with_parent
        self._durable = settings.durability == "power"
        self._ownership = BrokerOwnership(settings.state)
        self._launched = False
        self._embedded: EmbeddedBroker | None = None  # a child of this process
        self._backoff = Backoff()
        self._error = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="broker", daemon=True)

    def launch(self) -> None:
        """Starts the broker if none runs, and returns at once. JavaError, JarsError, BrokerError."""
        servers = self._kafka.servers
        owned = self._claim()
        address = find_running_broker(self._state)
        if address not in (None, servers):
            raise BrokerError(
                f"the broker of {self._state} runs at {address}, the settings say {servers}: stop it (kiln broker "
                f"stop), or set kafka.embedded_port = {str(address).rpartition(':')[2]}"
            )
        ensure_password(self._state / "broker")
        if address is None and owned:
            classpath = jars.list_broker_jars(jars.ensure_jars(progress=self._say))
            self._say("starting the broker")
            self._start(classpath)
        else:
            self._say(f"using the broker that {'runs' if address else 'another Kiln starts'} at {servers}")
            self._thread.start()
        self._launched = True

    def await_ready(self) -> str:
        """As of any broker. From then on at the latest, the broker is started again when it dies."""
        if self._embedded is not None and not self._thread.is_alive():
            self._embedded.start()  # should it not come up at all, this says why
            self._thread.start()
        await_broker(self._kafka.servers, self._kafka.client_options())
        return super().await_ready()

    @property
    def error(self) -> str:
        return self._error

    def stop(self) -> None:
        """Ends the broker, if this Kiln owns it or its owner is gone."""
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
            raise BrokerError(f"the state folder cannot be used: {error}") from None

    def _start(self, classpath: Iterable[Path]) -> None:
        kafka = self._kafka
        embedded = EmbeddedBroker(
            self._state,
            kafka.embedded_port,
            kafka.embedded_controller_port,
            classpath,
            kafka.embedded_heap,
            die_with_parent=self._die_with_parent,
            settings={"log.flush.interval.messages": "1"} if self._durable else {},
        )
        embedded.launch()
        self._embedded = embedded

    def _supervise(self) -> None:
        while not self._stop.wait(_LOOK_EVERY):
            with suppress(OSError):
                self._ownership.claim()  # the owner may have been killed
            if self._error:
                self._restart()
            elif find_running_broker(self._state) is None:
                self._backoff.record_death()
                self._error = "the broker has ended; it is started again"

    def _restart(self) -> None:
        if find_running_broker(self._state) is not None:
            if is_reachable(self._kafka.servers):
                self._backoff.reset()
                self._error = ""
        elif self._ownership.is_held and self._backoff.is_due:
            self._backoff.record_death()  # unless it comes to answer
            try:
                self._start(jars.list_broker_jars())
            except BrokerRunningError:
                return  # it has just been started otherwise
            except (JavaError, jars.JarsError, BrokerError) as error:
                self._error = f"the broker has ended, and cannot be started again: {error}"


@contextmanager
def start_broker(settings: Settings, say: Say, *, die_with_parent: bool = False) -> Iterator[str]:
    """`host:port,…` of a broker that answers and has Kiln's topics, for as long as the context lasts.

    The embedded broker is started where it does not run, started again when it dies, and ended at the end, unless
    another Kiln that runs owns it (`SupervisedBroker`). `say` hears what is waited for. JavaError, JarsError,
    BrokerError, TopicsError: there is no broker to be had; the text says why and what to do.
    """
    with launch_broker(settings, say, die_with_parent=die_with_parent) as launched:
        yield launched.await_ready()


@contextmanager
def launch_broker(settings: Settings, say: Say, *, die_with_parent: bool = False) -> Iterator[LaunchedBroker]:
    """As `start_broker`, but does not wait until the broker answers. `await_ready` does, so that others can start meanwhile."""
    if not settings.kafka.embedded:
        say(f"using the broker at {settings.kafka.servers}")
        yield LaunchedBroker(settings.broker)
        return
    supervised = SupervisedBroker(settings, say, die_with_parent=die_with_parent)
    try:
        supervised.launch()
        yield supervised
    finally:
        supervised.stop()


@contextmanager
def start_broker_eventually(settings: Settings, say: Say) -> Iterator[None]:
    """As `start_broker`, but also while the brokers of the settings are away: for what can do without them for a while.

    The topics are then made, or checked, once the brokers answer. `say` hears why that cannot be done yet.
    """
    with launch_broker(settings, say) as launched:
        kafka = settings.kafka
        if kafka.embedded or any(map(is_reachable, kafka.server_list())):  # kafka-python tries for half a minute
            launched.await_ready()
            yield
            return
        say(f"no broker at {kafka.servers}: what comes waits in {settings.bridge_dir / 'spool'} until one answers")
        over = threading.Event()
        thread = threading.Thread(target=_await_topics, args=(launched, say, over), name="broker", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()


def _await_topics(launched: LaunchedBroker, say: Say, over: threading.Event) -> None:
    while not over.wait(_ASK_EVERY):
        try:
            say(f"using the broker at {launched.await_ready()}")
            return
        except BrokerAwayError:
            continue
        except TopicsError as error:
            say(str(error))  # and again: what is wrong can be put right meanwhile


def is_reachable(server: str) -> bool:
    """Whether something listens at `host:port`."""
    host, _, port = server.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except (OSError, ValueError):
        return False
    return True


def make_topics(kafka: Kafka, servers: str) -> None:
    """Make the topics that are missing and check the others. TopicsError: as `ensure_topics`."""
    ensure_topics(
        servers,
        kafka.prefix,
        {topic.name: kafka.partitions(topic.partitions) for topic in TOPICS.values()},
        dict.fromkeys(TOPICS, kafka.retention),
        retention_bytes={topic.name: kafka.retention_bytes(topic.partitions) for topic in TOPICS.values()},
        client_options=kafka.security_options(),
    )
