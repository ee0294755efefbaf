"""Generator of synthetic traffic: all frames of several connections, from the hello to the close.

The generator builds each malformed or oversized RPC, and each rejected hello, with a known fault, so the ledger needs
no parser.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import sha256
from random import Random
from typing import BinaryIO, Final, Literal, NamedTuple

from kiln.deploy.demo.traffic.ledger import FrameEntry, Ledger
from kiln.deploy.demo.traffic.messages import TYPES, MessageFactory, SyntheticCopy, field
from kiln.deploy.demo.traffic.options import GarbageKind, TrafficOptions
from kiln.deploy.demo.traffic.population import Population, derive_bytes
from kiln.schemas.captures.kiln_capture import CaptureRecord, write_capture
from kiln.schemas.kafka.frames import CUT_PAYLOAD, MAX_RPC, RPC_MALFORMED, RPC_OVERSIZED
from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import write_varint
from kiln.schemas.wire.identity import Verdict
from kiln.schemas.wire.topic_table import HASH_LENGTH, MAX_BUNDLES, bundle_hash
from kiln.schemas.wire.topics import format_topic

Direction = Literal["IN", "OUT"]

# By style: 1.3 with a topic table, 1.2, 1.3 with partial messages, 1.1.
_PROTOCOLS: Final = ("/meshsub/1.3.0", "/meshsub/1.2.0", "/meshsub/1.3.0", "/meshsub/1.1.0")
_PARTIAL_MESSAGES: Final = 2
_TOPIC_TABLE_FIELD: Final = 4820938


class GeneratedFrame(NamedTuple):
    """A record for `kiln.frames`, due `due_ns` after the start; `value` is a serialized Frame, or garbage."""

    due_ns: int
    key: bytes
    value: bytes

    @property
    def frame(self) -> Frame:
        """Parse the Frame.

        Raises:
            DecodeError: The value is garbage.
        """
        return Frame.FromString(self.value)


class SyntheticConnection:
    """A connection of the local peer to a remote peer. `number` counts the connections of the same remote peer."""

    def __init__(
        self,
        options: TrafficOptions,
        population: Population,
        start_ns: int,
        remote: bytes,
        label: str,
        number: int,
        *,
        style: int = 0,
        hello: bytes | None = None,
        hello_parses: bool = True,
    ) -> None:
        """Derive the connection's id from the seed, `label`, `start_ns` and `number`.

        Args:
            style: Selects the gossipsub version and extensions of the remote peer.
            hello: ExtTopicTable bytes of the remote peer, by default those of `style`.
            hello_parses: False if `hello` would make the first RPC of the remote peer unreadable.
        """
        self.protocol = _PROTOCOLS[style % len(_PROTOCOLS)]
        self.partial_messages = style % len(_PROTOCOLS) == _PARTIAL_MESSAGES
        self.id = derive_bytes(options.seed, "connection", label, start_ns, number)[:16]
        self.topic = format_topic(options.network, None)
        self._start_ns = start_ns
        bundles = field(1, bundle_hash([self.topic]))
        self.hello_out = bundles if self.protocol == "/meshsub/1.3.0" else b""
        with_table = self.hello_out and not self.partial_messages
        self.hello_in = hello if hello is not None else bundles if with_table else b""
        self._hello_sent = self.hello_in if hello_parses else b""
        self.subscribed: dict[Direction, set[str]] = {"IN": set(), "OUT": set()}
        self._frame = Frame(
            network=options.network,
            connection=self.id,
            local_peer=population.peer("local"),
            remote_peer=remote,
            protocol=self.protocol,
            hello_in=self.hello_in,
            hello_out=self.hello_out,
            origin=Frame.REPLAY if options.origin == "REPLAY" else Frame.LIVE,
            # a multiaddr: /ip4/192.0.2.x/tcp/y, in a network reserved for examples (RFC 5737)
            remote_address=b"\x04\xc0\x00\x02" + self.id[:1] + b"\x06" + self.id[1:3],
        )
        self.sequence: dict[Direction, int] = {"IN": 0, "OUT": 0}

    def send(
        self, due_ns: int, direction: Direction, payload: bytes, verdicts: bytes = b"", declared_length: int = 0
    ) -> GeneratedFrame:
        """Build the next frame of a direction. A payload with a `declared_length` is cut, as a bridge does."""
        frame = Frame()  # a new one, because a reused Frame keeps the memory of every earlier payload
        frame.CopyFrom(self._frame)
        self.sequence[direction] += 1
        frame.direction = Frame.IN if direction == "IN" else Frame.OUT
        frame.sequence = self.sequence[direction]
        frame.observed_at = self._start_ns + due_ns
        frame.payload = payload if not declared_length else payload[:CUT_PAYLOAD]
        frame.verdicts = verdicts
        frame.declared_length = declared_length
        return GeneratedFrame(due_ns, self.id, frame.SerializeToString())

    def open(self, due_ns: int) -> list[GeneratedFrame]:
        """Build the first frame of each direction, with subscription and extensions."""
        sides: tuple[tuple[Direction, bytes], ...] = (("IN", self._hello_sent), ("OUT", self.hello_out))
        return [
            self.send(due_ns, side, self.subscription(side, self.topic) + self._extensions(hello))
            for side, hello in sides
        ]

    def close(self, due_ns: int) -> list[GeneratedFrame]:
        """Build the closing frame of each direction, which has an empty payload."""
        return [self.send(due_ns, "IN", b""), self.send(due_ns, "OUT", b"")]

    def subscription(self, direction: Direction, topic: str) -> bytes:
        """Build a SUBSCRIBE for a topic, or an UNSUBSCRIBE if this side is already subscribed.

        A second SUBSCRIBE would be taken for the start of a new connection (`schemas/captures/kiln_capture.py`).
        """
        topics = self.subscribed[direction]
        wanted = topic not in topics
        (topics.add if wanted else topics.discard)(topic)
        option = rpc_pb2.RPC.SubOpts(subscribe=wanted, topicid=topic).SerializeToString()
        if self.partial_messages and direction == "IN":
            # requestsPartial = 3 and supportsSendingPartial = 4, which go-libp2p-pubsub since 0.16 always writes
            option += b"\x18\x00\x20\x00"
        return field(1, option)

    def _extensions(self, hello: bytes) -> bytes:
        if self.protocol != "/meshsub/1.3.0":
            return b""
        control = rpc_pb2.ControlMessage()
        control.extensions.SetInParent()
        if not hello:
            return field(3, control.SerializeToString())
        return field(3, field(6, field(_TOPIC_TABLE_FIELD, hello)))


RPC_STAGE: Final = "rpc"
HELLO_STAGE: Final = "hello"


class BadRpc(NamedTuple):
    """A payload that is no valid RPC. `declared_length` is its length on the wire if it was cut, else 0."""

    payload: bytes
    declared_length: int
    reason: str


class BadHello(NamedTuple):
    """ExtTopicTable bytes that a bridge rejects for `reason`. `parses` is true if they are valid protobuf."""

    hello: bytes
    reason: str
    parses: bool


def build_random_rpc(random: Random) -> BadRpc:
    """Build an RPC of up to 400 random bytes that is no valid protobuf."""
    return BadRpc(build_malformed_protobuf(random, 400), 0, RPC_MALFORMED)


def build_truncated_rpc(random: Random, rpc: bytes) -> BadRpc:
    """Cut an RPC of one field at a random position, so that the field is incomplete."""
    return BadRpc(rpc[: random.randrange(1, len(rpc))], 0, RPC_MALFORMED)


def build_oversized_rpc(random: Random, publish: bytes) -> BadRpc:
    """Build an RPC over 4 MiB from a message and a field of zeros, and cut it as a bridge does.

    `write_traffic` restores the full length.
    """
    declared = MAX_RPC + random.randrange(1, 1 << 20)
    filler = declared - len(publish)
    head = publish + b"\x12" + write_varint(filler - 5)  # a varint of four bytes
    return BadRpc(head.ljust(CUT_PAYLOAD, b"\0"), declared, RPC_OVERSIZED)


def build_bad_hello(random: Random) -> BadHello:
    """Build a topic table with a random error, one of those that `kiln.schemas.wire.topic_table` rejects."""
    hashes = [random.randbytes(HASH_LENGTH) for _ in range(random.randrange(1, 6))]
    match random.randrange(4):
        case 0:
            return BadHello(build_malformed_protobuf(random, 40), "hello_malformed", False)
        case 1:
            hashes.insert(random.randrange(len(hashes)), random.randbytes(random.choice((0, 3, 5, 32))))
            return BadHello(_bundles(hashes), "hello_hash_length", True)
        case 2:
            hashes.append(random.choice(hashes))
            return BadHello(_bundles(hashes), "hello_repeats", True)
        case _:
            first = random.getrandbits(24)
            many = [(first + number).to_bytes(HASH_LENGTH) for number in range(MAX_BUNDLES + 1)]
            return BadHello(_bundles(many), "hello_too_many_bundles", True)


def build_malformed_protobuf(random: Random, most: int) -> bytes:
    """Build fewer than `most` random bytes. The first byte has the invalid wire type 6 or 7."""
    data = random.randbytes(random.randrange(1, most))
    return bytes([data[0] | 0b110]) + data[1:]


def _bundles(hashes: list[bytes]) -> bytes:
    return b"".join(field(1, known) for known in hashes)


_SECOND: Final = 1_000_000_000
_MILLISECOND: Final = 1_000_000
_RECENT: Final = 200  # message ids for IHAVE and IWANT
_BACKOFF: Final = 60  # seconds


class Traffic:
    """Synthetic traffic from one start time on.

    The same options, start and rate give the same bytes. The ledger covers the frames yielded so far, and is complete
    when `frames` has ended. Ids of connections and messages depend on the start, so that traffic with the same options
    and another start does not repeat them.
    """

    def __init__(self, options: TrafficOptions, start_ns: int, rate: float, *, keep_ledger: bool = True) -> None:
        """Create the traffic.

        Args:
            start_ns: Time of the first frame, Unix ns.
            rate: Messages per second, without copies.
            keep_ledger: False for a run without end, because the ledger grows with each message.

        Raises:
            ValueError: `rate` is not greater than 0.
        """
        if not rate > 0:
            raise ValueError(f"rate: {rate} messages per second; must be greater than zero")
        self.options = options
        self.ledger: Ledger | None = Ledger() if keep_ledger else None
        self._start_ns = start_ns
        self._rate = rate
        self._stopped = False
        self._random = Random(f"{options.seed}/{start_ns}/{float(rate)}")
        self._population = Population(options)
        self._messages = MessageFactory(options, self._population, self._random)
        self._connections = [self._connect(peer, 0) for peer in range(options.peers)]
        self._numbers = [0] * options.peers
        self._strangers = 0
        self._waiting: list[list[SyntheticCopy]] = [[] for _ in range(options.peers)]
        self._recent: deque[bytes] = deque(maxlen=_RECENT)
        # (due time, number of the event, event): the number keeps events with equal times in order
        self._due: list[tuple[int, int, Callable[[int], list[GeneratedFrame]]]] = []
        self._events = 0
        self._actions: list[tuple[float, Callable[[int], None]]] = [
            (options.garbage, self._garbage),
            (options.impostors, self._impostor),
            (options.reannounced, self._announce_again),
        ]

    def stop(self) -> None:
        """Generate no more messages. Then `frames` yields the pending and closing frames, and ends."""
        self._stopped = True

    def frames(self, *, messages: int | None = None, duration_ns: int | None = None) -> Iterator[GeneratedFrame]:
        """Yield the frames in the order of their due times. Call this only once.

        The traffic ends after `messages` messages (including garbage), after `duration_ns`, or after `stop`.
        """
        for connection in self._connections:
            yield from connection.open(0)
        number, due = 0, 0
        while not self._stopped and (messages is None or number < messages):
            # Each message is at a random time within its own interval, so messages never overtake each other.
            due = int((number + self._random.random()) / self._rate * _SECOND)
            if duration_ns is not None and due >= duration_ns:
                break
            while self._due and self._due[0][0] <= due:
                at, _, event = heapq.heappop(self._due)
                yield from event(at)
            self._step(due)
            number += 1
        while self._due:
            due, _, event = heapq.heappop(self._due)
            yield from event(due)
        for peer, connection in enumerate(self._connections):
            yield from self._flush(peer, due)
            yield from connection.close(due)

    # ---------------------------------------------------------------- events

    def _step(self, due: int) -> None:
        options, random = self.options, self._random
        u = random.random()
        for share, action in self._actions:
            if u < share:
                action(due)
                break
            u -= share
        else:
            self._message(due)
        if random.random() < options.control:
            self._control(due)
        if random.random() < options.reconnects:
            self._at(due, partial(self._reconnect, random.randrange(options.peers)))

    def _message(self, due: int) -> None:
        random, options = self._random, self.options
        now = self._start_ns + due
        content = self._messages.content(random.choices(TYPES, options.mix)[0], now)
        author = self._population.pick_author(random.random())
        if options.signed and random.random() < options.forged:
            forged, true = self._messages.forged(content, author, now)
            self._at(due, partial(self._arrive, random.randrange(options.peers), forged))
            self._spread(due + _MILLISECOND, true)
        else:
            self._spread(due, self._messages.usual(content, author, now))

    def _announce_again(self, due: int) -> None:
        now = self._start_ns + due
        author = self._population.pick_author(self._random.random())
        self._spread(due, self._messages.usual(self._messages.announced_again(now), author, now))

    def _impostor(self, due: int) -> None:
        if not self.options.signed:
            self._message(due)
            return
        now = self._start_ns + due
        content = self._messages.content("UPDATE", now)
        victim, signer = self._population.pick_author(0.0), self._population.pick_spammer(self._random.random())
        self._spread(due, self._messages.impostor(content, victim, signer, now))

    def _garbage(self, due: int) -> None:
        random = self._random
        now = self._start_ns + due
        kind: GarbageKind = random.choice(self.options.garbage_kinds)
        peer = random.randrange(self.options.peers)
        spammer = self._population.pick_spammer(random.random())
        match kind:
            case "random_rpc":
                self._at(due, partial(self._bad_rpc, peer, build_random_rpc(random)))
            case "truncated_rpc" | "oversized_rpc":
                publish = self._messages.usual(self._messages.content("UPDATE", now), spammer, now).publish
                bad = (
                    build_truncated_rpc(random, publish)
                    if kind == "truncated_rpc"
                    else build_oversized_rpc(random, publish)
                )
                self._at(due, partial(self._bad_rpc, peer, bad))
            case "wrong_hello":
                self._at(due, self._stranger)
            case "wrong_auth":
                self._spread(due, self._messages.wrong_auth(self._messages.content("UPDATE", now), spammer, now))
            case _:
                self._spread(due, self._messages.usual(self._messages.garbage(kind), spammer, now))

    def _spread(self, due: int, copy: SyntheticCopy) -> None:
        random, options = self._random, self.options
        count_copies = options.copies if random.random() < 0.7 else random.randint(1, options.copies)
        for place, peer in enumerate(random.sample(range(options.peers), count_copies)):
            delay = int(options.max_delay_ns * random.random() ** 3) if place else 0
            waits = random.random() < options.bundled
            self._at(due + delay, partial(self._wait if waits else self._arrive, peer, copy))
        if random.random() < options.forwarded:
            self._at(due + _MILLISECOND, partial(self._forward, random.randrange(options.peers), copy))
        self._recent.append(copy.gossip_id)

    def _control(self, due: int) -> None:
        random = self._random
        peer = random.randrange(self.options.peers)
        side: Direction = "IN" if random.random() < 0.7 else "OUT"
        topic = self._connections[peer].topic
        ids = random.sample(self._recent, min(len(self._recent), random.randint(1, 10)))
        control = rpc_pb2.ControlMessage()
        match random.randrange(6):
            case 0 | 1:
                control.ihave.add(topicID=topic, messageIDs=ids)
                answer = rpc_pb2.ControlMessage()
                answer.iwant.add(messageIDs=ids[:3])
                other: Direction = "OUT" if side == "IN" else "IN"
                event = partial(self._say, peer, other, field(3, answer.SerializeToString()))
                self._at(due + _MILLISECOND, event)
            case 2:
                control.graft.add(topicID=topic)
            case 3:
                control.prune.add(topicID=topic, backoff=_BACKOFF)
            case 4:
                control.idontwant.add(messageIDs=ids)
            case _:
                topic = format_topic(self.options.network, self._population.pick_separator(self._random.random()))
                self._at(due, partial(self._subscribe, peer, side, topic))
                return
        self._at(due, partial(self._say, peer, side, field(3, control.SerializeToString())))

    # ---------------------------------------------------------------- frames that are due

    def _at(self, due: int, event: Callable[[int], list[GeneratedFrame]]) -> None:
        self._events += 1
        heapq.heappush(self._due, (due, self._events, event))

    def _wait(self, peer: int, copy: SyntheticCopy, due: int) -> list[GeneratedFrame]:
        self._waiting[peer].append(copy)
        return []

    def _arrive(self, peer: int, copy: SyntheticCopy, due: int) -> list[GeneratedFrame]:
        self._waiting[peer].append(copy)
        return self._flush(peer, due)

    def _flush(self, peer: int, due: int) -> list[GeneratedFrame]:
        """Build a frame with all pending messages of a peer's connection; none if no message is pending."""
        copies = self._waiting[peer]
        if not copies:
            return []
        self._waiting[peer] = []
        payload = b"".join(copy.publish for copy in copies)
        verdicts = find_verdicts(copies, self._random.random() < self.options.checked)
        frame = self._connections[peer].send(due, "IN", payload, verdicts)
        if self.ledger is not None:
            count_copies(self.ledger, copies, self._start_ns + due)
        return [frame]

    def _forward(self, peer: int, copy: SyntheticCopy, due: int) -> list[GeneratedFrame]:
        # A bridge does not forward a message that it has rejected.
        good = copy.tally == "good_copies"
        return [self._connections[peer].send(due, "OUT", copy.publish)] if good else []

    def _say(self, peer: int, side: Direction, payload: bytes, due: int) -> list[GeneratedFrame]:
        return [self._connections[peer].send(due, side, payload)]

    def _subscribe(self, peer: int, side: Direction, topic: str, due: int) -> list[GeneratedFrame]:
        connection = self._connections[peer]
        return [connection.send(due, side, connection.subscription(side, topic))]

    def _bad_rpc(self, peer: int, bad: BadRpc, due: int) -> list[GeneratedFrame]:
        connection = self._connections[peer]
        frame = connection.send(due, "IN", bad.payload, declared_length=bad.declared_length)
        if self.ledger is not None:
            self.ledger.frames.append(build_fault(connection, bad.payload, RPC_STAGE, bad.reason, self._start_ns + due))
        return [frame]

    def _stranger(self, due: int) -> list[GeneratedFrame]:
        bad = build_bad_hello(self._random)
        self._strangers += 1
        connection = SyntheticConnection(
            self.options,
            self._population,
            self._start_ns,
            self._population.peer("stranger", self._strangers),
            "stranger",
            self._strangers,
            hello=bad.hello,
            hello_parses=bad.parses,
        )
        frames = connection.open(due) + connection.close(due)
        if self.ledger is not None:
            for sequence in (1, 2):
                entry = build_fault(connection, bad.hello, HELLO_STAGE, bad.reason, self._start_ns + due, sequence)
                self.ledger.frames.append(entry)
        return frames

    def _reconnect(self, peer: int, due: int) -> list[GeneratedFrame]:
        frames = self._flush(peer, due) + self._connections[peer].close(due)
        self._numbers[peer] += 1
        self._connections[peer] = self._connect(peer, self._numbers[peer])
        return frames + self._connections[peer].open(due)

    def _connect(self, peer: int, number: int) -> SyntheticConnection:
        remote = self._population.peer("remote", peer)
        return SyntheticConnection(
            self.options, self._population, self._start_ns, remote, f"peer {peer}", number, style=peer
        )


