"""Bitswap without I/O: the codec, and the engine that decides what to send to which peer."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from libp2p.bitswap.pb.bitswap_pb2 import Message
from trio.testing import MockClock

from kiln.bridge.ipfs.bitswap.engine import BitswapEngine, EngineLimits, Output
from kiln.bridge.ipfs.bitswap.exchange import _spend
from kiln.bridge.ipfs.bitswap.messages import (
    MAX_ENTRIES,
    PROTOCOLS,
    V1_0,
    V1_1,
    V1_2,
    BitswapMessage,
    MessageError,
    WantEntry,
    read_message,
    write_message,
)
from kiln.bridge.libp2p.budget import CaptureBudget
from kiln.schemas.wire.cid import compute_cid

A, B, C, D = b"peer a", b"peer b", b"peer c", b"peer d"
SMALL, LARGE = 200, 100_000


def block_of(number: int, size: int = SMALL) -> bytes:
    return b"%d " % number + bytes(size)


def cid_of(number: int, size: int = SMALL, codec: int = 0x71) -> bytes:
    return compute_cid(block_of(number, size), codec)


def digest_of(number: int, size: int = SMALL) -> bytes:
    return cid_of(number, size)[-32:]


def wants(*cids: bytes, have: bool = False, cancel: bool = False, dont_have: bool = True) -> BitswapMessage:
    return BitswapMessage(tuple(WantEntry(cid, have, cancel, dont_have) for cid in cids))


def connected(*peers: bytes, limits: EngineLimits | None = None) -> BitswapEngine:
    engine = BitswapEngine(limits)
    engine.set_peers(set(peers), 0.0)
    return engine


def outputs(engine: BitswapEngine, peer: bytes) -> list[Output]:
    found = []
    while (output := engine.next_output(peer)) is not None:
        engine.confirm(output)
        found.append(output)
    return found


def output(engine: BitswapEngine, peer: bytes) -> Output:
    (only,) = outputs(engine, peer)
    return only


def requests(engine: BitswapEngine, *peers: bytes) -> dict[bytes, str]:
    """Requests to each peer: "have", "block" or "cancel"."""
    found = {}
    for peer in peers:
        for each in outputs(engine, peer):
            for entry in each.wants:
                found[peer] = "cancel" if entry.cancel else "have" if entry.have else "block"
    return found


# ---------------------------------------------------------------- messages

cids = st.builds(compute_cid, st.binary(max_size=8), st.sampled_from([0x55, 0x70, 0x71, 0x85, 0x0129])) | st.builds(
    lambda data: compute_cid(data)[2:], st.binary(max_size=8)
)
entries = st.builds(WantEntry, cids, st.booleans(), st.booleans(), st.booleans())


@given(
    st.sampled_from(PROTOCOLS),
    st.lists(entries, max_size=5),
    st.lists(cids, max_size=3),
    st.lists(cids, max_size=3),
    st.lists(st.tuples(cids, st.binary(max_size=50)), max_size=3),
)
def test_a_message_is_read_as_it_was_written(
    protocol: str,
    entries: list[WantEntry],
    haves: list[bytes],
    dont_haves: list[bytes],
    blocks: list[tuple[bytes, bytes]],
) -> None:
    message = read_message(write_message(protocol, entries, haves, dont_haves, blocks), protocol)
    newest = protocol == V1_2
    assert message.wants == tuple(entry if newest else WantEntry(entry.cid, cancel=entry.cancel) for entry in entries)
    assert message.haves == (tuple(haves) if newest else ())
    assert message.dont_haves == (tuple(dont_haves) if newest else ())
    assert message.blocks == tuple(data for _, data in blocks)
    assert not message.full
    assert not message.skipped


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    try:
        message = read_message(data)
    except MessageError:
        return
    assert len(message.wants) <= MAX_ENTRIES


def test_a_message_always_has_a_wantlist() -> None:
    assert Message.FromString(write_message(V1_2)).HasField("wantlist")


def test_the_prefix_of_a_block_completes_its_cid() -> None:
    v1, v0 = compute_cid(b"one", 0x85), compute_cid(b"two")[2:]
    message = Message.FromString(write_message(V1_1, blocks=[(v1, b"one"), (v0, b"two")]))
    prefixes = [block.prefix for block in message.payload]
    assert prefixes[0] + v1[-32:] == v1
    assert prefixes[1] == b"\0\x70\x12\x20"
    assert list(Message.FromString(write_message(V1_0, blocks=[(v0, b"two")])).blocks) == [b"two"]


def test_entries_that_are_no_cid_and_too_many_entries_are_skipped() -> None:
    good = cid_of(1)
    odd = [b"", b"\x01", good + b"\0", b"\x12\x20abc", good[:-1], b"\x01\x71\x12\x61" + bytes(97)]
    message = read_message(write_message(V1_2, [WantEntry(cid) for cid in (*odd, good)]))
    assert (message.wants, message.skipped) == ((WantEntry(good),), len(odd))
    many = read_message(write_message(V1_2, [WantEntry(cid_of(number, 1)) for number in range(MAX_ENTRIES + 7)]))
    assert (len(many.wants), many.skipped) == (MAX_ENTRIES, 7)


# ---------------------------------------------------------------- serving


def test_a_want_is_answered_with_the_block_or_its_absence() -> None:
    engine = connected(A)
    received = engine.receive(A, wants(cid_of(1, LARGE), cid_of(2)), 0.0)
    assert received.lookups == (cid_of(1, LARGE), cid_of(2))
    engine.resolve(A, {cid_of(1, LARGE): LARGE, cid_of(2): None})
    assert engine.peers_with_output() == [A]
    assert output(engine, A) == Output(dont_haves=(cid_of(2),), blocks=((cid_of(1, LARGE), LARGE),))
    assert engine.peers_with_output() == []


@pytest.mark.parametrize(("size", "replaced"), [(1024, True), (1025, False)])
def test_a_want_have_is_answered_with_have_or_a_small_block(size: int, replaced: bool) -> None:
    engine = connected(A)
    engine.receive(A, wants(cid_of(1), have=True), 0.0)
    engine.resolve(A, {cid_of(1): size})
    found = output(engine, A)
    assert (found.blocks, found.haves) == ((((cid_of(1), size),), ()) if replaced else ((), (cid_of(1),)))


def test_a_block_that_comes_after_it_was_wanted_is_sent_at_once() -> None:
    engine = connected(A, B)
    engine.receive(A, wants(cid_of(1)), 0.0)
    engine.resolve(A, {cid_of(1): None})
    assert output(engine, A).dont_haves == (cid_of(1),)
    engine.receive(B, wants(cid_of(1), dont_have=False), 0.0)
    engine.add_block(cid_of(1), SMALL)
    # the lookup was made before the block was there, and its result comes after it
    engine.resolve(B, {cid_of(1): None})
    assert sorted(engine.peers_with_output()) == [A, B]
    for peer in (A, B):
        assert output(engine, peer) == Output(blocks=((cid_of(1), SMALL),))


def test_what_a_peer_cancels_or_replaces_is_not_sent() -> None:
    engine = connected(A)
    engine.receive(A, wants(cid_of(1), cid_of(2)), 0.0)
    engine.resolve(A, {cid_of(1): SMALL, cid_of(2): None})
    engine.receive(A, wants(cid_of(1), cid_of(2), cancel=True), 0.0)
    engine.add_block(cid_of(2), SMALL)
    assert outputs(engine, A) == []
    engine.receive(A, wants(cid_of(3), cid_of(4)), 0.0)
    engine.resolve(A, {cid_of(3): SMALL})
    engine.receive(A, BitswapMessage((WantEntry(cid_of(5)),), full=True), 0.0)
    engine.resolve(A, {cid_of(5): SMALL})
    engine.add_block(cid_of(4), SMALL)
    assert output(engine, A).blocks == ((cid_of(5), SMALL),)


def test_blocks_go_in_messages_of_bounded_size() -> None:
    engine = connected(A, limits=EngineLimits(message_bytes=250))
    sizes = {cid_of(number): size for number, size in enumerate([100, 100, 100, 300, 10])}
    engine.receive(A, wants(*sizes), 0.0)
    engine.resolve(A, sizes)
    assert [[size for _, size in each.blocks] for each in outputs(engine, A)] == [[100, 100], [100], [300], [10]]


def test_a_reply_that_could_not_be_written_is_kept_and_nothing_newer_is_lost() -> None:
    engine = connected(A)
    engine.receive(A, wants(cid_of(1), cid_of(2), cid_of(3)), 0.0)
    engine.resolve(A, {cid_of(1): SMALL, cid_of(2): None, cid_of(3): SMALL})
    failed = engine.next_output(A)
    assert failed is not None
    engine.receive(A, wants(cid_of(4)), 0.0)
    engine.resolve(A, {cid_of(4): SMALL})
    engine.add_block(cid_of(2), SMALL)
    engine.put_back(A, failed)
    assert output(engine, A).blocks == tuple((cid_of(number), SMALL) for number in (1, 3, 4, 2))


def test_what_a_peer_wants_and_is_owed_is_bounded_and_forgotten_when_it_disconnects() -> None:
    limits = EngineLimits(wants=10, replies=5)
    engine = connected(A, B, limits=limits)
    for start in range(0, 100, 20):
        batch = [cid_of(number) for number in range(start, start + 20)]
        engine.receive(A, wants(*batch), 0.0)
        engine.resolve(A, dict.fromkeys(batch[10:15], SMALL) | dict.fromkeys(batch[15:]))
    assert engine.sizes["wants"] <= limits.wants
    assert engine.sizes["blocks"] == engine.sizes["presences"] == limits.replies
    assert engine.counters["bitswap_wants_dropped"] > 0
    assert engine.counters["bitswap_replies_dropped"] > 0
    engine.receive(B, wants(cid_of(1)), 0.0)
    engine.resolve(B, {cid_of(1): SMALL})
    engine.set_peers({B}, 1.0)
    assert engine.sizes == {"wants": 0, "blocks": 1, "presences": 0, "requests": 0, "asked": 0, "own": 0}


# ---------------------------------------------------------------- fetching


def receive_block(engine: BitswapEngine, peer: bytes, number: int, now: float = 0.0) -> bool:
    received = engine.receive(peer, BitswapMessage(blocks=(block_of(number),)), now)
    return [block.data for block in received.blocks] == [block_of(number)]


def test_the_relaying_peer_is_asked_for_the_block_and_the_others_whether_they_have_it() -> None:
    engine = connected(A, B, C)
    engine.want(cid_of(1), digest_of(1), [B], 0.0)
    assert requests(engine, A, B, C) == {A: "have", B: "block", C: "have"}
    assert receive_block(engine, B, 1)
    assert requests(engine, A, B, C) == {A: "cancel", C: "cancel"}
    assert engine.sizes == dict.fromkeys(engine.sizes, 0)


def test_of_several_relaying_peers_one_is_asked_at_a_time_and_none_is_lost() -> None:
    limits = EngineLimits(asked_peers=2)
    engine = connected(A, B, C, limits=limits)
    engine.want(cid_of(1), digest_of(1), [D, B, C], 0.0)
    assert requests(engine, A, B, C) == {B: "block", C: "have"}
    engine.tick(limits.next_peer_after)  # neither has answered
    assert requests(engine, A, B, C) == {C: "block"}
    engine.want(cid_of(2), digest_of(2), [C, B], 0.0)
    assert requests(engine, A, B, C) == {C: "block", B: "have"}
    engine.receive(C, BitswapMessage(dont_haves=(cid_of(2),)), 0.0)
    assert requests(engine, A, B, C) == {B: "block"}


def test_without_a_relaying_peer_the_first_that_has_it_is_asked_and_then_the_next() -> None:
    limits = EngineLimits()
    engine = connected(A, B, C)
    engine.want(cid_of(1), digest_of(1), [], 0.0)
    assert requests(engine, A, B, C) == dict.fromkeys([A, B, C], "have")
    for peer in (B, C):
        engine.receive(peer, BitswapMessage(haves=(cid_of(1),)), 0.0)
    assert requests(engine, A, B, C) == {B: "block"}
    engine.tick(limits.next_peer_after - 0.1)
    assert requests(engine, A, B, C) == {}
    engine.tick(limits.next_peer_after)
    assert requests(engine, A, B, C) == {C: "block"}
    engine.receive(C, BitswapMessage(dont_haves=(cid_of(1),)), limits.next_peer_after)
    engine.tick(limits.repeat_after)
    assert requests(engine, A, B, C) == {B: "block"}  # once more, for want of others
    engine.receive(A, BitswapMessage(haves=(cid_of(1),)), limits.repeat_after)
    engine.set_peers({A, C}, limits.repeat_after)
    engine.tick(limits.repeat_after)
    assert requests(engine, A, C) == {A: "block"}


def test_a_peer_that_is_sending_is_given_its_time() -> None:
    limits = EngineLimits()
    engine = connected(A, B)
    engine.want(cid_of(1), digest_of(1), [A], 0.0)
    engine.receive(B, BitswapMessage(haves=(cid_of(1),)), 0.0)
    assert requests(engine, A, B) == {A: "block", B: "have"}
    engine.record_progress(A, limits.next_peer_after - 0.1)
    engine.record_progress(B, limits.next_peer_after - 0.1)  # which was not asked for the block
    engine.tick(limits.next_peer_after)
    assert requests(engine, A, B) == {}
    engine.tick(2 * limits.next_peer_after)
    assert requests(engine, A, B) == {B: "block"}


def test_a_peer_that_connects_later_is_asked_too_and_providers_at_once() -> None:
    engine = connected(A)
    engine.want(cid_of(1), digest_of(1), [], 0.0)
    assert not engine.is_exhausted(digest_of(1))
    engine.receive(A, BitswapMessage(dont_haves=(cid_of(1),)), 0.0)
    assert engine.is_exhausted(digest_of(1))
    engine.set_peers({A, B}, 1.0)
    assert requests(engine, A, B) == {A: "have", B: "have"}
    engine.prefer(digest_of(1), B, 1.0)
    assert requests(engine, A, B) == {B: "block"}
    engine.set_peers({A, B, C}, 1.0)
    engine.prefer(digest_of(1), D, 1.0)  # not connected yet
    engine.set_peers({A, B, C, D}, 1.1)
    assert requests(engine, A, B, C, D) == {C: "have", D: "block"}


def test_no_more_peers_than_the_limit_are_asked() -> None:
    peers = [b"peer %d" % number for number in range(100)]
    engine = connected(*peers)
    engine.want(cid_of(1), digest_of(1), [peers[99]], 0.0)
    asked = requests(engine, *peers)
    assert (len(asked), asked[peers[99]]) == (64, "block")


def test_blocks_that_were_not_asked_for_are_ignored() -> None:
    engine = connected(A, B)
    assert not receive_block(engine, A, 1)
    engine.want(cid_of(1), digest_of(1), [A], 0.0)
    assert not receive_block(engine, A, 2)
    assert not receive_block(engine, C, 1)  # not asked
    assert engine.is_asked(A)
    assert receive_block(engine, A, 1)
    assert not engine.is_asked(A)
    assert not receive_block(engine, A, 1)
    assert engine.counters["bitswap_blocks_unwanted"] == 4


def test_a_want_that_is_given_up_is_cancelled_at_all_that_know_it() -> None:
    engine = connected(A, B)
    engine.want(cid_of(1), digest_of(1), [A], 0.0)
    written = engine.next_output(A)
    assert written is not None
    engine.cancel(digest_of(1))
    engine.put_back(A, written)  # it could not be written, and the cancel is newer
    assert requests(engine, A, B) == {A: "cancel", B: "cancel"}
    assert not engine.is_asked(A)


def test_a_message_of_a_thousand_presences_costs_one_round() -> None:
    engine = connected(*(b"peer %d" % number for number in range(300)), A)
    engine.want(cid_of(1), digest_of(1), [A], 0.0)
    before = dict(requests(engine, A))
    engine.receive(A, BitswapMessage(haves=(cid_of(1),) * 1024, dont_haves=(cid_of(1),) * 1024), 0.0)
    assert before == {A: "block"}
    assert not engine.is_exhausted(digest_of(1))
    assert requests(engine, A) == {}


# ---------------------------------------------------------------- two engines


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_every_block_arrives_whatever_writes_fail(seed: int, count: int) -> None:
    """A has or gets all blocks, B wants them. Messages that fail are put back; both reconnect at any time."""
    random = Random(seed)
    numbers = list(range(count))
    here = {cid_of(number): block_of(number) for number in numbers if random.random() < 0.5}
    late = [number for number in numbers if cid_of(number) not in here]
    server, client = connected(B), connected(A)
    missing = {digest_of(number) for number in numbers}
    unwanted = list(numbers)
    now = 0.0
    for step in range(2000):
        now += random.random()
        lossy = step < 500
        if unwanted and random.random() < 0.3:
            number = unwanted.pop()
            client.want(cid_of(number), digest_of(number), [A] if random.random() < 0.5 else [], now)
        if late and random.random() < 0.1:
            number = late.pop()
            here[cid_of(number)] = block_of(number)
            server.add_block(cid_of(number), len(block_of(number)))
        if lossy and random.random() < 0.02:
            server.set_peers(set(), now)
            client.set_peers(set(), now)
            server.set_peers({B}, now)
            client.set_peers({A}, now)
        client.tick(now)
        for sender, to, receiver, source in ((client, A, server, B), (server, B, client, A)):
            message = sender.next_output(to)
            if message is None:
                continue
            if lossy and random.random() < 0.3:
                sender.put_back(to, message)
                continue
            missing -= transfer(message, receiver, source, here, now)
        if not missing:
            break
    assert not missing
    assert client.sizes["own"] == client.sizes["asked"] == 0


def transfer(
    message: Output, receiver: BitswapEngine, source: bytes, here: dict[bytes, bytes], now: float
) -> set[bytes]:
    """Hand a message over as bytes, and return the digests of the blocks that were wanted."""
    blocks: Iterable[tuple[bytes, bytes]] = [(cid, here[cid]) for cid, _ in message.blocks]
    body = write_message(V1_2, message.wants, message.haves, message.dont_haves, blocks)
    received = receiver.receive(source, read_message(body), now)
    receiver.resolve(source, {cid: len(here[cid]) if cid in here else None for cid in received.lookups})
    return {block.digest for block in received.blocks}


def test_a_peer_over_its_budget_waits_until_it_is_paid_and_another_does_not() -> None:
    """In virtual time: 2 a second for a peer, of which 8 at once."""
    budget = CaptureBudget(8.0, 1000.0, 4.0)

    async def test() -> None:
        assert not await _spend(budget, A, 8.0, {A, B})
        assert trio.current_time() == 0
        assert await _spend(budget, A, 10.0, {A, B})
        assert trio.current_time() == pytest.approx(5.0)
        assert not await _spend(budget, B, 8.0, {A, B})
        assert trio.current_time() == pytest.approx(5.0)

    trio.run(test, clock=MockClock(autojump_threshold=0))
