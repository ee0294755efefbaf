"""kiln.schemas.wire.message_id: the ids of messages by the rules of networks."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.schemas.proto.gossipsub.rpc_pb2 import Message
from kiln.schemas.wire.identity import message_id, sign
from kiln.schemas.wire.message_id import MessageIdRuleError, parse_message_id_rule

TOPIC, DATA = "/waku/2/rs/0/1", b"\x0a\x03abc"
SHA256, TOPIC_SHA256 = hashlib.sha256(DATA).digest(), hashlib.sha256(TOPIC.encode() + DATA).digest()
BLAKE2B = hashlib.blake2b(DATA, digest_size=32).digest()


def message(*, signed: bool) -> Message:
    made = Message(topic=TOPIC, data=DATA)
    if signed:
        made.seqno = (7).to_bytes(8, "big")
        sign(made, Ed25519PrivateKey.generate())
    return made


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    ("rule", "raw", "text"),
    [
        ("sha256_data", SHA256, f"sha256/{SHA256.hex()}"),
        ("sha256_topic_data", TOPIC_SHA256, f"sha256/{TOPIC_SHA256.hex()}"),
        ("blake2b_data", BLAKE2B, f"blake2b/{BLAKE2B.hex()}"),
        ("sha256_data:20", SHA256[:20], f"sha256/{SHA256[:20].hex()}"),
        ("sha256_data:hex", SHA256.hex().encode(), f"sha256/{SHA256.hex()}"),
        ("blake2b_data:hex20", BLAKE2B.hex()[:20].encode(), f"blake2b/{BLAKE2B.hex()[:20]}"),
    ],
)
def test_an_id_by_content_does_not_depend_on_the_author(rule: str, raw: bytes, text: str, signed: bool) -> None:
    ids = parse_message_id_rule(rule)
    assert ids.by_content
    assert ids.compute(message(signed=signed), TOPIC) == raw
    assert ids.describe(message(signed=signed), TOPIC) == ids.format(raw) == text


def test_the_topic_of_a_message_by_index_is_the_one_given() -> None:
    by_index = Message(topicIndex=3, data=DATA)
    assert parse_message_id_rule("sha256_topic_data").compute(by_index, TOPIC) == TOPIC_SHA256


@pytest.mark.parametrize("signed", [True, False])
def test_the_default_rule_is_that_of_gossipsub(signed: bool) -> None:
    ids, each = parse_message_id_rule("author_seqno"), message(signed=signed)
    assert not ids.by_content
    expected = getattr(each, "from") + each.seqno if signed else SHA256
    assert ids.compute(each, TOPIC) == expected
    assert ids.describe(each, TOPIC) == ids.format(expected) == message_id(each)


def test_an_id_that_breaks_the_rule_is_hex() -> None:
    assert parse_message_id_rule("sha256_data").format(b"\x01\x02") == "0102"
    assert parse_message_id_rule("sha256_data:hex8").format(b"\xffabcdef0") == b"\xffabcdef0".hex()
    assert parse_message_id_rule("sha256_data").format(b"\x01" * 128) == "01" * 128
    assert parse_message_id_rule("sha256_data").format(b"\x01" * 129) == "01" * 128 + "…"


@pytest.mark.parametrize("rule", ["", "sha256", "sha256_data:", "sha1_data", "sha256_data:33", "author_seqno:hex"])
def test_a_text_that_names_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(MessageIdRuleError):
        parse_message_id_rule(rule)
