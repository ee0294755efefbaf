"""The bridge's side of BEP 50 on loopback UDP: batches announced by one are Frames of the other, restarts included."""

from __future__ import annotations

import itertools
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from nacl.signing import SigningKey

from conftest import free_ports
from kiln.bridge.bep50.carrier import Carrier, CarrierError, CarrierOptions, publisher_key
from kiln.bridge.bep50.store import TopicStore
from kiln.bridge.publisher.batches import PublishError
from kiln.conf.process.bridge_status import OverlayStatus, PublisherStatus, read_status
from kiln.deploy.demo.network import NODES, REANNOUNCED, OverlayListeners
from kiln.schemas.dht.announcement import (
    Announcement,
    PublisherKey,
    ReceivedAnnouncement,
    compute_salt,
    find_missed_batches,
    parse_source,
    read_announcement,
    read_datagram,
)
from kiln.schemas.dht.items import compute_target
from kiln.schemas.kafka.frames import BEP50, read_frame
from kiln.schemas.kafka.records import QuarantineRecord
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import cid_bytes, cid_text, compute_cid
from kiln.schemas.wire.pubsub import write_batch_update
from kiln.schemas.wire.topics import Separator, encode_separator_value, format_topic
from kit.awaiting import until, wait_until
from kit.torrent_nodes import PATIENCE, Torrent

pytest_plugins = ["kit.torrent_fixtures"]

NETWORK = "local-test"
SEPARATOR = Separator("model", encode_separator_value(b"\x01\x02"))
TOPIC = format_topic(NETWORK, SEPARATOR)
KEY, OTHER_KEY = SigningKey(b"\x21" * 32), SigningKey(b"\x22" * 32)
SOURCE = PublisherKey(KEY.verify_key.encode(), SEPARATOR)
TARGET = compute_target(SOURCE.key, compute_salt(NETWORK, SEPARATOR))
ANYWHERE = ("127.0.0.1:0",)


def cid(number: int) -> str:
    return cid_text(compute_cid(b"block %d" % number))


class Tape:
    """A sink that keeps the frames."""

    def __init__(self) -> None:
        self.full = False
        self.frames: list[Frame] = []

    def put(self, connection: bytes, frame: bytes) -> None:
        read = read_frame(frame)
        assert isinstance(read, Frame)
        assert read.connection == connection
        self.frames.append(read)

    def subscribe(self, callback: Callable[[], None]) -> None: ...

    def announced(self) -> list[ReceivedAnnouncement]:
        """What the frames that came in announce, verified."""
        found = [
            read_datagram(each.payload, NETWORK)
            for each in self.frames
            if each.direction == Frame.IN and each.payload and each.protocol == BEP50
        ]
        assert all(isinstance(each, ReceivedAnnouncement) for each in found)
        return [each for each in found if isinstance(each, ReceivedAnnouncement)]

    def batches(self) -> list[str]:
        """CIDs announced, each once, as they came."""
        return list(dict.fromkeys(cid_text(each.announcement.batch) for each in self.announced()))


class Records:
    """A quarantine that has what it took only once it is told so."""

    def __init__(self, *, is_there: bool = True) -> None:
        self.is_there = is_there
        self.taken: list[tuple[bytes, QuarantineRecord]] = []
        self._events: list[threading.Event] = []

    def put(self, key: bytes, record: QuarantineRecord) -> threading.Event:
        self.taken.append((key, record))
        self._events.append(threading.Event())
        if self.is_there:
            self.come_back()
        return self._events[-1]

    def come_back(self) -> None:
        for event in self._events:
            event.set()


class Kiln:
    """A running overlay of a bridge."""

    def __init__(self, carrier: Carrier, tape: Tape) -> None:
        self.carrier = carrier
        self.tape = tape

    @property
    def place(self) -> str:
        return self.carrier.addresses[0].text

    @property
    def status(self) -> OverlayStatus:
        return self.carrier.status(PublisherStatus(""))

    async def announce(self, number: int, peers: int = 1, separator: Separator = SEPARATOR) -> int:
        """Announce a batch, until so many contacts have it."""
        topic, data = format_topic(NETWORK, separator), write_batch_update(separator, cid(number))
        with trio.fail_after(PATIENCE):
            while (reached := await self.carrier.announce(topic, data)) < peers:
                await trio.sleep(0.01)  # the answers to its puts come later, and wake nobody
            return reached

    async def hears(self, *numbers: int) -> None:
        """Until these are the batches that were announced to it."""
        wanted = [cid(number) for number in numbers]
        await until(lambda: self.tape.batches() == wanted, lambda: f"{wanted}, not {self.tape.batches()}")


