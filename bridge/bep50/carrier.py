"""The overlay as a part of the bridge: what it listens to, what it captures, what it announces, what it keeps.

A topic belongs to one publisher's key and one separator (kiln.schemas.dht.announcement). The carrier follows the topics
of the settings. It joins a topic under its own key when a batch of that separator is to be announced, and leaves the
topic again when too many other topics have had a batch since.

An item leaves a gap if it does not name the batch that the item before it announced: nobody can tell any more what was
announced between the two. The gap goes to quarantine, and only then does the carrier keep the newer item, so that a
crash loses no gap.

Layout of its folder: `node.id`; `<target>.item`, the newest item of a topic and contacts; `stopped`, see `stopped`.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from random import SystemRandom
from typing import Final

import trio
from nacl.signing import SigningKey
from trio_typing import TaskStatus

from kiln.bridge.bep50.core import Event, ItemConflict, ItemTransfer, ItemUpdate, OverlaySettings, PlainStoreResult
from kiln.bridge.bep50.overlay import Overlay
from kiln.bridge.bep50.socket import Endpoint, bind
from kiln.bridge.bep50.store import TopicStore, TopicStoreError
from kiln.bridge.bep50.tap import ItemTap
from kiln.bridge.bep50.topic import ItemPublishError as OverlayError
from kiln.bridge.bep50.topic import TopicNode, addresses
from kiln.bridge.capture.sink import Sink
from kiln.bridge.libp2p.keys import load_or_create
from kiln.bridge.publisher.outbox import PublishError
from kiln.conf.process.bridge_status import OverlayStatus, OverlayTopicStatus, PublisherStatus
from kiln.schemas.dht.announcement import (
    Announcement,
    PublisherKey,
    find_missed,
    next_sequence,
    read_announcement,
    topic_salt,
    write_announcement,
)
from kiln.schemas.dht.items import Item, sign
from kiln.schemas.dht.items import target as target_of
from kiln.schemas.dht.krpc import ID_SIZE, DhtAddress, Family, host_and_port
from kiln.schemas.dht.node_id import bound_id, is_exempt
from kiln.schemas.kafka.records import QuarantineRecord
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import CidError, cid_bytes, cid_text
from kiln.schemas.wire.pubsub import BATCH_UPDATE, read_message
from kiln.schemas.wire.topics import TopicError, parse_topic, separator_text

TRANSPORT: Final = "bep50"
GAP: Final = "gap"

_KEEP_AFTER: Final = 2.0
"""Seconds from an item to its file. By then its frame is with Kafka or in the spool; were the file first, a crash
between them would lose the frame, since others are only asked for what is newer than the file."""
_EVERY: Final = 1.0
_ASK_AGAIN: Final = 60.0  # s between two tries to find the address of a name
_FULL: Final = 0.1  # s between two looks whether the sink has room
_MOST_TOLD: Final = 50  # topics in the status
_MOST_GAPS: Final = 1_000  # that wait for Kafka before nothing more is read


class CarrierError(Exception):
    """The overlay cannot run; the text says why, and what to do."""


@dataclass(frozen=True)
class CarrierOptions:
    """Places are texts, ``host:port``."""

    network: str
    listen: Sequence[str]
    """IP addresses, one of a family; port 0: any that is free"""
    bootstrap: Sequence[str] = ()
    """nodes of the plain DHT"""
    contacts: Sequence[str] = ()
    """nodes that are tried for every topic, as IP addresses"""
    follow: Sequence[PublisherKey] = ()
    most_topics: int = 500
    """of our own key, joined at a time"""
    batch_typ: int = BATCH_UPDATE


class Carrier:
    """The overlay on its sockets. All but `stopped` is for the trio thread."""

    def __init__(
        self,
        options: CarrierOptions,
        key: SigningKey,
        folder: Path,
        sink: Sink,
        clock_ns: Callable[[], int] = time.time_ns,
        on_item: Callable[[Item], None] | None = None,
        quarantine: Callable[[bytes, QuarantineRecord], threading.Event] | None = None,
    ) -> None:
        """``on_item`` is told each new item of others. ``quarantine`` takes a record and its key, and sets the event
        once nothing can lose it any more. Raises CarrierError."""
        self.public = key.verify_key.encode()
        self._options = options
        self._key = key
        self._sink = sink
        self._clock_ns = clock_ns
        self._on_item = on_item
        self._quarantine = quarantine
        self._stop_file = folder / "stopped"
        try:
            self._store = TopicStore(folder)
            self.stopped: str | None = self._stop_file.read_text() if self._stop_file.exists() else None
            """Why nothing may be published under our key, in words. Kept in a file that the user removes: who starts
            again and goes on would fight with the other publisher for ever."""
        except OSError as error:
            raise CarrierError(f"the folder {folder} cannot be used: {error}") from error
        self._sources: dict[bytes, PublisherKey] = {}
        self._ours: OrderedDict[bytes, None] = OrderedDict()  # joined to announce, the last used last
        self._unsaved: dict[bytes, float] = {}
        self._gaps: dict[bytes, list[threading.Event]] = {}  # by target, those not known to be written
        self._unknown: dict[str, str] = {}  # names of no address, and why
        self._counts: Counter[str] = Counter()
        self._troubles: dict[bytes, str] = {}
        self._disk: str | None = None
        self.addresses: tuple[DhtAddress, ...] = ()
        """Where it listens."""

    # ---------------------------------------------------------------- running

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started when all that is followed is joined. Raises CarrierError."""
        options = self._options
        try:
            sockets = [await bind(*host_and_port(text)) for text in options.listen]
            random = SystemRandom()
            self.addresses = tuple(DhtAddress.parse(*each.getsockname()[:2]) for each in sockets)
            local: dict[Family, DhtAddress] = {each.family: each for each in self.addresses}
            node = self._store.node_id(_new_id(self.addresses[0].ip, random.randbytes(ID_SIZE)))
        except (OSError, TopicStoreError) as error:
            raise CarrierError(str(error)) from error
        at_home = all(ipaddress.ip_address(each.ip).is_loopback for each in self.addresses)
        self._overlay = Overlay(
            node,
            self.addresses[0].port,
            random,
            trio.current_time(),
            OverlaySettings(per_ip=0) if at_home else OverlaySettings(),  # on loopback all have one IP
            filter(None, map(_address, options.bootstrap)),
        )
        self._tap = ItemTap(options.network, node, local, self._sink.put)
        self._endpoint = Endpoint(self._overlay, sockets, self._handle_events, self._has_room)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._endpoint.run)
                nursery.start_soon(self._run_saves)
                for source in options.follow:
                    await self._join(source)
                nursery.start_soon(self._find_names)
                task_status.started()
        except* TopicStoreError as group:
            raise CarrierError(str(group.exceptions[0])) from group
        finally:
            for target in self._sources:
                self._save(target)
            self._tap.close(self._clock_ns())

    async def _has_room(self) -> None:
        while self._sink.full or sum(map(len, self._gaps.values())) > _MOST_GAPS:
            await trio.sleep(_FULL)

    async def _run_saves(self) -> None:
        while True:
            await trio.sleep(_EVERY)
            now = trio.current_time()
            for target in [target for target, due in self._unsaved.items() if due <= now]:
                self._save(target)

    async def _find_names(self) -> None:
        """Look up the addresses of bootstrap nodes that are given by name, until all are known."""
        names = [text for text in self._options.bootstrap if _address(text) is None]
        while names:
            for text in names:
                await self._find_name(text)
            names = list(self._unknown)
            await trio.sleep(_ASK_AGAIN)

    async def _find_name(self, text: str) -> None:
        try:
            found = await trio.socket.getaddrinfo(*host_and_port(text), type=trio.socket.SOCK_DGRAM)
        except OSError as error:
            self._unknown[text] = f"{TRANSPORT}: {text}: {error.strerror or error}"
            return
        self._unknown.pop(text, None)
        known, families = self._overlay.plain.bootstrap, {each.family for each in self.addresses}
        places = [DhtAddress.parse(str(place[0]).partition("%")[0], int(place[1])) for *_, place in found]
        known += [each for each in places if each.family in families and each not in known]

    # ---------------------------------------------------------------- topics

    async def _join(self, source: PublisherKey) -> bytes:
        """The target of a source's topic, which is joined. Raises StoreError, TopicError."""
        salt = topic_salt(self._options.network, source.separator)
        target = target_of(source.key, salt)
        if target not in self._overlay.topics:
            stored = self._store.load(target)
            contacts = [*stored.contacts, *map(DhtAddress.from_text, self._options.contacts)]
            self._sources[target] = source
            await self._endpoint.subscribe(source.key, salt, stored.item, contacts, source.key == self.public)
        return target

    async def _join_own(self, source: PublisherKey) -> bytes:
        target = await self._join(source)
        if source not in self._options.follow:
            self._ours[target] = None
            self._ours.move_to_end(target)
            if len(self._ours) > self._options.most_topics:
                oldest, _ = self._ours.popitem(last=False)
                self._save(oldest)
                await self._endpoint.unsubscribe(oldest)
                del self._sources[oldest]
                self._unsaved.pop(oldest, None)
        return target

    def _save(self, target: bytes) -> None:
        topic = self._overlay.topics.get(target)
        if topic is None:
            return
        if not all(written.is_set() for written in self._gaps.get(target, ())):
            self._unsaved[target] = trio.current_time() + _EVERY
            return
        self._gaps.pop(target, None)
        try:
            self._store.save(target, topic.item, addresses(topic.contacts))
        except OSError as error:
            self._disk = f"{TRANSPORT}: what is needed after a restart cannot be kept: {error}"
            self._unsaved[target] = trio.current_time() + _EVERY
        else:
            self._disk = None
            self._unsaved.pop(target, None)

    def _handle_events(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case ItemTransfer():
                    self._tap.record(event, self._clock_ns())
                case ItemUpdate():
                    self._handle_update(event)
                case ItemConflict():
                    self._handle_conflict(event)
                case PlainStoreResult():
                    self._counts["stored"] += event.nodes

    def _handle_update(self, event: ItemUpdate) -> None:
        self._counts["items"] += 1
        if event.via == "publish":  # now: the next one's number and `prev` come from it
            self._save(event.target)
            return
        self._unsaved.setdefault(event.target, trio.current_time() + _KEEP_AFTER)
        self._check_gap(event)
        if self._on_item is not None:
            self._on_item(event.item)

    def _check_gap(self, event: ItemUpdate) -> None:
        source = self._sources[event.target]
        if event.kept is None or source.key == self.public:
            return
        last, new = self._read(event.kept), self._read(event.item)
        # what is no announcement the pipeline quarantines, as it has its frame
        if isinstance(last, Rejected) or isinstance(new, Rejected) or not find_missed(new, last.batch).gap:
            return
        self._counts["gaps"] += 1
        if self._quarantine is None:
            return
        cid = cid_text(new.batch)
        record = QuarantineRecord(
            stage=TRANSPORT,
            reason=GAP,
            # the same whenever it is found: so it is one row, however often it is written
            detail=f"{source.key.hex()} for {separator_text(source.separator)}: the item of {cid} does not name "
            f"{cid_text(last.batch)}, the newest known before it",
            data=event.item.value,
            observed_at=self._clock_ns() // 1_000,
        )
        self._gaps.setdefault(event.target, []).append(self._quarantine(cid.encode(), record))

    def _handle_conflict(self, event: ItemConflict) -> None:
        source = self._sources[event.target]
        signed = _signature_text(event.kept)
        of = f"for {separator_text(source.separator)}: sequence {event.kept.sequence}, signed {signed}"
        other = f"sequence {event.other.sequence}, signed {_signature_text(event.other)}"
        where = f" (from {event.source.text})" if event.source else ""
        if not event.ours:
            self._troubles[event.target] = (
                f"{TRANSPORT}: the publisher {source.key.hex()} has signed two values {of}, kept, and {other}{where}"
            )
        elif self.stopped is None:
            self.stopped = (
                f"{TRANSPORT}: nothing is announced any more: somebody else publishes under our key. We wrote, {of}; "
                f"they {other}{where}. Leave one that has the key of {self.public.hex()[:16]}…, then remove "
                f"{self._stop_file} and start again"
            )
            with suppress(OSError):  # if it cannot be kept, it is noticed anew
                self._stop_file.write_text(self.stopped)

    # ---------------------------------------------------------------- announcing

    async def announce(self, topic: str, data: bytes) -> int:
        """Announce the batch of a BATCH_UPDATE for a topic: to how many contacts it is known to have come so far.

        The answers to the first call's puts come later: call again until there are some. A batch that the topic's item
        already names is not announced again. Raises kiln.bridge.publisher.publisher.PublishError.
        """
        if self.stopped is not None:
            raise PublishError(self.stopped)
        name, update = parse_topic(topic), read_message(data, self._options.batch_typ)
        if name is None or name.separator is None or isinstance(update, Rejected) or update.batch is None:
            raise PublishError(f"{topic} is no topic of a separator, or its message no BATCH_UPDATE")
        separator = name.separator
        try:
            joined = self._overlay.topics[await self._join_own(PublisherKey(self.public, separator))]
            cid, named = cid_bytes(update.batch), self._describe_topic(joined)
            if cid not in named:
                now = self._clock_ns() // 1_000_000
                value = write_announcement(Announcement(separator, cid, now, named), self._options.batch_typ)
                last = joined.item.sequence if joined.item is not None else None
                await self._endpoint.publish(sign(self._key, joined.salt, next_sequence(now, last), value))
        except (OverlayError, TopicStoreError, TopicError, CidError, ValueError, OSError) as error:
            raise PublishError(str(error)) from error
        assert joined.item is not None
        return sum(each.sequence >= joined.item.sequence for each in joined.contacts)

    def target(self, topic: str) -> str:
        """Under which target the batches of a pubsub topic are announced, hex. Pure, so for any thread."""
        name = parse_topic(topic)
        assert name is not None
        assert name.separator is not None
        return target_of(self.public, topic_salt(name.network, name.separator)).hex()

    def _describe_topic(self, topic: TopicNode) -> tuple[bytes, ...]:
        """The batches that the topic's item names, newest first. So they survive a restart with the item."""
        if topic.item is None:
            return ()
        found = self._read(topic.item)
        return () if isinstance(found, Rejected) else (found.batch, *found.previous)

    def _read(self, item: Item) -> Announcement | Rejected:
        return read_announcement(item.value, self._options.network, item.salt, self._options.batch_typ)

    # ---------------------------------------------------------------- telling

    @property
    def errors(self) -> tuple[str, ...]:
        """What is wrong, in words."""
        texts = (self.stopped, self._disk, *self._unknown.values(), *self._troubles.values())
        return tuple(text for text in texts if text is not None)

    def status(self, publisher: PublisherStatus) -> OverlayStatus:
        """How it goes, with what its publisher says of itself."""
        joined = self._overlay.topics.values()
        topics = nlargest(_MOST_TOLD, joined, key=lambda each: len(each.contacts))
        return OverlayStatus(
            key=self.public.hex(),
            node=self._overlay.node_id.hex(),
            addresses=tuple(each.text for each in self.addresses),
            joined=len(joined),
            contacts=sum(len(each.contacts) for each in joined),
            topics=tuple(
                OverlayTopicStatus(
                    each.target.hex(),
                    each.key.hex(),
                    separator_text(self._sources[each.target].separator),
                    len(each.contacts),
                    each.item.sequence if each.item is not None else None,
                )
                for each in topics
            ),
            publisher=publisher,
            items=self._counts["items"],
            stored=self._counts["stored"],
            frames_in=self._tap.frames_in,
            frames_out=self._tap.frames_out,
            dropped=dict(self._overlay.dropped),
            unsent=dict(self._endpoint.unsent),
            gaps=self._counts["gaps"],
        )


def publisher_key(folder: Path) -> SigningKey:
    """The key under which batches are announced: that in `bep50.key`, a new one where there is none. KeyFileError."""
    return SigningKey(load_or_create(folder / "bep50.key").private_bytes_raw())


def _address(text: str) -> DhtAddress | None:
    """None: the host is a name."""
    try:
        return DhtAddress.from_text(text)
    except ValueError:
        return None


def _new_id(ip: bytes, entropy: bytes) -> bytes:
    return entropy if is_exempt(ip) or ipaddress.ip_address(ip).is_unspecified else bound_id(ip, entropy)


def _signature_text(item: Item) -> str:
    return f"{item.signature.hex()[:16]}…"
