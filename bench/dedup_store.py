"""Time of a micro-batch of `updates` with few and with many stored digests of earlier updates (`dedupe.signed_ttl`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, islice
from statistics import median

from bench.catch_up import catch_up, in_micro_batches
from bench.frames import Keyed, append, generated
from bench.ground import Ground
from bench.report import Aim, Finding, Ratio
from bench.runs import BenchError, Extent, Side, in_turn
from kiln.deploy.demo.traffic import TrafficOptions
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.pubsub import UPDATE, write_update

DIGESTS = (10_000, 1_000_000)
"""updates in the deduplication state"""
TOUCHED = 25
"""updates of a measured micro-batch, few compared with the stored digests"""
AIM = Aim(most=2.0)

_AT_ONCE = 200_000  # updates of a micro-batch that fills the state
_MICRO_BATCHES = 12  # per run; the first one includes the start of the query


def measure(ground: Ground, extent: Extent) -> Finding:
    """Measure the query `updates` with few and with many stored digests. Each run reads new updates."""
    few, many = (_DedupQuery(ground, extent.of(size, least=1_000)) for size in DIGESTS)
    sides: dict[str, Side] = {f"{side.size:,} digests": side.micro_batch for side in (few, many)}
    least, most = in_turn(sides, extent.runs, "s", ground.say)
    return Finding(
        "dedup",
        f"a micro-batch of {TOUCHED} updates of the query updates",
        (least, most),
        (Ratio("many over few", most, least, AIM),),
        {"micro-batches a run": _MICRO_BATCHES - 1, "master": few.settings.spark.master},
    )


class _DedupQuery:
    """A query `updates` whose state has the digests of `size` updates, and of the updates that earlier runs read."""

    def __init__(self, ground: Ground, size: int) -> None:
        self.size = size
        self.settings = ground.plot(f"dedup-{size}")
        self._ground = ground
        self._frames = _frames()
        ground.say(f"reading {size:,} updates")
        self._read(size, _AT_ONCE)

    def micro_batch(self, run: int) -> float:
        """Return the median time of a micro-batch of a run, from trigger to commit, s."""
        return median(self._read(TOUCHED * _MICRO_BATCHES, TOUCHED)[1:])

    def _read(self, updates_more: int, at_once: int) -> list[float]:
        ground, settings = self._ground, in_micro_batches(self.settings, at_once, "updates")
        ends = append(ground, settings, islice(self._frames, updates_more))
        return [micro_batch.seconds for micro_batch in catch_up(ground.spark, settings, "updates", {"frames": ends})]


def _frames() -> Iterator[Keyed]:
    """Yield distinct frames with one update each, without end.

    Raises:
        BenchError: The synthetic traffic has no such frame to start from.
    """
    options = TrafficOptions(network="local-bench", checked=1.0)
    for _, value in generated(1_000, options):
        frame = Frame.FromString(value)
        rpc = RPC.FromString(frame.payload)
        if len(rpc.publish) == 1 and json.loads(rpc.publish[0].data).get("typ") == UPDATE:
            break
    else:
        raise BenchError("no frame of the synthetic traffic has exactly one update")
    message = rpc.publish[0]
    stream = json.loads(message.data)["stream"]
    for number in count():
        frame.sequence = number
        message.seqno = number.to_bytes(8)
        message.data = write_update(stream, cid_text(compute_cid(b"tip %d" % number)))
        frame.payload = rpc.SerializeToString()
        yield frame.connection, frame.SerializeToString()
