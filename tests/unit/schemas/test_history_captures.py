"""kiln.schemas.captures.kiln_capture: captures that are small as gzip and expand enormously."""

from __future__ import annotations

import gzip
import io
import tracemalloc
from collections.abc import Iterator

import pytest

from kiln.schemas.captures import kiln_capture
from kiln.schemas.captures.items import FILE_DAMAGED, FileSource, UnreadableItem
from kiln.schemas.captures.kiln_capture import CaptureError, CaptureRecord, write_capture
from kiln.schemas.kafka.frames import MAX_NETWORK, MAX_RPC
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC

MIB = 1 << 20


def records(count: int, peer_bytes: int = 60, rpc: bytes = b"\x12\x00") -> Iterator[CaptureRecord]:
    """A connection for each record."""
    for number in range(count):
        yield CaptureRecord("R", 1, b"us", number.to_bytes(peer_bytes), "/meshsub/1.2.0", rpc)


def subscribing(count: int, length: int) -> Iterator[CaptureRecord]:
    """One connection on ever more topics."""
    for number in range(count):
        topic = str(number).ljust(length, "t")
        rpc = RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid=topic)]).SerializeToString()
        yield CaptureRecord("R", 1, b"us", b"them", "/meshsub/1.2.0", rpc)


@pytest.mark.parametrize(
    "many",
    [records(10_000), records(10_000, 60_000), subscribing(50_000, 10)],
    ids=["connections", "giant peer ids", "subscriptions"],
)
def test_what_a_reader_holds_of_a_capture_is_bounded(
    many: Iterator[CaptureRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kiln_capture, "MAX_SURVEY_BYTES", 4 * MIB)
    tracemalloc.start()
    try:
        with pytest.raises(CaptureError, match="the connections and subscriptions of the capture need"):
            kiln_capture.survey_capture(many)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


def test_subscriptions_that_end_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kiln_capture, "MAX_SURVEY_BYTES", 20_000)

    def on_and_off() -> Iterator[CaptureRecord]:
        for number in range(2_000):
            rpc = RPC(subscriptions=[RPC.SubOpts(subscribe=number % 2 == 0, topicid=f"topic {number // 2}")])
            yield CaptureRecord("R", 1, b"us", b"them", "/meshsub/1.2.0", rpc.SerializeToString())

    assert kiln_capture.survey_capture(on_and_off()).records == 2_000


def test_a_few_kilobytes_of_gzip_that_are_gigabytes_of_objects_are_read_in_little_memory() -> None:
    """64 MiB of empty messages were 32 million objects. An RPC over 4 MiB is cut in its frame, and not looked into."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file:
        write_capture(file, records(1, rpc=b"\x12\x00" * (63 * MIB // 2)))  # type: ignore[arg-type]  # is one in all but its type
    assert len(packed.getvalue()) < 128 * 1024
    items = list(kiln_capture.read(packed, FileSource(b"digest", "n", 0)))
    frame, closing = items
    assert not isinstance(frame, UnreadableItem)
    assert not isinstance(closing, UnreadableItem)
    assert (frame.declared_length, len(frame.payload) < MAX_RPC) == (63 * MIB, True)


def test_of_a_capture_that_names_too_much_quarantine_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kiln_capture, "MAX_SURVEY_BYTES", 100_000)
    file = io.BytesIO()
    write_capture(file, records(1_000))
    (item,) = kiln_capture.read(file, FileSource(b"digest", "n", 0))
    assert isinstance(item, UnreadableItem)
    assert item.reason == FILE_DAMAGED
    assert "Split the file" in item.detail


def test_a_network_that_no_frame_can_have_is_not_the_capture_s() -> None:
    rpc = RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid="/ceramic/" + "n" * (MAX_NETWORK + 1))])
    assert kiln_capture.survey_capture(records(3, rpc=rpc.SerializeToString())).select_network("mainnet") == "mainnet"
