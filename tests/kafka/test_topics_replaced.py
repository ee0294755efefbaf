"""Topics that are deleted and created again under the same name, while Kiln is stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from deltalake import DeltaTable

from conftest import free_ports
from kafka import KafkaAdminClient
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_broker import make_topics
from kiln.pipelines.runtime.topics import KafkaTopics
from kiln.schemas.captures.kiln_capture import open_capture, read_capture
from kiln.schemas.kafka.frames import CUT_PAYLOAD, MAX_RPC
from kiln.schemas.kafka.topics import TOPICS
from kit.awaiting import wait_until
from kit.kiln_process import Kiln, kill_all
from kit.log_feed import kiln_beside

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

PREFIX = "replaced."
LENGTHS = {"first": "5s", "second": "10s", "third": "15s"}
"""lengths of the captures. The records replayed into a new topic are more than those read from the old one"""


def create_again(kiln: Kiln, topics: Sequence[str]) -> None:
    """Delete topics and create them as Kiln does."""
    kafka = kiln.settings().broker
    full = [kafka.topic(topic) for topic in topics]
    with KafkaAdminClient(**kafka.client_options()) as admin:
        admin.delete_topics(full)
        wait_until(lambda: not set(full) & set(admin.list_topics()), "the topics are gone")
    make_topics(kafka, kafka.servers)


def end_offset(kiln: Kiln, topic: str) -> int:
    """The records of a topic of one partition, over all of its time."""
    topics = KafkaTopics(kiln.settings().broker.client_options)
    states = topics.read_states([kiln.settings().kafka.topic(topic)])
    topics.close()
    return sum(sum(state.end.values()) for state in states.values())


def payloads(*captures: Path) -> Counter[tuple[str, bytes]]:
    """The RPCs of captures, by direction, as the table has them: the start of one that is too large."""
    found: Counter[tuple[str, bytes]] = Counter()
    for path in captures:
        with open_capture(path) as stream:
            records = [each for each in read_capture(stream) if each.rpc]
        for each in records:
            rpc = each.rpc if len(each.rpc) <= MAX_RPC else each.rpc[:CUT_PAYLOAD]
            found["IN" if each.direction == "R" else "OUT", rpc] += 1
    return found


def held_payloads(kiln: Kiln) -> Counter[tuple[str, bytes]]:
    """Those of the table `frames`."""
    rows = DeltaTable(str(kiln.lake / "frames")).to_pyarrow_table(columns=["direction", "payload"]).to_pylist()
    return Counter((row["direction"], row["payload"]) for row in rows if row["payload"])


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("captures")
    generator = Kiln(folder / "state", free_ports(2))
    made = {name: folder / f"{name}.rpc.gz" for name in LENGTHS}
    for seed, (name, path) in enumerate(made.items(), 5):
        options = ("--for", LENGTHS[name], "--rate", "20", "--seed", str(seed), "--network", name)
        generator.run_kept("generate", str(path), *options)
    return made


@pytest.fixture(scope="module")
def kiln(broker: EmbeddedBroker, captures: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Kiln:
    """A Kiln that has read the first capture. Its topics have one partition."""
    partitions = {f"KILN_KAFKA__{name}_PARTITIONS": "1" for name in ("FRAMES", "UPDATES")}
    state = tmp_path_factory.mktemp("replaced") / "state"
    kiln = kiln_beside(broker.address, PREFIX, state, partitions, partitions=1)
    kiln.run_kept("replay", str(captures["first"]))
    kiln.run_kept("run", "--catch-up")
    return kiln


def check_each_thing_is_there_once(kiln: Kiln) -> None:
    """As `Kiln.check_tables_hold_each_thing_once`, without keys of offsets: those of two topics may be the same."""
    keys = {
        "frames": "connection, direction, sequence",
        "messages": "network, message_id",
        "updates": "network, origin, message_id",
        "batch_tips": "batch_cid, stream, tip",
        "tips": "network, stream, tip",
    }
    for table, key in keys.items():
        assert kiln.sql(f"select {key}, count(*) as n from {table} group by all having n > 1 limit 3") == [], table
    missed = "select stream, tip from updates where separator_key is not null except select stream, tip from batch_tips"
    assert kiln.sql(missed) == []


def test_a_topic_that_is_created_again_under_a_running_kiln_ends_the_run_in_words(
    kiln: Kiln, captures: dict[str, Path]
) -> None:
    read, held = end_offset(kiln, "frames"), held_payloads(kiln)
    process = kiln.start("run", "--no-network")
    try:
        out = kiln.state / "started.out"
        wait_until(lambda: "batch delay p50" in out.read_text(), "the queries run", 120)
        create_again(kiln, ["frames"])
        kiln.run_kept("replay", str(captures["second"]))
        assert process.wait(timeout=180) == 1
        assert f"{PREFIX}frames is not the topic that was read before" in out.read_text()
    finally:
        if process.poll() is None:
            kill_all(process)
    assert end_offset(kiln, "frames") > read
    shown = kiln.attempt_kept("recover")
    assert shown.returncode == 1
    assert [f"{query}:" in shown.stdout for query in ("archive", "updates", "sink")] == [True, True, False]
    kiln.run_kept("recover", "--yes")
    kiln.run_kept("run", "--catch-up")
    assert held_payloads(kiln) == held + payloads(captures["second"])
    check_each_thing_is_there_once(kiln)


def test_a_capture_in_topics_that_were_created_again_is_in_the_tables_after_recover(
    kiln: Kiln, captures: dict[str, Path]
) -> None:
    read, held = end_offset(kiln, "frames"), held_payloads(kiln)

    create_again(kiln, list(TOPICS))
    kiln.run_kept("replay", str(captures["third"]), str(captures["first"]))
    assert end_offset(kiln, "frames") > read
    refused = kiln.attempt_kept("run", "--catch-up")
    assert refused.returncode == 1, refused.stdout
    assert f"cannot start: {PREFIX}frames is not the topic that was read before" in refused.stdout
    assert "kiln recover" in refused.stdout
    shown = kiln.attempt_kept("recover")
    assert shown.returncode == 1
    assert [f"{query}:" in shown.stdout for query in ("archive", "updates", "batch", "sink")] == [True] * 4
    kiln.run_kept("recover", "--yes")
    kiln.run_kept("run", "--catch-up")
    assert held_payloads(kiln) == held + payloads(captures["third"])
    check_each_thing_is_there_once(kiln)
    assert kiln.attempt_kept("recover").returncode == 0
