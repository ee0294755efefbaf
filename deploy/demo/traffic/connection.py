"""Connections between a local peer and its remote peers, with consecutive frames from hello to closing."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from kiln.deploy.demo.traffic.messages import field
from kiln.deploy.demo.traffic.options import TrafficOptions
from kiln.deploy.demo.traffic.population import Population, derive_bytes
from kiln.schemas.kafka.frames import CUT_PAYLOAD
from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.topic_table import bundle_hash
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
    """A connection; `number` distinguishes the successive connections of a remote peer."""

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
        """The id is derived from `label` and `start_ns`: the same peer at another time has another connection.

        `style`: software of the remote peer. `hello`: its ExtTopicTable bytes, by default those of `style`; its first
        RPC contains them too, unless that would make the RPC unreadable.
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
            # a multiaddr: /ip4/192.0.2.x/tcp/y, of the network that is set aside for examples (RFC 5737)
            remote_address=b"\x04\xc0\x00\x02" + self.id[:1] + b"\x06" + self.id[1:3],
        )
        self.sequence: dict[Direction, int] = {"IN": 0, "OUT": 0}

    def observed_at(self, due_ns: int) -> int:
        return self._start_ns + due_ns

    def send(
        self, due_ns: int, direction: Direction, payload: bytes, verdicts: bytes = b"", declared_length: int = 0
    ) -> GeneratedFrame:
        """Build the next frame of a direction."""
        frame = Frame()  # one that is used again keeps every payload it ever had
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
        """Build the hellos of both sides, with their subscriptions and extensions."""
        sides: tuple[tuple[Direction, bytes], ...] = (("IN", self._hello_sent), ("OUT", self.hello_out))
        return [
            self.send(due_ns, side, self.subscription(side, self.topic) + self._extensions(hello))
            for side, hello in sides
        ]

    def close(self, due_ns: int) -> list[GeneratedFrame]:
        """Build the closing frame of each direction."""
        return [self.send(due_ns, "IN", b""), self.send(due_ns, "OUT", b"")]

    def subscription(self, direction: Direction, topic: str) -> bytes:
        """Build a SUBSCRIBE for a topic, or an UNSUBSCRIBE if this side is subscribed: a second SUBSCRIBE would mean a
        new stream (`schemas/captures/kiln_capture.py`)."""
        topics = self.subscribed[direction]
        wanted = topic not in topics
        (topics.add if wanted else topics.discard)(topic)
        option = rpc_pb2.RPC.SubOpts(subscribe=wanted, topicid=topic).SerializeToString()
        if self.partial_messages and direction == "IN":
            # requestsPartial = 3 and supportsSendingPartial = 4, as go-libp2p-pubsub since 0.16 writes in each one
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
