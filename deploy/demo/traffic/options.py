"""Options of the synthetic traffic, their meaning and their limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from kiln.conf.settings.model import Settings
from kiln.schemas.wire.signing_policy import Policy

GarbageKind = Literal[
    "random_data",  # a message of random bytes
    "invalid_json",  # a message that is nearly JSON
    "nan",  # a message with NaN or Infinity, which are not JSON
    "typ_true",  # a message whose `typ` is true, a text, …
    "bad_id",  # a message with a malformed StreamID, CID or separator
    "bad_shape",  # a message that lacks a field, or is of two types at once
    "wrong_auth",  # unsigned where signatures are required; signed where none are allowed
    "random_rpc",  # an RPC of random bytes
    "truncated_rpc",  # an RPC that ends too early
    "oversized_rpc",  # an RPC over 4 MiB, of which the frame has the beginning
    "wrong_hello",  # a connection whose hello has a topic table that is refused
]
GARBAGE: Final[tuple[GarbageKind, ...]] = get_args(GarbageKind)


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Options of synthetic traffic: equal options give the same traffic. Shares are from 0 to 1.

    Raises:
        ValueError: The seed is out of its range. The settings limit the other values.
    """

    seed: int = 1
    network: str = "local-demo"
    origin: Literal["LIVE", "REPLAY"] = "LIVE"
    # False: a StrictNoSign network, whose messages carry neither author, seqno, signature nor key.
    signed: bool = True

    # Remote peers, each with one connection to the one local peer.
    peers: int = 8
    authors: int = 24
    # Maximum number of copies of a message, each through another peer.
    copies: int = 3
    # Maximum delay of a copy after the first one.
    max_delay_ns: int = 250_000_000

    streams: int = 400
    # Number of separators, the first being the most popular. The key of most separators is `model`.
    separators: int = 40
    # Exponent of Zipf's law.
    skew: float = 1.1
    # Share of streams that have no separator.
    without_separator: float = 0.08

    # Relative weights of the types of messages.
    update: float = 0.62
    query: float = 0.13
    response: float = 0.17
    keepalive: float = 0.05
    batch_update: float = 0.03
    # Shares of messages in the forms of older eras; the rest has the current form.
    era_2020: float = 0.02
    era_doc: float = 0.06
    era_doc_stream: float = 0.12
    # Share of messages written by other clients: keys in another order, unknown keys, ids in other spellings.
    other_clients: float = 0.04
    # Share of the updates that come on the topic of their separator, not on that of the network.
    on_separator_topic: float = 0.5
    # Share of the updates of a model's streams that name the model in `model`.
    with_model: float = 0.8
    # Share of messages that announce an earlier update again, with a new seqno.
    reannounced: float = 0.05
    # Share of messages of a second network on the same connections. Without effect if messages are unsigned, because
    # the second network has the default signature policy.
    other_network: float = 0.005

    # Share of messages and frames that are garbage, in equal parts of these kinds. With 1, everything is garbage.
    garbage: float = 0.01
    garbage_kinds: tuple[GarbageKind, ...] = GARBAGE
    # Share of messages that are preceded by a copy with other data and the same signature.
    forged: float = 0.01
    # Share of messages in the name of an author who did not sign them.
    impostors: float = 0.002

    # Share of frames whose signatures the bridge has checked.
    checked: float = 0.5
    # Share of copies that are held back and sent in the next RPC of their connection.
    bundled: float = 0.15
    # Per message: control entries (IHAVE, GRAFT, …) of a peer or of the local peer.
    control: float = 0.2
    # Share of messages that the local peer forwards (OUT frames).
    forwarded: float = 0.05
    # Per message: a peer disconnects and connects again.
    reconnects: float = 0.0005

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= 2**63:
            raise ValueError(f"seed: {self.seed} is not between 0 and {2**63}")

    @property
    def mix(self) -> tuple[float, ...]:
        """Weights of UPDATE, QUERY, RESPONSE, KEEPALIVE, BATCH_UPDATE."""
        return (self.update, self.query, self.response, self.keepalive, self.batch_update)

    @property
    def policy(self) -> Policy:
        """Signature policy by which the ledger expects messages to be accepted or rejected. Always `either` for origin
        REPLAY (decision 5)."""
        if self.origin == "REPLAY":
            return "either"
        return "strict" if self.signed else "none"

    @property
    def second_network(self) -> str:
        """Name of the second network (see `other_network`)."""
        return f"{self.network}-2"

    def for_capture(self) -> TrafficOptions:
        """Return options without verdicts and rejected hellos, which a capture file cannot contain."""
        kinds = tuple(kind for kind in self.garbage_kinds if kind != "wrong_hello")
        return replace(self, origin="REPLAY", checked=0.0, garbage_kinds=kinds, garbage=self.garbage if kinds else 0.0)


def traffic_options(settings: Settings) -> TrafficOptions:
    """Return the options of the demo network's traffic, which is unsigned if the network's policy is `none`."""
    traffic = settings.traffic
    return TrafficOptions(
        seed=traffic.seed,
        network=settings.network.name,
        signed=settings.policy.of(settings.network.name) != "none",
        peers=traffic.peers,
        copies=traffic.copies,
        streams=traffic.streams,
        separators=traffic.separators,
        garbage=traffic.garbage,
        forged=traffic.forged,
    )
