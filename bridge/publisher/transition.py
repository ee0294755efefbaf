"""The transition from the network's topic to topics by separator (CIP-120, Transition).

In the mode `cutover`, all nodes change at one moment, which is a time or a block height. In the mode `duplicate`, nodes
publish on both kinds of topics until that moment. In both modes, the bridge subscribes to both kinds, because nodes may
change early or late. After the moment it leaves the network's topic only if a phase-out is set, because updates without
a separator are always published there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec
import trio

from kiln.conf.process.files import replace_file
from kiln.conf.process.proxies import is_loopback
from kiln.schemas.wire.topics import Separator, format_topic, parse_topic

Mode = Literal["cutover", "duplicate"]


class TopicScheme(NamedTuple):
    """The topics on which messages about a separator are published: the network's, the separator's, or both."""

    network: bool
    separator: bool

    def topics_of(self, network: str, separator: Separator) -> tuple[str, ...]:
        """Return the names of the topics.

        Raises:
            TopicError: no topic name can be built from the separator.
        """
        by_separator = (format_topic(network, separator),) if self.separator else ()
        return (*by_separator, format_topic(network, None)) if self.network else by_separator


BY_NETWORK: Final = TopicScheme(network=True, separator=False)
BY_SEPARATOR: Final = TopicScheme(network=False, separator=True)
BOTH: Final = TopicScheme(network=True, separator=True)


def describe_unreached_peers(scheme: TopicScheme, network: str, peers: Iterable[Collection[str]]) -> str:
    """Describe the peers that receive no batch because they subscribe only to the network's topic.

    Args:
        scheme: the topics on which batches are published.
        peers: the topics of each peer.

    Returns:
        A warning for users; empty if there are no such peers.
    """
    if scheme.network:
        return ""
    network_topics = (
        [topic for name in names if (topic := parse_topic(name)) and topic.network == network] for names in peers
    )
    present = [topics for topics in network_topics if topics]
    alone = sum(all(topic.separator is None for topic in topics) for topics in present)
    if not alone:
        return ""
    return (
        f"{alone} of {len(present)} peers subscribe only to the network's topic, /ceramic/{network}. They receive no "
        "batches, because batches are published only on the topics of separators. While the network has such peers, "
        'set transition.mode = "duplicate".'
    )


# ---------------------------------------------------------------- the height


class HeightError(Exception):
    """The block height cannot be read. The message does not contain the URL, because the URL may contain a key."""


class _RpcFault(msgspec.Struct):
    message: str = ""


class _HeightReply(msgspec.Struct):
    result: str | None = None
    error: _RpcFault | None = None


_REPLY: Final = msgspec.json.Decoder(_HeightReply)
_MAX_RESPONSE: Final = 64 << 10  # bytes of a response
_REQUEST: Final = {"jsonrpc": "2.0", "id": 1, "method": "eth_blockNumber", "params": []}


def read_height(body: bytes) -> int:
    """Return the block number in a response to eth_blockNumber (Ethereum JSON-RPC specification).

    Raises:
        HeightError: the response has no block number.
    """
    try:
        reply = _REPLY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HeightError(f"the response is not JSON-RPC: {error}") from None
    if reply.error is not None:
        raise HeightError(f"the response is an error: {reply.error.message[:200]}")
    try:
        if reply.result is None or not reply.result.startswith("0x"):
            raise ValueError
        return int(reply.result, 16)
    except ValueError:
        raise HeightError(f"the response has no block number: {(reply.result or 'null')[:80]}") from None


def fetch_height(url: str, timeout: float) -> int:
    """Request the current block height of the chain.

    Args:
        timeout: seconds for the whole request, however slowly the response comes.

    Raises:
        HeightError: the URL returned no height.
    """
    try:
        return read_height(trio.run(_request_height, url, timeout))
    except trio.TooSlowError:
        raise HeightError(f"no complete response within {timeout:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise HeightError(f"no response: {type(error).__name__}") from None


async def _request_height(url: str, timeout: float) -> bytes:
    # timeouts of httpx are for each read, so that a byte now and then would keep a request alive
    with trio.fail_after(timeout):
        async with (
            httpx.AsyncClient(
                timeout=None, headers={"Accept-Encoding": "identity"}, trust_env=not is_loopback(url)
            ) as client,
            client.stream("POST", url, json=_REQUEST) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise HeightError(f"the response has status {response.status_code}")
            body = bytearray()
            async for part in response.aiter_raw():
                body += part
                if len(body) > _MAX_RESPONSE:
                    raise HeightError(f"the response is longer than {_MAX_RESPONSE} bytes")
    return bytes(body)


class HeightWatch:
    """A thread that polls the block height of the chain until `height` is reached, from `start()` to `stop()`.

    The time at which `height` was reached is saved in a file. So later starts know it even if the URL does not answer.
    """

    def __init__(
        self, url: str, height: int, path: Path, clock_us: Callable[[], int], every: float = 12.0, timeout: float = 10.0
    ) -> None:
        """Create the thread without starting it.

        Args:
            path: file in which the time is saved.
            every: seconds between two requests; Ethereum has a block every 12 s.
            timeout: seconds for a whole request.
        """
        self._url = url
        self.height = height
        self._path = path
        self._clock_us = clock_us
        self._every = every
        self._timeout = timeout
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="height", daemon=True)
        self.reached_at: int | None = self._load_reached_at()
        """time in µs at which a response first showed `height` or more; `None` before"""
        self.error: str | None = None
        """text for users if the height cannot be read, or the time cannot be saved"""

    def start(self) -> None:
        if self.reached_at is None:
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread without waiting for its current request."""
        self._stop.set()

    def _run(self) -> None:
        host = urlsplit(self._url).hostname
        while not self._stop.is_set():
            try:
                height = fetch_height(self._url, self._timeout)
            except HeightError as error:
                self.error = (
                    f"transition: cannot read the height of the chain from {host} ({error}). Check transition.rpc_url."
                )
            else:
                self.error = None
                if height >= self.height:
                    self._save_reached_at(self._clock_us())
                    return
            self._stop.wait(self._every)

    def _load_reached_at(self) -> int | None:
        try:
            content = msgspec.json.decode(self._path.read_bytes(), type=dict[str, int])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return content.get("reached_at") if content.get("height") == self.height else None

    def _save_reached_at(self, now: int) -> None:
        try:
            replace_file(self._path, msgspec.json.encode({"height": self.height, "reached_at": now}))
        except OSError as error:
            self.error = (
                f"transition: cannot write {self._path} ({error.strerror}). Check the disk; the next start requests "
                "the height again."
            )
        self.reached_at = now


