"""The client of Kubo's RPC against a server on loopback that answers as Kubo does, and as what stands in its way does.

Answers are Kubo's to the byte where it matters: chunked, with the trailer it announces; errors as JSON with 500 or
400; its handler's own in plain text.
"""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

from kiln.bridge.ipfs.blocks import Announcer, BlockRefusedError, BlockStoreUnavailableError, BlockUnavailableError
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.ipfs.kubo import Kubo, KuboError, NoRoutingError, auth_header
from kiln.bridge.ipfs.neighbours import BitswapPeer
from kiln.bridge.ipfs.node import KuboBlockStore
from kiln.conf.process.bridge_status import IpfsStatus
from kiln.schemas.wire.cid import cid_text, compute_cid
from kit.awaiting import PATIENCE, wait_until
from kit.endless_http import Kind, endless_server

DATA = b"\xa1dtips\xa0"
CID = cid_text(compute_cid(DATA))
OTHER = cid_text(compute_cid(b"other"))
PEER = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWM68GyFKBT9JsuTRB6CYkF61PtMuSkynUauSQEGBX51JW"


class Asked(NamedTuple):
    """One request."""

    method: str
    command: str
    options: dict[str, str]
    headers: dict[str, str]
    body: bytes


Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """One connection: what is asked is noted, what is answered is as told."""

    protocol_version = "HTTP/1.1"
    server: FakeKubo

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        command = url.path.removeprefix("/api/v0/")
        options = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.server.asked.append(Asked(self.command, command, options, dict(self.headers), body))
        answer = self.server.answers.get(command)
        if answer is None:
            plain(404, "404 page not found")(self)
        else:
            answer(self)

    def head(self, status: int, content_type: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": content_type, "Vary": "Origin", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def version_string(self) -> str:
        return "kubo/0.44.0"

    def log_message(self, *args: object) -> None:
        pass


class FakeKubo(ThreadingHTTPServer):
    """Answers by command; `asked` is what was asked, in order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Answer] = {}
        self.asked: list[Asked] = []
        self.go_on = threading.Event()
        """what waits in an answer goes on"""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the client may leave in the middle of an answer: that is what some tests are about


def kubo_json(value: object, status: int = 200) -> Answer:
    """As go-ipfs-cmds writes a value: one line of JSON, chunked, with an empty trailer."""

    def answer(handler: Handler) -> None:
        body = json.dumps(value).encode() + b"\n"
        handler.head(
            status, "application/json", X_Chunked_Output="1", Trailer="X-Stream-Error", Transfer_Encoding="chunked"
        )
        handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))

    return answer


def kubo_error(message: str, status: int = 500, code: int = 0) -> Answer:
    return kubo_json({"Message": message, "Code": code, "Type": "error"}, status)


def kubo_bytes(*parts: bytes, ends: bool = True) -> Answer:
    """As Kubo streams a block; without its end if it `ends` not: the connection is closed in the middle."""

    def answer(handler: Handler) -> None:
        handler.head(200, "text/plain", X_Stream_Output="1", Trailer="X-Stream-Error", Transfer_Encoding="chunked")
        for part in parts:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        if ends:
            handler.wfile.write(b"0\r\n\r\n")
        else:
            handler.close_connection = True

    return answer


def plain(status: int, text: str, content_type: str = "text/plain; charset=utf-8") -> Answer:
    """As Kubo's handler, or something before it, answers."""

    def answer(handler: Handler) -> None:
        handler.head(status, content_type, Content_Length=str(len(text) + 1))
        handler.wfile.write(text.encode() + b"\n")

    return answer


def hang_up(handler: Handler) -> None:
    """No answer, and the connection is closed."""
    handler.close_connection = True


def half_of_its_length(handler: Handler) -> None:
    """Fewer bytes than it said."""
    handler.head(200, "application/json", Content_Length="100")
    handler.wfile.write(b'{"Key":"')
    handler.close_connection = True


def silence(handler: Handler) -> None:
    """Nothing at all, until the test is over."""
    handler.server.go_on.wait(60)
    handler.close_connection = True


HTML = "<html><body><h1>502 Bad Gateway</h1></body></html>"
NO_RPC: list[tuple[Answer, str]] = [
    (plain(404, "404 page not found"), "404"),
    (plain(405, "405 - Method Not Allowed"), "405"),
    (plain(502, HTML, "text/html"), "502"),
    (plain(200, HTML, "text/html"), "not a response of Kubo"),
    (plain(302, ""), "302"),
    (kubo_json(["no", "object"]), "not a response of Kubo"),
    (kubo_json({"No": "such"}), "not a response of Kubo"),
]
"""Not Kubo: to be waited out, as it is for a person to mend."""
_STORED = {"block/put": kubo_json({"Key": CID, "Size": len(DATA)}), "pin/add": kubo_json({"Pins": [CID]})}
"""A block that is put."""


@pytest.fixture
def kubo() -> Iterator[FakeKubo]:
    server = FakeKubo()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(kubo: FakeKubo, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubo]:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # a node is never asked through a proxy
    client = Kubo(kubo.url)
    yield client
    client.close()


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL at which nobody answers. The port is held: else another program, or another test, takes it and answers."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


# ---------------------------------------------------------------- put


def test_a_block_is_put_with_its_codec_and_not_pinned_by_that(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers["block/put"] = kubo_json({"Key": CID, "Size": len(DATA)})
    client.put(CID, DATA)
    (asked,) = kubo.asked
    assert asked.method == "POST"
    assert asked.options == {"cid-codec": "dag-cbor", "mhtype": "sha2-256", "mhlen": "32", "pin": "false"}
    form = message_from_bytes(b"Content-Type: " + asked.headers["Content-Type"].encode() + b"\r\n\r\n" + asked.body)
    whole, part = form.walk()
    assert whole.get_content_type() == "multipart/form-data"
    assert part.get_payload(decode=True) == DATA
    assert "Origin" not in asked.headers  # Kubo refuses those of browsers


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        (0x55, "raw"),
        (0x85, "dag-jose"),
        (0x70, "dag-pb"),
        (0x71, "dag-cbor"),
        (0x0129, "dag-json"),
        (0x51, "cbor"),
        (0x0200, "json"),
    ],
)
def test_each_codec_has_kubos_name(kubo: FakeKubo, client: Kubo, codec: int, name: str) -> None:
    cid = cid_text(compute_cid(DATA, codec))
    kubo.answers["block/put"] = kubo_json({"Key": cid, "Size": len(DATA)})
    client.put(cid, DATA)
    assert kubo.asked[0].options["cid-codec"] == name