@asynccontextmanager
async def kiln(
    folder: Path,
    key: SigningKey,
    *,
    follow: Sequence[PublisherKey] = (),
    bootstrap: Sequence[str] = (),
    contacts: Sequence[str] = (),
    listen: Sequence[str] = ANYWHERE,
    clock_ns: Callable[[], int] = time.time_ns,
    max_topics: int = 500,
    quarantine: Records | None = None,
) -> AsyncIterator[Kiln]:
    tape = Tape()
    options = CarrierOptions(NETWORK, listen, bootstrap, contacts, follow, max_topics)
    carrier = Carrier(options, key, folder, tape, clock_ns, quarantine=quarantine.put if quarantine else None)
    async with trio.open_nursery() as nursery:
        await nursery.start(carrier.run)
        yield Kiln(carrier, tape)
        nursery.cancel_scope.cancel()


def subscriber(folder: Path, *others: Kiln, quarantine: Records | None = None) -> AbstractAsyncContextManager[Kiln]:
    """One that follows SOURCE."""
    return kiln(folder, OTHER_KEY, follow=[SOURCE], contacts=[each.place for each in others], quarantine=quarantine)


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[Kiln, Kiln]]:
    """SOURCE and a subscriber, of which it knows the address."""
    async with subscriber(folder / "b") as b, kiln(folder / "a", KEY, contacts=[b.place]) as a:
        yield a, b


# ---------------------------------------------------------------- one to the other


def test_a_batch_announced_by_one_is_a_frame_of_the_other(torrents: list[Torrent], tmp_path: Path) -> None:
    """They know nothing of each other but the key: plain nodes bring them together."""

    async def main() -> None:
        one_way, other_way = torrents[0].address.text, torrents[1].address.text
        async with (
            kiln(tmp_path / "a", KEY, bootstrap=[one_way]) as a,
            kiln(tmp_path / "b", OTHER_KEY, bootstrap=[other_way], follow=[SOURCE]) as b,
        ):
            assert await a.announce(1) == 1
            await a.announce(2)
            await b.hears(1, 2)
            newest = max(b.tape.announced(), key=lambda each: each.item.sequence)  # an older one may come again
            assert newest.item.key == SOURCE.key
            assert newest.announcement.separator == SEPARATOR
            assert newest.announcement.previous == (cid_bytes(cid(1)),)
            (topic,) = b.status.topics
            assert (topic.target, topic.publisher, topic.contacts) == (TARGET.hex(), SOURCE.key.hex(), 1)
            assert topic.sequence == newest.item.sequence
            assert a.carrier.target(TOPIC) == TARGET.hex()
            # in the plain DHT too, for who polls or comes later
            await until(lambda: a.status.stored > 0, "nodes that store the item")
            read = await trio.to_thread.run_sync(torrents[2].get, SOURCE.key, compute_salt(NETWORK, SEPARATOR))
            assert read.sequence in {each.item.sequence for each in b.tape.announced()}

    trio.run(main)


def test_two_kilns_find_each_other_by_their_addresses_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            await a.announce(1)
            await b.hears(1)

    trio.run(main)


def test_over_ipv6(tmp_path: Path) -> None:
    async def main() -> None:
        listen = ("127.0.0.1:0", "[::1]:0")
        async with kiln(tmp_path / "b", OTHER_KEY, follow=[SOURCE], listen=listen) as b:
            there = b.carrier.addresses[1].text
            async with kiln(tmp_path / "a", KEY, contacts=[there], listen=listen) as a:
                await a.announce(1)
                await b.hears(1)
                assert len(b.tape.frames[0].remote_address) == 18

    try:
        trio.run(main)
    except* CarrierError as group:
        if "cannot listen" in str(group.exceptions[0]):
            pytest.skip("no IPv6 loopback")
        raise


# ---------------------------------------------------------------- frames


