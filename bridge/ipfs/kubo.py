"""Client of Kubo's HTTP RPC (https://docs.ipfs.tech/reference/kubo/rpc/).

Every call is a POST. The status of the response shows the result:

- 200: the call succeeded.
- 500, or 400 for a wrong argument: the call failed. The body is JSON, `{"Message", "Code", "Type": "error"}`.
- 403, 404 or 405 with plain text: Kubo's HTTP handler rejected the call.

Any other response does not come from Kubo's RPC.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

import httpx
from multiformats import multicodec

from kiln.bridge.ipfs.blocks import (
    CODEC_UNSUPPORTED,
    TOO_LARGE,
    WRONG_CID,
    BlockRefusedError,
    BlockStoreUnavailableError,
    BlockUnavailableError,
    read_digest,
    refuse_too_large,
    verify_block,
)
from kiln.conf.process.proxies import is_loopback
from kiln.schemas.wire.batch_block import MAX_BLOCK
from kiln.schemas.wire.cid import CidError, cid_bytes, cid_text, parse_cid

_CODECS: Final = ("raw", "dag-pb", "dag-cbor", "dag-jose", "dag-json", "cbor", "json")
"""Codecs of the blocks that Kubo stores, by their names in the multicodec table."""
_CONNECT: Final = 5.0  # seconds
_CALL: Final = 15.0  # seconds for a call that needs no peer
_GRACE: Final = 5.0  # seconds beyond the node's timeout, so that the node reports the timeout itself
_MAX_ANSWER: Final = 1 << 20  # bytes of JSON
_MOST_PEERS_ANSWER: Final = 8 << 20  # bytes of JSON for a list of peers: thousands of peers, some hundred bytes each
_PROVIDE: Final = 60.0  # seconds for a walk through the DHT
_SET_ADDRESS: Final = "Set ipfs.api to the address of Kubo's RPC."


class KuboError(Exception):
    """Kubo reported an error. The message is Kubo's own text."""


class NoRoutingError(Exception):
    """The node cannot announce blocks, because it has no content routing (no DHT)."""


class _NoSuchCommandError(BlockStoreUnavailableError):
    """The server has no such RPC command."""


class NodeIdentity(NamedTuple):
    """Peer id of an IPFS node, and name and version of its program, such as "kubo 0.44.0"."""

    peer: str
    name: str


def auth_header(auth: str) -> dict[str, str]:
    """Return the HTTP header that authenticates at Kubo's RPC.

    Args:
        auth: a secret in the form of Kubo's setting API.Authorizations, "bearer:TOKEN" or "basic:USER:PASSWORD"; or ""
            for no header.

    Raises:
        ValueError: The secret has another form. The message does not contain the secret.
    """
    kind, _, secret = auth.partition(":")
    if kind == "bearer" and secret:
        return {"Authorization": f"Bearer {secret}"}
    if kind == "basic" and ":" in secret:
        user, _, password = secret.partition(":")
        request = next(httpx.BasicAuth(user, password).auth_flow(httpx.Request("POST", "http://localhost")))
        return {"Authorization": request.headers["Authorization"]}
    if auth:
        raise ValueError('cannot read ipfs.api_auth: expected "bearer:TOKEN" or "basic:USER:PASSWORD"')
    return {}


