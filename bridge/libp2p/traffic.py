"""The path of RPCs between the streams of peers and the router. Each RPC is captured as a frame in the sink.

* In: bytes -> RPCs (kiln.bridge.gossipsub.wire) -> router -> frame.
* Out: router -> queue of the peer -> frame -> bytes.

Each peer has budgets of received bytes, sent bytes and CPU (`PeerAccounts`). While a peer exceeds one, the node reads
from it or writes to it more slowly.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Final, NamedTuple

import trio

from kiln.bridge.capture.tap import Sink
from kiln.bridge.gossipsub.effects import Deliver, PeerID, Send
from kiln.bridge.gossipsub.router import Router
from kiln.bridge.gossipsub.wire import OversizedRpc, RpcSplitter, WireError, encode
from kiln.bridge.libp2p.budget import CaptureBudget, UnfinishedRpcs
from kiln.bridge.libp2p.closing import BROKEN
from kiln.bridge.libp2p.inflow import READ_BYTES
from kiln.bridge.libp2p.links import InboundStream, PeerAccount, PeerAccounts, PeerLink, PubsubSession, QueuedRpc
from kiln.bridge.libp2p.options import NodeOptions
from kiln.bridge.libp2p.streams import GossipStream
from kiln.schemas.kafka.frames import CUT_PAYLOAD, read_rpc
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import Verdict

_FRAMES_BETWEEN_CHECKPOINTS: Final = 32
_CPU_TURN: Final = 0.005  # s of CPU for one peer's RPCs before the other tasks run
_CPU_PERIOD: Final = 4.0  # s; a peer may use its CPU of this period at once
_CPU_AFTER_DISCONNECT: Final = 0.1  # s for the remaining RPCs of a disconnected peer
# Two queries verify the messages that the node does not. Each query takes up to a millisecond for a message, within
# `kiln.schemas.wire.identity.MAX_RPC_COST` for an RPC. An honest peer sends hardly any such message, because they are
# on topics to which the node is not subscribed.
_UNCHECKED_CPU: Final = 0.004  # s
_MAX_UNCHECKED: Final = 200
_UNCHECKED_BYTES: Final = 150  # minimum size of a signed message
_WRITE_BYTES: Final = 32 * 1024  # frames are captured as they are written, so that few are in flight when a write fails


class Budgets(NamedTuple):
    """Budgets for captured bytes, received and sent, and for seconds of CPU for received RPCs."""

    bytes_in: CaptureBudget
    bytes_out: CaptureBudget
    cpu: CaptureBudget


class Traffic:
    """Reads, routes, captures and writes the RPCs of all sessions. Use it only in the trio thread.

    Args:
        router: Decides what is sent.
        sink: Stores each frame. While it is full, nothing is read or written.
        links: The connected peers, which the node adds and removes.
        counters: Numbers of events of the node, by name.
        on_message: Called for the first valid copy of each message on a joined topic.
        on_graylisted: Called with the session of a peer whose score is below the graylist threshold.
        disconnect: Called with a peer id to close all connections with the peer, without waiting for the end.
    """

    def __init__(
        self,
        options: NodeOptions,
        router: Router,
        sink: Sink,
        links: Mapping[bytes, PeerLink],
        counters: Counter[str],
        on_message: Callable[[Deliver], None] | None,
        on_graylisted: Callable[[PubsubSession], None],
        disconnect: Callable[[bytes], None],
    ) -> None:
        self._options = options
        self._router = router
        self._sink = sink
        self._sink_room = trio.Event()
        self._links = links
        self._counters = counters
        self._on_message = on_message
        self._on_graylisted = on_graylisted
        self._disconnect = disconnect
        self.budgets = Budgets(
            CaptureBudget(options.max_peer_bytes_per_hour, options.max_bytes_per_hour),
            CaptureBudget(options.max_peer_bytes_per_hour_out, options.max_bytes_per_hour_out),
            CaptureBudget(options.peer_cpu * _CPU_PERIOD, options.all_cpu * _CPU_PERIOD, _CPU_PERIOD),
        )
        self._unfinished = UnfinishedRpcs[InboundStream](options.unfinished_bytes)

    def start(self) -> None:
        """Subscribe to the sink, so that waiting reads and writes continue once the sink has room again."""
        token = trio.lowlevel.current_trio_token()
        # the sink may call from any thread
        self._sink.subscribe(lambda: _call_in_trio(token, self._signal_sink_room))

    def open_accounts(self, peer: bytes) -> PeerAccounts:
        """Return a peer's accounts for a new session. Their balances continue from its previous session."""
        return PeerAccounts(*(PeerAccount(budget, peer, self._links) for budget in self.budgets))

    # ------------------------------------------------------------------ in

    async def read(self, session: PubsubSession, inbound: InboundStream) -> str:
        """Read one of the peer's streams to its end, process its RPCs, and return why it ended."""
        inbound.session = session
        stream = inbound.stream.muxed_stream
        splitter = RpcSplitter(self._options.max_rpc_bytes, CUT_PAYLOAD)
        payloads, chunk = splitter.feed(b""), b""
        count = 0
        try:
            while True:
                chunk = await stream.read(READ_BYTES)
                await self._pay_bytes(session, len(chunk))
                payloads = splitter.feed(chunk)
                if self._sink.full:
                    await self._wait_for_sink_room()
                for payload in payloads:
                    self.process(session, payload)
                    count += 1
                    if session.unpaid_cpu >= _CPU_TURN or not count % _FRAMES_BETWEEN_CHECKPOINTS:
                        await self._pay_cpu(session)
                self._limit_unfinished(inbound, splitter.buffered)
                if self._router.is_graylisted(session.peer):
                    self._on_graylisted(session)
        except BROKEN:
            self._counters["stream_ended"] += 1
            reason = "stream closed by the peer"
        except WireError:
            self._counters["stream_unreadable"] += 1
            reason = "the peer sent an invalid RPC length prefix"
        finally:
            self._unfinished.set_size(inbound, 0)
            self._read_rest(session, stream, splitter, payloads, chunk)
        if splitter.pending:
            self._counters["stream_broken_off"] += 1
        return reason

    def _read_rest(
        self,
        session: PubsubSession,
        stream: object,
        splitter: RpcSplitter,
        payloads: Iterable[bytes | OversizedRpc],
        chunk: bytes,
    ) -> None:
        """Process what a peer sent before its stream ended, without awaiting, because the task may be cancelled.

        If the peer is over its budget of bytes or CPU, the rest is dropped and counted. Otherwise peers could exceed
        their budget by disconnecting.

        Args:
            payloads: The RPCs of `chunk` that are not processed yet.
            chunk: The last bytes that were read.
        """
        unread = stream.take_unread() if isinstance(stream, GossipStream) else b""
        if session.accounts.bytes_in.is_held:
            self._counters["over_budget_unread"] += len(chunk) + len(unread)
            self._charge_bytes(session, -len(chunk))
            unread = b""
        else:
            self._charge_bytes(session, len(unread))
        is_over = session.accounts.cpu.charge(session.unpaid_cpu) > 0
        spent = 0.0
        with suppress(WireError):
            for payload in chain(payloads, splitter.feed(unread)):
                if is_over:
                    size = len(payload.head if isinstance(payload, OversizedRpc) else payload)
                    self._counters["over_budget_unread"] += size
                    continue
                session.unpaid_cpu = 0.0
                self.process(session, payload, decode=spent < _CPU_AFTER_DISCONNECT)
                spent += session.unpaid_cpu
        session.accounts.cpu.charge(spent)

    def process(self, session: PubsubSession, received: bytes | OversizedRpc, decode: bool = True) -> None:
        """Let the router process an RPC, then capture it.

        Args:
            decode: If false, only capture the RPC. The queries then verify its messages.
        """
        started = time.thread_time()
        if isinstance(received, OversizedRpc):
            payload, declared = received.head, received.declared_length
        else:
            payload, declared = received, 0
        counters = self._counters
        if not payload:
            # an empty RPC, which would be captured as the end of this direction
            counters["rpc_empty"] += 1
            session.unpaid_cpu += time.thread_time() - started
            return
        observed_at = time.time_ns()
        counters["frames_in"] += 1
        counters["bytes_in"] += declared or len(payload)
        session.frames_in += 1
        sends: list[Send] = []
        delivers: list[Deliver] = []
        verdicts = b""
        try:
            if decode:
                rpc = None if declared else read_rpc(payload)
                if rpc is None or isinstance(rpc, Rejected):
                    counters["rpc_oversized" if declared else "rpc_malformed"] += 1
                    if not declared or declared > self._options.gossip.rpc_limits.size:
                        self._router.penalize(session.peer)
                    rpc = RPC()  # the router must know that the first RPC of the stream has passed
                sends, delivers, verdicts = self._router.receive(session.peer, rpc, trio.current_time())
            unchecked = verdicts.count(Verdict.NOT_CHECKED) if decode else len(payload) // _UNCHECKED_BYTES
            session.unpaid_cpu += _UNCHECKED_CPU * min(unchecked, _MAX_UNCHECKED)
        finally:  # the RPC is captured even if the router fails
            frame = session.connection.frame("IN", payload, observed_at, verdicts, declared)
            session.bytes_in += len(frame)
            self._sink.put(session.id, frame)
        if sends:
            self.dispatch(sends)
        if delivers and self._on_message is not None:
            for deliver in delivers:
                self._on_message(deliver)
        session.unpaid_cpu += time.thread_time() - started

    def _limit_unfinished(self, inbound: InboundStream, size: int) -> None:
        largest = self._unfinished.set_size(inbound, size)
        if largest is not None and largest.session is not None:
            self._counters["unfinished_dropped"] += 1
            largest.session.end("incomplete RPCs of all peers take too much memory, and this peer's take the most")

    # ------------------------------------------------------------------ out

    def dispatch(self, sends: Iterable[Send]) -> int:
        """Queue RPCs for their peers. Return the number of peers whose queues had room for at least one."""
        queued: set[PeerID] = set()
        last: RPC | None = None
        payload = b""
        limit, control = self._options.queue_bytes, self._options.control_bytes
        for send in sends:
            link = self._links.get(send.peer)
            session = link.session if link is not None else None
            if session is None:
                continue
            if send.rpc is not last:
                last = send.rpc
                payload = last.SerializeToString()
            if not payload:
                continue
            rpc = QueuedRpc(payload, send.verdicts)
            if session.queue.put(rpc, send.priority, limit if send.rpc.publish else limit + control):
                queued.add(send.peer)
            elif send.priority and not send.rpc.publish:
                # without these RPCs the peer would have a wrong state of the node
                self._counters["peer_control_overflow"] += 1
                self._disconnect(send.peer)
                session.end("the send queue of the peer has no room for control messages")
            else:
                self._counters["dropped"] += 1
                session.dropped += 1
                self._router.record_dropped(send.peer, send.rpc)
        return len(queued)

    async def write(self, session: PubsubSession) -> None:
        """Write the queued RPCs of a session to its stream until the session ends."""
        queue, stream, account = session.queue, session.outbound.muxed_stream, session.accounts.bytes_out
        while True:
            await queue.filled.wait()
            rpcs = queue.pop(_WRITE_BYTES)
            size = sum(len(rpc.payload) for rpc in rpcs)
            if pause := account.charge(size):  # the queue fills meanwhile
                self._counters["over_budget_out"] += 1
                await account.wait(pause)
            if self._sink.full:
                await self._wait_for_sink_room()  # the node sends nothing that it cannot capture
            now = time.time_ns()
            captured = 0
            for rpc in rpcs:
                frame = session.connection.frame("OUT", rpc.payload, now, rpc.verdicts)
                self._sink.put(session.id, frame)
                captured += len(frame)
            session.bytes_out += captured
            # the frames of small RPCs are larger than the sent bytes; the next RPCs wait for the difference
            account.charge(captured - size)
            self._counters["frames_out"] += len(rpcs)
            session.frames_out += len(rpcs)
            data = b"".join([encode(rpc.payload) for rpc in rpcs])
            self._counters["bytes_out"] += len(data)
            try:
                with trio.fail_after(self._options.stuck_after):
                    await stream.write(data)
            except trio.TooSlowError:
                self._counters["peer_stuck"] += 1
                # a part of the frame may be written, so that nothing more can be sent on this connection
                self._disconnect(session.peer)
                session.end(f"the peer accepted no bytes for {self._options.stuck_after:g} s")
            except BROKEN:
                session.end("cannot write to the peer's stream")

    # ------------------------------------------------------------------ waiting

    async def _pay_bytes(self, session: PubsubSession, size: int) -> None:
        """Charge received bytes to the peer, and wait while the peer is over its budget of bytes."""
        if pause := self._charge_bytes(session, size):
            self._counters["over_budget"] += 1
            await session.accounts.bytes_in.wait(pause)

    def _charge_bytes(self, session: PubsubSession, size: int) -> float:
        # the frames of many small RPCs are larger than the received bytes
        size += max(0, session.bytes_in - session.bytes_paid)
        session.bytes_paid += size
        return session.accounts.bytes_in.charge(size)

    async def _pay_cpu(self, session: PubsubSession) -> None:
        """Charge the CPU used for the peer, and wait while the peer is over its budget of CPU. Let other tasks run."""
        spent, session.unpaid_cpu = session.unpaid_cpu, 0.0
        if pause := session.accounts.cpu.charge(spent):
            self._counters["over_budget_cpu"] += 1
            await session.accounts.cpu.wait(pause)
        else:
            await trio.lowlevel.checkpoint()

    async def _wait_for_sink_room(self) -> None:
        self._counters["reads_paused"] += 1
        while self._sink.full:
            with trio.move_on_after(1):  # in case a call of the sink gets lost
                await self._sink_room.wait()

    def _signal_sink_room(self) -> None:
        self._sink_room.set()
        self._sink_room = trio.Event()


def _call_in_trio(token: trio.lowlevel.TrioToken, call: Callable[[], None]) -> None:
    with suppress(trio.RunFinishedError):  # the node has ended, and its readers with it
        token.run_sync_soon(call)
