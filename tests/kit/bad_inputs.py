"""Bad input in bulk, one kind at a time on its own connections, to be mixed with valid traffic."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from random import Random
from typing import Final, Literal, get_args

from kiln.deploy.demo.traffic.generator import (
    HELLO_STAGE,
    RPC_STAGE,
    GeneratedFrame,
    SyntheticConnection,
    build_bad_hello,
    build_fault,
    build_malformed_protobuf,
    build_oversized_rpc,
    build_random_rpc,
    build_truncated_rpc,
    count_copies,
    find_verdicts,
)
from kiln.deploy.demo.traffic.ledger import FrameEntry, Ledger, MessageEntry
from kiln.deploy.demo.traffic.messages import (
    MESSAGE_STAGE,
    SIGNATURE_STAGE,
    MessageContent,
    MessageFactory,
    SyntheticCopy,
)
from kiln.deploy.demo.traffic.options import TrafficOptions
from kiln.deploy.demo.traffic.population import Population
from kiln.schemas.kafka.frames import FRAME_INVALID, FRAME_MALFORMED, MAX_RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import MISSING_SIGNATURE, Verdict
from kiln.schemas.wire.topics import format_topic

FRAME_STAGE: Final = "frame"

BadKind = Literal[
    "random_record",  # record values that are no Frames
    "random_rpc",
    "truncated_rpc",
    "oversized_rpc",
    "many_messages",  # one RPC with all of them in it
    "random_data",
    "invalid_json",
    "nan",
    "typ_true",
    "bad_id",
    "bad_shape",
    "wrong_auth",
    "impostor",
    "forged_first",  # each a forged copy and, on another connection, the true one after it
    "wrong_hello",  # each a connection: two IN frames, the hello and the closing one, have it
]
BAD_KINDS: Final[tuple[BadKind, ...]] = get_args(BadKind)


class BadInputs:
    """Frames of one kind of bad input, to be iterated once. The ledger is complete at the end of the iteration.

    Two spammers sign all bad messages that are signed. The population's authors sign the true messages of
    "forged_first".
    """

    def __init__(
        self, kind: BadKind, number: int, seed: int, options: TrafficOptions, start_ns: int, spacing_ns: int
    ) -> None:
        if number < 1:
            raise ValueError(f"number: {number} is less than 1")
        if kind in ("forged_first", "impostor") and not options.signed:
            raise ValueError(f"{kind}: there is nothing to forge in a network without signatures")
        self.ledger = Ledger()
        self._kind = kind
        self._number = number
        self._options = options
        self._start_ns = start_ns
        self._spacing_ns = spacing_ns
        self._label = f"{kind} {seed}"
        self._random = Random(f"{options.seed}/{self._label}/{start_ns}")
        self._population = Population(options)
        self._messages = MessageFactory(options, self._population, self._random)
        if kind == "many_messages" and (size := number * len(self._bare_number(number).publish)) > MAX_RPC:
            raise ValueError(f"number: an RPC of {number} messages would have {size} bytes, over {MAX_RPC}")

    def __iter__(self) -> Iterator[GeneratedFrame]:
        if self._kind == "wrong_hello":
            yield from self._wrong_hellos()
            return
        first, second = self._connect(0), self._connect(1)
        used = [first, second] if self._kind == "forged_first" else [first]
        for connection in used:
            yield from connection.open(0)
        due = 0
        for number in range(1 if self._kind == "many_messages" else self._number):
            due = (number + 1) * self._spacing_ns
            if self._kind == "forged_first":
                yield from self._forged_pair(first, second, due)
            else:
                yield self._one(first, due)
        for connection in used:
            yield from connection.close(due + self._spacing_ns)

    def _connect(self, number: int, hello: bytes | None = None, parses: bool = True) -> SyntheticConnection:
        remote = self._population.peer("stranger", number)
        return SyntheticConnection(
            self._options,
            self._population,
            self._start_ns,
            remote,
            self._label,
            number,
            style=0 if hello is not None else 1,
            hello=hello,
            hello_parses=parses,
        )

    def _one(self, connection: SyntheticConnection, due: int) -> GeneratedFrame:
        random, messages, now = self._random, self._messages, self._start_ns + due
        spammer = self._population.pick_spammer(random.random())
        match self._kind:
            case "random_record":
                return self._random_record(connection, due)
            case "random_rpc":
                bad = build_random_rpc(random)
            case "truncated_rpc":
                publish = messages.usual(messages.content("UPDATE", now), spammer, now).publish
                bad = build_truncated_rpc(random, publish)
            case "oversized_rpc":
                publish = messages.usual(messages.content("UPDATE", now), spammer, now).publish
                bad = build_oversized_rpc(random, publish)
            case "many_messages":
                # The number alone is the data: signed, so many would not fit into an RPC.
                return self._publish(connection, due, [self._bare_number(n) for n in range(self._number)])
            case "wrong_auth":
                copy = messages.wrong_auth(messages.content("UPDATE", now), spammer, now)
                return self._publish(connection, due, [copy])
            case "impostor":
                content, victim = messages.content("UPDATE", now), self._population.pick_author(0.0)
                return self._publish(connection, due, [messages.impostor(content, victim, spammer, now)])
            case "random_data" | "invalid_json" | "nan" | "typ_true" | "bad_id" | "bad_shape" as kind:
                copy = messages.usual(messages.garbage(kind), spammer, now)
                return self._publish(connection, due, [copy])
            case _:
                raise AssertionError(f"{self._kind} is made elsewhere")
        frame = connection.send(due, "IN", bad.payload, declared_length=bad.declared_length)
        self.ledger.frames.append(build_fault(connection, bad.payload, RPC_STAGE, bad.reason, now))
        return frame

    def _bare_number(self, number: int) -> SyntheticCopy:
        """Make the shortest message, unsigned, whose data is a number: invalid under any policy."""
        entry = MessageEntry(
            network=self._options.network,
            topic=format_topic(self._options.network, None),
            outcome="quarantine",
            stage=MESSAGE_STAGE,
            reason="not_an_object",
        )
        copy = self._messages._unsigned(MessageContent(b"%d" % number, entry))
        if self._options.policy == "strict":
            copy.entry.stage, copy.entry.reason = SIGNATURE_STAGE, MISSING_SIGNATURE
            return copy._replace(verdict=Verdict.AGAINST_POLICY, pinned=Verdict.NOT_CHECKED)
        return copy

    def _publish(self, connection: SyntheticConnection, due: int, copies: list[SyntheticCopy]) -> GeneratedFrame:
        payload = b"".join(copy.publish for copy in copies)
        verdicts = find_verdicts(copies, self._random.random() < self._options.checked)
        count_copies(self.ledger, copies, self._start_ns + due)
        return connection.send(due, "IN", payload, verdicts)

    def _random_record(self, connection: SyntheticConnection, due: int) -> GeneratedFrame:
        # A connection of the same id, so that no number is missing in that one.
        template = self._connect(0).send(due, "IN", b"")
        value, reason = build_bad_frame(self._random, template.frame)
        digest = sha256(value).hexdigest()
        self.ledger.frames.append(FrameEntry(None, None, None, digest, FRAME_STAGE, reason))
        return GeneratedFrame(due, connection.id, value)

    def _forged_pair(
        self, first: SyntheticConnection, second: SyntheticConnection, due: int
    ) -> Iterator[GeneratedFrame]:
        now = self._start_ns + due
        content = self._messages.content("UPDATE", now)
        author = self._population.pick_author(self._random.random())
        forged, true = self._messages.forged(content, author, now)
        yield self._publish(first, due, [forged])
        yield self._publish(second, due + self._spacing_ns // 2, [true])

    def _wrong_hellos(self) -> Iterator[GeneratedFrame]:
        for number in range(self._number):
            due = number * self._spacing_ns
            bad = build_bad_hello(self._random)
            connection = self._connect(number, bad.hello, bad.parses)
            yield from connection.open(due) + connection.close(due)
            for sequence in (1, 2):
                entry = build_fault(connection, bad.hello, HELLO_STAGE, bad.reason, self._start_ns + due, sequence)
                self.ledger.frames.append(entry)


def build_bad_frame(random: Random, frame: Frame) -> tuple[bytes, str]:
    """Build a record value that is not a Frame, or an invalid one, with its reason."""
    broken = Frame()
    broken.CopyFrom(frame)
    match random.randrange(5):
        case 0:
            broken.connection = frame.connection[:-1]
        case 1:
            broken.sequence = 0
        case 2:
            # proto3 enums are open, but the generated types are not: direction 2, written behind the rest
            return frame.SerializeToString() + b"\x18\x02", FRAME_INVALID
        case _:
            return build_malformed_protobuf(random, 400), FRAME_MALFORMED
    return broken.SerializeToString(), FRAME_INVALID


def generate_bad_inputs(
    kind: BadKind,
    number: int,
    seed: int,
    *,
    options: TrafficOptions | None = None,
    start_ns: int = 1_700_000_000_000_000_000,
    spacing_ns: int = 100_000,
) -> BadInputs:
    """Generate `number` bad inputs of one kind, `spacing_ns` apart. The same arguments give the same bytes.

    Pass the `options` of the valid traffic with which you mix these inputs.

    Raises:
        ValueError: `number` is less than 1, the network cannot have this kind, or an RPC of 4 MiB cannot hold so many
            messages.
    """
    return BadInputs(kind, number, seed, options or TrafficOptions(), start_ns, spacing_ns)
