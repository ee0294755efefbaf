"""From the topic of the network to topics by separator: what is published and heard where; the height of the chain."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.publisher.transition import (
    BOTH,
    BY_NETWORK,
    BY_SEPARATOR,
    HeightError,
    HeightWatch,
    Transition,
    describe_unreached_peers,
    fetch_height,
    read_height,
)
from kiln.schemas.wire.topics import Separator, encode_separator_value, parse_topic
from kit.awaiting import PATIENCE, awaited
from kit.endless_http import Kind, endless_server

S = 1_000_000
AT = 1_000 * S
SEPARATOR = Separator("model", encode_separator_value(b"\x01\x02"))


def test_names_of_the_topics() -> None:
    by_separator = f"/ceramic/mainnet/sep/model/{SEPARATOR.value}"
    assert BY_SEPARATOR.topics_of("mainnet", SEPARATOR) == (by_separator,)
    assert BY_NETWORK.topics_of("mainnet", SEPARATOR) == ("/ceramic/mainnet",)
    assert BOTH.topics_of("mainnet", SEPARATOR) == (by_separator, "/ceramic/mainnet")
    assert [parse_topic(name) for name in BOTH.topics_of("mainnet", SEPARATOR)] == [
        ("mainnet", SEPARATOR),
        ("mainnet", None),
    ]


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: int = AT) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def test_without_a_moment_a_cutover_is_over_and_a_duplicate_goes_on() -> None:
    assert Transition(Clock()).publishing_scheme() == BY_SEPARATOR
    assert Transition(Clock()).joins_network_topic()
    assert Transition(Clock()).describe() == ""
    assert Transition(Clock(), "duplicate").publishing_scheme() == BOTH


def joins(clock: Clock, transition: Transition, *waits: int) -> list[bool]:
    """Return for each number of seconds after AT whether the transition joins the topic of the network."""
    joined = []
    for wait in waits:
        clock.now = AT + wait * S
        joined.append(transition.joins_network_topic())
    return joined


def test_cutover_at_a_time() -> None:
    clock = Clock(AT - 1)
    transition = Transition(clock, "cutover", at=AT, phase_out=10 * S)
    assert transition.publishing_scheme() == BY_NETWORK
    assert transition.describe() == "cutover: publishing on the network's topic"
    clock.now = AT
    assert transition.publishing_scheme() == BY_SEPARATOR
    assert transition.describe() == "cutover completed: publishing on the topics of separators"
    assert joins(clock, transition, -5, 0, 9, 10, 11) == [True, True, True, False, False]
    assert transition.describe() == (
        "cutover completed: publishing on the topics of separators; not subscribed to the network's topic"
    )


def test_duplicate_until_a_time() -> None:
    clock = Clock(AT - 1)
    transition = Transition(clock, "duplicate", at=AT)
    assert transition.publishing_scheme() == BOTH
    clock.now = AT
    assert transition.publishing_scheme() == BY_SEPARATOR
    clock.now = AT + 10**15
    assert transition.joins_network_topic()  # no phase-out


def test_cutover_at_a_height_is_when_it_was_seen(tmp_path: Path) -> None:
    clock = Clock()
    height = HeightWatch("http://127.0.0.1:1", 17, tmp_path / "transition.json", clock)
    transition = Transition(clock, "cutover", height=height, phase_out=10 * S)
    assert transition.publishing_scheme() == BY_NETWORK
    assert transition.describe() == "cutover: publishing on the network's topic, until block 17"
    height.reached_at = AT
    assert transition.publishing_scheme() == BY_SEPARATOR
    assert joins(clock, transition, 0, 9, 10) == [True, True, False]


@given(
    mode=st.sampled_from(["cutover", "duplicate"]),
    at=st.none() | st.integers(0, 100),
    phase_out=st.integers(0, 50),
    now=st.integers(0, 200),
    later=st.integers(0, 200),
)
def test_there_is_always_a_topic_and_no_way_back(
    mode: str, at: int | None, phase_out: int, now: int, later: int
) -> None:
    clock = Clock(now)
    transition = Transition(clock, "cutover" if mode == "cutover" else "duplicate", at, None, phase_out)
    scheme, joined = transition.publishing_scheme(), transition.joins_network_topic()
    assert scheme.topics_of("mainnet", SEPARATOR)
    assert joined or not scheme.network  # what is published on is heard
    clock.now += later
    if scheme == BY_SEPARATOR:
        assert transition.publishing_scheme() == BY_SEPARATOR
    if not joined:
        assert not transition.joins_network_topic()


# ---------------------------------------------------------------- the height


def test_peers_that_hear_no_batch_are_told_with_what_to_set() -> None:
    network, separator, other = "/ceramic/clay", "/ceramic/clay/sep/model/k1", "/ceramic/mainnet"
    peers = [{network}, {network, separator}, {f"{network}/"}, {other}, set[str]()]
    told = describe_unreached_peers(BY_SEPARATOR, "clay", peers)
    assert told.startswith("2 of 3 peers subscribe only to the network's topic, /ceramic/clay.")
    assert 'transition.mode = "duplicate"' in told
    assert describe_unreached_peers(BOTH, "clay", peers) == describe_unreached_peers(BY_NETWORK, "clay", peers) == ""
    assert describe_unreached_peers(BY_SEPARATOR, "clay", peers[1:2]) == ""


def test_answer_of_a_node() -> None:
    assert read_height(b'{"jsonrpc":"2.0","id":1,"result":"0x4b7"}') == 1207


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON-RPC"),
        (b"<html>", "not JSON-RPC"),
        (b"\xff", "not JSON-RPC"),
        (b"[]", "not JSON-RPC"),
        (b'{"result":12}', "not JSON-RPC"),
        (b'{"jsonrpc":"2.0","id":1}', "no block number: null"),
        (b'{"jsonrpc":"2.0","id":1,"result":"12"}', "no block number: 12"),
        (b'{"jsonrpc":"2.0","id":1,"result":"0x"}', "no block number: 0x"),
        (b'{"error":{"code":-32005,"message":"daily limit"}}', "an error: daily limit"),
    ],
)
def test_answer_that_is_none(body: bytes, says: str) -> None:
    with pytest.raises(HeightError, match=says):
        read_height(body)


class Chain:
    """A JSON-RPC on loopback: what it answers next is set by the test."""

    def __init__(self) -> None:
        self.height = 10
        self.status = 200
        self.body: bytes | None = None
        self.asked = 0
        chain = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert (request["method"], request["params"]) == ("eth_blockNumber", [])
                answer = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": hex(chain.height)}).encode()
                body = answer if chain.body is None else chain.body
                self.send_response(chain.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                chain.asked += 1

            def log_message(self, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v3/secret"


@pytest.fixture
def chain() -> Iterator[Chain]:
    made = Chain()
    yield made
    made.server.shutdown()
    made.server.server_close()


def watch(chain: Chain, path: Path, height: int = 20) -> HeightWatch:
    return HeightWatch(chain.url, height, path / "transition.json", lambda: AT, every=0.02, timeout=5)


def test_height_is_awaited_and_then_not_asked_for_again(chain: Chain, tmp_path: Path) -> None:
    seen = watch(chain, tmp_path)
    seen.start()
    assert awaited(lambda: chain.asked > 2)
    assert (seen.reached_at, seen.error) == (None, None)
    chain.height = 20
    assert awaited(lambda: seen.reached_at == AT)
    asked = chain.asked
    again = watch(chain, tmp_path)
    assert again.reached_at == AT  # over a restart, though nobody was asked
    again.start()
    assert chain.asked == asked
    assert watch(chain, tmp_path, height=21).reached_at is None  # another height is another moment


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (500, b"", "the response has status 500"),
        (200, b"<html>", "the response is not JSON-RPC"),
        (200, b'{"error":{"message":"daily limit"}}', "the response is an error: daily limit"),
    ],
)
def test_height_that_is_away_changes_nothing_and_is_told_without_the_url(
    status: int, body: bytes, says: str, chain: Chain, tmp_path: Path
) -> None:
    chain.height, chain.status, chain.body = 20, status, body
    seen = watch(chain, tmp_path)
    seen.start()
    assert awaited(lambda: seen.error is not None)
    assert seen.error is not None
    assert says in seen.error
    assert "from 127.0.0.1" in seen.error
    assert "secret" not in seen.error
    assert seen.reached_at is None
    chain.status, chain.body = 200, None
    assert awaited(lambda: seen.reached_at == AT)
    assert seen.error is None


def test_nobody_there(tmp_path: Path, free_port: int) -> None:
    seen = HeightWatch(f"http://127.0.0.1:{free_port}/secret", 5, tmp_path / "x.json", lambda: AT, every=0.02)
    seen.start()
    assert awaited(lambda: seen.error is not None)
    assert seen.error == (
        "transition: cannot read the height of the chain from 127.0.0.1 (no response: ConnectError). Check "
        "transition.rpc_url."
    )
    seen.stop()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("slow headers", "no complete response within 0.3 s"),
        ("slow body", "no complete response within 0.3 s"),
        ("endless body", "the response is longer than 65536 bytes"),
    ],
)
def test_response_without_an_end_is_left(kind: Kind, says: str) -> None:
    timeout = PATIENCE if kind == "endless body" else 0.3
    with endless_server(kind) as server:
        with pytest.raises(HeightError, match=says):
            fetch_height(server.url, timeout)
        assert server.hung_up.wait(PATIENCE)
        assert server.sent < 64 << 20  # what was under way in buffers


def test_file_that_cannot_be_read_is_no_height(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "transition.json").write_text("{")
    assert watch(chain, tmp_path).reached_at is None
