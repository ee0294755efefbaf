"""The router on networks with protocols, ids of messages and sizes of their own."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b, sha256

import pytest

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.protocols import select_versions
from kiln.schemas.proto.gossipsub.rpc_pb2 import Message
from kiln.schemas.wire.identity import Verdict
from kiln.schemas.wire.message_id import parse_message_id_rule
from kit.scripted_peers import (
    T,
    asked,
    graft,
    idontwant,
    ihave,
    iwant,
    message,
    node,
    peer,
    prunes,
    receivers,
    rpc_of,
    with_peers,
)

WAKU = "/vac/waku/relay/2.0.0"
BY_SHA256 = RouterOptions(
    protocols=select_versions([WAKU, "/meshsub/1.2.0"]), message_id=parse_message_id_rule("sha256_data"), policy="none"
)
BY_BLAKE2B = RouterOptions(message_id=parse_message_id_rule("blake2b_data"))


def unsigned(number: int, size: int = 20) -> Message:
    return Message(data=b"%d" % number + bytes(size), topic=T)


def signed(number: int, size: int) -> Message:
    return message(number, size=size)


def test_an_own_protocol_is_spoken_as_gossipsub_1_1() -> None:
    router = with_peers(node(BY_SHA256), 1, WAKU)
    sends, _, _ = router.receive(peer(0), graft("/elsewhere", T), 1.0)
    assert sends == []  # in the mesh already
    left = prunes(router.leave(T, 2.0))
    assert left == [(peer(0), T, 10)]  # a back-off, as since 1.1
    router = with_peers(node(BY_SHA256), 2, WAKU)
    sends, _, _ = router.receive(peer(0), rpc_of(unsigned(1, 5000)), 1.0)
    assert not any(send.rpc.control.idontwant for send in sends)  # nothing of 1.2
    with pytest.raises(ValueError, match=rf"protocols \['{WAKU}', '/meshsub/1.2.0'\]"):
        router.add_peer(peer(9), "/meshsub/1.1.0", True, 2.0)


@pytest.mark.parametrize(
    ("options", "make", "compute"),
    [
        (BY_SHA256, unsigned, lambda data: sha256(data).digest()),
        (BY_BLAKE2B, signed, lambda data: blake2b(data, digest_size=32).digest()),
    ],
    ids=["unsigned", "signed"],
)
def test_messages_are_named_by_the_rule_in_all_control_messages(
    options: RouterOptions, make: Callable[[int, int], Message], compute: Callable[[bytes], bytes]
) -> None:
    router = with_peers(node(options), 30, "/meshsub/1.2.0")
    router.heartbeat(0.0)
    first, second, third = make(1, 2000), make(2, 2000), make(3, 2000)
    source = next(iter(router.mesh[T]))
    sends, _, _ = router.receive(source, rpc_of(first), 0.5)
    key = compute(first.data)
    assert {raw for send in sends for each in send.rpc.control.idontwant for raw in each.messageIDs} == {key}
    told = {raw for send in router.heartbeat(1.0) for each in send.rpc.control.ihave for raw in each.messageIDs}
    assert told == {key}
    sends, _, _ = router.receive(peer(0), iwant(key), 1.1)
    assert [send.rpc.publish[0] for send in sends] == [first]
    sends, _, _ = router.receive(peer(0), ihave([key, compute(second.data)]), 1.2)
    assert asked(sends) == [compute(second.data)]
    router.receive(peer(0), rpc_of(second), 1.3)
    other = next(each for each in router.mesh[T] if each != source)
    router.receive(other, idontwant(compute(third.data)), 1.4)
    sends, _, verdicts = router.receive(source, rpc_of(third), 1.5)
    assert verdicts[0] in (Verdict.VALID, Verdict.UNSIGNED)
    assert other not in receivers(sends)
    for beat in range(2, 8):
        router.heartbeat(float(beat))
    assert router.counters["broken_promise"] == 0
    assert all(view.score >= 0 for view in router.peers.values())


def test_ids_that_look_like_those_of_other_implementations_are_taken_as_they_are() -> None:
    """An id by content may begin like js-libp2p's key, or be as text."""
    options = RouterOptions(message_id=parse_message_id_rule("sha256_data:hex"))
    router = with_peers(node(options), 1)
    keyed = bytes.fromhex("0801 1220".replace(" ", "")) + bytes(40)
    sends, _, _ = router.receive(peer(0), ihave([keyed]), 1.0)
    assert asked(sends) == [keyed]
    sends, _, _ = router.receive(peer(0), rpc_of(message(1)), 1.0)
    own = sha256(message(1).data).hexdigest().encode()
    sends, _, _ = router.receive(peer(0), iwant(own), 1.1)
    assert [send.rpc.publish[0] for send in sends] == [message(1)]


def test_the_same_data_of_another_author_is_a_duplicate_where_ids_are_by_content() -> None:
    router = with_peers(node(BY_BLAKE2B), 3)
    one, other = message(1), message(1, author=b"\x00\x24another")
    assert len(router.receive(peer(0), rpc_of(one), 1.0)[1]) == 1
    sends, delivered, verdicts = router.receive(peer(1), rpc_of(other), 1.1)
    assert (sends, delivered, verdicts) == ([], [], bytes([Verdict.VALID]))
    forged = message(1, sig=b"bad")
    assert router.receive(peer(2), rpc_of(forged), 1.2)[2] == bytes([Verdict.INVALID])


def test_a_message_over_the_size_of_the_network_is_delivered_but_not_relayed() -> None:
    router = with_peers(node(RouterOptions(max_message_bytes=1000)), 3)
    within, over = message(1, size=999), message(2, size=1000)
    assert receivers(router.receive(peer(0), rpc_of(within), 1.0)[0]) == {peer(1), peer(2)}
    sends, delivered, verdicts = router.receive(peer(0), rpc_of(over), 1.1)
    assert receivers(sends) == set()
    assert [each.message for each in delivered] == [over]
    assert verdicts == bytes([Verdict.VALID])
    assert router.counters["message_too_large"] == 1


def test_a_message_of_another_kind_is_withheld_by_its_signature_and_not_by_the_length_of_its_id() -> None:
    """Both kinds have ids of 32 bytes here."""
    options = RouterOptions(message_id=parse_message_id_rule("sha256_data"), policy="either")
    router = with_peers(node(options), 3)
    router.receive(peer(1), rpc_of(unsigned(1)), 1.0)  # it sends unsigned messages alone
    sends, _, _ = router.receive(peer(0), rpc_of(message(2)), 1.1)
    assert receivers(sends) == {peer(2)}
    key = sha256(message(2).data).digest()
    assert router.receive(peer(1), iwant(key), 1.2)[0] == []
    assert receivers(router.receive(peer(2), iwant(key), 1.2)[0]) == {peer(2)}
    sends, _, _ = router.receive(peer(2), rpc_of(unsigned(3)), 1.3)
    assert peer(1) in receivers(sends)
