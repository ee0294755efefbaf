"""Two Kilns and nodes that others wrote: what one batches, the other fetches over bitswap and reads (CIP-123).

No IPFS node runs beside the Kilns. The geneses come from a peer of both.
"""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import dag_cbor
import pytest
from deltalake import DeltaTable

from conftest import free_ports
from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.pubsub import write_update
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import Separator, format_separator, format_topic
from kit.awaiting import wait_until
from kit.foreign_peer import NewPeer
from kit.kiln_process import Kiln, end

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.network, pytest.mark.timeout(900)]

NETWORK = "local-two"
MODELS = [StreamID(2, compute_cid(b"model %d" % number)) for number in range(4)]
SEPARATORS = [Separator("model", model.text) for model in MODELS]
FOLLOWED = SEPARATORS[:2]  # by the second Kiln
STREAMS_EACH, TIPS_EACH = 5, 3
PATIENCE = 120.0  # s


class Genesis(NamedTuple):
    stream: str
    cid: str
    block: bytes


def genesis(number: int, separator: Separator) -> Genesis:
    """The init event of a stream, as an anchor service that names no `model` would speak of it."""
    model = StreamID.parse(separator.value).bytes
    header = {"controllers": ["did:key:z6Mk"], "model": model, "sep": "model", "unique": bytes([number])}
    block = dag_cbor.encode({"data": None, "header": header})
    return Genesis(StreamID(3, compute_cid(block)).text, cid_text(compute_cid(block)), block)


OTHERS = [
    (StreamID(3, compute_cid(b"other/%d" % number)).text, cid_text(compute_cid(b"o%d" % number))) for number in range(6)
]
"""streams and tips of another author, whose updates the second Kiln batches"""
UNNAMED = [genesis(number, SEPARATORS[0]) for number in range(3)]
FORGED, DISPUTED = (genesis(number, SEPARATORS[0]) for number in (3, 4))
"""announced on the topic of another separator; and there with the true `model`"""


def late_tip(stream: int, tip: int) -> str:
    return cid_text(compute_cid(b"late %d/%d" % (stream, tip)))


def updates() -> Iterator[tuple[str, bytes]]:
    """(topic, message): by the topic of their separator, with `model` on the network's, and with neither."""
    for place, separator in enumerate(SEPARATORS):
        for stream in range(STREAMS_EACH):
            name = StreamID(3, compute_cid(b"%d/%d" % (place, stream))).text
            for tip in range(TIPS_EACH):
                cid = cid_text(compute_cid(b"tip %d/%d/%d" % (place, stream, tip)))
                if stream % 2:
                    yield format_topic(NETWORK, separator), write_update(name, cid)
                else:
                    yield format_topic(NETWORK, None), write_update(name, cid, separator.value)
    for number, each in enumerate(UNNAMED):
        for tip in range(TIPS_EACH):
            yield format_topic(NETWORK, None), write_update(each.stream, late_tip(number, tip))
    false = format_topic(NETWORK, SEPARATORS[1])
    yield false, write_update(FORGED.stream, late_tip(3, 0))
    yield false, write_update(DISPUTED.stream, late_tip(4, 0), SEPARATORS[0].value)


def told(kiln: Kiln) -> BridgeStatus | None:
    return read_status(kiln.state / "bridge" / "status.json")


def rows(kiln: Kiln, table: str) -> list[dict[str, object]]:
    path = str(kiln.lake / table)
    if not DeltaTable.is_deltatable(path):
        return []
    found: list[dict[str, object]] = DeltaTable(path).to_pyarrow_table().to_pylist()
    return found


def all_published(kiln: Kiln) -> bool:
    sent = {row["batch_cid"] for row in rows(kiln, "publications") if row["error"] is None}
    made = {row["batch_cid"] for row in rows(kiln, "batches")}
    wanted = tips_in(rows(kiln, "updates")).difference(OTHERS)
    return bool(made) and made == sent and tips_in(rows(kiln, "batch_tips")) == wanted


def tips_in(found: list[dict[str, object]]) -> set[tuple[object, object]]:
    return {(row["stream"], row["tip"]) for row in found}


def of_followed(kiln: Kiln, table: str) -> list[dict[str, object]]:
    return [row for row in rows(kiln, table) if row["separator_value"] in {each.value for each in FOLLOWED}]


