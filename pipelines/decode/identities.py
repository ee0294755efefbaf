"""Digests by which copies of a message, and copies of a fault, are recognised (decision 5)."""

from __future__ import annotations

from hashlib import blake2b

from kiln.pipelines.decode.decoder import DecodedMessage, RejectedMessage
from kiln.schemas.wire.identity import UNVERIFIED, Verdict
from kiln.schemas.wire.message_id import CONTENT_PREFIXES


def compute_identities(decoded: DecodedMessage, scope: str, horizon: int) -> tuple[bytes, ...]:
    """Compute the digests that identify copies of a message; copies agree in at least one of them.

    Copies of a signed message, or of an unverifiable message with author and seqno, are identified as long as its
    digest is stored. An unsigned message, and any message on a network with ids by content, is identified by its bytes.
    The same bytes may legitimately be sent again (an unsigned QUERY is always the same), so the digests of such a
    message include its span of time. There are two digests, because time is divided into spans of one horizon in two
    ways, half a span apart. Copies less than half a span apart share at least one span; a repeat after a whole horizon
    shares none.

    Args:
        decoded: The message.
        scope: Namespace of the digests.
        horizon: Deduplication horizon of unsigned messages, µs.
    """
    signed = decoded.verdict is Verdict.VALID
    return compute_column_identities(decoded.network, decoded.message_id, signed, decoded.observed_at, scope, horizon)


def compute_column_identities(
    network: str, message_id: str, signed: bool, observed_at: int, scope: str, horizon: int
) -> tuple[bytes, ...]:
    """Compute the digests of `compute_identities` from columns of the table `messages`. `observed_at`: µs."""
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
    """Return true if copies of a message are identified while its digest is stored, not only within a horizon."""
    if signed:
        return not message_id.startswith(CONTENT_PREFIXES)
    return message_id.startswith(UNVERIFIED) and not message_id.startswith(CONTENT_PREFIXES, len(UNVERIFIED))


def compute_fault_identity(fault: RejectedMessage) -> bytes:
    """Compute the digest of a fault. Faults have no copies, so each is stored, but only once for a frame that was
    written twice (docs/design/contracts.md, Frame)."""
    where = (fault.frame, fault.ref.position) if fault.frame else fault.ref
    return blake2b(repr((where, fault.stage, fault.detail)).encode(), digest_size=16).digest()
