"""Which topics the bridge is on, and interests that change while it runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.app.interests import CeramicTopics, InterestsFile
from kiln.schemas.wire.topics import (
    Interest,
    Separator,
    TopicError,
    encode_separator_value,
    format_topic,
    parse_interest,
)

NETWORK = "testnet-clay"
ONE, TWO = Separator("model", encode_separator_value(b"one")), Separator("model", encode_separator_value(b"two"))
OTHER = Separator("a/tag", encode_separator_value(b"three"))
SEEN = [format_topic(NETWORK, each) for each in (None, ONE, TWO, OTHER)] + [format_topic("mainnet", ONE), "elsewhere"]


def wanted(*interests: str) -> set[str]:
    return CeramicTopics(NETWORK, tuple(map(parse_interest, interests))).select(SEEN)


def test_the_network_topic_is_always_wanted() -> None:
    assert wanted() == {"/ceramic/testnet-clay"}


def test_a_star_follows_what_peers_are_on_in_this_network() -> None:
    assert wanted("*") == set(SEEN[:4])


def test_a_key_follows_its_separators() -> None:
    assert wanted("model") == {SEEN[0], SEEN[1], SEEN[2]}
    assert wanted("a/tag") == {SEEN[0], SEEN[3]}


def test_one_separator_is_followed_before_any_peer_is_there() -> None:
    assert CeramicTopics(NETWORK, (Interest(ONE.key, ONE.value),)).select([]) == {SEEN[0], SEEN[1]}


def test_the_topic_of_the_network_is_heard_in_the_spelling_of_the_cip_where_a_peer_is_on_it() -> None:
    written = "/ceramic/testnet-clay/"
    assert CeramicTopics(NETWORK, ()).select([written]) == {"/ceramic/testnet-clay", written}
    assert CeramicTopics(NETWORK, ()).select(["/ceramic/mainnet/"]) == {"/ceramic/testnet-clay"}


def test_a_separator_in_another_spelling_is_not_joined() -> None:
    unprefixed = SEEN[1].replace(ONE.value, ONE.value[1:])
    assert CeramicTopics(NETWORK, (Interest(None, None),)).select([unprefixed]) == {"/ceramic/testnet-clay"}


@given(st.text(min_size=1), st.binary(min_size=1, max_size=40))
def test_what_names_one_separator_covers_it(key: str, raw: bytes) -> None:
    separator = Separator(key, encode_separator_value(raw))
    try:
        interest = parse_interest(f"{separator.key}/{separator.value}")
    except TopicError:
        return  # no topic name can hold the key
    assert interest == Interest(*separator)
    assert interest.covers(separator)


def test_an_empty_interest_is_refused() -> None:
    with pytest.raises(TopicError, match="must not be empty"):
        parse_interest("")


def test_a_file_changes_them_and_its_absence_brings_the_settings_back(tmp_path: Path) -> None:
    file = InterestsFile(tmp_path / "bridge" / "interests.json", ["*"])
    assert file.read() == ("*",)
    file.write(["model", "model", "other"])
    assert file.read() == ("model", "other")
    (tmp_path / "bridge" / "interests.json").unlink()
    assert file.read() == ("*",)


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1]", '[""]'])
def test_a_broken_file_is_told_and_changes_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "interests.json"
    file = InterestsFile(path, ["*"])
    file.write(["model"])
    assert file.read() == ("model",)
    path.write_text(text)
    os.utime(path, ns=(1, 1))
    assert file.read() == ("model",)
    assert file.error is not None
    assert str(path) in file.error


def test_what_is_no_interest_is_not_written(tmp_path: Path) -> None:
    file = InterestsFile(tmp_path / "interests.json", ["*"])
    with pytest.raises(TopicError):
        file.write(["model", ""])
    assert file.read() == ("*",)
