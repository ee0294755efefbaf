"""Bitswap on libp2p streams: `BitswapEngine` decides what to send, and this module reads and writes the messages.

Each side writes on streams that it opens itself; many peers open one for each message. The number of streams and the
CPU are limited for each peer, the bytes in memory for all peers together. A limit of bytes per second keeps blocks from
delaying the gossip on the same connections. Files are read in threads.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.network.stream.net_stream import NetStream
from trio_typing import TaskStatus

from kiln.bridge.gossipsub.wire import OversizedRpc, RpcSplitter, WireError, encode
from kiln.bridge.ipfs.bitswap.engine import BitswapEngine, Output
from kiln.bridge.ipfs.bitswap.messages import PROTOCOLS, MessageError, read_message, write_message
from kiln.bridge.ipfs.blocks import BlockUnavailableError, read_digest
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.libp2p.budget import CaptureBudget, UnfinishedRpcs
from kiln.bridge.libp2p.closing import BROKEN, reset_stream, shielded
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.streams import GossipStream
from kiln.conf.process.bounded_dict import BoundedDict
from kiln.schemas.wire.cid import cid_bytes

_READ_BYTES: Final = 64 * 1024
_WRITE_BYTES: Final = 64 * 1024  # written at a time, before other peers and gossip have their turn
_CPU_PERIOD: Final = 4.0  # s; a peer may use its CPU of this period at once
_SEND_PERIOD: Final = 0.5  # s; the bytes of this period may be sent at once
_CPU_TURN: Final = 0.005  # s of CPU for one peer's messages before the other tasks run
_LOOKUP_CPU: Final = 10e-6  # s for a CID that is looked up in the folder, in a thread
_BUDGET_CHECK_EVERY: Final = 1.0  # s
_TICK: Final = 0.25  # s between two rounds while a block is wanted
_IDLE_TICK: Final = 2.0  # s between two rounds otherwise
_LONGEST_BACKOFF: Final = 30.0  # s between two attempts to write to a peer
_MAX_SEARCHED: Final = 1_000  # blocks whose last search is remembered
_MAX_UNREAD: Final = 16  # written messages that are written again if the peer resets the stream


@dataclass(frozen=True)
class ExchangeOptions:
    """Limits of a `BlockExchange`. Sizes are in bytes, times in seconds."""

    max_bytes_per_second: int = 8 << 20  # of blocks and presences, to all peers
    max_message: int = 4 << 20  # Go and JavaScript send at most this
    max_unasked: int = 256 << 10  # of a message from a peer from which no block is requested
    max_streams: int = 192  # served at a time for one peer; Kubo opens one for each message
    unfinished_bytes: int = 64 << 20  # of all unfinished messages; beyond that the longest one is refused
    sending_bytes: int = 64 << 20  # of all messages being written; beyond that the longest one is tried again
    peer_cpu: float = 0.2  # for messages of one peer, as part of one core
    all_cpu: float = 0.3
    idle_timeout: float = 300.0  # a served stream without a message is closed
    open_timeout: float = 10.0
    stuck_after: float = 30.0  # a peer that accepts no bytes for this long has failed once
    max_failures: int = 6  # in a row; then the output for the peer is dropped
    linger: float = 2.0  # a written stream stays open for more messages
    file_threads: int = 4
    search_after: float = 1.0  # time that peers have to send a block before providers are looked up
    search_again_after: float = 300.0
    max_searches: int = 4  # at a time


ProviderSearch = Callable[[bytes, Callable[[bytes], None]], Awaitable[bool]]
"""Connects to providers of a multihash, and calls back with the id of each. Returns false if no DHT server answered."""


class _Fetch:
    """Callers that wait for one block."""

    def __init__(self) -> None:
        self.ended = trio.Event()  # the block has arrived, or no caller waits any more
        self.data: bytes | None = None
        self.waiting = 0


class _Writer:
    """State of the task that writes to one peer."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.filled = trio.Event()
        self.watch = trio.CancelScope()  # scope of the task that watches the written stream for a reset
        self.is_reset = False
        # true while a write to the socket is in progress: after an interrupted write, the connection cannot be used
        self.in_socket = False


