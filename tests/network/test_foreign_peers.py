"""The foreign peers talk to each other: what a test finds wrong with them is then not theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.foreign_peer import ForeignPeer, ForeignPeerError, NewPeer, Received, build_payload

pytest_plugins = ["kit.foreign_fixtures"]

TOPIC = "/ceramic/testnet-foreign"
COUNT = 100
SIZE = 300
RATE = 100  # Kubo loses what comes faster than a busy machine lets it verify


def meet(one: ForeignPeer, two: ForeignPeer) -> None:
    """Connected, both on the topic, and each knowing that of the other."""
    one.subscribe(TOPIC)
    one.connect(two)
    two.wait_connected(one)
    two.subscribe(TOPIC)
    one.wait_subscriber(TOPIC, two)
    two.wait_subscriber(TOPIC, one)


def numbers(messages: list[Received]) -> list[bytes]:
    return sorted(each.data for each in messages)


def exchange(one: ForeignPeer, two: ForeignPeer, *, signed: bool = True) -> None:
    """100 messages both ways: all come, once, as they were sent and from whom."""
    meet(one, two)
    for source, target in ((one, two), (two, one)):
        outcome = source.publish(TOPIC, COUNT, rate=RATE, size=SIZE, tag=source.name)
        assert (outcome.sent, outcome.failed) == (COUNT, 0), outcome.text
        received = target.wait_received(COUNT, TOPIC)
        assert numbers(received) == sorted(build_payload(source.name, number, SIZE) for number in range(COUNT))
        assert {each.author for each in received} == ({source.peer} if signed else {None})
        assert all((each.seqno is not None) == signed for each in received)
        if outcome.ids and signed:
            assert sorted(outcome.ids) == sorted(f"{each.author}/{(each.seqno or b'').hex()}" for each in received)


def test_js_and_js(js_peer: NewPeer) -> None:
    exchange(js_peer(), js_peer(key="secp256k1"))


def test_js_and_js_unsigned(js_peer: NewPeer) -> None:
    exchange(js_peer(signing="none"), js_peer(signing="none"), signed=False)


def test_go_and_js(go_peer: NewPeer, js_peer: NewPeer) -> None:
    exchange(go_peer(), js_peer())


def test_js_and_go(go_peer: NewPeer, js_peer: NewPeer) -> None:
    exchange(js_peer(protocol="1.0.0"), go_peer())


def test_rust_and_js(rust_peer: NewPeer, js_peer: NewPeer) -> None:
    exchange(rust_peer(), js_peer(key="rsa"))


def test_rust_and_js_unsigned(rust_peer: NewPeer, js_peer: NewPeer) -> None:
    exchange(rust_peer(signing="none", protocol="1.1.0"), js_peer(signing="none"), signed=False)


def test_rust_and_go(rust_peer: NewPeer, go_peer: NewPeer) -> None:
    exchange(rust_peer(key="secp256k1"), go_peer())


def test_rust_and_rust_by_ids_of_their_own(rust_peer: NewPeer) -> None:
    exchange(rust_peer(ids="own"), rust_peer(ids="own"))


def test_chain_hands_on(go_peer: NewPeer, js_peer: NewPeer, rust_peer: NewPeer) -> None:
    """go – js – rust: what go says comes to rust by way of js, with go's RSA signature on it."""
    go, js, rust = go_peer(), js_peer(), rust_peer()
    meet(go, js)
    meet(rust, js)
    js.wait_mesh(TOPIC, rust)
    rust.wait_mesh(TOPIC, js)
    go.publish(TOPIC, COUNT, rate=RATE, tag="far")
    received = rust.wait_received(COUNT, TOPIC)
    assert numbers(received) == sorted(build_payload("far", number, 0) for number in range(COUNT))
    assert {(each.author, each.via) for each in received} == {(go.peer, js.peer)}


def test_signed_messages_are_refused_where_nobody_signs(js_peer: NewPeer, rust_peer: NewPeer) -> None:
    strict, none, last = js_peer(), rust_peer(signing="none"), rust_peer(signing="none")
    meet(none, strict)
    assert strict.publish(TOPIC, 5, tag="signed").sent == 5
    meet(last, none)
    # the one that refused is still there for others, and by then would have told of the five
    assert last.publish(TOPIC, 1, tag="unsigned").sent == 1
    assert [each.data for each in none.wait_received(1)] == [build_payload("unsigned", 0, 0)]


def test_unsubscribing_and_leaving_are_seen(js_peer: NewPeer, go_peer: NewPeer) -> None:
    js, go = js_peer(), go_peer()
    meet(js, go)
    go.unsubscribe(TOPIC)
    js.wait_for(lambda: (TOPIC, go.peer) not in js.subscribers, what="go unsubscribed")
    js.stop()
    go.wait_for(lambda: js.peer not in go.connected, what="js gone")


def test_raw_bytes_arrive(js_peer: NewPeer, go_peer: NewPeer) -> None:
    js, go = js_peer(), go_peer()
    meet(js, go)
    data = bytes(range(256))
    assert js.publish_raw(TOPIC, data).sent == 1
    assert [each.data for each in go.wait_received(1)] == [data]
    assert go.publish_raw(TOPIC, data[::-1]).sent == 1
    assert [each.data for each in js.wait_received(1)] == [data[::-1]]


def test_go_peer_started_again_is_the_same(go_peer: NewPeer, tmp_path: Path) -> None:
    first = go_peer(tmp_path / "again")
    first.stop()
    assert go_peer(tmp_path / "again").peer == first.peer


@pytest.mark.parametrize("kind", ["go", "js", "rust"])
def test_refusals_are_told(kind: str, request: pytest.FixtureRequest) -> None:
    new: NewPeer = request.getfixturevalue(f"{kind}_peer")
    peer = new()
    with pytest.raises(ForeignPeerError, match="connect"):
        peer.connect(f"/ip4/127.0.0.1/tcp/1/p2p/{peer.peer[:-1]}{'a' if peer.peer[-1] != 'a' else 'b'}")
    with pytest.raises(ForeignPeerError, match="no command"):
        peer.command("dance")


@pytest.mark.parametrize("kind", ["go", "js", "rust"])
def test_port_in_use_is_told(kind: str, taken_port: int, request: pytest.FixtureRequest) -> None:
    new: NewPeer = request.getfixturevalue(f"{kind}_peer")
    with pytest.raises(ForeignPeerError, match="has ended"):
        new(port=taken_port)


def test_lock_file_names_no_place(root: Path) -> None:
    for name in ("package.json", "package-lock.json", ".npmrc"):
        text = (root / "tests" / "network" / "js" / name).read_text()
        assert "://" not in text
        assert '"resolved"' not in text
