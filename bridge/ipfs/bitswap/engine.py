"""Bitswap as a state machine without I/O.

The caller passes in the messages of peers, the sizes of the blocks in the folder, and the time. To send messages, the
caller

1. gets the peers from `peers_with_output`;
2. takes the next message for a peer with `next_output`, and writes the message to the peer;
3. calls `confirm` if the message was written, otherwise `put_back`.

Serving: if the folder lacks the block of a want, the engine stores the want, and answers it once the block is added.
A connected peer does not repeat its wants, so the engine drops a want only if the peer cancels it, disconnects, or has
too many.

Fetching: a peer that relayed the announcement of a block gets a want-block, which requests the block. All other peers
get a want-have, which asks if they have the block. Those that answer HAVE get a want-block, one after the other.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, NamedTuple

from kiln.bridge.ipfs.bitswap.messages import BitswapMessage, WantEntry
from kiln.schemas.wire.cid import read_sha2_256_digest


@dataclass(frozen=True)
class EngineLimits:
    """Limits for each peer, and for each block that is fetched. Sizes are in bytes, times in seconds."""

    wants: int = 1024  # stored wants of a peer, as in boxo; beyond this the oldest is dropped
    replies: int = 1024  # blocks, and presences, that wait to be sent to a peer
    message_bytes: int = 256 << 10  # blocks in one message, or one larger block
    replace_have: int = 1024  # a block up to this size is sent instead of HAVE, as boxo does
    asked_peers: int = 64  # peers to which one block is requested at a time
    next_peer_after: float = 3.0  # time without a response after which a block is requested from the next peer
    repeat_after: float = 10.0  # time after which a want-block is sent to the same peer again


class Output(NamedTuple):
    """A message to write to a peer. It names blocks by CID; the caller reads their bytes from the folder."""

    wants: tuple[WantEntry, ...] = ()
    haves: tuple[bytes, ...] = ()
    dont_haves: tuple[bytes, ...] = ()
    blocks: tuple[tuple[bytes, int], ...] = ()  # CID and size


class FetchedBlock(NamedTuple):
    """A block that the engine was fetching, and its sha2-256 digest."""

    digest: bytes
    data: bytes


class Received(NamedTuple):
    """Result of a received message: CIDs whose sizes `resolve` needs, and blocks that the engine was fetching."""

    lookups: tuple[bytes, ...] = ()
    blocks: tuple[FetchedBlock, ...] = ()


@dataclass
class _PeerState:
    """State of a peer: its wants, the entries of the next messages to it, and the blocks requested from it."""

    wants: OrderedDict[bytes, WantEntry] = field(default_factory=OrderedDict)  # unanswered, by CID
    blocks: OrderedDict[bytes, int] = field(default_factory=OrderedDict)  # size by CID, to send
    presences: OrderedDict[bytes, bool] = field(default_factory=OrderedDict)  # HAVE or DONT_HAVE by CID, to send
    requests: OrderedDict[bytes, WantEntry] = field(default_factory=OrderedDict)  # own wants by CID, to send
    asked: set[bytes] = field(default_factory=set)  # digests of own wants that the peer knows, or will know

    @property
    def has_output(self) -> bool:
        return bool(self.blocks or self.presences or self.requests)


@dataclass
class _OwnWant:
    """A block that the engine is fetching."""

    cid: bytes
    digest: bytes
    preferred: dict[bytes, None]  # peers that get a want-block first
    asked: dict[bytes, float] = field(default_factory=dict)  # time of the last want-block, or -inf, by peer
    haves: dict[bytes, None] = field(default_factory=dict)  # peers that may have the block, in the order of trying
    dont_haves: set[bytes] = field(default_factory=set)


_NEVER: Final = float("-inf")


class BitswapEngine:
    """Wants of all peers, own wants, and messages to send. Times are seconds of the caller's clock."""

    def __init__(self, limits: EngineLimits | None = None, counters: Counter[str] | None = None) -> None:
        """Create an engine without peers.

        Args:
            counters: counts the engine's events, under names that begin with bitswap_; by default a new counter.
        """
        self._limits = limits or EngineLimits()
        self._peers: dict[bytes, _PeerState] = {}
        self._own: dict[bytes, _OwnWant] = {}  # by digest
        self._changed: dict[bytes, None] = {}
        self.counters: Counter[str] = Counter() if counters is None else counters

    # ------------------------------------------------------------------ peers

    @property
    def peers(self) -> Collection[bytes]:
        """Live view of the ids of all peers."""
        return self._peers.keys()

    def set_peers(self, peers: Collection[bytes], now: float) -> None:
        """Set the connected peers that speak bitswap, and remove all other peers with `remove_peer`."""
        for peer in [known for known in self._peers if known not in peers]:
            self.remove_peer(peer)
        new = [peer for peer in peers if peer not in self._peers]
        for peer in new:
            self._peers[peer] = _PeerState()
        if new:
            self.tick(now)

    def add_peer(self, peer: bytes) -> None:
        """Add a peer that has opened a bitswap stream."""
        self._peers.setdefault(peer, _PeerState())

    def remove_peer(self, peer: bytes) -> None:
        """Drop the wants of a disconnected peer, and the messages for it."""
        self._peers.pop(peer, None)
        self._changed.pop(peer, None)
        for want in self._own.values():
            want.asked.pop(peer, None)
            want.haves.pop(peer, None)
            want.dont_haves.discard(peer)

    def is_asked(self, peer: bytes) -> bool:
        """Return true if a block was requested from this peer, so that the peer may send large messages."""
        state = self._peers.get(peer)
        return state is not None and bool(state.asked)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of entries in each collection of the engine, for tests of the limits."""
        states = self._peers.values()
        return {
            "wants": sum(len(state.wants) for state in states),
            "blocks": sum(len(state.blocks) for state in states),
            "presences": sum(len(state.presences) for state in states),
            "requests": sum(len(state.requests) for state in states),
            "asked": sum(len(state.asked) for state in states),
            "own": len(self._own),
        }

    # ------------------------------------------------------------------ serving

    def receive(self, peer: bytes, message: BitswapMessage, now: float) -> Received:
        """Process a message from a peer. The caller must then pass the sizes of `Received.lookups` to `resolve`."""
        state = self._peers.setdefault(peer, _PeerState())
        self.counters["bitswap_entries_skipped"] += message.skipped
        if message.full:
            state.wants.clear()
            state.blocks.clear()
            state.presences.clear()
        lookups: dict[bytes, None] = {}
        for entry in message.wants:
            if entry.cancel:
                for store in (state.wants, state.blocks, state.presences, lookups):
                    store.pop(entry.cid, None)
                continue
            state.wants[entry.cid] = entry
            state.wants.move_to_end(entry.cid)
            lookups[entry.cid] = None
            if len(state.wants) > self._limits.wants:
                state.wants.popitem(last=False)
                self.counters["bitswap_wants_dropped"] += 1
        self._add_presences(peer, message, now)
        blocks = [block for data in message.blocks if (block := self._add_block_of(peer, state, data)) is not None]
        return Received(tuple(lookups), tuple(blocks))

    def resolve(self, peer: bytes, sizes: Mapping[bytes, int | None]) -> None:
        """Answer the wants of a peer's message whose blocks are in the folder. The other wants stay stored, and get
        DONT_HAVE if they ask for it.

        Args:
            sizes: size in bytes of each block by CID; `None` for a block that the folder lacks.
        """
        state = self._peers.get(peer)
        if state is None:
            return
        for cid, size in sizes.items():
            entry = state.wants.get(cid)
            if entry is None:  # canceled, or answered already because the block came meanwhile
                continue
            if size is not None:
                self._queue_reply(peer, state, entry, size)
            elif entry.send_dont_have:
                self._add_presence(peer, state, cid, has_block=False)

    def add_block(self, cid: bytes, size: int) -> None:
        """Answer the stored wants for a block that was added to the folder.

        Args:
            size: size of the block in bytes.
        """
        for peer, state in self._peers.items():
            entry = state.wants.get(cid)
            if entry is not None:
                self._queue_reply(peer, state, entry, size)

    def _queue_reply(self, peer: bytes, state: _PeerState, entry: WantEntry, size: int) -> None:
        del state.wants[entry.cid]
        if entry.have and size > self._limits.replace_have:
            self._add_presence(peer, state, entry.cid, has_block=True)
        elif entry.cid in state.blocks or len(state.blocks) < self._limits.replies:
            state.presences.pop(entry.cid, None)
            state.blocks[entry.cid] = size
            self._changed[peer] = None
        else:
            self.counters["bitswap_replies_dropped"] += 1

    def _add_presence(self, peer: bytes, state: _PeerState, cid: bytes, *, has_block: bool) -> None:
        if cid in state.presences or len(state.presences) < self._limits.replies:
            state.presences[cid] = has_block
            self._changed[peer] = None
        else:
            self.counters["bitswap_replies_dropped"] += 1

    # ------------------------------------------------------------------ fetching

    def want(self, cid: bytes, digest: bytes, announcers: Sequence[bytes], now: float) -> None:
        """Start fetching a block, or add announcers to a fetch in progress.

        Args:
            digest: sha2-256 digest in the CID.
            announcers: peers that relayed the announcement. The first connected one gets a want-block at once, and the
                others get one later if the block does not come.
        """
        if digest not in self._own:
            self._own[digest] = _OwnWant(cid, digest, {})
        want = self._own[digest]
        connected = [peer for peer in announcers if peer in self._peers]
        for peer in connected[:1]:
            self._prefer(want, peer)
        want.haves.update(dict.fromkeys(connected[1:]))
        self._advance(want, now)

    def prefer(self, digest: bytes, peer: bytes, now: float) -> None:
        """Add a preferred peer to a fetch in progress, such as a provider of the block in the DHT."""
        want = self._own.get(digest)
        if want is not None:
            self._prefer(want, peer)
            self._advance(want, now)

    def _prefer(self, want: _OwnWant, peer: bytes) -> None:
        if want.asked.get(peer) == _NEVER:  # a want-have so far
            want.haves[peer] = None
        want.preferred[peer] = None

    def record_progress(self, peer: bytes, now: float) -> None:
        """Record that a peer is still sending a message, so that its blocks are not requested from the next peer."""
        state = self._peers.get(peer)
        for digest in () if state is None else state.asked:
            want = self._own.get(digest)
            if want is not None and want.asked.get(peer, _NEVER) != _NEVER:
                want.asked[peer] = now

    def cancel(self, digest: bytes) -> None:
        """Stop fetching a block."""
        want = self._own.pop(digest, None)
        if want is not None:
            self._cancel_at(want, want.asked)

    def is_exhausted(self, digest: bytes) -> bool:
        """Return true if no connected peer is expected to send the block.

        That is the case if all peers that got a want for the block have answered DONT_HAVE, or if no peer got one.
        """
        want = self._own.get(digest)
        return want is not None and want.dont_haves.issuperset(want.asked)

    def tick(self, now: float) -> None:
        """Request the blocks of all fetches from new peers. If a response is overdue, request from the next peer."""
        for want in self._own.values():
            self._advance(want, now)

    def _advance(self, want: _OwnWant, now: float) -> None:
        limits = self._limits
        for peer in (*want.preferred, *want.haves, *self._peers):
            if peer not in self._peers or peer in want.asked:
                continue
            if len(want.asked) >= limits.asked_peers and peer not in want.preferred:
                continue
            if peer in want.preferred:
                self._ask_for_block(want, peer, now)
            else:
                want.asked[peer] = _NEVER
                self._request(peer, want, WantEntry(want.cid, have=True, send_dont_have=True))
        if any(at > now - limits.next_peer_after for peer, at in want.asked.items() if peer not in want.dont_haves):
            return
        for peer in (*want.haves, *want.preferred):
            if peer in want.asked and want.asked[peer] <= now - limits.repeat_after and peer not in want.dont_haves:
                self._ask_for_block(want, peer, now)
                return

    def _ask_for_block(self, want: _OwnWant, peer: bytes, now: float) -> None:
        want.asked[peer] = now
        self._request(peer, want, WantEntry(want.cid, send_dont_have=True))

    def _request(self, peer: bytes, want: _OwnWant, entry: WantEntry) -> None:
        state = self._peers[peer]
        state.asked.add(want.digest)
        state.requests[want.cid] = entry
        self._changed[peer] = None

    def _cancel_at(self, want: _OwnWant, peers: Iterable[bytes]) -> None:
        for peer in peers:
            state = self._peers.get(peer)
            if state is None:
                continue
            state.asked.discard(want.digest)
            state.requests[want.cid] = WantEntry(want.cid, cancel=True)
            self._changed[peer] = None

    def _add_presences(self, peer: bytes, message: BitswapMessage, now: float) -> None:
        changed: dict[bytes, _OwnWant] = {}
        for cids, has_block in ((message.haves, True), (message.dont_haves, False)):
            for cid in cids if self._own else ():
                digest = read_sha2_256_digest(cid)
                want = self._own.get(digest) if isinstance(digest, bytes) else None
                if want is None or peer not in want.asked:
                    continue
                if has_block:
                    want.haves[peer] = None
                    want.dont_haves.discard(peer)
                else:
                    want.haves.pop(peer, None)
                    want.dont_haves.add(peer)
                changed[want.digest] = want
        for want in changed.values():  # once each, as a message may repeat a CID a thousand times
            self._advance(want, now)

    def _add_block_of(self, peer: bytes, state: _PeerState, data: bytes) -> FetchedBlock | None:
        digest = sha256(data).digest() if state.asked else b""  # an unwanted block is not even hashed
        want = self._own.get(digest)
        if want is None or digest not in state.asked:
            self.counters["bitswap_blocks_unwanted"] += 1
            return None
        self.counters["bitswap_blocks_received"] += 1
        self.counters["bitswap_bytes_received"] += len(data)
        del self._own[digest]
        state.asked.discard(digest)
        state.requests.pop(want.cid, None)
        self._cancel_at(want, (other for other in want.asked if other != peer))
        return FetchedBlock(digest, data)

    # ------------------------------------------------------------------ output

    def peers_with_output(self) -> list[bytes]:
        """Return the peers for which something was queued since the last call."""
        changed = [peer for peer in self._changed if self.has_output(peer)]
        self._changed.clear()
        return changed

    def has_output(self, peer: bytes) -> bool:
        """Return true if something is queued for a peer."""
        state = self._peers.get(peer)
        return state is not None and state.has_output

    def next_output(self, peer: bytes) -> Output | None:
        """Take the next message for a peer; `None` if there is none."""
        state = self._peers.get(peer)
        if state is None or not state.has_output:
            return None
        wants = tuple(state.requests.values())
        haves = tuple(cid for cid, has_block in state.presences.items() if has_block)
        dont_haves = tuple(cid for cid, has_block in state.presences.items() if not has_block)
        state.requests.clear()
        state.presences.clear()
        blocks: list[tuple[bytes, int]] = []
        room = self._limits.message_bytes
        while state.blocks:
            cid, size = next(iter(state.blocks.items()))
            if blocks and size > room:
                break
            room -= size
            blocks.append((cid, size))
            del state.blocks[cid]
        return Output(wants, haves, dont_haves, tuple(blocks))

    def confirm(self, output: Output, missing: Collection[bytes] = ()) -> None:
        """Count the blocks and presences (HAVE, DONT_HAVE) of a message that was written.

        Args:
            missing: CIDs of blocks of the message that were no longer in the folder.
        """
        sent = [size for cid, size in output.blocks if cid not in missing]
        self.counters["bitswap_blocks_sent"] += len(sent)
        self.counters["bitswap_bytes_sent"] += sum(sent)
        self.counters["bitswap_presences_sent"] += len(output.haves) + len(output.dont_haves)

    def put_back(self, peer: bytes, output: Output) -> None:
        """Queue the parts of an unwritten message again, except those that are obsolete by now."""
        state = self._peers.get(peer)
        if state is None:
            return
        self.counters["bitswap_messages_retried"] += 1
        for entry in output.wants:
            if entry.cancel or read_sha2_256_digest(entry.cid) in state.asked:  # else the block came meanwhile
                state.requests.setdefault(entry.cid, entry)
        for cids, has_block in ((output.haves, True), (output.dont_haves, False)):
            for cid in cids:
                if cid not in state.blocks:
                    state.presences.setdefault(cid, has_block)
        for cid, size in reversed(output.blocks):
            state.blocks.setdefault(cid, size)
            state.blocks.move_to_end(cid, last=False)

    def drop_output(self, peer: bytes) -> None:
        """Drop everything that is queued for a peer which accepts no data."""
        state = self._peers.get(peer)
        if state is None:
            return
        self.counters["bitswap_replies_dropped"] += len(state.blocks) + len(state.presences)
        state.blocks.clear()
        state.presences.clear()
        state.requests.clear()
