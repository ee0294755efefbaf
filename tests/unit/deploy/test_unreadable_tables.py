"""Tables that other programs changed or damaged: each reader says so in a sentence, and reads the others."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import kiln
from kiln.conf.settings.model import Kafka, Settings
from kiln.deploy.cli.app import run_command
from kiln.deploy.ops.doctor import run_checks
from kiln.deploy.ops.doctor_checks import DoctorCheck, check_lake
from kiln.deploy.ops.status import read_lake_status, read_table_status
from kiln.deploy.query.ask import query_lake
from kiln.deploy.query.sample import SAMPLE_LAKE, copy_sample
from kiln.pipelines.delta.duckdb_tables import find_reading_faults
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.schemas.delta.tables import TABLES
from kit.foreign_table import FEATURES, add_feature, list_data_files, rename_column
from kit.traced_lake import BATCH

COUNT = "SELECT count(*) AS n FROM messages"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    copy_sample(tmp_path / "state")
    return tmp_path / "state"


@pytest.fixture
def lake(state: Path) -> Lake:
    return Lake(str(state / "lake"))


def test_a_renamed_column_is_never_null_without_a_word(lake: Lake) -> None:
    """Reader version 2 names no features, and implies column mapping."""
    add_feature(lake, "tips", "columnMapping", version=2)
    rename_column(lake, "tips", "controllers", "owners")
    for sql in ("SELECT owners FROM tips", "SELECT count(*) FROM tips"):
        with pytest.raises(LakeError, match=r"cannot read table tips in .*: it needs the Delta features columnMapping"):
            list(query_lake(lake, sql).rows())


def test_a_table_of_reader_version_2_that_maps_no_column_is_read(lake: Lake) -> None:
    expected = list(query_lake(lake, COUNT).rows())
    log = Path(lake.table("messages")) / "_delta_log" / f"{lake.open('messages').version() + 1:020}.json"
    log.write_text(json.dumps({"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}) + "\n")
    assert list(query_lake(lake, COUNT).rows()) == expected


def test_rows_that_deletion_vectors_remove_are_not_counted(lake: Lake) -> None:
    assert read_table_status(lake, "messages").rows
    add_feature(lake, "messages", "deletionVectors")
    status = read_table_status(lake, "messages")
    assert (status.rows, status.problem) == (None, "")


def lose_file(lake: Lake) -> str:
    """Remove the first data file of `messages`, and return what the error has to name."""
    file = list_data_files(lake, "messages")[0]
    file.unlink()
    return file.name


def lose_commit(lake: Lake) -> str:
    log = Path(lake.table("messages")) / "_delta_log"
    shutil.copy(log / f"{1:020}.json", log / f"{2:020}.json")
    (log / f"{1:020}.json").unlink()
    return "its log lacks the commit of version 1. Restore"


def lose_checkpoint(lake: Lake) -> str:
    (Path(lake.table("messages")) / "_delta_log" / "_last_checkpoint").write_text('{"version": 1, "size": 3}')
    return "_last_checkpoint names a checkpoint of version 1, which does not exist. Run kiln recover"


def damage_file(lake: Lake) -> str:
    file = list_data_files(lake, "messages")[0]
    file.write_bytes(file.read_bytes()[:1000])
    return file.name


@pytest.mark.parametrize("damage", [lose_file, lose_commit, lose_checkpoint, damage_file])
def test_each_reader_names_the_table_and_what_it_lacks(
    damage: Callable[[Lake], str], state: Path, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    words = damage(lake)
    (message,) = {
        _read_error(capsys, *command, "--state", str(state))
        for command in (["sql", COUNT], ["trace", BATCH], ["sql", "SELECT * FROM announcements"])
    }
    assert message.startswith(f"kiln: cannot read table messages in {lake.path}: ")
    assert words in message
    with pytest.raises(kiln.KilnError, match=re.escape(words)):
        kiln.open(state).sql(COUNT).rows()
    doctor = _check_lake(lake)
    assert doctor.level == "fail"
    assert words in doctor.found


def test_a_file_that_goes_while_a_result_is_read_is_named_too(state: Path, lake: Lake) -> None:
    result = kiln.open(state).sql(COUNT + " WHERE network <> ''")
    name = lose_file(lake)
    with pytest.raises(kiln.KilnError, match=f"cannot read table messages in .*: {name} is missing"):
        result.rows()


def test_an_old_version_whose_files_were_vacuumed_is_told_apart(lake: Lake) -> None:
    opened = lake.open("tips")
    version = opened.version()
    opened.delete("true")
    opened.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(LakeError, match=rf"is missing from version {version}\. .* Read a later version, up to \d+"):
        query_lake(lake, "SELECT * FROM tips", version)
    assert list(query_lake(lake, "SELECT * FROM tips").rows()) == []


@pytest.mark.parametrize("feature", FEATURES)
def test_doctor_names_the_features_that_no_query_can_read(feature: str, lake: Lake) -> None:
    add_feature(lake, "messages", feature)
    doctor = _check_lake(lake)
    assert doctor.level == "fail"
    assert f"cannot read table messages in {lake.path}: it needs the Delta features {feature}" in doctor.found


def test_the_doctor_reads_every_table(state: Path, lake: Lake) -> None:
    name = lose_file(lake)
    settings = Settings(state=state, kafka=Kafka(bootstrap="127.0.0.1:1"))
    (check,) = (each for each in run_checks(settings) if each.name == "lake")
    assert (check.level, check.what_to_do) == ("fail", 'see "A table cannot be read" in docs/RUNBOOK.md')
    assert name in check.found


def _check_lake(lake: Lake) -> DoctorCheck:
    return check_lake(read_lake_status(lake), find_reading_faults(lake))


def _read_error(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert run_command(list(command)) == 1
    return capsys.readouterr().err.strip()


def test_quality_names_the_tables_that_cannot_be_read_and_checks_the_others(
    state: Path, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    for table, feature in zip(("messages", "copies", "controls", "subscriptions"), FEATURES, strict=True):
        add_feature(lake, table, feature, version=2 if feature == "columnMapping" else 3)
    list_data_files(lake, "batch_tips")[0].unlink()
    (Path(lake.table("publications")) / "_delta_log" / f"{0:020}.json").unlink()
    damaged = list_data_files(lake, "frames")[0]
    damaged.write_bytes(damaged.read_bytes()[:1000])
    unreadable = {"messages", "copies", "controls", "subscriptions", "batch_tips", "publications", "frames"}
    assert run_command(["quality", "--json", "--state", str(state)]) == 1
    results = json.loads(capsys.readouterr().out)
    failed = {table: [each for each in results if each["table"] == table and not each["success"]] for table in TABLES}
    for table in unreadable:
        (own,) = [each for each in failed[table] if each["observed"].startswith(f"cannot read table {table} in ")]
        assert own["level"] == "error"
    judged = {each["table"] for each in results if each["success"]}
    assert judged == {"batches", "bundles", "quarantine", "streams", "tips", "updates"}
    named = [each["observed"] for table in TABLES.keys() - unreadable for each in failed[table]]
    assert named
    assert all(words.startswith("cannot read table ") for words in named)
    assert lake.open("quality_results").version() > 0


def test_recover_moves_a_hint_away_that_names_no_checkpoint(
    state: Path, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_checkpoint(lake)
    assert run_command(["recover", "--state", str(state)]) == 1
    assert "_last_checkpoint" in capsys.readouterr().out
    assert run_command(["recover", "--state", str(state), "--yes"]) == 1, "the sample has no checkpoints"
    assert run_command(["recover", "--state", str(state)]) == 1
    assert "_last_checkpoint" not in capsys.readouterr().out.partition("does not exist")[2]
    assert list(query_lake(lake, COUNT).rows()) == list(query_lake(Lake(str(SAMPLE_LAKE)), COUNT).rows())


@pytest.mark.parametrize("damage", [lose_file, lose_commit])
def test_recover_names_what_it_cannot_repair(
    damage: Callable[[Lake], str], state: Path, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    words = damage(lake)
    assert run_command(["recover", "--state", str(state)]) == 1
    assert words in capsys.readouterr().out
