"""kiln.pipelines.delta.delta_rs: a write is committed once, against two drivers, and next to commits of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

import pytest
from deltalake import DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError

from kiln.deploy.query.ask import query_lake
from kiln.pipelines.backfill.swap import FileSwap, has_mark
from kiln.pipelines.delta.commits import SecondWriterError, WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake, LakeError, SchemaChangedError

TABLE = "tips"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"))
    lake.create([TABLE])
    return lake


def files(lake: Lake, *streams: str) -> list[DataFile]:
    """A file for each stream."""
    made: list[DataFile] = []
    for stream in streams:
        out = TableFiles(lake, TABLE)
        out.add(("n", stream, "t", "update", None, 0))
        made += out.close()
    return made


def held(lake: Lake) -> list[str]:
    return sorted(lake.open(TABLE).to_pyarrow_table()["stream"].to_pylist())


class Meanwhile(Sequence[DataFile]):
    """Files on their way into a commit. When the commit looks at them, it has asked the log already; something happens
    then, once."""

    def __init__(self, files: Sequence[DataFile], happens: Callable[[], object]) -> None:
        self._files = files
        self._happens = [happens]

    @overload
    def __getitem__(self, index: int) -> DataFile: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DataFile]: ...
    def __getitem__(self, index: int | slice) -> DataFile | Sequence[DataFile]:
        return self._files[index]

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[DataFile]:
        while self._happens:
            self._happens.pop()()
        return iter(self._files)


# ---------------------------------------------------------------- once


def test_a_write_that_is_repeated_changes_nothing_and_says_so(lake: Lake) -> None:
    commits, first, second = DeltaRsCommits(lake), WriteId("query", 0), WriteId("query", 1)
    assert commits.commit(TABLE, files(lake, "a", "b"), first)
    version = lake.open(TABLE).version()
    for each in (commits, DeltaRsCommits(lake)):  # this driver, and the one after a crash
        assert not each.commit(TABLE, files(lake, "a", "b"), first)
    assert (held(lake), lake.open(TABLE).version()) == (["a", "b"], version)
    assert commits.commit(TABLE, files(lake, "c"), second)
    assert not commits.commit(TABLE, files(lake, "c"), first)
    assert held(lake) == ["a", "b", "c"]
    assert commits.commit(TABLE, files(lake, "d"), WriteId("query", 7))  # micro-batches without rows in between
    assert held(lake) == ["a", "b", "c", "d"]


def test_another_query_and_another_write_are_others(lake: Lake) -> None:
    commits = DeltaRsCommits(lake)
    for number, write in enumerate((WriteId("one", 5), WriteId("two", 5), WriteId("one", 5, "more"))):
        assert commits.commit(TABLE, files(lake, f"{number}"), write)
    assert held(lake) == ["0", "1", "2"]


def test_an_append_goes_through_when_a_swap_takes_files_meanwhile(lake: Lake) -> None:
    """Between the append's look at the log and its commit."""
    commits = DeltaRsCommits(lake)
    assert commits.commit(TABLE, files(lake, "a"), WriteId("query", 0))

    def take() -> None:
        read = lake.open(TABLE)
        gone = [str(path) for path in read.get_add_actions()["path"].to_pylist()]
        FileSwap(lake).commit(TABLE, read, gone, files(lake, "new"), Transaction(f"swap:run:{TABLE}", 1))

    assert commits.commit(TABLE, Meanwhile(files(lake, "b"), take), WriteId("query", 1))
    assert commits.commit(TABLE, files(lake, "c"), WriteId("query", 2))
    assert not DeltaRsCommits(lake).commit(TABLE, files(lake, "twice"), WriteId("query", 2))
    assert has_mark(lake.open(TABLE), Transaction(f"swap:run:{TABLE}", 1))
    assert held(lake) == ["b", "c", "new"]
    assert set(query_lake(lake, f"SELECT stream FROM {TABLE}").rows()) == {("b",), ("c",), ("new",)}


def test_an_append_goes_through_when_the_table_s_properties_change_meanwhile(lake: Lake) -> None:
    commits = DeltaRsCommits(lake)
    assert commits.commit(TABLE, files(lake, "a"), WriteId("query", 0))

    def change() -> None:
        lake.open(TABLE).alter.set_table_properties({"delta.checkpointInterval": "5"})

    assert commits.commit(TABLE, Meanwhile(files(lake, "b"), change), WriteId("query", 1))
    assert held(lake) == ["a", "b"]
    assert lake.open(TABLE).metadata().configuration["delta.checkpointInterval"] == "5"


def test_columns_that_change_meanwhile_stop_the_append_in_words(lake: Lake) -> None:
    def rename() -> None:
        rows = lake.open(TABLE).to_pyarrow_table()
        other = rows.rename_columns(["tip_cid" if name == "tip" else name for name in rows.column_names])
        write_deltalake(lake.table(TABLE), other, mode="overwrite", schema_mode="overwrite")

    with pytest.raises(SchemaChangedError, match="the column tip is missing"):
        DeltaRsCommits(lake).commit(TABLE, Meanwhile(files(lake, "a"), rename), WriteId("query", 0))
    assert lake.open(TABLE).to_pyarrow_table().num_rows == 0