# ---------------------------------------------------------------- the transition


@dataclass(frozen=True)
class Transition:
    """The topics on which batches are published now, and the subscription to the network's topic. Times in µs.

    If neither `at` nor `height` is set, a `cutover` is complete, and a `duplicate` lasts until the settings change.
    """

    clock_us: Callable[[], int]
    mode: Mode = "cutover"
    at: int | None = None
    height: HeightWatch | None = None
    phase_out: int = 0
    """time from the end of the transition until the bridge leaves the network's topic; 0 if it never leaves"""

    @property
    def _moment(self) -> int | None:
        """Time at which the transition ends or ended; `None` if unknown or never."""
        return self.at if self.height is None else self.height.reached_at

    @property
    def _is_over(self) -> bool:
        if self.at is None and self.height is None:
            return self.mode == "cutover"
        return self._moment is not None and self._moment <= self.clock_us()

    def publishing_scheme(self) -> TopicScheme:
        """Return the topics on which batches are published now."""
        if self._is_over:
            return BY_SEPARATOR
        return BOTH if self.mode == "duplicate" else BY_NETWORK

    def joins_network_topic(self) -> bool:
        """Return whether to subscribe to the network's topic now; the topics of separators are always joined."""
        if not self.phase_out or not self._is_over or self._moment is None:
            return True
        return self.clock_us() < self._moment + self.phase_out

    def describe(self) -> str:
        """Describe for users on which topics batches are published; empty if there is no transition."""
        if self.at is None and self.height is None and self.mode == "cutover":
            return ""
        if self._is_over:
            suffix = "" if self.joins_network_topic() else "; not subscribed to the network's topic"
            return f"{self.mode} completed: publishing on the topics of separators{suffix}"
        topics = "both topics" if self.mode == "duplicate" else "the network's topic"
        until = "" if self.height is None else f", until block {self.height.height}"
        return f"{self.mode}: publishing on {topics}{until}"

    @property
    def error(self) -> str | None:
        """The `error` of `height`, if any."""
        return None if self.height is None else self.height.error
