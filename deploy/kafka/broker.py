"""The broker that the settings speak of, with Kiln's topics on it: the embedded one is started, and stopped after."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.settings.model import Kafka, Settings
from deploy.children.backoff import Backoff
from deploy.embedded import jars
from deploy.embedded.broker import HOST, BrokerError, BrokerRunningError, EmbeddedBroker, await_broker, running
from deploy.embedded.java import JavaError
from deploy.kafka.topics import ensure_topics
from schemas.log import TOPICS

Say = Callable[[str], None]

_LOOK_EVERY = 0.25  # s


class LaunchedBroker:
    """A broker that may still be starting."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka

    def ready(self) -> str:
        """Its `host:port,…`, once it answers and has Kiln's topics. BrokerError, TopicsError."""
        make_topics(self._kafka, self._kafka.servers)
        return self._kafka.servers

    @property
    def error(self) -> str:
        """In words why it is away, as far as that is known here; empty: it is there."""
        return ""


class KeptBroker(LaunchedBroker):
    """The embedded broker of a state folder, started when none runs there, and again whenever it has died.

    One that runs already is left running at the end, and kept all the same: the Kiln that started it may have been
    killed. Where another Kiln keeps it too, whoever is first starts it.
    """

    def __init__(self, settings: Settings, say: Say, *, die_with_parent: bool) -> None:
        super().__init__(settings.kafka)
        self._state = settings.state
        self._say = say
        self._die_with_parent = die_with_parent
        self._embedded: EmbeddedBroker | None = None  # ours
        self._backoff = Backoff()
        self._error = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="broker", daemon=True)

    def launch(self) -> None:
        """Starts it if none runs, and returns at once. JavaError, JarsError, BrokerError."""
        servers = self._kafka.servers
        address = running(self._state)
        if address is None:
            classpath = jars.broker_classpath(jars.ensure(progress=self._say))
            self._say("starting the broker")
            self._start(classpath)
        elif address == servers:
            self._say(f"using the broker that runs at {address}")
            self._thread.start()
        else:
            raise BrokerError(
                f"the broker of {self._state} runs at {address}, the settings say {servers}: stop it, or set "
                f"kafka.embedded_port = {address.rpartition(':')[2]}"
            )

    def ready(self) -> str:
        """As that of any; at the latest from then on it is started again when it dies."""
        if self._embedded is not None and not self._thread.is_alive():
            self._embedded.start()  # should it not come up at all, this says why
            self._thread.start()
        await_broker(self._kafka.servers)
        return super().ready()

    @property
    def error(self) -> str:
        return self._error

    def stop(self) -> None:
        """Ends it if it was started here."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._embedded is not None:
            self._embedded.stop()

    def _start(self, classpath: Iterable[Path]) -> None:
        kafka = self._kafka
        embedded = EmbeddedBroker(
            self._state,
            kafka.embedded_port,
            kafka.embedded_controller_port,
            classpath,
            kafka.embedded_heap,
            die_with_parent=self._die_with_parent,
        )
        embedded.launch()
        self._embedded = embedded

    def _keep(self) -> None:
        while not self._stop.wait(_LOOK_EVERY):
            if self._error:
                self._restart()
            elif running(self._state) is None:
                self._backoff.died()
                self._error = "the broker has ended; it is started again"

    def _restart(self) -> None:
        if running(self._state) is not None:
            if _answers(self._kafka.embedded_port):
                self._backoff.well()
                self._error = ""
        elif self._backoff.due:
            self._backoff.died()  # unless it comes to answer
            try:
                self._start(jars.broker_classpath())
            except BrokerRunningError:
                return  # another Kiln was first
            except (JavaError, jars.JarsError, BrokerError) as error:
                self._error = f"the broker has ended, and cannot be started again: {error}"


@contextmanager
def broker(settings: Settings, say: Say, *, die_with_parent: bool = False) -> Iterator[str]:
    """`host:port,…` of a broker that answers and has Kiln's topics, for as long as the context lasts.

    An embedded one that already runs on this state folder is used and left running. One that dies meanwhile is started
    again. `say` hears what is waited for. JavaError, JarsError, BrokerError, TopicsError: there is none to be had; the
    text says why and what to do.
    """
    with launched_broker(settings, say, die_with_parent=die_with_parent) as launched:
        yield launched.ready()


@contextmanager
def launched_broker(settings: Settings, say: Say, *, die_with_parent: bool = False) -> Iterator[LaunchedBroker]:
    """As `broker`, but does not wait for it to answer: `ready` does, so that others can start meanwhile."""
    if not settings.kafka.embedded:
        say(f"using the broker at {settings.kafka.servers}")
        yield LaunchedBroker(settings.kafka)
        return
    kept = KeptBroker(settings, say, die_with_parent=die_with_parent)
    try:
        kept.launch()
        yield kept
    finally:
        kept.stop()


def _answers(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def make_topics(kafka: Kafka, servers: str) -> None:
    """Make the topics that are missing and check the others. TopicsError: as `ensure_topics`."""
    ensure_topics(
        servers,
        kafka.prefix,
        {topic.name: kafka.partitions(topic.partitions) for topic in TOPICS.values()},
        dict.fromkeys(TOPICS, kafka.retention),
        client_options=kafka.security_options(),
    )