@pytest.mark.parametrize("was_applied", [True, False])
def test_a_commit_that_fails_is_in_the_table_or_raises_at_once(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, was_applied: bool
) -> None:
    """A store may lose the response of a commit that it applied. A disk that is full applies none."""
    commit, calls = DeltaTable.create_write_transaction, []

    def fail(table: DeltaTable, *args: object, **options: object) -> None:
        calls.append(table)
        if was_applied:
            commit(table, *args, **options)  # type: ignore[arg-type]  # as they came
        raise CommitFailedError("no space left")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", fail)
    commits, write = DeltaRsCommits(lake), WriteId("query", 0)
    if was_applied:
        assert commits.commit(TABLE, files(lake, "a"), write)
    else:
        with pytest.raises(CommitFailedError, match="no space left"):
            commits.commit(TABLE, files(lake, "a"), write)
    assert (held(lake), len(calls)) == (["a"] if was_applied else [], 1)


def test_history_says_what_was_done(lake: Lake) -> None:
    DeltaRsCommits(lake).commit(TABLE, files(lake, "a"), WriteId("query", 0))
    history = lake.open(TABLE).history(1)[0]
    assert (history["operation"], history["operationParameters"]["mode"]) == ("WRITE", "Append")


def test_checkpoints_of_the_log_keep_what_was_committed(lake: Lake) -> None:
    """The commits before the checkpoint are taken away, as a log clean-up would do."""
    lake.open(TABLE).alter.set_table_properties({"delta.checkpointInterval": "5"})
    commits = DeltaRsCommits(lake)
    for number in range(7):
        assert commits.commit(TABLE, files(lake, f"{number:02}"), WriteId("query" if number else "older", number))
    log = Path(lake.table(TABLE)) / "_delta_log"
    (checkpoint,) = log.glob("*.checkpoint*.parquet")
    newest = int(checkpoint.name.split(".")[0])
    assert newest in (4, 5)
    for number in range(newest):
        (log / f"{number:020}.json").unlink()
    reopened = DeltaRsCommits(lake)
    for write in (WriteId("older", 0), WriteId("query", 2), WriteId("query", 6)):
        assert not reopened.commit(TABLE, files(lake, "twice"), write)
    assert held(lake) == [f"{number:02}" for number in range(7)]


# ---------------------------------------------------------------- two drivers

WORDS = (
    r"^cannot commit to table tips: another driver runs the query query, and has just committed to "
    r"this table.*Run only one"
)


@pytest.mark.parametrize("batch", [4, 5, 6])
def test_of_two_drivers_the_second_fails_in_words(lake: Lake, batch: int) -> None:
    """The first one commits while the second one is about to, and the rows are there once."""
    first, second = DeltaRsCommits(lake), DeltaRsCommits(lake)
    for driver, number in ((first, 1), (second, 2)):
        assert driver.commit(TABLE, files(lake, "before"), WriteId(f"driver {number}", 0))

    def commit_first() -> None:
        assert first.commit(TABLE, files(lake, "a"), WriteId("query", 5))

    with pytest.raises(SecondWriterError, match=WORDS):
        second.commit(TABLE, Meanwhile(files(lake, "a"), commit_first), WriteId("query", batch))
    assert held(lake) == ["a", "before", "before"]
    assert not second.commit(TABLE, files(lake, "a"), WriteId("query", 5)), "started again, it sees the other's commit"
    assert held(lake) == ["a", "before", "before"]


def test_a_driver_that_has_followed_the_log_is_told_of_another_since(lake: Lake) -> None:
    """delta-rs reads a table's log once. What another driver has committed since is not taken for a repeat."""
    first, second = DeltaRsCommits(lake), DeltaRsCommits(lake)
    assert first.commit(TABLE, files(lake, "a"), WriteId("query", 0))
    assert second.commit(TABLE, files(lake, "b"), WriteId("query", 1))
    for batch in (1, 2):
        with pytest.raises(SecondWriterError, match=WORDS):
            first.commit(TABLE, files(lake, "b"), WriteId("query", batch))
        first = DeltaRsCommits(lake)
        first._tables[TABLE] = DeltaTable(lake.table(TABLE), version=1)
    assert held(lake) == ["a", "b"]


def test_commits_of_others_in_between_do_no_harm(lake: Lake) -> None:
    """Commits of another query, of another write of the same query, and of a person."""
    mine = DeltaRsCommits(lake)
    for number, apart in enumerate((WriteId("other", 0), WriteId("query", 0, "received"), WriteId("third", 9))):

        def commit_apart(apart: WriteId = apart, number: int = number) -> None:
            assert DeltaRsCommits(lake).commit(TABLE, files(lake, f"apart {number}"), apart)

        assert mine.commit(TABLE, Meanwhile(files(lake, f"mine {number}"), commit_apart), WriteId("query", number))
    assert held(lake) == [f"{whose} {number}" for whose in ("apart", "mine") for number in range(3)]


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match=rf"cannot read table {TABLE} in"):
        DeltaRsCommits(Lake(str(tmp_path))).commit(TABLE, [], WriteId("query", 0))
