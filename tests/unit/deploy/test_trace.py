"""kiln trace over real Delta tables: the whole way of each kind of id, by questions that answer by themselves."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kiln.deploy.cli.app import run_command
from kiln.deploy.cli.trace import print_trace, write_trace
from kiln.deploy.query import trace
from kiln.deploy.query.ask import query_lake
from kiln.deploy.query.trace import Trace, TraceError, trace_subject
from kiln.deploy.query.trace_ids import CidRef, FrameRef, IdError, MessageRef, StreamRef, parse_id
from kiln.pipelines.delta.lake import Lake
from kit.traced_lake import BATCH, FALSE, OTHERS_BATCH, PEERS, TRUE, after, cid, make_lake, message, stream


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return make_lake(tmp_path_factory.mktemp("trace") / "lake")


def way(lake: Lake, text: str) -> dict[str, list[dict[str, object]]]:
    """Rows by step."""
    found = trace_subject(lake, parse_id(text))
    return {
        step.step.name: [dict(zip(step.columns, cells, strict=True)) for cells in step.cells] for step in found.steps
    }


def column(rows: Sequence[Mapping[str, object]], name: str) -> list[object]:
    return [row[name] for row in rows]


def filled(steps: Mapping[str, Sequence[object]]) -> set[str]:
    return {name for name, rows in steps.items() if rows}


def test_the_way_of_a_batch(lake: Lake) -> None:
    steps = way(lake, BATCH)
    assert column(steps["updates"], "message_id") == [message(1), message(2)]
    assert column(steps["updates"], "log_offset") == [1, 2]
    assert column(steps["messages"], "message_id") == [message(1), message(2)]
    assert [
        (row["message_id"], row["remote_peer"], row["copy"], row["copies"], row["behind_ms"]) for row in steps["copies"]
    ] == [(message(n), PEERS[c], c + 1, 2, 250.0 * c) for n in (1, 2) for c in (0, 1)]
    assert column(steps["copies"], "verdict") == ["valid"] * 4
    assert {(row["kafka_partition"], row["kafka_offset"], row["payload"]) for row in steps["frames"]} == {
        (c, 100 + n, b"rpc") for n in (1, 2) for c in (0, 1)
    }
    assert [(row["opened_at"], row["closed_at"], row["late_ms"], row["block"]) for row in steps["batch"]] == [
        (after(1), after(6), 400.0, b"\x82\x00\x00")
    ]
    assert column(steps["block"], "tip") == sorted((cid("tip 1"), cid("tip 2")))
    assert [(row["transport"], row["peer_count"]) for row in steps["publications"]] == [("gossipsub", 3)]
    assert column(steps["sent"], "kafka_offset") == [900, 902]
    assert column(steps["quarantine"], "reason") == ["contradicts_genesis"]
    assert column(steps["separator"], "contradicted") == [True]
    assert not steps["announcements"]


def test_the_way_of_a_stream_whose_claim_was_false(lake: Lake) -> None:
    steps = way(lake, f"ceramic://{stream('claimed')}")
    separator = steps["separator"][0]
    assert (separator["separator_source"], separator["separator_value"]) == ("topic", FALSE)
    assert (separator["genesis"], separator["genesis_value"], separator["contradicted"]) == ("genesis", TRUE, True)
    assert column(steps["quarantine"], "reason") == ["contradicts_genesis"]
    assert column(steps["quarantine"], "detail") == [f"claimed model/{FALSE}; the genesis names model/{TRUE}"]
    # each update in the batch of its own window, though a later batch holds one of the tips again
    assert [(row["message_id"], row["batch_cid"]) for row in steps["batches"]] == [
        (message(1), BATCH),
        (message(2), BATCH),
    ]
    assert filled(steps) == set(steps) - {"announcements"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        *((text, True) for text in (BATCH, OTHERS_BATCH, stream("claimed"), cid("tip 1"), message(4), "0/104")),
        *((text, False) for text in (BATCH, stream("claimed"))),
    ],
)
def test_the_question_of_each_step_has_its_answer_by_itself(
    lake: Lake, text: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not named:
        monkeypatch.setattr(trace, "_NAMED", 0)
    for step in trace_subject(lake, parse_id(text)).steps:
        again = query_lake(lake, step.step.sql)
        assert (again.columns, list(again.rows())) == (step.columns, step.cells), step.step.name


@pytest.mark.parametrize("text", [BATCH, stream("claimed"), cid("tip 1"), message(3)])
def test_the_way_is_the_same_where_updates_are_too_many_to_name(
    lake: Lake, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = way(lake, text)
    monkeypatch.setattr(trace, "_NAMED", 0)
    assert way(lake, text) == named


def test_a_stream_whose_separator_is_verified_is_not_contradicted(lake: Lake) -> None:
    separator = way(lake, stream("other"))["separator"][0]
    assert (separator["separator_source"], separator["contradicted"]) == ("genesis", False)


def test_a_stream_of_which_only_quarantine_knows(lake: Lake) -> None:
    steps = way(lake, stream("waits"))
    assert filled(steps) == {"quarantine"}
    assert column(steps["quarantine"], "reason") == ["genesis_unavailable"]


def test_the_way_of_a_tip(lake: Lake) -> None:
    found = trace_subject(lake, parse_id(cid("tip 1")))
    assert found.kind == "tip"
    assert "batch" not in [step.step.name for step in found.steps]  # a tip is no batch
    steps = way(lake, cid("tip 1"))
    assert column(steps["messages"], "message_id") == [message(1)]
    assert column(steps["batches"], "batch_cid") == [BATCH]
    assert column(steps["tips"], "source") == ["update"]
    assert len(steps["copies"]) == len(steps["frames"]) == 2


def test_the_way_of_a_message(lake: Lake) -> None:
    steps = way(lake, message(3))
    assert column(steps["updates"], "tip") == [cid("tip 3")]
    assert column(steps["batches"], "batch_cid") == [cid("third")]
    assert column(steps["messages"], "data") == [b"{}"]
    assert not steps["publications"]
    assert column(steps["quarantine"], "reason") == ["hello_repeats"]  # of the frame that brought it


@pytest.mark.parametrize("text", [message(4), "0/104/1", "1/104/1"])
def test_a_message_in_quarantine_is_found_by_its_id_and_by_its_place(lake: Lake, text: str) -> None:
    steps = way(lake, text)
    assert not steps["messages"]
    assert column(steps["quarantine"], "reason") == ["not_json"]
    assert column(steps["quarantine"], "data") == [b"bytes"]
    assert column(steps["frames"], "payload") == [b"rpc", b"rpc"]


def test_a_place_without_an_index_is_the_whole_frame(lake: Lake) -> None:
    assert len(way(lake, "0/104")["quarantine"]) == 2
    steps = way(lake, "0/777")
    assert column(steps["quarantine"], "reason") == ["rpc_malformed"]
    assert column(steps["frames"], "payload") == [b"garbage"]
    assert filled(steps) == {"frames", "quarantine"}


def test_the_way_of_a_batch_of_another_node(lake: Lake) -> None:
    for text in (OTHERS_BATCH, message(5)):
        steps = way(lake, text)
        assert column(steps["announcements"], "message_id") == [message(5)]
        assert column(steps["tips"], "tip") == [cid("theirs")]
        assert column(steps["quarantine"], "reason") == ["cid_hash_unsupported"]
        assert len(steps["frames"]) == 2
    assert trace_subject(lake, parse_id(OTHERS_BATCH)).kind == "batch"


def test_what_came_over_the_dht_has_a_frame_and_no_copies(lake: Lake) -> None:
    steps = way(lake, "bep50/ab/01")
    assert not steps["copies"]
    assert column(steps["frames"], "kafka_offset") == [106]


def test_copies_are_those_of_the_newest_messages(lake: Lake) -> None:
    found = trace_subject(lake, parse_id(stream("claimed")), most=1)
    copies = next(step for step in found.steps if step.step.name == "copies")
    assert {cells[copies.columns.index("message_id")] for cells in copies.cells} == {message(2)}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (cid("x"), CidRef(cid("x"))),
        (stream("x"), StreamRef(stream("x"))),
        (f" /ceramic/{stream('x')}\n", StreamRef(stream("x"))),
        (message(1), MessageRef(message(1))),
        (f"sha256/{'0f' * 32}", MessageRef(f"sha256/{'0f' * 32}")),
        ("blake2b/0123456789abcdef0123", MessageRef("blake2b/0123456789abcdef0123")),  # network.message_id ":hex20"
        ("0/12/3", FrameRef(0, 12, 3)),
        ("2/12", FrameRef(2, 12, None)),
    ],
)
def test_an_id_is_known_by_its_form(text: str, kind: object) -> None:
    assert parse_id(text) == kind


@pytest.mark.parametrize("text", ["", "hello", "0/", "9999999999/1", f"{stream('x')}?commit=0", "x'; DROP/ab"])
def test_other_texts_are_no_ids(text: str) -> None:
    with pytest.raises(IdError):
        parse_id(text)


def test_a_commit_id_is_named_as_such() -> None:
    commit = "k3y52l7qbv1frxwipl4hp7e6jlu4f6u8upm2xv0irmedfkm5cnutmezzi3u7mytj4"
    with pytest.raises(IdError, match=r"this is a CommitID \(of the genesis\), not a StreamID\. Pass a CID"):
        parse_id(commit)


def test_an_id_that_nothing_knows_is_an_error_in_words(lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    state = str(Path(lake.path).parent)
    for text in (cid("nobody's"), stream("nobody's"), message(99), "0/5000/0"):
        assert run_command(["trace", text, "--state", state]) == 1
        assert f"no table in {lake.path} has {text}" in capsys.readouterr().err
    assert run_command(["trace", "hello", "--state", state]) == 2
    assert "is not an id" in capsys.readouterr().err


def test_tables_that_are_not_there_yet_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no table batch_tips, .* yet"):
        trace_subject(Lake(str(tmp_path)), parse_id(cid("x")))


def printed(found: Trace, *, sql: bool = False) -> str:
    from kiln.deploy.cli.console import PlainConsole

    console = PlainConsole()
    console.file = io.StringIO()
    console.width = 120
    print_trace(found, console, 10, sql=sql)
    return console.file.getvalue()


def test_the_screen_names_each_step_and_obeys_nothing_of_the_network(lake: Lake) -> None:
    shown = printed(trace_subject(lake, parse_id(message(4))))
    assert r"\u001b[2Jno JSON" in shown
    assert "\x1b" not in shown
    assert "Quarantined records" in shown
    assert "no valid message" in shown
    assert "WHERE" not in shown
    assert f"WHERE message_id = '{message(4)}'" in printed(trace_subject(lake, parse_id(message(4))), sql=True)


def test_json_has_the_steps_with_questions_and_rows(lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["trace", BATCH, "--json", "--state", str(Path(lake.path).parent)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["id"], told["kind"]) == (BATCH, "batch")
    steps = {step["step"]: step for step in told["steps"]}
    assert [row["batch_cid"] for row in steps["batch"]["rows"]] == [BATCH]
    assert steps["frames"]["rows"][0]["payload"] == b"rpc".hex()
    out = io.StringIO()
    write_trace(trace_subject(lake, parse_id(BATCH)), out)
    assert json.loads(out.getvalue()) == told