class BlockExchange:
    """Bitswap of one libp2p node. Create it before the node runs, and await `run` once the node runs.

    Call all methods in the trio thread. The node's counters count events, under names that begin with bitswap_.
    """

    def __init__(
        self,
        node: Node,
        files: FolderBlockStore,
        options: ExchangeOptions | None = None,
        search: ProviderSearch | None = None,
    ) -> None:
        """Register the bitswap protocols at the node.

        Args:
            files: the blocks to serve.
            search: finds other providers if the connected peers do not send a block; `None` without a DHT.
        """
        self._node = node
        self._files = files
        self._options = options = options or ExchangeOptions()
        self._search_providers = search
        self._engine = BitswapEngine(counters=node.counters)
        self._speakers: set[bytes] = set()  # peers that opened a stream, perhaps before identify was done
        self._streams: Counter[bytes] = Counter()
        self._writers: dict[bytes, _Writer] = {}
        self._fetches: dict[bytes, _Fetch] = {}
        self._searched = BoundedDict[bytes, float](_MAX_SEARCHED)  # time of the last search by digest
        self._unfinished = UnfinishedRpcs[trio.CancelScope](options.unfinished_bytes)
        self._sending = UnfinishedRpcs[_Writer](options.sending_bytes)
        self._cpu = CaptureBudget(options.peer_cpu * _CPU_PERIOD, options.all_cpu * _CPU_PERIOD, _CPU_PERIOD)
        rate = options.max_bytes_per_second * _SEND_PERIOD
        self._send_budget = CaptureBudget(rate, rate, _SEND_PERIOD)
        self._file_limit = trio.CapacityLimiter(options.file_threads)
        self._search_limit = trio.CapacityLimiter(options.max_searches)
        self._woken = trio.Event()
        self._nursery: trio.Nursery | None = None
        for protocol in PROTOCOLS:
            node.serve(protocol, self._serve)

    # ------------------------------------------------------------------ life cycle

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve and fetch until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                while True:
                    self._update_peers()
                    self._engine.tick(trio.current_time())
                    self._start_writers()
                    self._woken = trio.Event()
                    with trio.move_on_after(_TICK if self._fetches else _IDLE_TICK):
                        await self._woken.wait()
        finally:
            self._nursery = None

    def _update_peers(self) -> None:
        self._speakers = {peer for peer in self._speakers if self._node.is_connected(peer)}
        peers = {peer for peer, _ in self._node.peers_speaking(*PROTOCOLS)} | self._speakers
        self._engine.set_peers(peers, trio.current_time())

    @property
    def peers(self) -> Collection[bytes]:
        """Live view of the ids of connected peers that speak bitswap."""
        return self._engine.peers

    @property
    def is_isolated(self) -> bool:
        """True if the node is connected to no bitswap peer, no gossip peer and no bootstrap peer."""
        node = self._node
        return not (self.peers or node.router.peers or any(map(node.is_connected, node.bootstrap)))

    @property
    def sizes(self) -> dict[str, int]:
        """Number of entries in each collection of the exchange and its engine, for tests of the limits."""
        return {**self._engine.sizes, "writers": len(self._writers), "streams": sum(self._streams.values())}

    # ------------------------------------------------------------------ blocks

    def add_block(self, cid: bytes, size: int) -> None:
        """Answer the wants of peers for a block that was added to the folder."""
        self._engine.add_block(cid, size)
        self._start_writers()

    async def fetch(self, cid: str, timeout: float, announcers: Sequence[bytes] = ()) -> bytes:
        """Fetch a block from peers within `timeout` seconds.

        Args:
            announcers: peers that announced the block, the most trusted first.

        Raises:
            BlockUnavailableError: no peer sent the block in time.
            BlockRefusedError: the hash of the CID is not sha2-256.
        """
        digest = read_digest(cid)
        fetch = self._fetches.setdefault(digest, _Fetch())
        fetch.waiting += 1
        try:
            self._update_peers()
            self._engine.want(cid_bytes(cid), digest, announcers, trio.current_time())
            self._start_writers()
            self._woken.set()
            with trio.move_on_after(timeout):
                if fetch.waiting == 1 and self._nursery is not None and self._needs_search(digest):
                    self._nursery.start_soon(self._search, digest, fetch)
                await fetch.ended.wait()
        finally:
            fetch.waiting -= 1
            if not fetch.waiting and self._fetches.get(digest) is fetch:
                del self._fetches[digest]
                fetch.ended.set()
                self._engine.cancel(digest)
                self._start_writers()
        if fetch.data is None:
            raise BlockUnavailableError(f"{cid[:80]}: none of {len(self.peers)} peers sent it in {timeout:g} s")
        return fetch.data

    async def _search(self, digest: bytes, fetch: _Fetch) -> None:
        """If the connected peers do not send a block, request it from providers that the DHT names."""
        assert self._search_providers is not None
        if not self._engine.is_exhausted(digest):
            with trio.move_on_after(self._options.search_after):
                await fetch.ended.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at, fetch.ended, nursery.cancel_scope)
            async with self._search_limit:
                if await self._search_providers(b"\x12\x20" + digest, partial(self._ask_provider, digest)):
                    self._searched[digest] = trio.current_time()
            nursery.cancel_scope.cancel()

    def _needs_search(self, digest: bytes) -> bool:
        if self._search_providers is None:
            return False
        return trio.current_time() - self._searched.get(digest, -math.inf) >= self._options.search_again_after

    def _ask_provider(self, digest: bytes, peer: bytes) -> None:
        self._node.counters["bitswap_providers_asked"] += 1
        self._speakers.add(peer)
        self._update_peers()
        self._engine.prefer(digest, peer, trio.current_time())
        self._start_writers()

    # ------------------------------------------------------------------ reading

    async def _serve(self, stream: INetStream) -> None:
        assert isinstance(stream, NetStream)
        peer = stream.muxed_conn.peer_id.to_bytes()
        if self._streams[peer] >= self._options.max_streams or self._nursery is None:
            self._node.counters["bitswap_streams_refused"] += 1
            await reset_stream(stream)
            return
        self._streams[peer] += 1
        self._speakers.add(peer)
        self._engine.add_peer(peer)
        scope = trio.CancelScope()
        completed = False
        try:
            with scope:
                await self._read_messages(peer, stream, scope)
                completed = True
        except BROKEN:
            pass
        except (WireError, MessageError):
            self._node.counters["bitswap_streams_unreadable"] += 1
        finally:
            self._unfinished.set_size(scope, 0)
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]
            with shielded(1), suppress(*BROKEN):
                await (stream.close() if completed else stream.reset())

    async def _read_messages(self, peer: bytes, stream: NetStream, scope: trio.CancelScope) -> None:
        """Read messages until the stream ends or is idle.

        Args:
            scope: scope of this call. It is cancelled if the unfinished messages of all streams are over the limit, and
                the largest one is on this stream.
        """
        options = self._options
        splitter = RpcSplitter(options.max_message, 1)
        protocol = str(stream.get_protocol())
        while True:
            try:
                with trio.fail_after(options.idle_timeout):
                    chunk = await stream.muxed_stream.read(_READ_BYTES)
            except (EOFError, trio.TooSlowError):
                return
            cpu = 0.0
            for body in splitter.feed(chunk):
                if isinstance(body, OversizedRpc):
                    raise WireError(f"the bitswap message has more than {options.max_message} bytes")
                started = time.thread_time()
                lookups = self._process(peer, body, protocol)
                cpu += time.thread_time() - started + len(lookups) * _LOOKUP_CPU
                if lookups:
                    sizes = await trio.to_thread.run_sync(self._files.find_sizes, lookups, limiter=self._file_limit)
                    self._engine.resolve(peer, sizes)
                self._start_writers()
                if cpu >= _CPU_TURN:  # thousands of messages may be in one chunk
                    await self._wait_for_cpu(peer, cpu)
                    cpu = 0.0
            if splitter.buffered > options.max_unasked and not self._engine.is_asked(peer):
                raise WireError(f"no block was requested, but the message has over {options.max_unasked} bytes")
            if splitter.buffered:
                self._engine.record_progress(peer, trio.current_time())
            largest = self._unfinished.set_size(scope, splitter.buffered)
            if largest is not None:
                self._node.counters["bitswap_messages_unfinished"] += 1
                largest.cancel()
            await self._wait_for_cpu(peer, cpu)

    def _process(self, peer: bytes, body: bytes, protocol: str) -> Sequence[bytes]:
        """Process a message, and return the CIDs whose block sizes the engine needs."""
        self._node.counters["bitswap_messages_received"] += 1
        received = self._engine.receive(peer, read_message(body, protocol), trio.current_time())
        for block in received.blocks:
            fetch = self._fetches.pop(block.digest, None)
            if fetch is not None:
                fetch.data = block.data
                fetch.ended.set()
        return received.lookups

    async def _wait_for_cpu(self, peer: bytes, cpu: float) -> None:
        if await _spend(self._cpu, peer, cpu, self._engine.peers):
            self._node.counters["bitswap_over_budget_cpu"] += 1
        else:
            await trio.lowlevel.checkpoint()

    # ------------------------------------------------------------------ writing

    def _start_writers(self) -> None:
        for peer in self._engine.peers_with_output():
            writer = self._writers.get(peer)
            if writer is not None:
                writer.filled.set()
            elif self._nursery is not None:
                self._writers[peer] = _Writer()
                self._nursery.start_soon(self._write, peer)

    async def _write(self, peer: bytes) -> None:
        """Write all queued messages of a peer, with back-off after failures."""
        failures = 0
        while self._engine.has_output(peer) and self._node.is_connected(peer):
            writer = self._writers[peer] = _Writer()
            is_written = False
            try:
                with writer.scope:
                    await self._write_stream(peer, writer)
                    is_written = True
            except BROKEN:
                pass
            finally:
                self._sending.set_size(writer, 0)
            if is_written:
                failures = 0
                continue
            failures += 1
            self._node.counters["bitswap_writes_failed"] += 1
            if writer.in_socket:
                # a frame may be half sent, so nothing more can be sent on this connection
                await self._node.disconnect(peer)
            if failures >= self._options.max_failures:
                self._engine.drop_output(peer)
            else:
                await trio.sleep(min(2.0 ** (failures - 1), _LONGEST_BACKOFF))
        del self._writers[peer]  # with no await since has_output, so that no output is left without a writer

    async def _write_stream(self, peer: bytes, writer: _Writer) -> None:
        """Open a stream to a peer, and write messages until none is left.

        On failure, raise one of `BROKEN`, and queue the last messages again, even written ones. Bitswap has no
        acknowledgements, so a peer that resets the stream may not have read what was written.
        """
        with trio.fail_after(self._options.open_timeout):
            stream = await self._node.stream_to(peer, *PROTOCOLS)
        assert self._nursery is not None
        self._nursery.start_soon(_watch_for_reset, stream, writer)
        unread = deque[Output](maxlen=_MAX_UNREAD)
        completed = False
        try:
            while not writer.is_reset:
                writer.filled = trio.Event()
                output = self._engine.next_output(peer)
                if output is not None:
                    unread.append(output)
                    missing = await self._send(peer, stream, writer, output)
                    self._engine.confirm(output, missing)
                    continue
                with trio.move_on_after(self._options.linger):
                    await writer.filled.wait()
                    continue
                if not self._engine.has_output(peer):
                    completed = True
                    return
            raise trio.BrokenResourceError("the peer has reset the stream")
        finally:
            writer.watch.cancel()
            if not completed:
                for output in reversed(unread):
                    self._engine.put_back(peer, output)
            with shielded(1), suppress(*BROKEN):
                await (stream.close() if completed else stream.reset())

    async def _send(self, peer: bytes, stream: NetStream, writer: _Writer, output: Output) -> Collection[bytes]:
        """Write a message, and return the CIDs of those blocks that are no longer in the folder."""
        cids = [cid for cid, _ in output.blocks]
        blocks: Mapping[bytes, bytes] = {}
        if cids:
            blocks = await trio.to_thread.run_sync(self._files.read_blocks, cids, limiter=self._file_limit)
        missing = [cid for cid in cids if cid not in blocks]
        message = write_message(
            str(stream.get_protocol()), output.wants, output.haves, (*output.dont_haves, *missing), blocks.items()
        )
        data = memoryview(encode(message))
        largest = self._sending.set_size(writer, len(data))
        if largest is not None:
            largest.scope.cancel()
        muxed = stream.muxed_stream
        assert isinstance(muxed, GossipStream)
        sent = 0
        while sent < len(data):
            await trio.lowlevel.checkpoint()  # a cancelled writer must not begin to write to the socket
            with trio.fail_after(self._options.stuck_after):
                await muxed.wait_for_window()
            size = min(muxed.send_window, _WRITE_BYTES, len(data) - sent)
            await _spend(self._send_budget, peer, size, self._writers)
            await self._write_chunk(muxed, writer, bytes(data[sent : sent + size]))
            sent += size
        self._sending.set_size(writer, 0)
        return missing

    async def _write_chunk(self, stream: GossipStream, writer: _Writer, data: bytes) -> None:
        """Write a chunk. The caller makes it fit into the send window of the stream, so only the socket can block."""
        writer.in_socket = True
        try:
            with trio.fail_after(self._options.stuck_after):
                await stream.write(data)
        except trio.TooSlowError:
            raise
        except BROKEN:
            writer.in_socket = False  # the stream was reset, or the connection is gone
            raise
        writer.in_socket = False


async def _spend(budget: CaptureBudget, peer: bytes, amount: float, peers: Collection[bytes]) -> bool:
    """Charge an amount to a peer's budget, and wait while the peer is over its budget.

    Args:
        amount: bytes or seconds of CPU, depending on the budget.
        peers: the peers that share the budget.

    Returns:
        True if the call had to wait.
    """
    pause = budget.spend(peer, amount, peers, trio.current_time())
    has_waited = bool(pause)
    while pause:
        await trio.sleep(min(pause, _BUDGET_CHECK_EVERY))
        pause = budget.spend(peer, 0, peers, trio.current_time())
    return has_waited


async def _watch_for_reset(stream: NetStream, writer: _Writer) -> None:
    with writer.watch:
        try:
            while True:
                await stream.muxed_stream.read(_READ_BYTES)
        except EOFError:
            return  # some peers close the unused direction
        except BROKEN:
            writer.is_reset = True
            writer.filled.set()


async def _cancel_at(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
