"""Records of `kiln.wanted`, each of which requests a block: its position, its announcer and its content."""

from __future__ import annotations

from typing import NamedTuple

from kiln.bridge.ipfs import Announcer
from kiln.schemas.kafka.records import SeparatorRecord, UpdateRecord, WantedRecord
from kiln.schemas.wire.cid import cid_text
from kiln.schemas.wire.identity import parse_author
from kiln.schemas.wire.streamid import StreamID


class KafkaPosition(NamedTuple):
    """The position of a record of `kiln.wanted`."""

    partition: int
    offset: int


class WantedEntry(NamedTuple):
    """A record of `kiln.wanted`, with its position and its announcer."""

    position: KafkaPosition
    record: WantedRecord
    announcer: Announcer


class NotWantedError(ValueError):
    """A record of `kiln.wanted` whose CID is not the genesis of its update's stream."""


def read_update(record: WantedRecord) -> UpdateRecord:
    """Return the update that waits for a genesis.

    Raises:
        NotWantedError: the CID is not the genesis of the update's stream.
    """
    update = record.update
    assert update is not None, "WantedRecord: a wanted genesis must have an update"
    if cid_text(StreamID.parse(update.stream).genesis) != record.cid:
        raise NotWantedError(f"{record.cid} is not the genesis of {update.stream}")
    return update


def read_announcer(record: WantedRecord) -> Announcer:
    """Return the announcer of a record. The peer that sent an unsigned message counts as its author."""
    peer = record.peer or ""
    return Announcer(parse_author(record.message_id or "") or peer, peer)


def get_separator(record: WantedRecord) -> SeparatorRecord:
    """Return the separator under which a wanted batch was announced."""
    assert record.separator is not None, "WantedRecord: a wanted batch must have a separator"
    return record.separator


def network_order(wanted: WantedEntry) -> tuple[int, int, int, int]:
    """Sort key: the order in which the bridge received updates. Spark writes them in any order within a micro-batch."""
    frame = wanted.record.update.frame if wanted.record.update is not None else None
    return wanted.record.observed_at, *((frame.partition, frame.offset, frame.index) if frame else (0, 0, 0))
