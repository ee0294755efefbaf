"""A bridge whose disk is full: it stays with its peers, says why it reads nothing, and goes on when there is room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kiln.bridge.gossipsub.wire import encode
from kit import loopback
from kit.bridge_alone import BridgeAlone
from kit.chance import new_key
from kit.node_town import call_at, message, raw_peer, subscription

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(not loopback.available(), reason="no namespace for this user, to mount a small disk in"),
]

MIB = 1 << 20
FLOOR = MIB
DISK = 8 * MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> list[str]:
    """A command line that runs another with a disk of its own as its state folder: DISK bytes."""
    mount = f'mount -t tmpfs -o size={DISK} tmpfs {tmp_path} && exec "$@"'
    return ["unshare", "-rm", "sh", "-c", mount, "sh"]


@pytest.fixture
def bridge(tmp_path: Path, small_disk: list[str]) -> Iterator[BridgeAlone]:
    alone = BridgeAlone(tmp_path, small_disk, KILN_BRIDGE__MIN_FREE_BYTES=str(FLOOR))
    yield alone
    alone.kill()


def fill(path: Path, leave: int = 0) -> None:
    """Take what is free on a disk but so many bytes."""
    size = os.statvfs(path.parent)
    with path.open("ab", buffering=0) as file:
        left = size.f_bavail * size.f_frsize - leave
        while left > 0 and (written := _write(file.fileno(), bytes(min(left, 65536)))):
            left -= written


def _write(file: int, data: bytes) -> int:
    try:
        return os.write(file, data)
    except OSError:
        return 0


def test_a_full_disk_stops_the_reading_and_nothing_else(bridge: BridgeAlone) -> None:
    address = bridge.until(lambda status: bool(status.addresses), "the bridge listens").addresses[0]
    key = new_key()

    def heard(count: int) -> None:
        bridge.until(lambda status: status.frames_in >= count, f"{count} frames are heard")

    async def test() -> None:
        async with raw_peer() as host:
            stream = await call_at(host, address)
            await stream.write(encode(subscription("/ceramic/local-test")))
            await stream.write(encode(message(1, key)))
            await trio.to_thread.run_sync(heard, 2)
            for leave in (FLOOR // 2, 0):
                ballast = bridge.files / "ballast"
                fill(ballast, leave)
                told = await trio.to_thread.run_sync(bridge.until, lambda status: status.spool.full, "it is full")
                before = told.frames_in
                assert any(
                    "reading from peers is paused" in error and "bridge.min_free_bytes" in error
                    for error in told.errors
                ), told.errors
                for number in range(100 * (leave + 2), 100 * (leave + 2) + 20):
                    await stream.write(encode(message(number, key)))
                for _ in range(2):  # two statuses more: it writes them on a disk of no room, too
                    at = told.at
                    told = await trio.to_thread.run_sync(
                        bridge.until, lambda status, at=at: status.at > at, "a further status"
                    )
                assert told.spool.full
                assert told.frames_in == before
                ballast.unlink()
                await trio.to_thread.run_sync(bridge.until, lambda status: not status.spool.full, "there is room")
                await trio.to_thread.run_sync(heard, before + 20)
            last = bridge.status()
            assert last is not None
            assert len(last.peers) == 1
            assert not any("disk" in error for error in last.errors)
            assert "stream_ended" not in last.counters

    trio.run(test)
    code, said = bridge.stop()
    assert (code, said) == (0, "")


def test_frames_that_find_no_room_at_the_end_are_counted_and_the_bridge_fails(
    tmp_path: Path, small_disk: list[str]
) -> None:
    bridge = BridgeAlone(tmp_path, small_disk, KILN_BRIDGE__MIN_FREE_BYTES="0")
    address = bridge.until(lambda status: bool(status.addresses), "the bridge listens").addresses[0]
    fill(bridge.files / "ballast")

    async def test() -> None:
        async with raw_peer() as host:
            stream = await call_at(host, address)
            await stream.write(encode(subscription("/ceramic/local-test")))
            await stream.write(encode(message(1, new_key())))
            await trio.to_thread.run_sync(bridge.until, lambda status: status.frames_in >= 2, "frames are heard")

    try:
        trio.run(test)
        code, said = bridge.stop()
    finally:
        bridge.kill()
    assert code == 1
    assert "frames are lost: Kafka did not acknowledge them" in said
    assert "Raise bridge.spool_bytes" in said
