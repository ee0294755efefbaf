"""Versions of the state folder and of the tables: another one is refused and left alone."""

from __future__ import annotations

import json
import multiprocessing
import re
from pathlib import Path

import pytest
from deltalake import DeltaTable

from kiln.conf.process.state_folder import (
    STATE_VERSION,
    StateVersionError,
    check_state_version,
    claim_state_folder,
    lock_state,
)
from kiln.deploy.cli.app import run_command
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.schemas.delta.tables import TABLES, TABLES_VERSION

OLDER = (
    rf"^the state folder {{state}} has {{what}}, and this Kiln reads version {STATE_VERSION}\. "
    r"Keep it for the older Kiln that wrote it, and pass another folder with --state\. To process old frames again "
    r"in the new folder, read those still in Kafka, replay captures, or copy the table {state}/lake/frames into "
    r"its lake and run kiln backfill run --source frames \(docs/RUNBOOK.md, Versions\)$"
)
NEWER = (
    rf"^the state folder {{state}} has version {STATE_VERSION + 1}, and this Kiln reads version {STATE_VERSION}\. "
    r"Use the newer Kiln that wrote it, or pass another folder with --state$"
)


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    found = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"") for path in found}


@pytest.mark.parametrize("before", [None, f"{STATE_VERSION}\n"])
def test_a_new_folder_and_one_of_this_version_are_claimed(tmp_path: Path, before: str | None) -> None:
    if before is not None:
        (tmp_path / "version").write_text(before)
    check_state_version(tmp_path)
    with lock_state(tmp_path, "archive"), lock_state(tmp_path, "bridge"):
        assert (tmp_path / "version").read_text() == f"{STATE_VERSION}\n"
    check_state_version(tmp_path)


def test_files_of_the_user_are_no_state(tmp_path: Path) -> None:
    (tmp_path / "kiln.toml").write_text("")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lake").mkdir()
    claim_state_folder(tmp_path)
    assert (tmp_path / "version").read_text() == f"{STATE_VERSION}\n"


def test_processes_that_claim_a_folder_at_the_same_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    claims = [context.Process(target=claim_state_folder, args=(tmp_path,)) for _ in range(8)]
    for claim in claims:
        claim.start()
    for claim in claims:
        claim.join()
    assert [claim.exitcode for claim in claims] == [0] * 8
    assert [path.name for path in tmp_path.iterdir()] == ["version"]


@pytest.mark.parametrize("content", ["broker", "checkpoints"])
@pytest.mark.parametrize(
    ("version", "what", "words"),
    [
        (None, "no version", OLDER),
        ("", "no version", OLDER),
        ("2\n", "version 2", OLDER),
        ("x\n", "version x", OLDER),
        (f"{STATE_VERSION + 1}\n", "", NEWER),
    ],
)
def test_a_folder_of_another_version_is_refused_and_left_alone(
    tmp_path: Path, content: str, version: str | None, what: str, words: str
) -> None:
    (tmp_path / content / "some").mkdir(parents=True)
    if version is not None:
        (tmp_path / "version").write_text(version)
    tmp_path.chmod(0o755)
    before = files(tmp_path)
    sentence = words.format(state=re.escape(str(tmp_path)), what=what)
    with pytest.raises(StateVersionError, match=sentence):
        check_state_version(tmp_path)
    with pytest.raises(StateVersionError, match=sentence), lock_state(tmp_path, "archive"):
        pytest.fail("locked")
    assert files(tmp_path) == before


