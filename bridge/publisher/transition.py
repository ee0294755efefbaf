"""From the topic of the network to topics by separator (CIP-120, Transition): on which to publish, which to hear.

Two ways. `cutover`: all nodes change over at one moment, a time or a block height. `duplicate`: for a while everything
is published on both. Both are heard, either way: before the change for those who are early, after it for the late.
The topic of the network stays heard for good, unless a phase-out is set: what has no separator is said there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec

from kiln.schemas.wire.topics import Separator, parse_topic, topic_name

Mode = Literal["cutover", "duplicate"]


class TopicScheme(NamedTuple):
    """Which topics of a separator's messages: that of the network, that of the separator."""

    network: bool
    separator: bool

    def of(self, network: str, separator: Separator) -> tuple[str, ...]:
        """Their names. TopicError."""
        by_separator = (topic_name(network, separator),) if self.separator else ()
        return (*by_separator, topic_name(network, None)) if self.network else by_separator


BY_NETWORK: Final = TopicScheme(network=True, separator=False)
BY_SEPARATOR: Final = TopicScheme(network=False, separator=True)
BOTH: Final = TopicScheme(network=True, separator=True)


def unreached(on: TopicScheme, network: str, peers: Iterable[Collection[str]]) -> str:
    """How many peers hear no batch, because they are on the topic of the network alone, and what to do; empty: none.

    `on`: the topics on which batches go out. `peers`: the topics of each peer.
    """
    if on.network:
        return ""
    theirs = ([topic for name in names if (topic := parse_topic(name)) and topic.network == network] for names in peers)
    there = [topics for topics in theirs if topics]
    alone = sum(all(topic.separator is None for topic in topics) for topics in there)
    if not alone:
        return ""
    return (
        f"{alone} of {len(there)} peers are on the topic of the network alone, /ceramic/{network}, and hear no batch: "
        "batches go out on the topics of separators. While the network has such peers, set "
        'transition.mode = "duplicate"'
    )


@dataclass(frozen=True)
class Transition:
    """How it goes. Times in µs since the epoch, durations in µs.

    With neither `at` nor `height`, a cutover is over, and a `duplicate` goes on until the settings change.
    """

    mode: Mode = "cutover"
    at: int | None = None
    height: int | None = None
    phase_out: int = 0
    """0: the topic of the network stays heard"""

    def over_since(self, reached_at: int | None) -> int | None:
        """When it ends or ended; None: not known yet, or never. `reached_at`: when the height was, None: not yet."""
        return reached_at if self.height is not None else self.at

    def _over(self, now: int, reached_at: int | None) -> bool:
        if self.at is None and self.height is None:
            return self.mode == "cutover"
        since = self.over_since(reached_at)
        return since is not None and since <= now

    def published_on(self, now: int, reached_at: int | None = None) -> TopicScheme:
        """On which topics a batch goes out now."""
        if self._over(now, reached_at):
            return BY_SEPARATOR
        return BOTH if self.mode == "duplicate" else BY_NETWORK

    def hears_network(self, now: int, reached_at: int | None = None) -> bool:
        """Whether to be on the topic of the network now. On those of separators the bridge always is."""
        if not self.phase_out or not self._over(now, reached_at):
            return True
        since = self.over_since(reached_at)
        return since is None or now < since + self.phase_out

    def in_words(self, now: int, reached_at: int | None = None) -> str:
        """What is published where, for people; empty where there is no transition."""
        if self.at is None and self.height is None and self.mode == "cutover":
            return ""
        if self._over(now, reached_at):
            heard = "" if self.hears_network(now, reached_at) else ", which alone are heard"
            return f"{self.mode} is over: published on the topics of separators{heard}"
        where = "both topics" if self.mode == "duplicate" else "the topic of the network"
        until = "" if self.height is None else f", until block {self.height}"
        return f"{self.mode}: published on {where}{until}"


# ---------------------------------------------------------------- the height


class HeightError(Exception):
    """The height could not be had; the text says why, without the URL, which may hold a key."""


class _Fault(msgspec.Struct):
    message: str = ""


class _Reply(msgspec.Struct):
    result: str | None = None
    error: _Fault | None = None


_REPLY: Final = msgspec.json.Decoder(_Reply)
_REQUEST: Final = {"jsonrpc": "2.0", "id": 1, "method": "eth_blockNumber", "params": []}


def read_height(body: bytes) -> int:
    """The block number in the answer to eth_blockNumber (Ethereum JSON-RPC specification). HeightError."""
    try:
        reply = _REPLY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HeightError(f"its answer is no JSON-RPC: {error}") from None
    if reply.error is not None:
        raise HeightError(f"it answers with an error: {reply.error.message[:200]}")
    try:
        if reply.result is None or not reply.result.startswith("0x"):
            raise ValueError
        return int(reply.result, 16)
    except ValueError:
        raise HeightError(f"its answer holds no block number: {(reply.result or 'null')[:80]}") from None


def ask_height(client: httpx.Client, url: str) -> int:
    """The height of the chain now. HeightError."""
    try:
        response = client.post(url, json=_REQUEST)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise HeightError(f"it does not answer: {type(error).__name__}") from None
    if response.status_code != httpx.codes.OK:
        raise HeightError(f"it answers with status {response.status_code}")
    return read_height(response.content)


class HeightWatch:
    """Asks for the height in a thread of its own, from `start()` to `stop()`, until it has reached the one awaited.

    That it has is kept in a file, so that a later start knows it though the URL is away.
    """

    def __init__(
        self, url: str, height: int, path: Path, clock_us: Callable[[], int], every: float = 12.0, timeout: float = 10.0
    ) -> None:
        """`every`: seconds between two questions; a block of Ethereum takes 12."""
        self._url = url
        self._height = height
        self._path = path
        self._clock_us = clock_us
        self._every = every
        self._timeout = timeout
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="height", daemon=True)
        self.reached_at: int | None = self._kept()
        """When the height was seen to be reached, µs; None: not yet."""
        self.error: str | None = None
        """Why the height is not known now, in words; everything stays as it was."""

    def start(self) -> None:
        if self.reached_at is None:
            self._thread.start()

    def stop(self) -> None:
        """Does not wait for a question that is under way."""
        self._stop.set()

    def _run(self) -> None:
        host = urlsplit(self._url).hostname
        proxied = host not in ("localhost", "127.0.0.1", "::1")  # a proxy's loopback is not ours
        with httpx.Client(timeout=self._timeout, trust_env=proxied) as client:
            while not self._stop.is_set():
                try:
                    height = ask_height(client, self._url)
                except HeightError as error:
                    self.error = f"transition: the height of the chain is not known, asking {host}: {error}"
                else:
                    self.error = None
                    if height >= self._height:
                        self._keep(self._clock_us())
                        return
                self._stop.wait(self._every)

    def _kept(self) -> int | None:
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=dict[str, int])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return kept.get("reached_at") if kept.get("height") == self._height else None

    def _keep(self, now: int) -> None:
        try:
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps({"height": self._height, "reached_at": now}))
            fresh.replace(self._path)
        except OSError as error:
            self.error = f"transition: {self._path} cannot be written ({error.strerror}): a later start asks again"
        self.reached_at = now
