"""Topic names of CIP-120 and the separators in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiformats import multibase

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import (
    MAX_KEY,
    MAX_NAME,
    MAX_VALUE,
    Interest,
    Separator,
    Topic,
    TopicError,
    encode_separator_value,
    format_separator,
    format_topic,
    parse_interest,
    parse_separator,
    parse_topic,
)

# CIP-120, Example
MODEL = "k2t6wyfsu4pg1hnttc39koxlw0pdn1kemzrn33cdfhrbooozvo7wb14sa1uqwi"
TOPIC = f"/ceramic/mainnet/sep/model/{MODEL}"

values = st.binary(min_size=1, max_size=60) | st.binary(min_size=1, max_size=8).map(lambda raw: b"\x00\x00" + raw)
keys = st.text(min_size=1, max_size=20)
networks = st.text(min_size=1, max_size=20).filter(lambda text: "/" not in text)
separators = st.builds(lambda key, raw: Separator(key, encode_separator_value(raw)), keys, values)


def test_example_of_the_cip() -> None:
    model = StreamID.parse(MODEL).bytes  # the header's field "model", which its field "sep" names
    separator = Separator("model", encode_separator_value(model))
    assert format_topic("mainnet", separator) == TOPIC
    assert parse_topic(TOPIC) == Topic("mainnet", Separator("model", MODEL))
    assert multibase.decode(MODEL) == model


@pytest.mark.parametrize("network", ["mainnet", "testnet-clay", "dev-unstable", "local-3459926044"])
def test_network_topic_with_and_without_its_slash(network: str) -> None:
    assert parse_topic(f"/ceramic/{network}") == parse_topic(f"/ceramic/{network}/") == Topic(network, None)
    assert format_topic(network, None) == f"/ceramic/{network}"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "/ceramic",
        "/ceramic/",
        "/ceramic//",
        "ceramic/mainnet",
        "/Ceramic/mainnet",
        "/eth2/beacon_block",
        "/ceramic//sep/model/k1",
    ],
)
def test_not_a_ceramic_topic(name: str) -> None:
    assert parse_topic(name) is None


@pytest.mark.parametrize(
    "rest",
    [
        MODEL,  # the draft before 2023-01-05
        "test",
        "sep",
        "sep/",
        "sep/model",
        "sep/model/",
        "sep/model/k",  # empty value
        "sep//" + MODEL,  # empty key
        "sep/" + MODEL,
        "sep/model/" + MODEL + "/",
        "sep/model/" + MODEL.upper(),
        "sep/model/k1A",
        "sep/model/k_1",
        "sep/model/k1１",
        "sep/model/bafyreigtsyqmmvgtal3y2ahcs277xjk5prvb673lb3li2i2egz2nhp6u4y",
        "sep/model/k" + "1" * MAX_VALUE,
        "sep/" + "a" * (MAX_KEY + 1) + "/k1",
        "/sep/model/" + MODEL,
    ],
)
def test_other_topic_of_a_network_has_no_separator(rest: str) -> None:
    assert parse_topic(f"/ceramic/mainnet/{rest}") == Topic("mainnet", None)


def test_slashes_belong_to_the_key() -> None:
    separator = Separator("a//b/", "k1")
    assert parse_topic("/ceramic/mainnet/sep/a//b//k1") == Topic("mainnet", separator)
    assert parse_separator("a//b//k1") == separator
    assert format_separator(separator) == "a//b//k1"


@given(networks, st.none() | separators)
def test_topic_round_trip(network: str, separator: Separator | None) -> None:
    assert parse_topic(format_topic(network, separator)) == Topic(network, separator)


@given(separators)
def test_separator_round_trip(separator: Separator) -> None:
    assert parse_separator(format_separator(separator)) == separator


@given(values)
def test_value_equals_multiformats(raw: bytes) -> None:
    value = encode_separator_value(raw)
    assert value == multibase.encode(raw, "base36")
    assert multibase.decode(value) == raw


@given(st.text("0123456789abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=70))
def test_every_value_text_is_canonical(digits: str) -> None:
    assert encode_separator_value(multibase.decode("k" + digits)) == "k" + digits


def test_longest_value() -> None:
    longest = b"\xff" * 330
    assert multibase.decode(encode_separator_value(longest)) == longest
    assert encode_separator_value(bytes(MAX_VALUE - 1)) == "k" + "0" * (MAX_VALUE - 1)
    for raw in (b"\xff" * 331, bytes(MAX_VALUE), b"\xff" * 1_000_000):
        with pytest.raises(TopicError, match="bytes"):
            encode_separator_value(raw)


@given(st.text(max_size=40) | st.text("/ceramicsepk01", max_size=40).map(lambda text: "/ceramic/n/sep/" + text))
def test_any_name_is_read_and_a_separator_topic_is_canonical(name: str) -> None:
    topic = parse_topic(name)
    if topic is not None and topic.separator is not None:
        key, _, value = name.rpartition("/")
        assert format_topic(*topic) in (name, f"{key}/k{value}")


def test_a_value_without_its_prefix_is_read_and_never_written() -> None:
    separator = Separator("model", MODEL)
    assert parse_topic(f"/ceramic/mainnet/sep/model/{MODEL[1:]}") == Topic("mainnet", separator)
    assert parse_separator(f"model/{MODEL[1:]}") == separator
    with pytest.raises(TopicError):
        format_separator(Separator("model", MODEL[1:]))


@pytest.mark.parametrize(
    ("text", "interest"),
    [
        ("*", Interest(None, None)),
        ("*/*", Interest("*", None)),
        ("*/k1", Interest("*", "k1")),
        ("a/b", Interest("a/b", None)),
        ("a/k1", Interest("a", "k1")),
        ("a/k1/*", Interest("a/k1", None)),
        ("a/*/*", Interest("a/*", None)),
    ],
)
def test_an_interest_can_name_any_key(text: str, interest: Interest) -> None:
    assert parse_interest(text) == interest


@pytest.mark.parametrize("network", ["", "a/b", "/", "\ud800"])
def test_network_that_no_name_can_hold(network: str) -> None:
    with pytest.raises(TopicError):
        format_topic(network, None)


@pytest.mark.parametrize(
    ("key", "value"), [("", "k1"), ("\ud800", "k1"), ("a", ""), ("a", "k"), ("a", "K1"), ("a", "k1/"), ("a", "b1")]
)
def test_separator_that_no_name_can_hold(key: str, value: str) -> None:
    with pytest.raises(TopicError):
        format_topic("mainnet", Separator(key, value))
    with pytest.raises(TopicError):
        format_separator(Separator(key, value))


@pytest.mark.parametrize(
    "text", ["", "/", "model", "model/", "/k1", "model/k", "model/K1", "model/k1A", "model/k1/", "k1"]
)
def test_bad_separator_text(text: str) -> None:
    with pytest.raises(TopicError):
        parse_separator(text)


def test_longest_key() -> None:
    """Every separator that is read has a topic that the router takes."""
    longest = Separator("/" * MAX_KEY, "k" + "1" * (MAX_VALUE - 1))
    assert len(format_topic("n" * 256, longest)) <= MAX_NAME == RouterOptions().max_topic_length
    assert parse_separator(format_separator(longest)) == longest
    name = format_topic("mainnet", longest)
    assert parse_topic(name) == Topic("mainnet", longest)
    assert parse_interest(format_separator(longest)) == Interest(*longest)
    longer = longest._replace(key="/" * (MAX_KEY + 1))
    for refused in (format_separator, lambda s: format_topic("mainnet", s)):
        with pytest.raises(TopicError, match=f"has {MAX_KEY + 1} characters; it may have {MAX_KEY}"):
            refused(longer)
    for reader in (parse_separator, parse_interest):
        with pytest.raises(TopicError, match=f"it may have {MAX_KEY}"):
            reader(f"{longer.key}/{longer.value}")


def test_a_stream_without_a_separator_is_on_the_topic_of_the_network() -> None:
    assert format_topic("testnet-clay", None) == "/ceramic/testnet-clay"
    assert parse_topic("/ceramic/testnet-clay/") == Topic("testnet-clay", None)
    # one slash: more of them, or one behind a separator, are other names
    assert parse_topic("/ceramic/testnet-clay//") == Topic("testnet-clay", None)
    assert parse_topic(TOPIC + "/") == Topic("mainnet", None)


def test_leading_zeros_are_bytes_of_the_value() -> None:
    assert multibase.decode("k0a") == b"\x00\x0a"
    assert multibase.decode("ka") == b"\x0a"
    assert parse_separator("model/k0a") != parse_separator("model/ka")


def test_empty_value_is_refused() -> None:
    with pytest.raises(TopicError, match="empty"):
        encode_separator_value(b"")
