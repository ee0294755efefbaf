"""The closed set of what goes to quarantine: the runbook explains all of the set, and the code writes nothing else."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kiln.bridge.bep50.carrier import GAP
from kiln.bridge.fetcher import attempts, pending
from kiln.bridge.ipfs import blocks
from kiln.bridge.publisher.batches import MALFORMED as BATCH_MALFORMED
from kiln.bridge.publisher.batches import RECORDS_LOST as BATCHES_GONE
from kiln.pipelines.decode import user_decoder
from kiln.pipelines.decode.processing_errors import PROCESSING_FAILED
from kiln.pipelines.sink.transform import OTHER_SEPARATOR
from kiln.schemas.captures import items
from kiln.schemas.dht import announcement
from kiln.schemas.faults import BEGIN, END, FAULTS, insert_tables, markdown
from kiln.schemas.kafka import frames
from kiln.schemas.wire import cid, genesis, identity, pubsub, topic_table
from kiln.schemas.wire.genesis import CONTRADICTS, CONTRADICTS_TOPIC

ROOT = Path(__file__).resolve().parents[3]
RUNBOOK = ROOT / "docs" / "RUNBOOK.md"

WRITTEN: dict[str, tuple[str, ...]] = {
    "frame": (frames.FRAME_MALFORMED, frames.FRAME_INVALID),
    "decode": (PROCESSING_FAILED,),
    "archive": (PROCESSING_FAILED,),
    user_decoder.STAGE: user_decoder.REASONS,
    "updates": (PROCESSING_FAILED,),
    "hello": topic_table.REASONS,
    "rpc": (
        frames.RPC_MALFORMED,
        frames.RPC_OVERSIZED,
        frames.RPC_TOO_MANY,
        frames.RPC_TOO_COSTLY,
        frames.TOO_MANY_VERDICTS,
    ),
    "topic": (
        topic_table.TOPIC_MISSING,
        frames.TOPIC_NOT_UTF8,
        frames.TOPIC_TOO_LONG,
        *topic_table.INDEX_REASONS,
    ),
    "signature": (*identity.REASONS, "against_policy"),
    "message": pubsub.REASONS,
    pending.CLAIM_STAGE: (CONTRADICTS, CONTRADICTS_TOPIC),
    "bep50": (*announcement.REASONS, "bad_network", GAP),
    pending.MALFORMED_STAGE: (pending.MALFORMED, pending.RECORDS_LOST),
    pending.STAGE: (*genesis.REASONS, *attempts.REASONS, blocks.TOO_LARGE),
    "receive": (OTHER_SEPARATOR,),
    frames.HISTORY: items.REASONS,
    "batch": ("update_malformed", PROCESSING_FAILED),
    "publisher": (BATCH_MALFORMED, BATCHES_GONE),
    "sink": ("record_malformed", PROCESSING_FAILED, "entry_malformed"),
}
"""By stage, every reason as the module that writes the reason calls it."""


def test_the_runbook_has_the_tables_and_each_shared_remedy_once() -> None:
    page = RUNBOOK.read_text(encoding="utf-8")
    assert page == insert_tables(page), "regenerate it: make pages"
    assert all(page.count(f"| {fault.stage} | `{fault.reason}` | {fault.meaning} |") == 1 for fault in FAULTS)
    remedies = Counter(fault.what_to_do for fault in FAULTS)
    assert all(page.count(f"**{remedy}**") == (count > 1) for remedy, count in remedies.items())


def test_a_page_without_markers_is_refused() -> None:
    assert insert_tables(f"above\n{BEGIN}\nold\n{END}\nbelow") == f"above\n{markdown()}\nbelow"
    with pytest.raises(ValueError, match="must have each"):
        insert_tables("above\nbelow")


@pytest.mark.parametrize("stage", [*WRITTEN, *({fault.stage for fault in FAULTS} - set(WRITTEN))])
def test_each_stage_has_the_reasons_that_are_written_there(stage: str) -> None:
    assert {fault.reason for fault in FAULTS if fault.stage == stage} == set(WRITTEN.get(stage, ()))


def test_every_reason_of_a_reader_belongs_to_a_stage() -> None:
    readers = (frames, topic_table, identity, pubsub, genesis, cid, announcement, attempts)
    known = {fault.reason for fault in FAULTS}
    assert {reason for reader in readers for reason in reader.REASONS} <= known
    assert set(topic_table.INDEX_REASONS) <= known


def test_each_fault_is_there_once_and_said_in_full() -> None:
    assert Counter((fault.stage, fault.reason) for fault in FAULTS).most_common(1)[0][1] == 1
    for fault in FAULTS:
        for name in (fault.stage, fault.reason):
            assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
        for sentence in (fault.meaning, fault.what_to_do):
            assert re.fullmatch(r"[A-Z`][^|\n]+\.", sentence), fault


# ---------------------------------------------------------------- the code


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call in the code that may write to quarantine: the name that is called, and the call."""
    for folder in ("schemas", "pipelines", "bridge", "deploy"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    yield node.func.id, node


def literal(node: ast.Call, position: int, name: str) -> str | None:
    """The argument of a call, where the argument is a text written out there."""
    named = [keyword.value for keyword in node.keywords if keyword.arg == name]
    given = named or node.args[position : position + 1]
    value = given[0] if given else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def test_no_reader_rejects_for_another_reason() -> None:
    reasons = {literal(node, 0, "reason") for name, node in calls() if name == "Rejected"} - {None}
    assert len(reasons) > 30
    assert reasons <= {fault.reason for fault in FAULTS}


def test_nothing_is_quarantined_at_another_stage() -> None:
    # "": a message that is none
    places = {
        "RejectedMessage": 1,
        "reject_failed": 0,
        "_reject_frame": 3,
        "QuarantineRecord": 0,
        "build_quarantine_records": 0,
        "_reject_copy": 1,
    }
    stages = {literal(node, places[name], "stage") for name, node in calls() if name in places} - {None, ""}
    assert {"frame", "hello", "rpc", "topic", "signature", "message", "separator", "batch", "publisher"} <= stages
    assert stages <= {fault.stage for fault in FAULTS}