class Town:
    """Kilns that know each other's bridge."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._ports = free_ports(2)

    def first(self, bootstrap: str, author: str) -> Kiln:
        """The Kiln that batches the updates of one author and announces the batches."""
        more = {"KILN_BATCH__AUTHORS": author, "KILN_PUBLISH__ENABLED": "true"}
        return self._kiln("first", self._ports[0], bootstrap, more)

    def second(self, bootstrap: str, author: str) -> Kiln:
        """It follows two of the separators, batches the updates of another author, and publishes nothing."""
        follows = {
            "KILN_BATCH__AUTHORS": author,
            "KILN_BRIDGE__INTERESTS": ",".join(map(format_separator, FOLLOWED)),
        }
        return self._kiln("second", self._ports[1], bootstrap, follows)

    def _kiln(self, name: str, port: int, bootstrap: str, more: dict[str, str]) -> Kiln:
        environment = {
            "KILN_NETWORK": NETWORK,
            "KILN_BRIDGE__LISTEN": f"/ip4/127.0.0.1/tcp/{port}",
            "KILN_BRIDGE__BOOTSTRAP": bootstrap,
            "KILN_IPFS__TIMEOUT": "3s",
            "KILN_IPFS__RETRY_AFTER": "1s",
        }
        return Kiln(self._folder / name, free_ports(2), environment | more)

    def run(self, kiln: Kiln, *arguments: str) -> subprocess.Popen[str]:
        process = kiln.start(*arguments)
        self._stack.callback(_ended, process)
        return process


def _ended(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        end(process)


@pytest.fixture
def town(peers: ExitStack, tmp_path: Path) -> Town:
    return Town(peers, tmp_path)


def test_what_one_kiln_batches_the_other_has(
    town: Town, js_peer: NewPeer, helia_peer: NewPeer, broker_classpath: list[Path]
) -> None:
    author, another = js_peer(), js_peer()
    topics = [format_topic(NETWORK, separator) for separator in (None, *SEPARATORS)]
    for topic in topics:
        author.subscribe(topic)
        another.subscribe(topic)
    first = town.first(f"{author.address},{another.address}", author.peer)
    run = town.run(first, "run")
    wait_until(lambda: told(first) is not None, "the first Kiln's bridge", PATIENCE)
    status = told(first)
    assert status is not None
    for topic in topics:
        author.wait_subscriber(topic, status.peer)
        another.wait_subscriber(topic, status.peer)
    second = town.second(status.addresses[0], another.peer)
    bridge = town.run(second, "bridge")
    wait_until(lambda: bool((heard := told(second)) and heard.peers), "the second Kiln has a peer", PATIENCE)
    for topic, message in updates():
        author.publish_raw(topic, message)
    for stream, tip in OTHERS:
        another.publish_raw(format_topic(NETWORK, FOLLOWED[0]), write_update(stream, tip))

    # nobody has the genesis of some: they wait, and nothing waits for them
    named = len(SEPARATORS) * STREAMS_EACH * TIPS_EACH + 1 + len(OTHERS)
    wait_until(lambda: len(rows(first, "updates")) == named, "all updates that name their separator", 180)
    world = helia_peer()
    follower = told(second)
    assert follower is not None
    for address in (status.addresses[0], follower.addresses[0]):
        world.connect(address)
    for each in (*UNNAMED, FORGED, DISPUTED):
        answer = world.command("put", codec=0x71, data=base64.b64encode(each.block).decode())
        assert answer["cid"] == each.cid
    late = len(UNNAMED) * TIPS_EACH + 1
    wait_until(lambda: len(rows(first, "updates")) == named + late, "all updates, by their genesis", 180)
    by_genesis = [row for row in rows(first, "updates") if row["separator_source"] == "genesis"]
    for number, each in enumerate(UNNAMED):
        mine = sorted((row["log_offset"], row["tip"]) for row in by_genesis if row["stream"] == each.stream)
        assert [tip for _, tip in mine] == [late_tip(number, tip) for tip in range(TIPS_EACH)]
    verify_block = {(each.stream, FOLLOWED[0].value) for each in (*UNNAMED, FORGED, DISPUTED)}
    wait_until(
        lambda: {(row["stream"], row["separator_value"]) for row in rows(first, "streams")} == verify_block,
        "what was verified is in the table streams",
        PATIENCE,
    )
    wait_until(lambda: all_published(first), "all batches are published", PATIENCE)
    # the false claim was believed until the genesis was there, and the two that disagree never were
    assert [row["stream"] for row in by_genesis if row["stream"] == DISPUTED.stream] == [DISPUTED.stream]
    false = first.sql("SELECT stream, tip, separator_value, true_value FROM false_claims")
    assert [tuple(row.values()) for row in false] == [
        (FORGED.stream, late_tip(3, 0), SEPARATORS[1].value, SEPARATORS[0].value)
    ]
    assert first.count("quarantine", "reason = 'contradicts_genesis'") == 2

    # the first Kiln's blocks are there to be fetched, without its queries
    end(run)
    town.run(first, "bridge")
    second.run("run", "--catch-up")
    wanted = {row["batch_cid"] for row in of_followed(first, "batches")}

    def fetched() -> int:
        status = told(second)
        return status.fetcher.counts.get("blocks", 0) if status and status.fetcher else 0

    wait_until(lambda: fetched() == len(wanted), lambda: f"{len(wanted)} blocks, not {fetched()}", PATIENCE)
    second.run("run", "--catch-up")
    end(bridge)

    received = [row for row in rows(second, "tips") if row["source"] == "batch"]
    ours = tips_in([row for row in of_followed(first, "updates") if row["stream"] != FORGED.stream]).difference(OTHERS)
    assert len(ours) == (len(FOLLOWED) * STREAMS_EACH + len(UNNAMED)) * TIPS_EACH + 1
    assert tips_in(received) == ours
    assert second.count("quarantine", "reason = 'other_separator'") == 1, "the false claim"
    # both heard both authors, and each Kiln batches the updates of its author alone (CIP-123)
    assert tips_in(rows(first, "updates")) >= set(OTHERS)
    assert tips_in(rows(second, "updates")) >= set(OTHERS)
    assert tips_in(rows(second, "updates")) & ours
    assert tips_in(rows(second, "batch_tips")) == set(OTHERS)
    assert {row["batch_cid"] for row in received} <= wanted
    assert not [row for row in rows(second, "quarantine") if row["stage"] == "fetch"]
    for row in rows(first, "batches"):
        assert isinstance(row["block"], bytes)
        assert dag_cbor.decode(row["block"])
