"""Messages without envelopes, for nodes that sign themselves: data and topic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from random import Random
from typing import Final, NamedTuple

from kiln.deploy.demo.traffic.messages import TYPES, MessageContent, MessageFactory
from kiln.deploy.demo.traffic.options import GarbageKind, TrafficOptions
from kiln.deploy.demo.traffic.population import Population
from kiln.schemas.wire.topics import format_topic

# The kinds of garbage that are a message's data, and not its envelope or an RPC.
DATA_GARBAGE: Final[tuple[GarbageKind, ...]] = (
    "random_data",
    "invalid_json",
    "nan",
    "typ_true",
    "bad_id",
    "bad_shape",
)


class TopicData(NamedTuple):
    """A message to publish: the name of its topic, and its bytes."""

    topic: str
    data: bytes


def list_topics(options: TrafficOptions, most_separators: int | None = None) -> tuple[str, ...]:
    """List the network's topic, then the topics of at most `most_separators` separators, the most popular first."""
    population = Population(options)
    count = options.separators if most_separators is None else min(options.separators, most_separators)
    separators = (population.separator(rank) for rank in range(count))
    return tuple(dict.fromkeys(format_topic(options.network, separator) for separator in (None, *separators)))


def generate_contents(
    options: TrafficOptions, clock_ns: Callable[[], int], on: Collection[str] | None = None
) -> Iterator[TopicData]:
    """Generate endless messages of every type and era, on the topics `on`, by default on `list_topics(options)`.

    `clock_ns`: unix time in ns, read once at the start and once per message. Equal options and readings give equal
    messages; another start gives other messages of the same streams and separators. Only those of
    `options.garbage_kinds` that are in DATA_GARBAGE are generated, and no forgers, impostors, copies or connections.
    Messages for another topic, such as `/ceramic` in 2020, are on the topic of the network.
    """
    random = Random(f"content/{options.seed}/{clock_ns()}")
    messages = MessageFactory(options, Population(options), random)
    known = frozenset(list_topics(options) if on is None else on)
    network = format_topic(options.network, None)
    garbage = tuple(kind for kind in options.garbage_kinds if kind in DATA_GARBAGE)
    garbage_share = options.garbage if garbage else 0.0
    while True:
        now = clock_ns()
        u = random.random()
        content: MessageContent
        if u < garbage_share:
            content = messages.garbage(random.choice(garbage))
        elif u < garbage_share + options.reannounced:
            content = messages.announced_again(now)
        else:
            content = messages.content(random.choices(TYPES, options.mix)[0], now)
        yield TopicData(content.topic if content.topic in known else network, content.data)
