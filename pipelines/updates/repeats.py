"""The rule by which the announcement of a tip is a new update, or a repeat (decision 5). The rule is a pure function,
which the deduplication file, Spark's state and a backfill share.

An announcement is a repeat if any author has announced the same tip of the stream before, unless its own author has
announced another tip of that stream since. So a node that returns to an earlier tip causes an update. Two nodes that
keep announcing different tips cause no further updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from kiln.pipelines.runtime.dedup_store import StoredDigest

_Tip = TypeVar("_Tip")


class LastTip(NamedTuple, Generic[_Tip]):
    """A tip of a stream that an author announced. `at`: capture time, µs."""

    tip: _Tip
    at: int


def is_update(announced: LastTip[_Tip], updated_at: int | None, last: LastTip[_Tip] | None) -> bool:
    """Return true if an announcement is an update, and not a repeat.

    Args:
        announced: The announced tip, and its time.
        updated_at: Time (µs) of the newest update of the stream to this tip, from any author; None if there is none.
        last: Tip that the same author announced for the stream before; None if there is none, or if the author is
            unknown.
    """
    if updated_at is None:
        return True
    return last is not None and last.tip != announced.tip and updated_at <= last.at <= announced.at


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """An announcement of a tip, as digests. `at`: capture time, µs."""

    update: bytes
    """digest of the stream, the tip and the separator: equal announcements have equal digests"""
    tip: bytes
    at: int
    message: bytes | None = None
    """digest of the message, to ignore its further copies; None if the author is unknown"""
    author: bytes | None = None
    """digest of the author and the stream; None if the author is unknown"""
    bare: bytes | None = None
    """digest as in `update`, but without separator; None if an announcement without separator is no repeat of this
    one"""
    has_waited: bool = False
    """true if the tip waited for the genesis of the stream, and became an update when the genesis arrived"""

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Digests under which state is stored."""
        return tuple(key for key in (self.message, self.update, self.author, self.bare) if key is not None)


class AnnouncementCopy(Protocol):
    """A copy of a row. Of all copies, only one is emitted. `identity`: digest of a row that is no announcement;
    `position`: unique for each copy."""

    @property
    def identity(self) -> bytes: ...
    @property
    def announcement(self) -> Announcement | None: ...
    @property
    def position(self) -> str: ...


_Copy = TypeVar("_Copy", bound=AnnouncementCopy)


def list_keys(copy: AnnouncementCopy) -> tuple[bytes, ...]:
    """List the digests whose state decides if a copy is emitted."""
    return (copy.identity,) if copy.announcement is None else copy.announcement.keys


def select_updates(
    copies: Iterable[_Copy], stored: Mapping[bytes, StoredDigest]
) -> tuple[list[_Copy], dict[bytes, StoredDigest]]:
    """Select the copies to emit.

    The first copy of a message decides for all its copies. If it is emitted, its position is stored. So a repeated
    micro-batch selects the same copies, even if the state already includes the micro-batch.

    Args:
        copies: The copies, in the order of their announcements.
        stored: State of the digests in `list_keys` of all copies.

    Returns:
        The copies to emit, and the changed state.
    """
    changed: dict[bytes, StoredDigest] = {}
    passed: list[_Copy] = []
    for copy in copies:
        announced = copy.announcement
        key = copy.identity if announced is None else announced.message
        known = None if key is None else changed.get(key) or stored.get(key)
        if known is not None:
            is_passed = known.position == copy.position
            if is_passed and announced is not None and not (announced.update in changed or announced.update in stored):
                # The micro-batch is repeated, and the separator has changed since. A tip that waited was emitted.
                is_passed = not announced.has_waited
                changed[announced.update] = StoredDigest(copy.position if is_passed else "", at=announced.at)
        elif announced is None:
            is_passed = True
        else:
            is_passed = _announce(announced, copy.position, stored, changed)
        if is_passed:
            passed.append(copy)
        if known is None and key is not None:
            changed[key] = StoredDigest(copy.position if is_passed else "")
    return passed, changed


def _announce(
    announced: Announcement, position: str, stored: Mapping[bytes, StoredDigest], changed: dict[bytes, StoredDigest]
) -> bool:
    """Decide by `is_update` if a message without stored state is an update. Change the state of its digests in
    `changed`."""

    def find(key: bytes | None) -> StoredDigest | None:
        return None if key is None else changed.get(key) or stored.get(key)

    update, bare, author = find(announced.update), find(announced.bare), find(announced.author)
    if update is not None and update.position == position:  # this copy passed before, and has no author
        return True
    updated_at = None if update is None else update.at
    if update is None and announced.has_waited:
        updated_at = 0 if bare is None else bare.at
    tip = LastTip(announced.tip, announced.at)
    is_new = is_update(tip, updated_at, None if author is None else LastTip(author.tip, author.at))
    if is_new:
        # without author there is no state of the message: the position of the first copy that passed is stored here
        changed[announced.update] = StoredDigest(position if update is None else update.position, at=announced.at)
        if announced.bare is not None:
            changed[announced.bare] = StoredDigest("" if bare is None else bare.position, at=announced.at)
    elif update is None:  # the tip waited: from now on the update has state of its own
        changed[announced.update] = StoredDigest(at=updated_at or 0)
    # Records may be read out of order, so the last tip is that of the newest announcement. An update that is read too
    # late counts as the last one, so that the next announcement of the tip after it is not taken for a repeat.
    if announced.author is not None and (author is None or is_new or announced.at >= author.at):
        changed[announced.author] = StoredDigest(tip=announced.tip, at=announced.at)
    return is_new
