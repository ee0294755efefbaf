"""A capture whose topics go by index alone: with its bundle in the settings, and with the bundle told afterwards."""

from __future__ import annotations

import gzip
import json

import pytest

from conftest import VECTORS
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kit.kiln_process import Kiln
from kit.log_feed import kiln_beside

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

COPIES, MESSAGES = 853, 153  # and one message that is not JSON


@pytest.fixture(scope="module")
def bundle() -> dict[str, str]:
    """Its settings, by environment."""
    topics = json.loads((VECTORS / "captures" / "go4tt.meta.json").read_text())["topics"]
    return {"KILN_TOPIC_TABLE__BUNDLES": json.dumps({"go4tt": topics})}


@pytest.fixture(scope="module")
def known(bundle: dict[str, str], broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Kiln:
    """It knew the bundle from the start."""
    kiln = kiln_beside(broker.address, "known.", tmp_path_factory.mktemp("known"), bundle)
    kiln.run("replay", str(VECTORS / "captures" / "go4tt.rpc.gz"))
    kiln.run_kept("run", "--catch-up")
    return kiln


@pytest.fixture(scope="module")
def told(bundle: dict[str, str], broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Kiln:
    """It was told of the bundle when all was in quarantine."""
    kiln = kiln_beside(broker.address, "told.", tmp_path_factory.mktemp("told"))
    kiln.run("replay", str(VECTORS / "captures" / "go4tt.rpc.gz"))
    kiln.run_kept("run", "--catch-up")
    assert kiln.count("messages") == kiln.count("updates") == 0
    assert kiln.count("quarantine", "reason = 'unknown_bundle_hash'") == COPIES
    kiln.environment |= bundle
    kiln.run("quarantine", "replay", "--reason", "unknown_bundle_hash")
    kiln.run_kept("run", "--catch-up")
    return kiln


def test_every_copy_is_resolved(known: Kiln) -> None:
    assert known.count("copies") == known.count("copies", "network = 'testnet-clay' and verdict <> 'invalid'") == COPIES
    assert known.count("messages") == MESSAGES
    assert known.count("messages", "topic_source = 'index' and verdict = 'valid'") == MESSAGES
    kept = known.sql("select reason, count(*) as n from quarantine group by 1 order by 1")
    assert [row["reason"] for row in kept] == ["contradicts_topic", "invalid_json"]
    # the capture's publisher draws the topic and the separator of a BATCH_UPDATE apart
    assert kept[0]["n"] == known.count("misplaced", "type = 'BATCH_UPDATE'") > 0


def test_each_message_has_the_topic_it_was_published_on(known: Kiln) -> None:
    with gzip.open(VECTORS / "captures" / "go4tt.published.jsonl.gz") as lines:
        published = {entry["sha256"]: entry["topic"] for entry in map(json.loads, lines)}
    rows = known.sql("select sha256(data) as digest, topic from messages")
    assert len(rows) == MESSAGES
    assert all(published[str(row["digest"])] == row["topic"] for row in rows)


def test_control_entries_have_the_topic_of_their_index(known: Kiln) -> None:
    known_topic = "topic in (select topic from messages)"
    by = f"select kind, topic_source, count(*) as n from controls where {known_topic} group by all"
    entries = {(row["kind"], row["topic_source"]): row["n"] for row in known.sql(by)}
    assert entries == {("GRAFT", "index"): 2 * 23, ("PRUNE", "index"): 2 * 2}
    assert known.count("controls", "topic is null and kind in ('GRAFT', 'PRUNE', 'IHAVE')") == 0
    assert known.count("subscriptions", "topic_source = 'name' and topic is not null") == 2 * 49


@pytest.mark.parametrize(
    ("table", "left_out"),
    [
        ("messages", "observed_at, kafka_partition, kafka_offset, message_index, remote_peer"),
        ("updates", "observed_at, log_time, log_partition, log_offset"),
        ("tips", "observed_at"),
    ],
)
def test_what_is_replayed_is_as_if_the_bundle_had_been_there(
    known: Kiln, told: Kiln, table: str, left_out: str
) -> None:
    query = f"select * exclude ({left_out}) from {table} order by all"
    rows = known.sql(query)
    assert rows
    assert told.sql(query) == rows


def test_what_stays_unusable_is_not_there_twice(told: Kiln) -> None:
    assert told.count("quarantine", "reason = 'invalid_json'") >= 1
    assert told.count("messages") == MESSAGES
    assert told.count("publications") == 0