COMMANDS = [
    ["run", "--for", "1s"],
    ["job", "archive"],
    ["bridge"],
    ["replay", "none.gz"],
    ["interests", "--add", "model"],
    ["sql", "select 1"],
    ["trace", "bafyreic5tutrbiczoqz3onmghm2rgaxn2ctiiyaopopnpgzz44357bvpli"],
    ["estimate"],
    ["status"],
    ["quality"],
    ["maintain"],
    ["recover"],
    ["quarantine", "list"],
    ["backfill", "list"],
    ["backfill", "run", "--run", "r", "--from", "2026-01-01", "--to", "2026-01-02"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_command_refuses_an_older_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    state = tmp_path / "state"
    (state / "checkpoints").mkdir(parents=True)
    (state / "version").write_text("2\n")
    (tmp_path / "none.gz").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KILN_STATE", str(state))
    before = files(tmp_path)
    assert run_command(command) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"the state folder {state} has version 2, and this Kiln reads version {STATE_VERSION}. Keep it" in err
    assert files(tmp_path) == before


def test_the_doctor_has_a_row_for_an_older_folder_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "version").write_text("2\n")
    before = files(tmp_path)
    assert run_command(["doctor", "--json", "--state", str(tmp_path)]) == 3
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["state folder"]["level"] == "fail"
    assert f"has version 2, and this Kiln reads version {STATE_VERSION}. Keep it" in rows["state folder"]["found"]
    assert files(tmp_path) == before


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("version", "what"), [(None, "no version"), ("1", "version 1"), (str(TABLES_VERSION + 1), "version 3")]
)
def test_a_table_of_another_version_is_refused_and_left_alone(tmp_path: Path, version: str | None, what: str) -> None:
    lake = Lake(str(tmp_path / "ours"))
    lake.create(("tips",))
    made = lake.open("tips")
    assert made.metadata().configuration["kiln.version"] == str(TABLES_VERSION)
    other = Lake(str(tmp_path / "other"))
    configuration = {} if version is None else {"kiln.version": version}
    DeltaTable.create(other.table("tips"), made.schema(), configuration=configuration, raise_if_key_not_exists=False)
    kind = "newer" if version == str(TABLES_VERSION + 1) else "older"
    words = (
        rf"^table tips in {re.escape(other.path)} has {what}, and this Kiln reads version 2\. Use the {kind} Kiln that "
        r"wrote the lake, or set another folder \(lake\.uri, or --state\)$"
    )
    before = files(tmp_path)
    with pytest.raises(LakeError, match=words):
        other.create(("tips",))
    with pytest.raises(LakeError, match=words):
        other.open("tips")
    assert files(tmp_path) == before


def test_a_table_of_the_user_has_no_version(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    lake.create(("tips",))
    DeltaTable.create(lake.table("mine"), lake.open("tips").schema())
    assert lake.open("mine").version() == 0


def test_a_table_that_lacks_columns_gets_them(tmp_path: Path) -> None:
    names = [column.name for column in TABLES["messages"].columns]
    added = [column.name for column in TABLES["messages"].columns if column.nullable][-2:]
    lake, whole = Lake(str(tmp_path / "lake")), Lake(str(tmp_path / "whole"))
    whole.create(("messages",))
    made = whole.open("messages")
    fields = [field for field in made.schema().fields if field.name not in added]
    DeltaTable.create(
        lake.table("messages"),
        type(made.schema())(fields),
        configuration=dict(made.metadata().configuration),
        raise_if_key_not_exists=False,
    )
    for _ in range(2):
        lake.create(("messages",))
        opened = lake.open("messages")
        assert opened.version() == 1
        assert {field.name for field in opened.schema().fields} == set(names)
        by_name = {field.name: field for field in made.schema().fields}
        assert [field for field in opened.schema().fields if field.name in added] == [by_name[name] for name in added]
        assert opened.metadata().configuration == made.metadata().configuration
        assert (opened.protocol().min_reader_version, opened.protocol().min_writer_version) == (1, 2)
        assert opened.protocol().reader_features is None


def test_a_folder_with_the_keys_of_a_node_and_with_empty_disks_is_new_state(tmp_path: Path) -> None:
    (tmp_path / "bridge").mkdir()
    (tmp_path / "bridge" / "key").write_bytes(b"k")
    (tmp_path / "broker").mkdir()
    (tmp_path / "checkpoints" / "lost+found").mkdir(parents=True)
    claim_state_folder(tmp_path)
    assert (tmp_path / "version").read_text() == f"{STATE_VERSION}\n"
