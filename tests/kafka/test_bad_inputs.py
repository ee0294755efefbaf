"""Every kind of bad input by the thousand, mixed with good traffic: no query stops, all is kept, all good arrives."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
from deltalake import DeltaTable

from kiln.deploy.demo.traffic import GeneratedFrame, Ledger, MessageEntry, Traffic, TrafficOptions
from kiln.deploy.demo.traffic.ledger import FrameEntry
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.schemas.kafka.frames import MAX_MESSAGES
from kit.bad_inputs import BAD_KINDS, BadInputs
from kit.kiln_process import Kiln
from kit.log_feed import alternate, frames_producer, kiln_beside

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(3_000)]

NUMBER = int(os.environ.get("KILN_TEST_BAD_INPUTS", "200"))
"""Bad inputs of each kind, but for the messages in one RPC, which are always 100,000."""
PREFIX = "bad."
HOUR = 3_600_000_000_000  # ns


@dataclass
class Run:
    kiln: Kiln
    ledger: Ledger


@pytest.fixture(scope="module")
def run(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Run:
    kiln = kiln_beside(broker.address, PREFIX, tmp_path_factory.mktemp("bad"))
    options = TrafficOptions(seed=5, network="local-bad")
    start, spacing = time.time_ns(), 1_000_000
    good = Traffic(options, start, 1_000.0)
    bad = [
        # times of their own: an author and a time are a message's id
        BadInputs(kind, MAX_MESSAGES if kind == "many_messages" else NUMBER, 5, options, start + place * HOUR, spacing)
        for place, kind in enumerate(BAD_KINDS, start=1)
    ]
    with frames_producer(broker.address, PREFIX) as producer:
        for key, value in alternate(records(good.frames(messages=3 * NUMBER)), *map(records, bad)):
            producer.send_record(key, value)
    ledger = Ledger()
    for part in (good.ledger, *(each.ledger for each in bad)):
        assert part is not None
        ledger.add(part)
    kiln.run_kept("run", "--catch-up", timeout=2_400)
    return Run(kiln, ledger)


def records(frames: Iterable[GeneratedFrame]) -> Iterator[tuple[bytes, bytes]]:
    return ((frame.key, frame.value) for frame in frames)


def messages(ledger: Ledger) -> Iterator[MessageEntry]:
    return (entry for entry in ledger if isinstance(entry, MessageEntry))


def test_no_query_was_started_again(run: Run) -> None:
    log = (run.kiln.state / "logs" / "spark.log").read_text(errors="replace")
    assert "terminated with error" not in log


def test_every_good_message_arrives_once(run: Run) -> None:
    table = DeltaTable(str(run.kiln.lake / "messages")).to_pyarrow_table(columns=["network", "message_id", "data"])
    arrived = Counter(
        (row["network"], row["message_id"], hashlib.sha256(row["data"]).hexdigest()) for row in table.to_pylist()
    )
    sent = {(each.network, each.message_id, each.sha256) for each in messages(run.ledger) if each.good_copies}
    assert len(sent) > NUMBER
    assert arrived == Counter(sent)


def test_everything_bad_is_in_quarantine_with_reason_and_bytes(run: Run) -> None:
    table = DeltaTable(str(run.kiln.lake / "quarantine")).to_pyarrow_table(columns=["stage", "reason", "data"])
    kept = Counter((row["stage"], row["reason"], hashlib.sha256(row["data"]).hexdigest()) for row in table.to_pylist())
    expected: Counter[tuple[str | None, str | None, str]] = Counter()
    forged: Counter[tuple[str | None, str | None]] = Counter()
    for entry in run.ledger:
        if isinstance(entry, FrameEntry):
            expected[entry.stage, entry.reason, entry.sha256] += 1
            continue
        if entry.bad_copies:
            expected[entry.stage, entry.reason, entry.sha256] += entry.bad_copies
        if entry.forged_copies:
            forged["signature", entry.forged_reason] += entry.forged_copies
    missing = expected - kept
    assert not missing, f"{missing.total()} are not in quarantine: {missing.most_common(3)}"
    # what is there beside is the forged copies, whose bytes no ledger has
    beside: Counter[tuple[str | None, str | None]] = Counter()
    for (stage, reason, _), number in (kept - expected).items():
        beside[stage, reason] += number
    assert beside == forged


def test_updates_are_those_of_the_good_messages(run: Run) -> None:
    sent: dict[tuple[object, ...], set[object]] = {}
    for each in messages(run.ledger):
        if each.good_copies and each.type == "UPDATE":
            separator = (each.separator.key, each.separator.value) if each.separator else (None, None)
            sent.setdefault((each.network, *separator, each.stream, each.tip), set()).add(each.message_id)
    rows = run.kiln.sql("select network, separator_key, separator_value, stream, tip, message_id from updates")
    found = [(*new, message) for *new, message in (tuple(row.values()) for row in rows)]
    keys = {tuple(each[:-1]) for each in found}
    separated = {(network, stream, tip) for network, key, _, stream, tip in keys if key is not None}
    # an announcement without a separator is a repeat of one that has one
    repeats = {each for each in sent if each[1] is None and (each[0], *each[3:]) in separated}
    assert sent.keys() - repeats <= keys <= sent.keys()
    run.kiln.check_updates_are_new_once()
    assert all(message in sent[tuple(new)] for *new, message in found)