def find_verdicts(copies: list[SyntheticCopy], checked: bool) -> bytes:
    """Build `Frame.verdicts` of an RPC with these messages, a byte per message; empty if none was checked."""
    given = [
        copy.pinned if copy.pinned is not None else copy.verdict if checked else Verdict.NOT_CHECKED for copy in copies
    ]
    return bytes(given) if any(given) else b""


def count_copies(ledger: Ledger, copies: list[SyntheticCopy], observed_at: int) -> None:
    for copy in copies:
        entry = ledger.message(copy.entry)
        if copy.tally == "good_copies":
            entry.good_copies += 1
            if entry.first_good_at is None:
                entry.first_good_at = observed_at
        elif copy.tally == "forged_copies":
            entry.forged_copies += 1
        else:
            entry.bad_copies += 1


def build_fault(
    connection: SyntheticConnection, data: bytes, stage: str, reason: str, observed_at: int, sequence: int | None = None
) -> FrameEntry:
    """Build the ledger entry of a bad IN frame: the frame with number `sequence`, by default the newest."""
    number = connection.sequence["IN"] if sequence is None else sequence
    return FrameEntry(
        connection=connection.id.hex(),
        direction="IN",
        sequence=number,
        sha256=sha256(data).hexdigest(),
        stage=stage,
        reason=reason,
        observed_at=observed_at,
    )


def write_traffic(stream: BinaryIO, frames: Iterable[GeneratedFrame]) -> int:
    """Write frames as an uncompressed capture file. For `*.rpc.gz`, pass a gzip stream.

    RPCs that were cut get their full length again. Closing frames are left out, because they are no RPCs. Use
    `TrafficOptions.for_capture`, because a capture has no rejected hellos, verdicts or ids of connections.

    Returns:
        The number of records.
    """
    records = (
        CaptureRecord(
            "R" if frame.direction == Frame.IN else "S",
            frame.observed_at,
            frame.local_peer,
            frame.remote_peer,
            frame.protocol,
            frame.payload.ljust(frame.declared_length, b"\0"),
        )
        for frame in (generated.frame for generated in frames)
        if frame.payload
    )
    return write_capture(stream, records)