def test_frames_are_numbered_by_connection_and_direction_and_end(tmp_path: Path) -> None:
    async def main() -> list[Tape]:
        async with pair(tmp_path) as (a, b):
            for number in range(3):
                await a.announce(number)
            await b.hears(0, 1, 2)
            assert a.status.frames_out == b.status.frames_in == len(b.tape.announced())
        return [a.tape, b.tape]

    for tape in trio.run(main):
        assert all(each.protocol == BEP50 and each.network == NETWORK for each in tape.frames)
        assert all(len(each.local_peer) == len(each.remote_peer) == 20 for each in tape.frames)
        assert all(len(each.remote_address) == 6 and not each.hello_in for each in tape.frames)
        by_direction: dict[tuple[bytes, int], list[Frame]] = {}
        for each in tape.frames:
            by_direction.setdefault((each.connection, each.direction), []).append(each)
        for frames in by_direction.values():
            assert [each.sequence for each in frames] == list(range(1, len(frames) + 1))
            assert [bool(each.payload) for each in frames] == [True] * (len(frames) - 1) + [False]


def test_what_is_sent_is_captured_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            await a.announce(1)
            out = [each.payload for each in a.tape.frames if each.direction == Frame.OUT and each.payload]
            came = [each.payload for each in b.tape.frames if each.direction == Frame.IN and each.payload]
            assert out == came

    trio.run(main)


