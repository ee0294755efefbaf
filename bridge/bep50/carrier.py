"""Run the BEP 50 overlay in the bridge: capture the followed topics, announce our batches, and save the state.

A topic belongs to one publisher key and one separator (kiln.schemas.dht.announcement). The carrier follows the topics
of `bep50.follow`. When it announces a batch, it joins the topic of our key and the batch's separator. Above
`CarrierOptions.max_topics`, it leaves the topic of our key whose last batch is oldest.

An item names its batch and some batches before it. If a new item does not name the batch of the stored item, there is a
gap: the batches announced between the two items are unknown. The carrier writes a record about the gap to
`kiln.quarantine` before it saves the new item, so that a crash loses no such record.

Files in the carrier's folder: `node.id`; `<target>.item`, the newest item of a topic and its contacts; `stopped`, the
text of `Carrier.stop_reason`.
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
from kiln.bridge.capture.tap import Sink
from kiln.bridge.libp2p.keys import load_or_create_key
from kiln.bridge.publisher.batches import PublishError
from kiln.conf.process.bridge_status import OverlayStatus, OverlayTopicStatus, PublisherStatus
from kiln.schemas.dht.announcement import (
    Announcement,
    PublisherKey,
    compute_next_sequence,
    compute_salt,
    find_missed_batches,
    read_announcement,
    write_announcement,
)
from kiln.schemas.dht.items import Item, sign
from kiln.schemas.dht.items import compute_target as target_of
from kiln.schemas.dht.krpc import ID_SIZE, DhtAddress, Family, parse_host_and_port
from kiln.schemas.dht.node_id import compute_bound_id, is_exempt
from kiln.schemas.kafka.records import QuarantineRecord
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import CidError, cid_bytes, cid_text
from kiln.schemas.wire.pubsub import BATCH_UPDATE, read_message
from kiln.schemas.wire.topics import TopicError, format_separator, parse_topic

TRANSPORT: Final = "bep50"
GAP: Final = "gap"

_SAVE_DELAY: Final = 2.0
"""Seconds from receiving an item to writing its file. By then the item's frame is in Kafka or in the spool. If the file
were written first, a crash before that would lose the frame: the next start requests only newer items."""
_SAVE_INTERVAL: Final = 1.0
_RESOLVE_INTERVAL: Final = 60.0  # s between attempts to resolve a host name
_ROOM_POLL: Final = 0.1  # s between checks for room in the sink
_MAX_STATUS_TOPICS: Final = 50
_MAX_WAITING_GAPS: Final = 1_000  # gaps waiting for Kafka at which reading pauses


class CarrierError(Exception):
    """The overlay cannot run. The message has the reason."""


@dataclass(frozen=True)
class CarrierOptions:
    """Options of the carrier. Addresses are texts ``host:port``."""

    network: str
    listen: Sequence[str]
    """At most one address for IPv4 and one for IPv6. The host is an IP address; port 0 is any free port."""
    bootstrap: Sequence[str] = ()
    """Nodes of the plain DHT."""
    contacts: Sequence[str] = ()
    """Nodes to try as contacts for every topic. The host is an IP address."""
    follow: Sequence[PublisherKey] = ()
    max_topics: int = 500
    """Maximum number of topics of our own key that are joined at a time."""
    batch_typ: int = BATCH_UPDATE


class Carrier:
    """Runs the overlay, and announces batches. In other threads than trio's, use only `stop_reason` and `target`."""

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
        """Open the topic store.

        Args:
            key: The key that signs our items.
            on_item: Called with each new item of another publisher.
            quarantine: Queues a record, given its key and value, for `kiln.quarantine`. Returns an event that is set
                once Kafka has the record.

        Raises:
            CarrierError: The folder cannot be used.
        """
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
            self.stop_reason: str | None = _read_stop_reason(self._stop_file)
            """Reason why publishing under our key has stopped; `None` if it has not. The reason is in a file, and stays
            until the user removes the file. Otherwise two publishers with one key would both resume after a restart."""
        except OSError as error:
            raise CarrierError(
                f"cannot use the BEP 50 folder {folder} ({error}). Check its permissions and the disk."
            ) from error
        self._sources: dict[bytes, PublisherKey] = {}
        self._own_topics: OrderedDict[bytes, None] = OrderedDict()  # joined to announce, least recently used first
        self._unsaved: dict[bytes, float] = {}
        self._gaps: dict[bytes, list[threading.Event]] = {}  # by target, events of gap records that Kafka may not have
        self._unresolved: dict[str, str] = {}  # host names that do not resolve, and the error
        self._counts: Counter[str] = Counter()
        self._conflicts: dict[bytes, str] = {}
        self._save_error: str | None = None
        self.addresses: tuple[DhtAddress, ...] = ()
        """The addresses on which the sockets listen."""

    # ---------------------------------------------------------------- running

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the overlay until cancelled. The task counts as started when all followed topics are joined.

        Raises:
            CarrierError: A socket cannot be bound, or a stored file is damaged.
        """
        options = self._options
        try:
            sockets = [await bind(*parse_host_and_port(text)) for text in options.listen]
            random = SystemRandom()
            self.addresses = tuple(DhtAddress.parse(*opened.getsockname()[:2]) for opened in sockets)
            local: dict[Family, DhtAddress] = {address.family: address for address in self.addresses}
            node = self._store.load_node_id(_new_id(self.addresses[0].ip, random.randbytes(ID_SIZE)))
        except (OSError, TopicStoreError) as error:
            raise CarrierError(str(error)) from error
        only_loopback = all(ipaddress.ip_address(address.ip).is_loopback for address in self.addresses)
        self._overlay = Overlay(
            node,
            self.addresses[0].port,
            random,
            trio.current_time(),
            OverlaySettings(per_ip=0) if only_loopback else OverlaySettings(),  # on loopback all nodes have one IP
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
                nursery.start_soon(self._resolve_names)
                task_status.started()
        except* TopicStoreError as group:
            raise CarrierError(str(group.exceptions[0])) from group
        finally:
            for target in self._sources:
                self._save(target)
            self._tap.close(self._clock_ns())

    async def _has_room(self) -> None:
        while self._sink.full or sum(map(len, self._gaps.values())) > _MAX_WAITING_GAPS:
            await trio.sleep(_ROOM_POLL)

    async def _run_saves(self) -> None:
        while True:
            await trio.sleep(_SAVE_INTERVAL)
            now = trio.current_time()
            for target in [target for target, due in self._unsaved.items() if due <= now]:
                self._save(target)

    async def _resolve_names(self) -> None:
        """Resolve the host names in `bep50.bootstrap`. Retry until all are resolved."""
        names = [text for text in self._options.bootstrap if _address(text) is None]
        while names:
            for text in names:
                await self._resolve_name(text)
            names = list(self._unresolved)
            await trio.sleep(_RESOLVE_INTERVAL)

    async def _resolve_name(self, text: str) -> None:
        try:
            results = await trio.socket.getaddrinfo(*parse_host_and_port(text), type=trio.socket.SOCK_DGRAM)
        except OSError as error:
            self._unresolved[text] = (
                f"{TRANSPORT}: cannot resolve {text} ({error.strerror or error}). Check bep50.bootstrap and the DNS."
            )
            return
        self._unresolved.pop(text, None)
        bootstrap, families = self._overlay.plain.bootstrap, {own.family for own in self.addresses}
        resolved = [DhtAddress.parse(str(address[0]).partition("%")[0], int(address[1])) for *_, address in results]
        bootstrap += [address for address in resolved if address.family in families and address not in bootstrap]

    # ---------------------------------------------------------------- topics

    async def _join(self, source: PublisherKey) -> bytes:
        """Join the topic of a publisher key and a separator, unless it is joined already.

        Returns:
            The topic's target.

        Raises:
            TopicStoreError: The stored topic is damaged.
            TopicError: The separator cannot be part of a topic name.
        """
        salt = compute_salt(self._options.network, source.separator)
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
            self._own_topics[target] = None
            self._own_topics.move_to_end(target)
            if len(self._own_topics) > self._options.max_topics:
                oldest, _ = self._own_topics.popitem(last=False)
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
            self._unsaved[target] = trio.current_time() + _SAVE_INTERVAL
            return
        self._gaps.pop(target, None)
        try:
            self._store.save(target, topic.item, addresses(topic.contacts))
        except OSError as error:
            self._save_error = f"{TRANSPORT}: cannot save topic {target.hex()} ({error}). Check the disk."
            self._unsaved[target] = trio.current_time() + _SAVE_INTERVAL
        else:
            self._save_error = None
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
        if event.via == "publish":  # saved at once: the next item's sequence number and `prev` depend on it
            self._save(event.target)
            return
        self._unsaved.setdefault(event.target, trio.current_time() + _SAVE_DELAY)
        self._check_gap(event)
        if self._on_item is not None:
            self._on_item(event.item)

    def _check_gap(self, event: ItemUpdate) -> None:
        source = self._sources[event.target]
        if event.stored is None or source.key == self.public:
            return
        last, new = self._read(event.stored), self._read(event.item)
        # an item that is no announcement is ignored here: a query quarantines its frame
        if isinstance(last, Rejected) or isinstance(new, Rejected) or not find_missed_batches(new, last.batch).gap:
            return
        self._counts["gaps"] += 1
        if self._quarantine is None:
            return
        cid = cid_text(new.batch)
        record = QuarantineRecord(
            stage=TRANSPORT,
            reason=GAP,
            # the text does not depend on the time of detection, so that a gap written several times is one row
            detail=f"{source.key.hex()} for {format_separator(source.separator)}: the item of {cid} does not name "
            f"{cid_text(last.batch)}, the newest batch known before it",
            data=event.item.value,
            observed_at=self._clock_ns() // 1_000,
        )
        self._gaps.setdefault(event.target, []).append(self._quarantine(cid.encode(), record))

    def _handle_conflict(self, event: ItemConflict) -> None:
        source = self._sources[event.target]
        separator = format_separator(source.separator)
        stored, other = (
            f"sequence number {item.sequence}, signature {item.signature.hex()[:16]}…"
            for item in (event.stored, event.other)
        )
        origin = f" from {event.source.text}" if event.source else ""
        if not event.is_own:
            self._conflicts[event.target] = (
                f"{TRANSPORT}: publisher {source.key.hex()} signed two different items for {separator}. Kiln "
                f"uses one ({stored}), and ignores the other ({other}{origin}). Ask the publisher to use the key in "
                "one place only."
            )
        elif self.stop_reason is None:
            self.stop_reason = (
                f"{TRANSPORT}: announcing has stopped: another publisher uses our key for {separator} (ours: {stored}; "
                f"theirs: {other}{origin}). Make sure that only one publisher uses the key {self.public.hex()[:16]}…, "
                f"remove {self._stop_file}, and restart the bridge."
            )
            with suppress(OSError):  # without the file, the next conflict is detected again
                self._stop_file.write_text(self.stop_reason)

    # ---------------------------------------------------------------- announcing

    async def announce(self, topic: str, data: bytes) -> int:
        """Announce the batch of a BATCH_UPDATE, unless the item of its topic already names the batch.

        Args:
            topic: The pubsub topic of the batch, from which the separator is taken.
            data: The BATCH_UPDATE.

        Returns:
            The number of contacts that are known to have the item. Responses to puts arrive after the first call, so
            call again until the number is above zero.

        Raises:
            PublishError: The batch cannot be announced.
        """
        if self.stop_reason is not None:
            raise PublishError(self.stop_reason)
        name, update = parse_topic(topic), read_message(data, self._options.batch_typ)
        if name is None or name.separator is None or isinstance(update, Rejected) or update.batch is None:
            raise PublishError(
                f"cannot announce on {topic}: the topic has no separator, or the message is not a BATCH_UPDATE"
            )
        separator = name.separator
        try:
            joined = self._overlay.topics[await self._join_own(PublisherKey(self.public, separator))]
            cid, batches = cid_bytes(update.batch), self._read_batches(joined)
            if cid not in batches:
                now = self._clock_ns() // 1_000_000
                value = write_announcement(Announcement(separator, cid, now, batches), self._options.batch_typ)
                last = joined.item.sequence if joined.item is not None else None
                await self._endpoint.publish(sign(self._key, joined.salt, compute_next_sequence(now, last), value))
        except (OverlayError, TopicStoreError, TopicError, CidError, ValueError, OSError) as error:
            raise PublishError(str(error)) from error
        assert joined.item is not None
        return sum(contact.sequence >= joined.item.sequence for contact in joined.contacts)

    def target(self, topic: str) -> str:
        """Return the DHT target, in hex, under which the batches of a pubsub topic are announced. Thread-safe."""
        name = parse_topic(topic)
        assert name is not None
        assert name.separator is not None
        return target_of(self.public, compute_salt(name.network, name.separator)).hex()

    def _read_batches(self, topic: TopicNode) -> tuple[bytes, ...]:
        """Return the CIDs of the batches that the topic's item names, newest first."""
        if topic.item is None:
            return ()
        announcement = self._read(topic.item)
        return () if isinstance(announcement, Rejected) else (announcement.batch, *announcement.previous)

    def _read(self, item: Item) -> Announcement | Rejected:
        return read_announcement(item.value, self._options.network, item.salt, self._options.batch_typ)

    # ---------------------------------------------------------------- status

    @property
    def errors(self) -> tuple[str, ...]:
        """Messages about the current errors, for users."""
        texts = (self.stop_reason, self._save_error, *self._unresolved.values(), *self._conflicts.values())
        return tuple(text for text in texts if text is not None)

    def status(self, publisher: PublisherStatus) -> OverlayStatus:
        """Return the overlay's part of the bridge's status.

        Args:
            publisher: Status of the publisher that calls `announce`.
        """
        joined = self._overlay.topics.values()
        topics = nlargest(_MAX_STATUS_TOPICS, joined, key=lambda topic: len(topic.contacts))
        return OverlayStatus(
            key=self.public.hex(),
            node=self._overlay.node_id.hex(),
            addresses=tuple(address.text for address in self.addresses),
            joined=len(joined),
            contacts=sum(len(topic.contacts) for topic in joined),
            topics=tuple(
                OverlayTopicStatus(
                    topic.target.hex(),
                    topic.key.hex(),
                    format_separator(self._sources[topic.target].separator),
                    len(topic.contacts),
                    topic.item.sequence if topic.item is not None else None,
                )
                for topic in topics
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
    """Load the key that signs our announcements from the file `bep50.key`, or create the file.

    Raises:
        KeyFileError: The file cannot be used.
    """
    return SigningKey(load_or_create_key(folder / "bep50.key").private_bytes_raw())


def _address(text: str) -> DhtAddress | None:
    """Parse ``host:port``; `None` if the host is not an IP address."""
    try:
        return DhtAddress.from_text(text)
    except ValueError:
        return None


def _new_id(ip: bytes, entropy: bytes) -> bytes:
    return entropy if is_exempt(ip) or ipaddress.ip_address(ip).is_unspecified else compute_bound_id(ip, entropy)


def _read_stop_reason(path: Path) -> str | None:
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return None
