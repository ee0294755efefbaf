"""The broker that the settings speak of, with Kiln's topics on it: the embedded one is started, and stopped after."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bridge.traffic.options import TrafficOptions
from conf.settings import Kafka, Settings
from deploy.embedded import jars
from deploy.embedded.broker import BrokerError, EmbeddedBroker, await_broker, running
from deploy.embedded.topics import TOPICS, ensure_topics

Say = Callable[[str], None]


@contextmanager
def broker(settings: Settings, say: Say, *, die_with_parent: bool = False) -> Iterator[str]:
    """`host:port,…` of a broker that answers and has Kiln's topics, for as long as the context lasts.

    An embedded one that already runs on this state folder is used and left running. `say` hears what is waited for.
    JavaError, JarsError, BrokerError, TopicsError: there is none to be had; the text says why and what to do.
    """
    with launched_broker(settings, say, die_with_parent=die_with_parent) as ready:
        yield ready()


@contextmanager
def launched_broker(settings: Settings, say: Say, *, die_with_parent: bool = False) -> Iterator[Callable[[], str]]:
    """As `broker`, but does not wait for it to answer: what is yielded does, so that others can start meanwhile."""
    kafka = settings.kafka
    if not kafka.embedded:
        say(f"using the broker at {kafka.servers}")
        yield lambda: _ready(kafka, kafka.servers)
        return
    address = running(settings.state)
    if address is not None:
        if address != kafka.servers:
            raise BrokerError(
                f"the broker of {settings.state} runs at {address}, the settings say {kafka.servers}: stop it, or set "
                f"kafka.embedded_port = {address.rpartition(':')[2]}"
            )
        say(f"using the broker that runs at {address}")
        yield lambda: _ready(kafka, address, embedded=True)
        return
    classpath = jars.broker_classpath(jars.ensure(progress=say))
    say("starting the broker")
    embedded = EmbeddedBroker(
        settings.state,
        kafka.embedded_port,
        kafka.embedded_controller_port,
        classpath,
        kafka.embedded_heap,
        die_with_parent=die_with_parent,
    )
    embedded.launch()
    try:
        yield lambda: _ready(kafka, embedded.start(), embedded=True)
    finally:
        embedded.stop()


def _ready(kafka: Kafka, address: str, *, embedded: bool = False) -> str:
    if embedded:
        await_broker(address)
    make_topics(kafka, address)
    return address


def make_topics(kafka: Kafka, servers: str) -> None:
    """Make the topics that are missing and check the others. TopicsError: as `ensure_topics`."""
    own = {"frames": kafka.frames_partitions, "updates": kafka.updates_partitions}
    ensure_topics(
        servers,
        kafka.prefix,
        {name: own.get(name, kafka.other_partitions) for name in TOPICS},
        dict.fromkeys(TOPICS, kafka.retention),
        client_options=kafka.security_options(),
    )


def traffic_options(settings: Settings) -> TrafficOptions:
    """The world of the built-in traffic: unsigned where the network's policy is `none`. ValueError: impossible one."""
    traffic = settings.traffic
    return TrafficOptions(
        seed=traffic.seed,
        network=settings.network,
        signed=settings.policy.of(settings.network) != "none",
        peers=traffic.peers,
        copies=traffic.copies,
        streams=traffic.streams,
        separators=traffic.separators,
        garbage=traffic.garbage,
        forged=traffic.forged,
    )