class Kubo:
    """Client for the RPC of one Kubo node: blocks, pins, connections and announcements. Thread-safe."""

    def __init__(self, url: str, auth: str = "", at_most: int = 16) -> None:
        """Create the client. Its first call connects to the node.

        Args:
            url: address of the RPC, such as "http://127.0.0.1:5001".
            auth: secret for the RPC, as for `auth_header`.
            at_most: maximum number of concurrent calls of `get`. Further connections are for the other calls.
        """
        self.url = url.rstrip("/")
        self._client = httpx.Client(
            headers={"Accept-Encoding": "identity", **auth_header(auth)},
            # in addition to the fetches: publisher, announcer, and the calls of `KuboBlockStore`
            limits=httpx.Limits(max_connections=at_most + 24, max_keepalive_connections=at_most),
            trust_env=not is_loopback(url),
        )
        self._closed = False

    # ------------------------------------------------------------ blocks

    def put(self, cid: str, data: bytes) -> None:
        """Store a block without pinning it. Raises the errors of `BlockStore.put`."""
        verify_block(cid, data)
        ours = cid_bytes(cid)
        options = {"cid-codec": _codec(cid, ours), "mhtype": "sha2-256", "mhlen": "32", "pin": "false"}
        try:
            answer = self._json("block/put", options, _CALL, files={"data": ("block", data)})
        except KuboError as error:
            if "big block" in str(error):
                raise BlockRefusedError(TOO_LARGE, f"{cid}: {self.url} rejects a block of this size: {error}") from None
            raise self._away(f"cannot store a block: {error}") from None
        theirs = answer.get("Key")
        if not isinstance(theirs, str):
            raise self._unexpected_answer("block/put", answer)
        if not _check_same_cid(theirs, ours):
            raise BlockRefusedError(WRONG_CID, f"{cid}: {self.url} stores this block under another CID, {theirs[:100]}")

    def get(self, cid: str, timeout: float, limit: int = MAX_BLOCK) -> bytes:
        """Implement `BlockStore.get`.

        If the connection breaks, raise `BlockUnavailableError`, because the node may have failed on this block only.
        """
        options = {"arg": _canonical_text(cid), "timeout": _go_duration(timeout)}
        ends_at = time.monotonic() + timeout + _GRACE
        data = bytearray()
        try:
            with self._post("block/get", options, timeout + _GRACE) as response:
                for part in response.iter_raw():
                    data += part
                    if len(data) > limit:
                        raise refuse_too_large(cid, limit)
                    if time.monotonic() > ends_at:
                        raise BlockUnavailableError(f"{cid}: received only {len(data)} bytes in {timeout:g} s")
        except KuboError as error:
            raise BlockUnavailableError(f"{cid}: {error}") from None
        except httpx.TimeoutException:
            raise BlockUnavailableError(f"{cid}: {self.url} did not answer in {timeout + _GRACE:g} s") from None
        except httpx.TransportError as error:
            raise BlockUnavailableError(f"{cid}: {self.url} stopped after {len(data)} bytes: {error}") from None
        try:
            return verify_block(cid, bytes(data))
        except BlockRefusedError:
            if data:
                raise
            raise BlockUnavailableError(f"{cid}: {self.url} sent no bytes") from None

    def pin(self, cid: str) -> None:
        """Protect this block from garbage collection, but not the blocks it links to. Keep a recursive pin as it is.

        Raises:
            BlockStoreUnavailableError: The node does not answer.
            BlockUnavailableError: The node has no such block.
        """
        usual = _canonical_text(cid)
        options = {"arg": usual, "recursive": "false", "timeout": _go_duration(_CALL)}
        try:
            answer = self._json("pin/add", options, _CALL + _GRACE)
        except KuboError as error:
            if "already pinned" in str(error):
                return
            raise BlockUnavailableError(f"cannot pin block {cid} at {self.url}: {error}") from None
        pins = answer.get("Pins")
        if not isinstance(pins, list) or usual not in pins:
            raise self._unexpected_answer("pin/add", answer)

    def unpin(self, cid: str) -> None:
        """Remove the direct pin of a block, if there is one. Raises the errors of `BlockStore.remove_older`."""
        try:
            self._json("pin/rm", {"arg": _canonical_text(cid), "recursive": "false"}, _CALL)
        except KuboError as error:
            if "not pinned" in str(error) or "pinned recursively" in str(error):
                return
            raise self._away(f"cannot unpin block {cid}: {error}") from None

    def close(self) -> None:
        """Implement `BlockStore.close`."""
        self._closed = True
        self._client.close()

    # ------------------------------------------------------------ the node

    def identity(self, timeout: float = _CALL) -> NodeIdentity:
        """Return the node's peer id, and the name and version of its program.

        Raises:
            BlockStoreUnavailableError: no node answers, or the response does not come from Kubo's RPC.
        """
        try:
            answer = self._json("id", {}, timeout)
        except KuboError as error:
            raise self._away(f"does not report its peer id: {error}") from None
        peer, agent = answer.get("ID"), answer.get("AgentVersion")
        if not isinstance(peer, str) or not isinstance(agent, str):
            raise self._unexpected_answer("id", answer)
        return NodeIdentity(peer, " ".join(agent.split("/")[:2]))

    def connect(self, *multiaddrs: str, timeout: float = _CALL) -> None:
        """Connect the node to a peer, unless they are connected already.

        Args:
            multiaddrs: addresses of one peer; the first that works is used.
            timeout: seconds that the node may take.

        Raises:
            KuboError: The node cannot connect.
            BlockStoreUnavailableError: The node does not answer.
        """
        options: dict[str, str | list[str]] = {"arg": list(multiaddrs), "timeout": _go_duration(timeout)}
        self._json("swarm/connect", options, timeout + _GRACE)

    def disconnect(self, peer: str) -> None:
        """Disconnect the node from a peer, if they are connected.

        Raises:
            KuboError: The node refuses.
            BlockStoreUnavailableError: The node does not answer.
        """
        self._json("swarm/disconnect", {"arg": f"/p2p/{peer}"}, _CALL)

    def connected(self) -> frozenset[str]:
        """Return the ids of the peers that the node is connected to.

        Raises:
            KuboError, BlockStoreUnavailableError: the call failed.
        """
        answer = self._json("swarm/peers", {}, _CALL, most=_MOST_PEERS_ANSWER)
        peers = answer.get("Peers") or []
        if not isinstance(peers, list) or not all(isinstance(peer, dict) for peer in peers):
            raise self._unexpected_answer("swarm/peers", answer)
        return frozenset(str(peer.get("Peer")) for peer in peers)

    def routes(self) -> bool:
        """Return false if the node's configuration disables content routing (Routing.Type is "none")."""
        try:
            return self._json("config", {"arg": "Routing.Type"}, _CALL).get("Value") != "none"
        except (KuboError, BlockStoreUnavailableError):  # the RPC's authorizations may not allow `config`
            return True  # without content routing, `provide` fails

    def provide(self, cid: str, timeout: float = _PROVIDE) -> None:
        """Announce through the node's content routing, usually the DHT, that the node has this block.

        Raises:
            NoRoutingError: The node has no content routing.
            KuboError: The node cannot announce the block.
            BlockStoreUnavailableError: The node does not answer.
        """
        options = {"arg": _canonical_text(cid), "timeout": _go_duration(timeout)}
        ends_at = time.monotonic() + timeout + _GRACE
        try:
            with self._post("routing/provide", options, timeout + _GRACE) as response:
                _read(response, _MAX_ANSWER, ends_at)  # events of the DHT walk, if any
        except _NoSuchCommandError as error:
            raise NoRoutingError(str(error)) from None
        except KuboError as error:
            if "Provide.Enabled" in str(error):
                raise NoRoutingError(str(error)) from None
            raise
        except httpx.TransportError as error:
            raise self._away(f"did not complete the call routing/provide: {error}") from None

    # ------------------------------------------------------------ HTTP

    def _json(
        self,
        command: str,
        options: Mapping[str, str | list[str]],
        timeout: float,
        files: Mapping[str, tuple[str, bytes]] | None = None,
        most: int = _MAX_ANSWER,
    ) -> dict[str, object]:
        ends_at = time.monotonic() + timeout
        try:
            with self._post(command, options, timeout, files) as response:
                body = _read(response, most, ends_at)
        except httpx.TimeoutException:
            raise self._away(f"did not answer the call {command} within {timeout:g} s") from None
        except httpx.TransportError as error:
            raise self._away(f"did not complete the call {command}: {error}") from None
        try:
            answer = json.loads(body)
        except ValueError:
            raise self._unexpected_answer(command, body[:200].decode(errors="replace")) from None
        if not isinstance(answer, dict):
            raise self._unexpected_answer(command, answer)
        return answer

    @contextmanager
    def _post(
        self,
        command: str,
        options: Mapping[str, str | list[str]],
        timeout: float,
        files: Mapping[str, tuple[str, bytes]] | None = None,
    ) -> Iterator[httpx.Response]:
        """Call an RPC command, and yield its response if the status is 200.

        Errors of httpx that occur after connecting are not converted.

        Raises:
            KuboError: The node reports an error.
            BlockStoreUnavailableError: The node does not answer.
        """
        ends_at = time.monotonic() + timeout
        try:
            with self._client.stream(
                "POST",
                f"{self.url}/api/v0/{command}",
                params=dict(options),
                files=files,
                timeout=httpx.Timeout(timeout, connect=_CONNECT),
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise self._failure(command, response, ends_at)
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise self._away(f"does not answer: {error or type(error).__name__}") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise self._away(f"cannot be called: {error}. {_SET_ADDRESS}") from None
        except RuntimeError:
            if not self._closed:
                raise
            raise BlockStoreUnavailableError("the bridge is stopping") from None

    def _failure(self, command: str, response: httpx.Response, ends_at: float) -> Exception:
        body = _read(response, _MAX_ANSWER, ends_at)
        try:
            said = json.loads(body)
        except ValueError:
            said = None
        if isinstance(said, dict) and isinstance(said.get("Message"), str):
            return KuboError(said["Message"])
        status = f"{response.status_code} {response.reason_phrase}".strip()
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            return self._away(f"refuses the call {command} ({status}). Check ipfs.api_auth.")
        if response.status_code == httpx.codes.NOT_FOUND:
            return _NoSuchCommandError(f"the IPFS node at {self.url} has no call {command} ({status}). {_SET_ADDRESS}")
        return self._away(f"answers the call {command} with {status}. {_SET_ADDRESS}")

    def _away(self, text: str) -> BlockStoreUnavailableError:
        return BlockStoreUnavailableError(f"the IPFS node at {self.url} {text}")

    def _unexpected_answer(self, command: str, answer: object) -> BlockStoreUnavailableError:
        return self._away(
            f"answers the call {command} with {str(answer)[:200]!r}, which is not a response of Kubo. {_SET_ADDRESS}"
        )


def _read(response: httpx.Response, limit: int, ends_at: float) -> bytes:
    """Read the body of a response. Stop early, and without an error, once more than `limit` bytes are read.

    Args:
        ends_at: time of the monotonic clock by which the body must end.

    Raises:
        httpx.ReadTimeout: the body has not ended by then.
    """
    body = bytearray()
    for part in response.iter_raw():
        body += part
        if len(body) > limit:
            break
        if time.monotonic() > ends_at:
            raise httpx.ReadTimeout("the response has not ended in time", request=response.request)
    return bytes(body)


def _canonical_text(cid: str) -> str:
    """Return a CID in the spelling that Kubo uses.

    Raises:
        BlockRefusedError: The text is not a CID of sha2-256.
    """
    read_digest(cid)
    return cid_text(cid_bytes(cid))


def _codec(cid: str, raw: bytes) -> str:
    """Return Kubo's name for the codec of a CIDv1.

    Raises:
        BlockRefusedError: Kubo does not store blocks of the codec, or the CID has version 0.
    """
    version, code, *_ = parse_cid(raw)
    name = multicodec.get(code=code).name if version == 1 and multicodec.exists(code=code) else ""
    if name not in _CODECS:
        raise BlockRefusedError(CODEC_UNSUPPORTED, f"{cid}: Kubo stores only CIDv1 blocks with {', '.join(_CODECS)}")
    return str(name)


def _check_same_cid(text: str, raw: bytes) -> bool:
    try:
        return cid_bytes(text) == raw
    except CidError:
        return False


def _go_duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"
