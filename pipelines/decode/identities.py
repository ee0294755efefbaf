"""Digests by which deduplication recognises the copies of a message and repeats of a rejected one (decision 5)."""

from __future__ import annotations

from hashlib import blake2b

from kiln.pipelines.decode.decoder import DecodedMessage, RejectedMessage
from kiln.schemas.wire.identity import UNVERIFIED, Verdict
from kiln.schemas.wire.message_id import CONTENT_PREFIXES


def compute_identities(decoded: DecodedMessage, scope: str, horizon: int) -> tuple[bytes, ...]:
    """Compute the digests that identify the copies of a message. Copies share at least one digest.

    A signed message, and a message that cannot be verified but has author and seqno, is identified by author and seqno,
    for as long as digests are stored. An unsigned message, and any message of a network whose message ids are hashes of
    the content, is identified by its bytes, but only within a span of time, because the same bytes may be sent again on
    purpose: an unsigned QUERY is always the same.

    Time is divided into spans of one `horizon` (µs) in two ways, half a span apart. So such a message has two digests.
    Copies less than half a span apart share at least one of them, and a repeat after a whole horizon shares none.
    Messages of different `scope` share no digest.
    """
    signed = decoded.verdict is Verdict.VALID
    return compute_column_identities(decoded.network, decoded.message_id, signed, decoded.observed_at, scope, horizon)


def compute_column_identities(
    network: str, message_id: str, signed: bool, observed_at: int, scope: str, horizon: int
) -> tuple[bytes, ...]:
    """Compute the digests of `compute_identities` from columns of `messages`. `signed`: the signature is valid;
    `observed_at` and `horizon`: µs."""
    start = f"{scope}\n{network}\n{message_id}"
    if is_lasting(message_id, signed):
        return (blake2b(start.encode(), digest_size=16).digest(),)
    early = observed_at // horizon
    late = (observed_at + horizon // 2) // horizon
    return (
        blake2b(f"{start}\n{early}".encode(), digest_size=16).digest(),
        blake2b(f"{start}\n{late}".encode(), digest_size=16).digest(),
    )


def is_lasting(message_id: str, signed: bool) -> bool:
    """Return true if copies of a message are recognised for as long as digests are stored, and not only within a
    horizon."""
    if signed:
        return not message_id.startswith(CONTENT_PREFIXES)
    return message_id.startswith(UNVERIFIED) and not message_id.startswith(CONTENT_PREFIXES, len(UNVERIFIED))


def compute_fault_identity(fault: RejectedMessage) -> bytes:
    """Compute the digest of a rejected message or frame. A repeat has the same digest only if its frame was
    written to Kafka twice (docs/design/contracts.md, Frame)."""
    where = (fault.frame, fault.ref.position) if fault.frame else fault.ref
    return blake2b(repr((where, fault.stage, fault.detail)).encode(), digest_size=16).digest()