def test_a_codec_that_kubo_cannot_put_is_refused_unasked(kubo: FakeKubo, client: Kubo) -> None:
    for cid in (
        cid_text(compute_cid(DATA, 0x4242)),
        cid_text(compute_cid(DATA, 0x72)),
        cid_text(b"\x12\x20" + compute_cid(DATA, 0x70)[4:]),
    ):
        with pytest.raises(BlockRefusedError) as refused:
            client.put(cid, DATA)
        assert refused.value.reason == "cid_codec_unsupported"
    assert not kubo.asked


def test_other_bytes_than_the_cids_are_refused_unasked(kubo: FakeKubo, client: Kubo) -> None:
    with pytest.raises(BlockRefusedError) as refused:
        client.put(OTHER, DATA)
    assert refused.value.reason == "block_hash_mismatch"
    assert not kubo.asked


def test_a_block_kept_under_another_cid_is_not_kept(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers["block/put"] = kubo_json({"Key": OTHER, "Size": len(DATA)})
    with pytest.raises(BlockRefusedError, match=OTHER) as refused:
        client.put(CID, DATA)
    assert refused.value.reason == "block_cid_mismatch"


def test_the_same_cid_in_another_base_is_the_same(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers["block/put"] = kubo_json({"Key": CID.upper(), "Size": len(DATA)})
    client.put(CID, DATA)


def test_a_block_too_large_for_bitswap_is_refused(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers["block/put"] = kubo_error(
        "produced block is over 1MiB: big blocks can't be exchanged with other peers. consider using UnixFS for "
        "automatic chunking of bigger files, or pass --allow-big-block to override"
    )
    with pytest.raises(BlockRefusedError, match="big blocks") as refused:
        client.put(CID, DATA)
    assert refused.value.reason == "block_too_large"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (kubo_error("write /data/ipfs/blocks/put-1: no space left on device"), "no space left"),
        (kubo_error('argument "data" is required', 400, 1), "is required"),
        (hang_up, "did not complete"),
        (half_of_its_length, "did not complete"),
        *NO_RPC,
    ],
)
def test_a_put_that_fails_waits(kubo: FakeKubo, client: Kubo, answer: Answer, words: str) -> None:
    kubo.answers["block/put"] = answer
    with pytest.raises(BlockStoreUnavailableError, match=words):
        client.put(CID, DATA)


# ---------------------------------------------------------------- get


def test_a_block_is_got_by_its_usual_cid(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers["block/get"] = kubo_bytes(DATA[:3], DATA[3:])
    assert client.get(CID.upper(), 2.5) == DATA
    assert kubo.asked[0].options == {"arg": CID, "timeout": "2500ms"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (kubo_error("context deadline exceeded"), "context deadline exceeded"),
        (kubo_error(f"block was not found locally (offline): ipld: could not find {CID}"), "could not find"),
        (kubo_bytes(DATA[:3], ends=False), "stopped after 3 bytes"),
        (kubo_bytes(), "sent no bytes"),
        (hang_up, "stopped after"),
    ],
)
def test_a_block_that_does_not_come_is_unavailable_for_now(
    kubo: FakeKubo, client: Kubo, answer: Answer, words: str
) -> None:
    kubo.answers["block/get"] = answer
    with pytest.raises(BlockUnavailableError) as unavailable:
        client.get(CID, 1.0)
    assert words in str(unavailable.value)


@pytest.mark.parametrize(("answer", "words"), [each for each in NO_RPC if each[1] != "not a response of Kubo"])
def test_what_is_no_kubo_has_no_blocks_to_give_up_on(kubo: FakeKubo, client: Kubo, answer: Answer, words: str) -> None:
    kubo.answers["block/get"] = answer
    with pytest.raises(BlockStoreUnavailableError, match=words):
        client.get(CID, 1.0)


def test_other_bytes_are_refused_for_good(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers["block/get"] = kubo_bytes(DATA + b"\0")
    with pytest.raises(BlockRefusedError) as refused:
        client.get(CID, 1.0)
    assert refused.value.reason == "block_hash_mismatch"


@pytest.mark.parametrize("cid", ["bogus", cid_text(b"\x01\x71\x00\x04" + bytes(4))])
def test_what_cannot_be_checked_is_not_asked_for(kubo: FakeKubo, client: Kubo, cid: str) -> None:
    for call in (lambda: client.get(cid, 1.0), lambda: client.pin(cid), lambda: client.unpin(cid)):
        with pytest.raises(BlockRefusedError):
            call()
    assert not kubo.asked


def test_reading_stops_beyond_the_limit(kubo: FakeKubo, client: Kubo) -> None:
    def endless(handler: Handler) -> None:
        handler.head(200, "text/plain", X_Stream_Output="1", Transfer_Encoding="chunked")
        try:
            for _ in range(1024):  # 64 MiB
                handler.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
        except OSError:
            handler.server.go_on.set()
            raise

    kubo.answers["block/get"] = endless
    with pytest.raises(BlockRefusedError, match="100,000 bytes") as refused:
        client.get(CID, 60.0, limit=100_000)
    assert refused.value.reason == "block_too_large"
    assert kubo.go_on.wait(60), "the rest of it is read still"


def test_a_block_of_just_the_limit_is_not_too_large(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers["block/get"] = kubo_bytes(DATA)
    assert client.get(CID, 1.0, limit=len(DATA)) == DATA


def test_a_block_that_comes_drop_by_drop_is_given_up_in_time(
    kubo: FakeKubo, client: Kubo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiln.bridge.ipfs.kubo._GRACE", 0.2)

    def drip(handler: Handler) -> None:
        handler.head(200, "text/plain", X_Stream_Output="1", Transfer_Encoding="chunked")
        for _ in range(12_000):
            if not handler.server.go_on.wait(0.05):
                handler.wfile.write(b"1\r\n\0\r\n")

    kubo.answers["block/get"] = drip
    with pytest.raises(BlockUnavailableError, match=r"received only \d+ bytes"):
        client.get(CID, 0.3)


# ---------------------------------------------------------------- silence and absence


def test_silence_ends_in_time(kubo: FakeKubo, client: Kubo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiln.bridge.ipfs.kubo._GRACE", 0.1)
    monkeypatch.setattr("kiln.bridge.ipfs.kubo._CALL", 0.2)
    kubo.answers |= dict.fromkeys(("block/get", "block/put", "pin/add", "pin/rm", "id"), silence)
    with pytest.raises(BlockUnavailableError, match="did not answer"):
        client.get(CID, 0.1)
    calls: list[Callable[[], None]] = [
        lambda: client.put(CID, DATA),
        lambda: client.pin(CID),
        lambda: client.unpin(CID),
    ]
    for call in calls:
        with pytest.raises(BlockStoreUnavailableError, match="did not answer the call"):
            call()
    with pytest.raises(BlockStoreUnavailableError, match="did not answer the call id"):
        client.identity(0.1)


def test_nobody_there_is_away(nobody: str) -> None:
    client = Kubo(nobody)
    for call in (
        lambda: client.put(CID, DATA),
        lambda: client.get(CID, 1.0),
        lambda: client.pin(CID),
        lambda: client.unpin(CID),
        lambda: client.identity(),
        lambda: client.connect(PEER),
    ):
        with pytest.raises(BlockStoreUnavailableError, match="does not answer") as away:
            call()
        assert nobody in str(away.value)
    client.close()


@pytest.mark.parametrize("url", ["http://", "http://127.0.0.1:x", "ftp://127.0.0.1", "http://no such host"])
def test_an_address_of_nobody_is_away(url: str) -> None:
    with pytest.raises(BlockStoreUnavailableError):
        Kubo(url).identity(1.0)


def test_a_closed_client_is_away_and_no_fault(client: Kubo) -> None:
    client.close()
    with pytest.raises(BlockStoreUnavailableError, match="stopping"):
        client.get(CID, 1.0)


# ---------------------------------------------------------------- pins


def test_a_pin_is_of_the_block_alone(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers |= {"pin/add": kubo_json({"Pins": [CID]}), "pin/rm": kubo_json({"Pins": [CID]})}
    client.pin(CID)
    client.unpin(CID)
    for asked in kubo.asked:
        assert (asked.options["arg"], asked.options["recursive"]) == (CID, "false")
    assert kubo.asked[0].options["timeout"] == "15000ms"  # Kubo would look for a block it lacks for ever


def test_what_is_pinned_otherwise_is_left_so(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers["pin/add"] = kubo_error(f"pin: {CID} already pinned recursively")
    client.pin(CID)
    for message in ("not pinned or pinned indirectly", f"{CID} is pinned recursively"):
        kubo.answers["pin/rm"] = kubo_error(message)
        client.unpin(CID)


def test_a_block_that_is_not_there_is_not_pinned(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers["pin/add"] = kubo_error("context deadline exceeded")
    with pytest.raises(BlockUnavailableError, match="context deadline exceeded"):
        client.pin(CID)
    kubo.answers["pin/rm"] = kubo_error("lock /data/ipfs/repo.lock: someone else has the lock")
    with pytest.raises(BlockStoreUnavailableError, match="someone else has the lock"):
        client.unpin(CID)


def test_a_pin_of_something_else_is_none(kubo: FakeKubo, client: Kubo) -> None:
    for answer in ({"Pins": [OTHER]}, {"Pins": None}, {}):
        kubo.answers["pin/add"] = kubo_json(answer)
        with pytest.raises(BlockStoreUnavailableError, match="not a response of Kubo"):
            client.pin(CID)


@pytest.mark.parametrize(("answer", "words"), NO_RPC[:5])
def test_pins_wait_for_kubo(kubo: FakeKubo, client: Kubo, answer: Answer, words: str) -> None:
    kubo.answers |= {"pin/add": answer, "pin/rm": answer}
    for call in (client.pin, client.unpin):
        with pytest.raises(BlockStoreUnavailableError, match=words):
            call(CID)


# ---------------------------------------------------------------- the node

IDENTITY = {
    "ID": "12D3KooWM68GyFKBT9JsuTRB6CYkF61PtMuSkynUauSQEGBX51JW",
    "PublicKey": "CAESIKg=",
    "Addresses": [PEER],
    "AgentVersion": "kubo/0.44.0/0f2aa4d",
    "Protocols": ["/ipfs/bitswap/1.2.0"],
}


def test_who_answers(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers["id"] = kubo_json(IDENTITY)
    assert client.identity() == (IDENTITY["ID"], "kubo 0.44.0")


def test_a_connection_to_a_peer(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers["swarm/connect"] = kubo_json({"Strings": ["connect 12D3KooWM68G success"]})
    client.connect(PEER)
    assert kubo.asked[0].options["arg"] == PEER
    kubo.answers["swarm/connect"] = kubo_error("connect 12D3KooWM68G failure: failed to dial: connection refused")
    with pytest.raises(KuboError, match="failed to dial"):
        client.connect(PEER)


def test_a_peer_at_several_addresses_and_the_end_of_it(kubo: FakeKubo, client: Kubo) -> None:
    name = PEER.rpartition("/")[2]
    kubo.answers |= dict.fromkeys(("swarm/connect", "swarm/disconnect"), kubo_json({"Strings": ["success"]}))
    client.connect(PEER, f"/ip4/192.0.2.1/tcp/1/p2p/{name}", timeout=2.0)
    assert (kubo.asked[0].options["arg"], kubo.asked[0].options["timeout"]) == (
        f"/ip4/192.0.2.1/tcp/1/p2p/{name}",
        "2000ms",
    )
    client.disconnect(name)
    assert kubo.asked[1].options["arg"] == f"/p2p/{name}"
    kubo.answers["swarm/peers"] = kubo_json({"Peers": [{"Addr": "/ip4/192.0.2.1/tcp/1", "Peer": name}]})
    assert client.connected() == {name}
    kubo.answers["swarm/peers"] = kubo_json({"Peers": None})
    assert client.connected() == frozenset()
    kubo.answers["swarm/peers"] = kubo_json({"Peers": 3})
    with pytest.raises(BlockStoreUnavailableError, match="not a response of Kubo"):
        client.connected()


def test_who_has_a_block_is_told_to_the_routing_where_there_is_one(kubo: FakeKubo, client: Kubo) -> None:
    kubo.answers["routing/provide"] = kubo_bytes()
    client.provide(CID)
    assert kubo.asked[0].options == {"arg": CID, "timeout": "60000ms"}
    kubo.answers["routing/provide"] = kubo_error("cannot provide, no connected peers")
    with pytest.raises(KuboError, match="no connected peers"):
        client.provide(CID)
    kubo.answers["routing/provide"] = hang_up
    with pytest.raises(BlockStoreUnavailableError, match="did not complete"):
        client.provide(CID)
    for no_routing in (
        plain(404, "404 page not found"),
        kubo_error("invalid configuration: Provide.Enabled is set to 'false'"),
    ):
        kubo.answers["routing/provide"] = no_routing
        with pytest.raises(NoRoutingError):
            client.provide(CID)


@pytest.mark.parametrize(
    ("answer", "routes"),
    [
        (kubo_json({"Key": "Routing.Type", "Value": "none"}), False),
        (kubo_json({"Key": "Routing.Type", "Value": "auto"}), True),
        (kubo_error('failed to get config value: "Routing.Type not found"'), True),
        (plain(403, "403 - Forbidden"), True),
    ],
)
def test_whether_a_node_routes(kubo: FakeKubo, client: Kubo, answer: Answer, routes: bool) -> None:
    kubo.answers["config"] = answer
    assert client.routes() is routes


def test_a_node_that_wants_a_secret_gets_it(kubo: FakeKubo) -> None:
    def guarded(handler: Handler) -> None:
        good = handler.headers.get("Authorization") in (
            "Bearer s3cret",
            "Basic " + base64.b64encode(b"me:a:b").decode(),
        )
        (kubo_json(IDENTITY) if good else plain(403, "Kubo RPC Access Denied: Please provide a valid token"))(handler)

    kubo.answers["id"] = guarded
    for auth in ("bearer:s3cret", "basic:me:a:b"):
        assert Kubo(kubo.url, auth).identity().peer == IDENTITY["ID"]
    for auth in ("", "bearer:wrong"):
        with pytest.raises(BlockStoreUnavailableError, match=r"403 .*ipfs\.api_auth"):
            Kubo(kubo.url, auth).identity()
    with pytest.raises(ValueError, match="expected") as wrong:
        auth_header("s3cret")
    assert "s3cret" not in str(wrong.value)


def test_the_node_is_kept_connected_and_says_how_it_is(kubo: FakeKubo, tmp_path: Path) -> None:
    kubo.answers |= {
        "id": kubo_json(IDENTITY),
        "config": kubo_json({"Key": "Routing.Type", "Value": "none"}),
        "swarm/connect": kubo_json({"Strings": ["connect success"]}),
    }
    again = threading.Event()
    calls = 0

    def second_time(handler: Handler) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:  # a whole round of two is over by then, and told
            again.set()
        kubo_error("connect 12D3KooWM68G failure: failed to dial")(handler)

    node = KuboBlockStore(Kubo(kubo.url), FolderBlockStore(tmp_path), [PEER, PEER], every=0.05)
    try:
        wait_until(lambda: "not checked yet" not in node.describe(), node.describe)
        about = f"kubo 0.44.0 at {kubo.url}, without content routing, 2 of 2 peers of ipfs.peers connected"
        assert node.describe() == about
        kubo.answers["swarm/connect"] = second_time
        assert again.wait(60)
        kubo.answers["block/get"] = kubo_bytes(DATA)
        assert node.get(CID, 1.0) == DATA
    finally:
        node.close()
    assert "0 of 2 peers of ipfs.peers connected; connect 12D3KooWM68G failure" in node.describe()
    with pytest.raises(BlockStoreUnavailableError):
        node.get(CID, 1.0)


def test_a_neighbour_is_dialled_at_once_and_again_and_hung_up_on_when_it_is_gone(
    kubo: FakeKubo, tmp_path: Path
) -> None:
    name = "12D3KooWG2uXrVbEqZRQk8rqGNsBmY2jJ5tPpdkqK3sNbKDPJz6x"
    there = set[str]()

    def connect(handler: Handler) -> None:
        there.add(kubo.asked[-1].options["arg"])
        kubo_json({"Strings": ["success"]})(handler)

    def disconnect(handler: Handler) -> None:
        there.clear()
        kubo_json({"Strings": ["success"]})(handler)

    def peers(handler: Handler) -> None:
        kubo_json({"Peers": [{"Peer": each.rpartition("/")[2]} for each in there]})(handler)

    kubo.answers |= {"id": kubo_json(IDENTITY), "config": kubo_json({"Value": "auto"})}
    kubo.answers |= {"swarm/connect": connect, "swarm/disconnect": disconnect, "swarm/peers": peers}
    kubo.answers |= {"routing/provide": kubo_bytes(), **_STORED}
    node = KuboBlockStore(Kubo(kubo.url), FolderBlockStore(tmp_path), every=0.5)
    try:
        wait_until(lambda: "not checked yet" not in node.describe(), node.describe)
        node.put(CID, DATA)
        node.connect_gossip_peers([BitswapPeer(name, ("/ip4/192.0.2.1/tcp/1",))])
        wait_until(lambda: there == {f"/ip4/192.0.2.1/tcp/1/p2p/{name}"}, "a connection")
        there.clear()  # lost
        wait_until(lambda: bool(there), "another connection")
        wait_until(lambda: node.describe().endswith(f" at {kubo.url}, 1 of 1 gossip peers connected"), node.describe)
        node.connect_gossip_peers([])
        wait_until(lambda: not there, "the end of the connection")
        kubo.answers["block/get"] = kubo_bytes(DATA)
        announcers = [Announcer(name, ""), Announcer("10.0.0.1:6881", "10.0.0.1:6881"), Announcer("", "")]
        assert node.get(CID, 1.0, announcers=announcers) == DATA
        wait_until(lambda: there == {f"/p2p/{name}"}, "a connection with the announcer")
        wait_until(lambda: node.status() == IpfsStatus(connections=1, provided=1), lambda: str(node.status()))
    finally:
        node.close()


def test_blocks_are_unpinned_when_their_time_is_over_also_after_a_restart(kubo: FakeKubo, tmp_path: Path) -> None:
    kubo.answers |= {"id": kubo_json(IDENTITY), "config": kubo_json({"Value": "none"}), **_STORED}
    node = KuboBlockStore(Kubo(kubo.url), FolderBlockStore(tmp_path / "blocks"))
    node.put(CID, DATA)
    node.close()
    assert "pin/add" in [asked.command for asked in kubo.asked]
    node = KuboBlockStore(Kubo(kubo.url), FolderBlockStore(tmp_path / "blocks"))
    try:
        now = time.time_ns() // 1_000
        assert not node.remove_older(now - 60_000_000)
        assert "pin/rm" not in [asked.command for asked in kubo.asked]
        kubo.answers["pin/rm"] = plain(403, "403 - Forbidden")
        with pytest.raises(BlockStoreUnavailableError):
            node.remove_older(now + 60_000_000)
        kubo.answers["pin/rm"] = kubo_json({"Pins": [CID]})
        assert not node.remove_older(now + 60_000_000)  # the rest of the folder
        assert not node.remove_older(now + 60_000_000)
        assert [asked.options for asked in kubo.asked if asked.command == "pin/rm"] == [
            {"arg": CID, "recursive": "false"}
        ] * 2
        assert list((tmp_path / "blocks").iterdir()) == []
    finally:
        node.close()


def test_the_end_does_not_wait_for_the_routing(kubo: FakeKubo, tmp_path: Path) -> None:
    answered = threading.Event()

    def provide(handler: Handler) -> None:
        silence(handler)
        answered.set()

    kubo.answers |= {"id": kubo_json(IDENTITY), "config": kubo_json({"Value": "auto"}), "routing/provide": provide}
    kubo.answers |= _STORED
    node = KuboBlockStore(Kubo(kubo.url), FolderBlockStore(tmp_path))
    wait_until(lambda: "not checked yet" not in node.describe(), node.describe)
    node.put(CID, DATA)
    wait_until(lambda: any(asked.command == "routing/provide" for asked in kubo.asked), "the call")
    node.close()
    assert not answered.is_set()


def test_an_rpc_for_blocks_alone_is_no_fault(kubo: FakeKubo, tmp_path: Path) -> None:
    kubo.answers |= {"id": kubo_json(IDENTITY), "block/get": kubo_bytes(DATA)}
    kubo.answers |= dict.fromkeys(("swarm/peers", "config"), plain(403, "403 - Forbidden"))
    node = KuboBlockStore(Kubo(kubo.url), FolderBlockStore(tmp_path), every=0.05)
    try:
        node.connect_gossip_peers(
            [BitswapPeer("12D3KooWG2uXrVbEqZRQk8rqGNsBmY2jJ5tPpdkqK3sNbKDPJz6x", ("/ip4/192.0.2.1/tcp/1",))]
        )
        wait_until(lambda: "gossip peers are not connected: " in node.describe(), node.describe)
        assert node.get(CID, 1.0) == DATA
    finally:
        node.close()


def test_a_node_that_is_away_is_said_to_be(nobody: str, tmp_path: Path) -> None:
    node = KuboBlockStore(Kubo(nobody), FolderBlockStore(tmp_path))
    try:
        wait_until(lambda: "not checked yet" not in node.describe(), node.describe)
        assert "does not answer" in node.describe()
        with pytest.raises(BlockStoreUnavailableError):
            node.put(CID, DATA)
    finally:
        node.close()


@pytest.mark.parametrize("kind", ["slow body", "endless body"])
def test_response_without_an_end_is_left(kind: Kind) -> None:
    with endless_server(kind) as server:
        kubo = Kubo(server.url)
        with pytest.raises(BlockStoreUnavailableError):
            kubo.identity(0.3 if kind == "slow body" else PATIENCE)
        assert server.hung_up.wait(PATIENCE)
        assert server.sent < 64 << 20  # what was under way in buffers
        kubo.close()
