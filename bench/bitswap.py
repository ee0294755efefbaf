"""Bitswap server of the bridge's node: time to serve a block, and delay of gossip through the node meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

import trio

from bench.report import Finding, Series
from bench.runs import BenchError, Extent, Say
from kiln.schemas.wire.cid import cid_text, compute_cid
from kit.bitswap_sides import Side, open_side
from kit.node_town import OPTIONS, TOPIC, Running, Town, in_town

BLOCKS = 1_000  # of 300 bytes, like most batches
LARGE = 160  # of 256 kB: 40 MB
MESSAGES = 200
_SIZES = {"small": 300, "large": 256_000}
_GAP = 0.02  # s between two messages


def measure(extent: Extent, say: Say) -> Finding:
    """Measure a node that serves small blocks, one by one and 50 at once. Then measure the delay of gossip through the
    node, while it serves no blocks and while it serves 40 MB of large ones."""
    values_by_name: dict[str, list[float]] = {}
    units: dict[str, str] = {}
    for run in range(1, extent.runs + 1):
        for name, unit, value in _measure_once(extent):
            values_by_name.setdefault(name, []).append(value)
            units[name] = unit
            say(f"run {run} of {extent.runs}: {name}: {value:.3g} {unit}")
    return Finding(
        "bitswap",
        "a node serves blocks to another node, each in its own process",
        tuple(Series(name, units[name], tuple(values)) for name, values in values_by_name.items()),
        notes={"small blocks": extent.of(BLOCKS, 100), "large blocks": extent.of(LARGE, 20)},
    )


def _measure_once(extent: Extent) -> list[tuple[str, str, float]]:
    small, large = extent.of(BLOCKS, 100), extent.of(LARGE, 20)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs, small, large), daemon=True)
    server.start()
    figures: list[tuple[str, str, float]] = []
    with TemporaryDirectory(prefix="kiln-bench-") as folder:
        if not pipe.poll(60):
            raise BenchError("the node that serves blocks did not start within 60 s")
        address = pipe.recv()
        puller_pipe, puller_theirs = context.Pipe()
        puller = context.Process(target=_pull, args=(puller_theirs, address, large, folder), daemon=True)
        puller.start()

        def cpu() -> float:
            pipe.send("cpu")
            return float(pipe.recv())

        async def test(town: Town) -> None:
            client = await open_side(town, "client", address)
            await town.bell.until(lambda: bool(client.exchange.peers))
            before = cpu()
            times = await _fetch_in_turn(client, small // 2)
            figures.append(("one by one, p50", "ms", median(times) * 1e3))
            began = time.monotonic()
            await _fetch_at_once(client, range(small // 2, small))
            took = time.monotonic() - began
            figures.append(("50 at once", "blocks/s", (small - small // 2) / took))
            figures.append(("CPU of the server, a small block", "ms", (cpu() - before) / small * 1e3))
            one, two = await _gossipers(town, address)
            figures.extend(await _delays(town, one, two, "alone", lambda: False))
            puller_pipe.send("go")
            figures.extend(await _delays(town, one, two, "while 40 MB are pulled", puller_pipe.poll))
            if not puller_pipe.poll(120):
                raise BenchError("the large blocks did not arrive within 120 s")
            figures.append(("pull", "MB/s", large * _SIZES["large"] / 1e6 / float(puller_pipe.recv())))

        try:
            in_town(Path(folder), test, 600)
        finally:
            for process in (server, puller):
                process.kill()
                process.join()
    return figures


def _block(kind: str, number: int) -> tuple[str, bytes]:
    data = b"%s %d " % (kind.encode(), number)
    data += bytes(_SIZES[kind] - len(data))
    return cid_text(compute_cid(data, 0x55)), data


async def _fetch_in_turn(client: Side, count: int) -> list[float]:
    times = []
    for number in range(count):
        began = time.monotonic()
        await client.fetch(_block("small", number)[0], 60)
        times.append(time.monotonic() - began)
    return times


async def _fetch_at_once(client: Side, numbers: range) -> None:
    limit = trio.CapacityLimiter(50)

    async def fetch(number: int) -> None:
        async with limit:
            await client.fetch(_block("small", number)[0], 60)

    async with trio.open_nursery() as nursery:
        for number in numbers:
            nursery.start_soon(fetch, number)


async def _gossipers(town: Town, address: str) -> tuple[Running, Running]:
    options = replace(OPTIONS, listen=(), bootstrap=(address,))
    one, two = await town.node(options), await town.node(options)
    for side in (one, two):
        side.node.join(TOPIC)
    await town.bell.until(lambda: all(side.node.router.mesh.get(TOPIC) for side in (one, two)))
    return one, two


async def _delays(
    town: Town, one: Running, two: Running, name: str, ended: Callable[[], bool]
) -> list[tuple[str, str, float]]:
    """Measure the delays of MESSAGES messages from `one` to `two`, or of at least a quarter once `ended()` is true."""
    sent: list[float] = []
    first = len(two.heard)
    while len(sent) < MESSAGES and not (ended() and len(sent) >= MESSAGES // 4):
        one.node.publish(TOPIC, os.urandom(300))
        sent.append(trio.current_time())
        await trio.sleep(_GAP)
    await town.bell.until(lambda: len(two.heard) >= first + len(sent))
    delays = [came - at for came, at in zip(two.heard_at[first:], sent, strict=True)]
    p99 = quantiles(delays, n=100)[98]
    return [(f"gossip {name}, p50", "ms", median(delays) * 1e3), (f"gossip {name}, p99", "ms", p99 * 1e3)]


def _serve(pipe: Connection, small: int, large: int) -> None:
    async def main(town: Town) -> None:
        side = await open_side(town, "server")
        for kind, count in (("small", small), ("large", large)):
            for number in range(count):
                side.folder.put(*_block(kind, number))
        side.node.join(TOPIC)
        pipe.send(side.address)
        while True:
            await trio.to_thread.run_sync(pipe.recv)
            pipe.send(time.process_time())

    with TemporaryDirectory(prefix="kiln-bench-") as folder:
        in_town(Path(folder), main, 3600)


def _pull(pipe: Connection, address: str, large: int, folder: str) -> None:
    async def main(town: Town) -> None:
        side = await open_side(town, "puller", address)
        await town.bell.until(lambda: bool(side.exchange.peers))
        await trio.to_thread.run_sync(pipe.recv)
        began = time.monotonic()
        limit = trio.CapacityLimiter(16)

        async def fetch(number: int) -> None:
            async with limit:
                await side.fetch(_block("large", number)[0], 300)

        async with trio.open_nursery() as nursery:
            for number in range(large):
                nursery.start_soon(fetch, number)
        pipe.send(time.monotonic() - began)
        await trio.sleep_forever()

    in_town(Path(folder), main, 3600)
