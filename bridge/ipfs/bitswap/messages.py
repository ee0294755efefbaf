"""Read and write messages of bitswap 1.2.0, 1.1.0 and 1.0.0 (https://specs.ipfs.tech/bitswap-protocol/)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError
from libp2p.bitswap.pb.bitswap_pb2 import Message

from kiln.schemas.wire.cid import is_cid

V1_2: Final = "/ipfs/bitswap/1.2.0"
V1_1: Final = "/ipfs/bitswap/1.1.0"
V1_0: Final = "/ipfs/bitswap/1.0.0"
PROTOCOLS: Final = (V1_2, V1_1, V1_0)
"""Protocols that the bridge speaks, in order of preference."""

MAX_ENTRIES: Final = 1024
"""Maximum number of wants, and of presences, that are read from one message. Boxo, the bitswap library of Kubo, stores
no more wants of a peer."""
MAX_CID: Final = 100
"""Maximum size of a CID in a want, in bytes, as in boxo. A CID of sha2-256 has at most 44 bytes."""

_SHA2_256: Final = b"\x12\x20"
_DIGEST: Final = 32
_V0_PREFIX: Final = b"\x00\x70\x12\x20"


class MessageError(ValueError):
    """Bytes that are not a bitswap message."""


class WantEntry(NamedTuple):
    """An entry of a wantlist: a new want or, with `cancel`, the end of a want.

    Attributes:
        have: true for a want-have, which the receiver answers with HAVE; false for a want-block, which it answers with
            the block.
        send_dont_have: true if a receiver without the block should answer DONT_HAVE.
    """

    cid: bytes
    have: bool = False
    cancel: bool = False
    send_dont_have: bool = False


@dataclass(frozen=True, slots=True)
class BitswapMessage:
    """A bitswap message that was received.

    Attributes:
        full: true if `wants` replaces the sender's wantlist; false if it adds to the wantlist.
        haves: CIDs of blocks that the sender has.
        dont_haves: CIDs of blocks that the sender does not have.
        blocks: bytes of blocks. The receiver identifies a block by its hash.
        skipped: number of wants that have no usable CID, or are beyond MAX_ENTRIES.
    """

    wants: tuple[WantEntry, ...] = ()
    full: bool = False
    haves: tuple[bytes, ...] = ()
    dont_haves: tuple[bytes, ...] = ()
    blocks: tuple[bytes, ...] = ()
    skipped: int = 0


def read_message(body: bytes, protocol: str = V1_2) -> BitswapMessage:
    """Decode a message.

    Args:
        protocol: protocol id of the stream. Only version 1.2.0 has want-have and DONT_HAVE.

    Raises:
        MessageError: the bytes are not a bitswap message.
    """
    try:
        message = Message.FromString(body)
    except DecodeError as error:
        raise MessageError("the bytes are not a bitswap message") from error
    presences_known = protocol == V1_2
    entries = message.wantlist.entries
    wants = []
    for entry in entries[:MAX_ENTRIES]:
        cid = entry.block
        if len(cid) <= MAX_CID and is_cid(cid):
            have = presences_known and entry.wantType == Message.Wantlist.Have
            wants.append(WantEntry(cid, have, entry.cancel, presences_known and entry.sendDontHave))
    presences = message.blockPresences[:MAX_ENTRIES]
    return BitswapMessage(
        wants=tuple(wants),
        full=message.wantlist.full,
        haves=tuple(presence.cid for presence in presences if presence.type == Message.Have),
        dont_haves=tuple(presence.cid for presence in presences if presence.type == Message.DontHave),
        blocks=(*(block.data for block in message.payload), *message.blocks),
        skipped=len(entries) - len(wants),
    )


def write_message(
    protocol: str,
    wants: Iterable[WantEntry] = (),
    haves: Iterable[bytes] = (),
    dont_haves: Iterable[bytes] = (),
    blocks: Iterable[tuple[bytes, bytes]] = (),
) -> bytes:
    """Encode a message.

    Versions before 1.2.0 have no presences (HAVE, DONT_HAVE) and no want-haves. For these versions, presences are
    omitted, and want-haves become want-blocks.

    Args:
        protocol: protocol id of the stream.
        blocks: CID and bytes of each block.
    """
    message = Message()
    message.wantlist.SetInParent()  # older Kubo crashes on a message without a wantlist (litep2p issue 457)
    presences_known = protocol == V1_2
    for entry in wants:
        message.wantlist.entries.add(
            block=entry.cid,
            priority=1,
            cancel=entry.cancel,
            wantType=Message.Wantlist.Have if entry.have and presences_known else Message.Wantlist.Block,
            sendDontHave=entry.send_dont_have and presences_known,
        )
    if presences_known:
        for cid in haves:
            message.blockPresences.add(cid=cid, type=Message.Have)
        for cid in dont_haves:
            message.blockPresences.add(cid=cid, type=Message.DontHave)
    for cid, data in blocks:
        if protocol == V1_0:
            message.blocks.append(data)
        else:
            message.payload.add(prefix=_V0_PREFIX if cid.startswith(_SHA2_256) else cid[:-_DIGEST], data=data)
    return message.SerializeToString()
