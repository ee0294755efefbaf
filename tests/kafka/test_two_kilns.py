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
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.schemas.kafka.frames import read_frame, read_rpc
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.pubsub import PubsubMessage, read_message, write_update
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import Separator, format_separator, format_topic
from kit.awaiting import wait_until
from kit.foreign_peer import NewPeer
from kit.kiln_process import Kiln, end
from kit.log_feed import await_end, kiln_beside
from kit.log_model import read_log, read_records

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


def told(kiln: Kiln) -> BridgeStatus:
    """Return the status of a bridge, and wait for it if the bridge has just started."""
    wait_until(lambda: read_status(kiln.state / "bridge" / "status.json") is not None, "the bridge", PATIENCE)
    status = read_status(kiln.state / "bridge" / "status.json")
    assert status is not None
    return status


def heard(kiln: Kiln) -> set[PubsubMessage]:
    """Messages in the frames that the bridge received and wrote to Kafka."""
    found = set()
    for records in read_records(kiln.servers, kiln.settings().kafka.topic("frames")).values():
        for _, _, value in records:
            frame = read_frame(value)
            assert isinstance(frame, Frame)
            rpc = read_rpc(frame.payload)
            assert isinstance(rpc, RPC)
            if frame.direction == Frame.IN:
                found |= {read_message(message.data) for message in rpc.publish}
    return {each for each in found if isinstance(each, PubsubMessage)}


def catch_up(kiln: Kiln, *queries: str) -> None:
    """Have these queries read all records in Kafka."""
    kiln.environment["KILN_JOBS__QUERIES"] = ",".join(queries)
    kiln.run_kept("run", "--catch-up")


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
    """Kilns that know each other's bridge, with topics of their own on one broker."""

    def __init__(self, stack: ExitStack, folder: Path, address: str, prefix: str) -> None:
        self._stack = stack
        self._folder = folder
        self._address = address
        self._prefix = prefix
        self._ports = free_ports(2)
        self._bridges: dict[Path, subprocess.Popen[str]] = {}

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
        return kiln_beside(self._address, f"{name}.{self._prefix}", self._folder / name, environment | more)

    def start_bridge(self, kiln: Kiln) -> BridgeStatus:
        self._bridges[kiln.state] = kiln.start("bridge")
        self._stack.callback(end, self._bridges[kiln.state])
        return told(kiln)

    def restart_bridge(self, kiln: Kiln) -> None:
        end(self._bridges[kiln.state])
        self.start_bridge(kiln)


@pytest.fixture
def town(peers: ExitStack, broker: EmbeddedBroker, prefix: str, tmp_path: Path) -> Town:
    return Town(peers, tmp_path, broker.address, prefix)


def test_what_one_kiln_batches_the_other_has(town: Town, js_peer: NewPeer, helia_peer: NewPeer) -> None:
    author, another = js_peer(), js_peer()
    topics = [format_topic(NETWORK, separator) for separator in (None, *SEPARATORS)]
    for topic in topics:
        author.subscribe(topic)
        another.subscribe(topic)
    first = town.first(f"{author.address},{another.address}", author.peer)
    status = town.start_bridge(first)
    for topic in topics:
        author.wait_subscriber(topic, status.peer)
        another.wait_subscriber(topic, status.peer)
    second = town.second(status.addresses[0], another.peer)
    follower = town.start_bridge(second)
    wait_until(lambda: bool(told(second).peers), "the second Kiln has a peer", PATIENCE)
    said = set(OTHERS)
    for topic, message in updates():
        author.publish_raw(topic, message)
        read = read_message(message)
        assert isinstance(read, PubsubMessage)
        said.add((str(read.stream), str(read.tip)))
    for stream, tip in OTHERS:
        another.publish_raw(format_topic(NETWORK, FOLLOWED[0]), write_update(stream, tip))
    wait_until(lambda: {(each.stream, each.tip) for each in heard(first)} >= said, "all updates", PATIENCE)

    # nobody has the genesis of some: they wait, and nothing waits for them
    named = len(SEPARATORS) * STREAMS_EACH * TIPS_EACH + 1 + len(OTHERS)
    catch_up(first, "updates", "batch", "sink")
    assert len(rows(first, "updates")) == named
    world = helia_peer()
    for address in (status.addresses[0], follower.addresses[0]):
        world.connect(address)
    for each in (*UNNAMED, FORGED, DISPUTED):
        answer = world.command("put", codec=0x71, data=base64.b64encode(each.block).decode())
        assert answer["cid"] == each.cid
    late = len(UNNAMED) * TIPS_EACH + 1
    kafka = first.settings().kafka

    def released() -> int:
        log = read_log(first.servers, kafka.topic("updates"))
        return sum(update is not None for records in log for _, update in records)

    wait_until(lambda: released() == named + late, "all updates, by their genesis", PATIENCE)
    verified = {(each.stream, FOLLOWED[0].value) for each in (*UNNAMED, FORGED, DISPUTED)}
    await_end(first.servers, kafka.topic("streams"), len(verified), PATIENCE)
    await_end(first.servers, kafka.topic("quarantine"), 2, PATIENCE)
    catch_up(first, "batch", "sink")
    assert len(rows(first, "updates")) == named + late
    by_genesis = [row for row in rows(first, "updates") if row["separator_source"] == "genesis"]
    for number, each in enumerate(UNNAMED):
        mine = sorted((row["log_offset"], row["tip"]) for row in by_genesis if row["stream"] == each.stream)
        assert [tip for _, tip in mine] == [late_tip(number, tip) for tip in range(TIPS_EACH)]
    assert {(row["stream"], row["separator_value"]) for row in rows(first, "streams")} == verified
    await_end(first.servers, kafka.topic("publications"), len(rows(first, "batches")), PATIENCE)
    catch_up(first, "sink")
    assert all_published(first)
    # the false claim was believed until the genesis was there, and the two that disagree never were
    assert [row["stream"] for row in by_genesis if row["stream"] == DISPUTED.stream] == [DISPUTED.stream]
    false = first.sql("SELECT stream, tip, separator_value, true_value FROM false_claims")
    assert [tuple(row.values()) for row in false] == [
        (FORGED.stream, late_tip(3, 0), SEPARATORS[1].value, SEPARATORS[0].value)
    ]
    assert first.count("quarantine", "reason = 'contradicts_genesis'") == 2

    # the first Kiln's blocks are there to be fetched, although its bridge has started again
    wanted = {row["batch_cid"] for row in of_followed(first, "batches")}
    wait_until(lambda: {each.batch for each in heard(second)} >= wanted, "all announcements", PATIENCE)
    town.restart_bridge(first)
    catch_up(second, "updates")
    await_end(second.servers, second.settings().kafka.topic("blocks"), len(wanted), PATIENCE)
    catch_up(second, "updates", "batch", "sink")

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
