"""The broker that the settings speak of, with Kiln's topics on it: the embedded one is started, and stopped at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bridge.traffic.options import TrafficOptions
from conf.settings import Kafka, Settings
from deploy.embedded import jars
from deploy.embedded.broker import EmbeddedBroker, await_broker, running
from deploy.embedded.topics import TOPICS, ensure_topics

Say = Callable[[str], None]


@contextmanager
def broker(settings: Settings, say: Say, *, die_with_parent: bool = False) -> Iterator[str]:
    """`host:port,…` of a broker that answers and has Kiln's topics, for as long as the context lasts.

    An embedded one that already runs on this state folder is used and left running. `say` hears what is waited for.
    JavaError, JarsError, BrokerError, TopicsError: there is none to be had; the text says why and what to do.
    """
    kafka = settings.kafka
    if not kafka.embedded:
        say(f"using the broker at {kafka.servers}")
        make_topics(kafka, kafka.servers)
        yield kafka.servers
        return
    address = running(settings.state)
    if address is not None:
        say(f"using the broker that runs at {address}")
        await_broker(address)
        make_topics(kafka, address)
        yield address
        return
    classpath = jars.broker_classpath(jars.ensure(progress=say))
    say("starting the broker")
    with EmbeddedBroker(
        settings.state,
        kafka.embedded_port,
        kafka.embedded_controller_port,
        classpath,
        kafka.embedded_heap,
        die_with_parent=die_with_parent,
    ) as embedded:
        make_topics(kafka, embedded.address)
        yield embedded.address


def make_topics(kafka: Kafka, servers: str) -> None:
    """Make the topics that are missing and check the others. TopicsError: as `ensure_topics`."""
    own = {"frames": kafka.frames_partitions, "updates": kafka.updates_partitions}
    ensure_topics(
        servers,
        kafka.prefix,
        {name: own.get(name, kafka.other_partitions) for name in TOPICS},
        {name: kafka.retention for name in TOPICS},
        client_options=kafka.security_options(),
    )


def traffic_options(settings: Settings) -> TrafficOptions:
    """The world of the built-in traffic: unsigned on a network whose policy is `none`. ValueError: there is none such."""
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
