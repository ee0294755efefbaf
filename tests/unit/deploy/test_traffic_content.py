"""Made-up messages for nodes that sign for themselves: the same for the same seed and clock, of every type and era."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.deploy.demo.traffic.messages import DATA_GARBAGE, TopicData, generate_contents, list_topics
from kiln.deploy.demo.traffic.options import TrafficOptions
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.pubsub import PubsubMessage, read_message
from kiln.schemas.wire.topics import format_separator, parse_topic

START = 1_700_000_000_000_000_000
SECOND = 1_000_000_000
OPTIONS = TrafficOptions(seed=3, separators=12, streams=200)


def clock(start: int = START) -> Callable[[], int]:
    readings = count(start, SECOND)
    return lambda: next(readings)


def first(number: int, options: TrafficOptions = OPTIONS, start: int = START) -> list[TopicData]:
    return list(islice(generate_contents(options, clock(start)), number))


def good(messages: list[TopicData]) -> Iterator[tuple[str, PubsubMessage]]:
    for topic, data in messages:
        message = read_message(data)
        if not isinstance(message, Rejected):
            yield topic, message


worlds = st.builds(
    TrafficOptions,
    seed=st.integers(0, 2**63),
    separators=st.integers(1, 60),
    streams=st.integers(1, 500),
    signed=st.booleans(),
    garbage=st.floats(0, 1),
    reannounced=st.floats(0, 1),
    other_network=st.floats(0, 1),
    era_2020=st.floats(0, 0.4),
)


@given(worlds)
@settings(max_examples=25)
def test_any_world_says_the_same_again_and_only_on_its_own_topics(options: TrafficOptions) -> None:
    messages = first(40, options)
    assert messages == first(40, options)
    assert {message.topic for message in messages} <= set(list_topics(options))


def test_another_start_or_seed_says_other_things() -> None:
    def tips(messages: list[TopicData]) -> set[str]:
        return {message.tip for _, message in good(messages) if message.tip}

    # a QUERY may well be asked again; an update is new
    one = tips(first(300))
    assert len(one) > 100
    assert not one & tips(first(300, start=START + 1))
    assert not one & tips(first(300, replace(OPTIONS, seed=4)))


def test_another_start_is_of_the_same_streams() -> None:
    options = replace(OPTIONS, streams=5, era_2020=0.0, era_doc=0.0)
    streams = [{m.stream for _, m in good(first(300, options, start)) if m.stream} for start in (START, START + 1)]
    assert streams[0] == streams[1]
    assert len(streams[0]) == 5


def test_every_type_and_era_is_there() -> None:
    messages = first(3000, replace(OPTIONS, other_clients=0.0))
    assert {message.type for _, message in good(messages)} == {
        "UPDATE",
        "QUERY",
        "RESPONSE",
        "KEEPALIVE",
        "BATCH_UPDATE",
    }
    updates = [data for _, data in messages if data.startswith(b'{"typ":0')]
    by_shape = Counter(tuple(name in data for name in (b'"doctype":', b'"doc":', b'"stream":')) for data in updates)
    assert {(True, False, False), (False, True, False), (False, True, True), (False, False, True)} <= set(by_shape)


def test_types_that_weigh_nothing_are_not_there() -> None:
    messages = first(2000, replace(OPTIONS, batch_update=0.0))
    assert "BATCH_UPDATE" not in {message.type for _, message in good(messages)}


def test_updates_on_separator_topics_are_of_streams_that_have_the_separator() -> None:
    messages = first(3000)
    places = Counter(topic for topic, _ in messages)
    network, *separators = list_topics(OPTIONS)
    assert network == "/ceramic/local-demo"
    assert len(separators) == OPTIONS.separators
    assert all(places[topic] for topic in (network, *separators))
    # Zipf's law: the most popular separator is well ahead of the least
    assert places[separators[0]] > 3 * places[separators[-1]]
    for topic, message in good(messages):
        parsed = parse_topic(topic)
        assert parsed is not None
        if parsed.separator is not None and message.model is not None:
            assert format_separator(parsed.separator) == f"model/{message.model}"


def test_what_has_no_topic_of_its_own_is_on_that_of_the_network() -> None:
    few = list_topics(OPTIONS, 2)
    assert few == list_topics(OPTIONS)[:3]
    all_on = first(2000)
    some_on = list(islice(generate_contents(OPTIONS, clock(), few), 2000))
    assert [data for _, data in some_on] == [data for _, data in all_on]
    assert [topic for topic, _ in some_on] == [topic if topic in few else few[0] for topic, _ in all_on]


def test_garbage_is_a_small_share_and_none_where_none_is_wanted() -> None:
    refused = sum(isinstance(read_message(data), Rejected) for _, data in first(5000))
    assert 10 < refused < 150
    for clean in (replace(OPTIONS, garbage=0.0), replace(OPTIONS, garbage=0.5, garbage_kinds=("wrong_hello",))):
        assert not any(isinstance(read_message(data), Rejected) for _, data in first(1000, clean))


@pytest.mark.parametrize("kind", DATA_GARBAGE)
def test_each_kind_of_garbage_is_refused(kind: str) -> None:
    (found,) = (each for each in DATA_GARBAGE if each == kind)
    for _, data in first(50, replace(OPTIONS, garbage=1.0, garbage_kinds=(found,))):
        assert isinstance(read_message(data), Rejected)


def test_keepalives_tell_the_time_of_the_clock() -> None:
    messages = first(500, replace(OPTIONS, update=0, query=0, response=0, batch_update=0, garbage=0, reannounced=0))
    times = [message.ts for _, message in good(messages)]
    # one reading at the start
    assert times == [(START + number * SECOND) // 1_000_000 for number in range(1, 501)]


def test_some_updates_are_announced_again() -> None:
    seen = Counter((m.stream, m.tip) for _, m in good(first(2000)) if m.type == "UPDATE")
    assert max(seen.values()) > 1
