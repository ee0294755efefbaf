"""The separator of an update: from the verified genesis of its stream, or from a claim (decision 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from kiln.pipelines.updates.known_streams import StreamsTopic
from kiln.schemas.kafka.records import QuarantineRecord, SeparatorRecord, SeparatorSource
from kiln.schemas.wire.claims import CONTRADICTS, Claims, describe_contradiction
from kiln.schemas.wire.topics import Separator


@dataclass(frozen=True)
class SeparatorConfig:
    """Configuration of separators.

    Attributes:
        streams: Topic of the verified separators, if any.
        fetch: True if blocks can be fetched.
        believe: True to accept a claim before it is verified, even if it can be verified.
    """

    streams: StreamsTopic | None = None
    fetch: bool = False
    believe: bool = True


class KnownSeparators(Protocol):
    """Separators of verified geneses, by (network, StreamID), such as a dict; None for a genesis without one."""

    def get(self, stream: tuple[str, str], default: SeparatorRecord | None, /) -> SeparatorRecord | None: ...


_UNKNOWN: Final = SeparatorRecord("-", "-")


class SeparatedUpdate(NamedTuple):
    """The separator of an update, its source, and the claim that the genesis contradicts."""

    separator: Separator | None
    source: SeparatorSource | None
    contradicted: Separator | None = None


def resolve_separator(
    claims: Claims, stream: tuple[str, str], known: KnownSeparators, separating: SeparatorConfig
) -> SeparatedUpdate:
    """Resolve the separator of an update (decision 4): from the verified genesis, else from the topic, else from
    `model`.

    A genesis without a separator contradicts no claim, but still takes precedence. If the genesis can be fetched,
    claims that contradict each other are ignored.

    Args:
        claims: Claims of the update.
        stream: Network and StreamID.
        known: Verified separators.
        separating: The configuration, which decides which claims are accepted.
    """
    verified = known.get(stream, _UNKNOWN)
    if verified is None:
        return SeparatedUpdate(None, "genesis")
    if verified is not _UNKNOWN:
        separator = Separator(verified.key, verified.value)
        return SeparatedUpdate(separator, "genesis", claims.find_contradicted(separator))
    if claims.first is None or (separating.fetch and (claims.disagree or not separating.believe)):
        return SeparatedUpdate(None, None)
    return SeparatedUpdate(claims.first, "topic" if claims.topic is not None else "model")


def build_claims(topic: Separator | None, model: str | None) -> Claims:
    """Build the claims of an UPDATE: the separator of its topic, and its field `model`."""
    return Claims(topic, None if model is None else Separator("model", model))


def build_false_claim(claimed: Separator, separator: Separator, data: bytes, observed_at: int) -> QuarantineRecord:
    """Build the quarantine record of an UPDATE whose claim the genesis contradicts. `data`: bytes of the message."""
    return QuarantineRecord(
        stage="separator",
        reason=CONTRADICTS,
        detail=describe_contradiction(claimed, separator),
        data=data,
        observed_at=observed_at,
    )