def test_while_frames_can_go_nowhere_nothing_is_read(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            await a.announce(1)
            await b.hears(1)
            b.tape.full = True
            assert await a.carrier.announce(TOPIC, write_batch_update(SEPARATOR, cid(2))) == 0
            await trio.testing.wait_all_tasks_blocked(0.01)  # the datagram is there: who read would have read it
            await a.carrier.announce(TOPIC, write_batch_update(SEPARATOR, cid(3)))
            await trio.testing.wait_all_tasks_blocked(0.01)
            # the read that was in progress may still have taken one datagram, with the item or another, and no more
            assert b.tape.batches() in ([cid(1)], [cid(1), cid(2)])
            b.tape.full = False
            await b.hears(1, 2, 3)

    trio.run(main)


# ---------------------------------------------------------------- restarts


def test_a_subscriber_that_was_away_gets_what_it_missed(tmp_path: Path) -> None:
    """Batches announced meanwhile are named by the newest item, and nothing is told twice as news."""

    async def main() -> None:
        async with kiln(tmp_path / "a", KEY) as a:
            async with subscriber(tmp_path / "b", a) as b:
                await a.announce(1)
                await b.hears(1)
            for number in range(2, 6):
                await a.announce(number, peers=0)
            async with subscriber(tmp_path / "b", a) as again:
                (topic,) = again.status.topics
                assert topic.sequence is not None  # served from the first moment
                await again.hears(5)
                (newest,) = {each.item.sequence: each for each in again.tape.announced()}.values()
                assert [
                    cid_text(each) for each in find_missed_batches(newest.announcement, cid_bytes(cid(1))).batches
                ] == [cid(number) for number in range(2, 6)]
                ids = {each.connection for each in b.tape.frames}
                assert ids.isdisjoint(each.connection for each in again.tape.frames)

    trio.run(main)


def test_an_item_whose_frame_may_be_lost_is_asked_for_again(tmp_path: Path) -> None:
    """After a crash: what is on disk is not newer than what is captured."""

    async def main() -> None:
        async with kiln(tmp_path / "a", KEY) as a:
            async with subscriber(tmp_path / "b", a) as b:
                await a.announce(1)
                await b.hears(1)
                kept = {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
            folder = tmp_path / "crashed"
            folder.mkdir()
            for name, data in kept.items():
                (folder / name).write_bytes(data)
            async with subscriber(folder, a) as again:
                await again.hears(1)

    trio.run(main)


def test_a_publisher_goes_on_where_it_was(tmp_path: Path) -> None:
    """Also with a clock that was put back; and a batch that was announced is not announced again."""
    times = itertools.count(2_000_000_000_000_000_000, 1_000_000)
    earlier = itertools.count(1_000_000_000_000_000_000, 1_000_000)

    async def main() -> None:
        async with subscriber(tmp_path / "b") as b:
            async with kiln(tmp_path / "a", KEY, contacts=[b.place], clock_ns=times.__next__) as a:
                await a.announce(1)
                await a.announce(2)
            async with kiln(tmp_path / "a", KEY, contacts=[b.place], clock_ns=earlier.__next__) as a:
                await a.announce(2)
                await a.announce(3)
                await b.hears(1, 2, 3)
                announced = {each.item.sequence: each.announcement for each in b.tape.announced()}
                assert len(announced) == 3
                newest = announced[max(announced)]
                assert [cid_text(each) for each in (newest.batch, *newest.previous)] == [cid(3), cid(2), cid(1)]

    trio.run(main)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with subscriber(tmp_path / "b"):
            pass

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / f"{TARGET.hex()}.item").write_bytes(b"d1:a")
    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(main)
    assert caught.group_contains(CarrierError, match=f"cannot read .*{TARGET.hex()}.item", depth=None)


# ---------------------------------------------------------------- gaps


def kept(folder: Path) -> Announcement:
    """What the item announces that a folder holds."""
    item = TopicStore(folder).load(TARGET).item
    assert item is not None
    found = read_announcement(item.value, NETWORK, item.salt)
    assert isinstance(found, Announcement)
    return found


async def away_while(a: Kiln, folder: Path, numbers: range) -> None:
    """A subscriber hears batch 1 and is away while others are announced."""
    async with subscriber(folder, a) as b:
        await a.announce(1)
        await b.hears(1)
    for number in numbers:
        await a.announce(number, peers=0)


@asynccontextmanager
async def back_after(folder: Path, numbers: range, records: Records) -> AsyncIterator[tuple[Kiln, Kiln]]:
    """SOURCE, and a subscriber that is back from being away while `numbers` were announced."""
    async with kiln(folder / "a", KEY) as a:
        await away_while(a, folder / "b", numbers)
        async with subscriber(folder / "b", a, quarantine=records) as b:
            yield a, b


def test_more_batches_than_an_item_names_leave_a_gap_which_is_quarantined_once(tmp_path: Path) -> None:
    async def main() -> None:
        records = Records()
        async with back_after(tmp_path, range(2, 30), records) as (a, b):
            await b.hears(29)
            await a.announce(30)  # which names all that came
            await b.hears(29, 30)
            assert b.status.gaps == 1
            ((key, record),) = records.taken
            assert key == cid(29).encode()
            assert (record.stage, record.reason) == ("bep50", "gap")
            for told in (SOURCE.key.hex(), f"{SEPARATOR.key}/{SEPARATOR.value}", cid(1), cid(29)):
                assert told in record.detail
            read = read_announcement(record.data, NETWORK, compute_salt(NETWORK, SEPARATOR))
            assert isinstance(read, Announcement)
            assert read.batch == cid_bytes(cid(29))
            assert cid_bytes(cid(1)) not in read.previous

    trio.run(main)


def test_batches_that_an_item_names_are_no_gap(tmp_path: Path) -> None:
    """The item has room for all that were announced meanwhile, and the one before."""

    async def main() -> None:
        records = Records()
        async with back_after(tmp_path, range(2, 24), records) as (_, b):
            await b.hears(23)
            assert len(b.tape.announced()[0].announcement.previous) == 22
            assert b.status.gaps == 0
        assert records.taken == []
        assert kept(tmp_path / "b").batch == cid_bytes(cid(23))

    trio.run(main)


def test_a_newcomer_has_no_gap_and_a_publisher_none_of_its_own(tmp_path: Path) -> None:
    async def main() -> None:
        records = Records()
        async with kiln(tmp_path / "a", KEY, follow=[SOURCE], quarantine=records) as a:
            for number in range(30):
                await a.announce(number, peers=0)
            async with subscriber(tmp_path / "b", a, quarantine=records) as b:
                await b.hears(29)
        assert records.taken == []

    trio.run(main)


def test_an_item_after_a_gap_is_kept_once_kafka_has_the_gap(tmp_path: Path) -> None:
    """A crash, or a stop, before that: the gap is found again, in the same words. New items come in meanwhile."""

    async def main() -> None:
        away = Records(is_there=False)
        async with kiln(tmp_path / "a", KEY) as a:
            await away_while(a, tmp_path / "b", range(2, 30))
            async with subscriber(tmp_path / "b", a, quarantine=away) as b:
                await until(lambda: len(away.taken) == 1, "the gap")
                await trio.sleep(3.0)  # longer than an item otherwise takes to its file
                assert kept(tmp_path / "b").batch == cid_bytes(cid(1))
                assert b.tape.batches() == [cid(29)]
            assert kept(tmp_path / "b").batch == cid_bytes(cid(1))
            async with subscriber(tmp_path / "b", a, quarantine=away) as b:
                await until(lambda: len(away.taken) == 2, "the gap once more")
                (first_key, first), (second_key, second) = away.taken
                assert (first_key, first.stage, first.reason, first.detail, first.data) == (
                    second_key,
                    second.stage,
                    second.reason,
                    second.detail,
                    second.data,
                )
                await a.announce(30)
                await b.hears(29, 30)
                away.come_back()
                await until(lambda: kept(tmp_path / "b").batch == cid_bytes(cid(30)), "the newest item in its file")
        assert len(away.taken) == 2

    trio.run(main)


# ---------------------------------------------------------------- one key, two publishers


def test_another_publisher_under_our_key_stops_ours_for_good(tmp_path: Path) -> None:
    async def main() -> None:
        records = Records()
        async with (
            subscriber(tmp_path / "b") as b,
            kiln(tmp_path / "one", KEY, contacts=[b.place], quarantine=records) as one,
            kiln(tmp_path / "two", KEY, contacts=[b.place]) as two,
        ):
            await one.announce(1)
            await two.announce(2)
            await until(lambda: one.carrier.stop_reason is not None, "the end of the one")
            with pytest.raises(PublishError, match="another publisher uses our key"):
                await one.announce(3)
            assert one.carrier.stop_reason in one.carrier.errors
            assert records.taken == []  # nothing of ours is lost
            assert b.status.gaps == 1
            for each in b.tape.announced():
                assert str(each.item.sequence) in str(one.carrier.stop_reason)  # theirs, and ours
            await two.announce(4)  # the other one goes on, and is not answered
            await b.hears(1, 2, 4)
            assert two.carrier.stop_reason is None
        async with kiln(tmp_path / "one", KEY) as one:  # also after a restart
            with pytest.raises(PublishError, match=str(tmp_path / "one" / "stopped")):
                await one.announce(3)
        (tmp_path / "one" / "stopped").unlink()
        async with kiln(tmp_path / "one", KEY) as one:
            await one.announce(3, peers=0)

    trio.run(main)


def test_a_copied_state_folder_is_noticed_by_the_copy(tmp_path: Path) -> None:
    """What it has stored is the last that it published: anything newer is not its own."""

    async def main() -> None:
        async with kiln(tmp_path / "one", KEY) as one:
            await one.announce(1, peers=0)
        (tmp_path / "copy").mkdir()
        for path in (tmp_path / "one").iterdir():
            (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
        (tmp_path / "copy" / "node.id").unlink()
        async with kiln(tmp_path / "one", KEY) as one:
            await one.announce(2, peers=0)
            async with kiln(tmp_path / "copy", KEY, follow=[SOURCE], contacts=[one.place]) as copy:
                await until(lambda: copy.carrier.stop_reason is not None, "the end of the copy")
                with pytest.raises(PublishError):
                    await copy.announce(3)

    trio.run(main)


# ---------------------------------------------------------------- bounds


def test_topics_of_our_own_are_left_when_there_are_too_many(tmp_path: Path) -> None:
    async def main() -> None:
        async with kiln(tmp_path / "a", KEY, follow=[PublisherKey(OTHER_KEY.verify_key.encode(), SEPARATOR)]) as a:
            pass
        async with kiln(
            tmp_path / "a", KEY, follow=[PublisherKey(OTHER_KEY.verify_key.encode(), SEPARATOR)], max_topics=2
        ) as a:
            separators = [Separator("model", encode_separator_value(bytes([1, number]))) for number in range(4)]
            for separator in separators:
                update = write_batch_update(separator, cid(1))
                await a.carrier.announce(format_topic(NETWORK, separator), update)
            joined = {(each.publisher, each.separator) for each in a.status.topics}
            assert joined == {
                (OTHER_KEY.verify_key.encode().hex(), f"model/{SEPARATOR.value}"),
                *((SOURCE.key.hex(), f"model/{each.value}") for each in separators[2:]),
            }
            # the one that was left goes on where it was
            await a.carrier.announce(format_topic(NETWORK, separators[0]), write_batch_update(separators[0], cid(2)))
            sent = [each for each in a.status.topics if each.separator == f"model/{separators[0].value}"]
            assert len(sent) == 1

    trio.run(main)


class Names(trio.abc.HostnameResolver):
    """Knows no name until it is given one."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.asked = 0

    async def getaddrinfo(
        self,
        host: bytes,
        port: str | int | None,
        family: int = 0,
        type: int = 0,  # noqa: A002  as it is called
        proto: int = 0,
        flags: int = 0,
    ) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        self.asked += 1
        name = host.decode()
        if name not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (self.known[name], int(port or 0)))]

    async def getnameinfo(self, sockaddr: tuple[str, int] | tuple[str, int, int, int], flags: int) -> tuple[str, str]:
        raise AssertionError("nobody asks for the name of an address")


def test_names_of_nodes_are_looked_up_and_those_without_an_address_told(
    torrents: list[Torrent], tmp_path: Path
) -> None:
    async def main() -> None:
        names = Names()
        names.known["router.example"] = "127.0.0.1"
        trio.socket.set_custom_hostname_resolver(names)
        bootstrap = [f"router.example:{torrents[0].port}", "nowhere.example:6881"]
        async with (
            kiln(tmp_path / "a", KEY, bootstrap=bootstrap) as a,
            kiln(tmp_path / "b", OTHER_KEY, bootstrap=[torrents[1].address.text], follow=[SOURCE]) as b,
        ):
            await until(lambda: names.asked == 2, "both names are asked for")
            await a.announce(1)
            await b.hears(1)
            (error,) = a.carrier.errors
            assert error == (
                "bep50: cannot resolve nowhere.example:6881 (Name or service not known). "
                "Check bep50.bootstrap and the DNS."
            )

    trio.run(main)


# ---------------------------------------------------------------- the demo network


def test_the_demo_network_hears_batches_and_announces_them_again(tmp_path: Path) -> None:
    async def main() -> None:
        errors: list[str] = []
        others = [Separator("model", encode_separator_value(bytes([2, number]))) for number in range(REANNOUNCED)]
        listeners = OverlayListeners(
            tmp_path / "demo", NETWORK, SOURCE.key, [SEPARATOR, *others], Tape(), errors.append
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(listeners.run)
            follow = [parse_source(text) for text in listeners.sources]
            assert len(follow) == REANNOUNCED
            async with kiln(tmp_path / "a", KEY, follow=follow, contacts=listeners.addresses) as a:
                await a.announce(1, peers=2)
                await a.announce(2, peers=2, separator=others[-1])  # of these one more than are announced again
                await a.hears(1)
                (again,) = {each.item.key for each in a.tape.announced()}
                assert again == follow[0].key != SOURCE.key
                await until(lambda: listeners.received == dict.fromkeys(NODES, 2), "both batches at all listeners")
            nursery.cancel_scope.cancel()
        assert errors == []

    trio.run(main)


# ---------------------------------------------------------------- the process


def environment(state: Path, **settings: str) -> dict[str, str]:
    """Of a bridge whose broker is away."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("KILN_")},
        "KILN_STATE": str(state),
        "KILN_NETWORK": NETWORK,
        "KILN_KAFKA__EMBEDDED_PORT": str(free_ports(1)[0]),
        "KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0",
        "KILN_BEP50__ENABLED": "true",
        "KILN_BEP50__LISTEN": "127.0.0.1:0",
        **settings,
    }


def refused(state: Path, **settings: str) -> str:
    """What a bridge says that does not start."""
    command = [sys.executable, "-m", "kiln.bridge.app.main"]
    done = subprocess.run(
        command, env=environment(state, **settings), capture_output=True, text=True, check=False, timeout=PATIENCE * 3
    )
    assert done.returncode not in (0, -9)
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_second_bridge_of_one_state_folder_is_refused_and_the_first_named(tmp_path: Path) -> None:
    """So a key has one publisher, as long as its folder is not copied."""
    follow = f"{OTHER_KEY.verify_key.encode().hex()}/{SEPARATOR.key}/{SEPARATOR.value}"
    command = [sys.executable, "-m", "kiln.bridge.app.main"]
    with subprocess.Popen(command, env=environment(tmp_path, KILN_BEP50__FOLLOW=follow)) as process:
        try:
            path = tmp_path / "bridge" / "status.json"
            wait_until(lambda: read_status(path) is not None or process.poll() is not None, "the bridge runs")
            status = read_status(path)
            assert status is not None
            assert status.bep50 is not None
            (topic,) = status.bep50.topics
            assert (topic.publisher, topic.separator) == (follow[:64], follow[65:])
            assert str(process.pid) in refused(tmp_path)
            taken = status.bep50.addresses[0]
            assert f"cannot listen on UDP {taken}" in refused(tmp_path / "other", KILN_BEP50__LISTEN=taken)
        finally:
            process.terminate()
        assert process.wait(PATIENCE) == 0
    key = tmp_path / "bridge" / "bep50.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert publisher_key(tmp_path / "bridge").verify_key.encode().hex() == status.bep50.key
    key.chmod(0o644)
    assert f"cannot use the identity key {key}: it has mode 0644" in refused(tmp_path)
