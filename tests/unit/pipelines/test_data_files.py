"""kiln.pipelines.delta.files: what is written into files is read back the same, and the statistics hold for every
row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import example, given
from hypothesis import strategies as st

from kiln.pipelines.delta import files as module
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, TableFiles, delete_files, rewrite_file
from kiln.pipelines.delta.lake import (
    Lake,
    SchemaChangedError,
    find_column_fault,
    list_delta_fields,
    list_stats_columns,
)
from kiln.schemas.delta.tables import TABLES, Column

TABLE = "updates"
COLUMNS = TABLES[TABLE].columns
SCHEMA = build_arrow_schema(COLUMNS)
SKIPPED = list_stats_columns(TABLES[TABLE])
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST, LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The first and the last µs of the years 1 to 9999, which are all that a statistic can name."""

TOO_LONG = "x" * 5_000
"""Parquet states no bounds of more than 4 KiB."""

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ("", TOO_LONG, "ÿ\U0001f600", "\uffff", "\U00010000", "\0", '"\\\n', "é" * 40, "x" * 32 + "\U0010ffff")
)
times = st.integers(FIRST, LAST) | st.integers(-2_000_000, 2_000_000) | st.sampled_from((FIRST, LAST, -1, 0, 999))
beyond = st.sampled_from((-(2**63), FIRST - 1, LAST + 1, 2**63 - 1))
VALUES: Mapping[str, st.SearchStrategy[object]] = {
    "string": texts,
    "timestamp": times,
    "int": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
}


def values_of(column: Column) -> st.SearchStrategy[object]:
    return st.none() | VALUES[column.type] if column.nullable else VALUES[column.type]


rows_of_table = st.lists(st.tuples(*map(values_of, COLUMNS)), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    made = Lake(str(tmp_path_factory.mktemp("lake")))
    made.create((TABLE, "frames", "messages"))
    return made


def write(lake: Lake, *rows: tuple[object, ...]) -> list[DataFile]:
    out = TableFiles(lake, TABLE)
    for row in rows:
        out.add(row)
    return out.close()


def row(**named: object) -> tuple[object, ...]:
    some: Mapping[str, object] = {"string": "a", "timestamp": 0, "int": 0, "bigint": 0}
    return tuple(named.get(column.name, some[column.type]) for column in COLUMNS)


def arrow(*rows: tuple[object, ...]) -> pa.Table:
    columns = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def stated(text: object, kind: str) -> object:
    """A value of the statistics as the table has it; times in µs."""
    if kind != "timestamp":
        return text
    assert isinstance(text, str)
    return (datetime.fromisoformat(text) - EPOCH) // timedelta(microseconds=1)


# ---------------------------------------------------------------- one file


@given(rows_of_table)
@example([row(observed_at=FIRST), row(observed_at=LAST)])
@example([row(observed_at=-1)])
@example([row(separator_value=TOO_LONG), row(separator_value="\U0010ffff")])
def test_a_file_holds_its_rows_and_states_what_holds_for_each(lake: Lake, rows: list[tuple[object, ...]]) -> None:
    (file,) = write(lake, *rows)
    path = Path(lake.table(TABLE)) / file.name
    assert (file.table, file.rows, file.size) == (TABLE, len(rows), path.stat().st_size)
    assert pq.read_table(path).cast(SCHEMA).equals(arrow(*rows))
    stats = json.loads(file.stats)
    assert stats["numRecords"] == len(rows)
    assert set(stats["nullCount"]) == set(SKIPPED)
    for place, column in enumerate(COLUMNS):
        if column.name not in SKIPPED:
            continue
        values = [each[place] for each in rows if each[place] is not None]
        assert stats["nullCount"][column.name] == len(rows) - len(values)
        in_order = sorted(values, key=_order)
        assert (column.name in stats["minValues"]) == (column.name in stats["maxValues"]) == bool(values)
        if values:
            low, high = (stated(stats[name][column.name], column.type) for name in ("minValues", "maxValues"))
            if TOO_LONG in (in_order[0], in_order[-1]):
                assert _order(low) <= _order(in_order[0])
                assert _order(in_order[-1]) <= _order(high)
            else:
                assert (low, high) == (in_order[0], in_order[-1])
    delete_files(lake, [file])


def _order(value: object) -> tuple[bytes, int]:
    """As readers order: texts by their bytes."""
    return (value.encode(), 0) if isinstance(value, str) else (b"", value if isinstance(value, int) else 0)


@given(st.lists(times | beyond, min_size=1, max_size=5))
@example([2**63 - 1])
@example([-(2**63), 0])
@example([0, LAST + 1])
def test_a_time_that_no_statistic_can_name_stops_nothing_and_no_statistic_lies(lake: Lake, values: list[int]) -> None:
    (file,) = write(lake, *(row(observed_at=value) for value in values))
    assert pq.read_table(Path(lake.table(TABLE)) / file.name).cast(SCHEMA)["observed_at"].cast(
        pa.int64()
    ).to_pylist() == (values)
    stats = json.loads(file.stats)
    for name, extreme in (("minValues", min(values)), ("maxValues", max(values))):
        assert ("observed_at" in stats[name]) == (FIRST <= extreme <= LAST)
        if "observed_at" in stats[name]:
            assert stated(stats[name]["observed_at"], "timestamp") == extreme
    delete_files(lake, [file])


def test_nothing_is_made_where_there_is_no_row(lake: Lake) -> None:
    before = set(Path(lake.table(TABLE)).iterdir())
    assert write(lake) == []
    assert set(Path(lake.table(TABLE)).iterdir()) == before


def test_a_file_that_is_large_is_closed_and_the_next_begun(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 1_000)
    out = TableFiles(lake, TABLE)
    for number in range(40_001):
        out.add(row(log_offset=number))
    found = out.close()
    assert [file.rows for file in found] == [20_000, 20_000, 1]
    ranges = [json.loads(file.stats) for file in found]
    assert [(each["minValues"]["log_offset"], each["maxValues"]["log_offset"]) for each in ranges] == [
        (0, 19_999),
        (20_000, 39_999),
        (40_000, 40_000),
    ]
    delete_files(lake, found)


def test_a_row_without_what_must_be_there_is_no_file(lake: Lake) -> None:
    out = TableFiles(lake, TABLE)
    out.add(row(stream=None))
    with pytest.raises(pa.ArrowInvalid, match="non-nullable but contains nulls"):
        out.close()


def test_maps_and_bytes_are_read_back(lake: Lake) -> None:
    columns = TABLES["messages"].columns
    some: Mapping[str, object] = {
        "string": "a",
        "timestamp": 0,
        "int": 0,
        "bigint": 0,
        "binary": b"\xff\0",
        "map<string,string>": [("a", "b"), ("c", "d")],
    }
    out = TableFiles(lake, "messages")
    out.add(tuple(some[column.type] for column in columns))
    (file,) = out.close()
    DeltaRsCommits(lake).commit("messages", [file], WriteId("query", 0))
    (found,) = DeltaTable(lake.table("messages")).to_pyarrow_table().to_pylist()
    assert (found["tips"], found["data"]) == ([("a", "b"), ("c", "d")], b"\xff\0")


# ---------------------------------------------------------------- columns that another program has changed

TIP = ("n", "s", "t", "update", None, 1_700_000_000_000_000)


def rewritten_by_another(lake: Lake, change: Callable[[pa.Table], pa.Table]) -> None:
    """Another program writes the table `tips` anew, with other columns."""
    rows = pa.table(lake.open("tips").to_pyarrow_table())
    write_deltalake(lake.table("tips"), change(rows), mode="overwrite", schema_mode="overwrite")


def renamed(rows: pa.Table) -> pa.Table:
    return rows.rename_columns(["tip_cid" if name == "tip" else name for name in rows.column_names])


CHANGES: Mapping[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "renamed": (renamed, "the column tip is missing, and Kiln does not know the column tip_cid"),
    "dropped": (lambda rows: rows.drop_columns(["batch_cid"]), "the column batch_cid is missing"),
    "another type": (
        lambda rows: rows.set_column(rows.column_names.index("tip"), "tip", rows["tip"].cast(pa.binary())),
        'the column tip has the type "binary", not "string"',
    ),
    "added and required": (
        lambda rows: rows.append_column(pa.field("extra", pa.string(), False), pa.array(["x"] * len(rows))),
        "Kiln does not know the column extra, which does not allow null",
    ),
}


@pytest.mark.parametrize(("change", "fault"), CHANGES.values(), ids=CHANGES)
def test_nothing_is_written_to_a_table_whose_columns_another_program_has_changed(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], fault: str
) -> None:
    """Without the check, new rows would be null in the renamed column, and no error would show it."""
    lake = Lake(str(tmp_path))
    lake.create(("tips",))
    running = DeltaRsCommits(lake)
    running.commit("tips", [tip_file(lake)], WriteId("query", 0))
    rewritten_by_another(lake, change)
    for driver in (running, DeltaRsCommits(lake)):
        with pytest.raises(
            SchemaChangedError, match=re.escape(f"cannot write to table tips in {lake.path}: {fault}. ")
        ):
            driver.commit("tips", [tip_file(lake)], WriteId("query", 1))
    assert lake.open("tips").to_pyarrow_table().num_rows == 1
    assert find_column_fault("tips", lake.open("tips").schema().to_json()) == fault


def test_a_column_that_is_missing_beside_an_unknown_one_is_not_added(tmp_path: Path) -> None:
    """Such a column was renamed. Kiln adds a column of a newer version only if nothing else has changed."""
    lake = Lake(str(tmp_path))
    lake.create(("tips",))
    rewritten_by_another(lake, lambda rows: rows.drop_columns(["batch_cid"]))
    lake.create(("tips",))
    assert "batch_cid" in [field.name for field in lake.open("tips").schema().fields]
    rewritten_by_another(
        lake, lambda rows: rows.rename_columns(["cid" if name == "batch_cid" else name for name in rows.column_names])
    )
    with pytest.raises(
        SchemaChangedError, match="the column batch_cid is missing, and Kiln does not know the column cid"
    ):
        lake.create(("tips",))


def test_a_nullable_column_of_somebody_else_does_no_harm_and_no_rewrite_drops_it(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    lake.create(("tips",))
    for number in range(3):
        DeltaRsCommits(lake).commit("tips", [tip_file(lake)], WriteId("query", number))
    rewritten_by_another(lake, lambda rows: rows.append_column("note", pa.array(["mine"] * len(rows))))
    DeltaRsCommits(lake).commit("tips", [tip_file(lake)], WriteId("query", 3))
    with pytest.raises(SchemaChangedError, match="the column note, and would rewrite the rows without it"):
        lake.check_columns("tips", lake.open("tips").schema().to_json(), exact=True)


def test_a_renamed_column_of_a_table_with_column_mapping_is_seen() -> None:
    """The set of names is unchanged: `tip` was renamed, and another column took its name (Delta's Column Mapping)."""
    fields = [
        {
            "name": name,
            "type": kind,
            "nullable": True,
            "metadata": {"delta.columnMapping.physicalName": "col-1" if name == "tip" else name},
        }
        for name, kind in list_delta_fields(TABLES["tips"])
    ]
    schema = json.dumps({"type": "struct", "fields": fields})
    assert find_column_fault("tips", schema) == "the column tip was renamed"


def tip_file(lake: Lake) -> DataFile:
    out = TableFiles(lake, "tips")
    out.add(TIP)
    (file,) = out.close()
    return file


# ---------------------------------------------------------------- a table of such files


@given(st.lists(rows_of_table, min_size=1, max_size=3), st.data())
def test_readers_that_skip_files_find_every_row(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[tuple[object, ...]]], data: st.DataObject
) -> None:
    """deltalake skips by the statistics in the log; a filter finds the rows that it finds without a log."""
    lake = Lake(str(tmp_path_factory.mktemp("lake")))
    lake.create((TABLE,))
    DeltaRsCommits(lake).commit(TABLE, [file for part in parts for file in write(lake, *part)], WriteId("query", 0))
    everything = [each for part in parts for each in part]
    table = DeltaTable(lake.table(TABLE))
    found = table.to_pyarrow_table().cast(SCHEMA)
    assert sorted(found.to_pylist(), key=repr) == sorted(arrow(*everything).to_pylist(), key=repr)
    place = data.draw(st.sampled_from([place for place, column in enumerate(COLUMNS) if column.name in SKIPPED]))
    wanted = data.draw(st.sampled_from(everything))[place]
    matching = [each for each in everything if each[place] == wanted and wanted is not None]
    field = SCHEMA.field(place)
    value = pa.scalar(wanted, field.type)
    condition = pa.compute.field(field.name) == value
    assert table.to_pyarrow_dataset().to_table(filter=condition).num_rows == len(matching)


def test_a_filter_skips_the_files_that_cannot_have_the_row(lake: Lake) -> None:
    lake = Lake(f"{lake.path}/skipping")
    lake.create((TABLE,))
    files = [
        file for part in range(5) for file in write(lake, row(network=f"n{part}", observed_at=part * 1_000_000 + 7))
    ]
    DeltaRsCommits(lake).commit(TABLE, files, WriteId("query", 0))
    gone = Path(lake.table(TABLE)) / files[4].name
    gone.unlink()  # a reader that opened it would fail
    table = DeltaTable(lake.table(TABLE))
    second = pa.scalar(1_000_007, pa.timestamp("us", tz="UTC"))
    dataset = table.to_pyarrow_dataset()
    assert dataset.to_table(filter=pa.compute.field("observed_at") <= second).num_rows == 2
    assert dataset.to_table(filter=pa.compute.field("network") == "n2").num_rows == 1
    with pytest.raises(FileNotFoundError):
        dataset.to_table()


# ---------------------------------------------------------------- files anew, and files that nobody wants


def test_a_file_written_anew_has_the_rows_to_keep_and_statistics_of_its_own(lake: Lake) -> None:
    rows = (row(log_offset=number, separator_value="v" if number % 2 else None) for number in range(50_000))
    (file,) = write(lake, *rows)
    assert json.loads(file.stats)["nullCount"]["separator_value"] == 25_000  # of several batches of rows
    (anew,) = rewrite_file(lake, file, lambda table: pa.compute.greater_equal(table["log_offset"], 100))
    folder = Path(lake.table(TABLE))
    assert not (folder / file.name).exists()
    assert pq.read_table(folder / anew.name)["log_offset"].to_pylist() == list(range(100, 50_000))
    stats = json.loads(anew.stats)
    assert (anew.rows, stats["numRecords"]) == (49_900, 49_900)
    assert (stats["minValues"]["log_offset"], stats["maxValues"]["log_offset"]) == (100, 49_999)
    assert stats["nullCount"]["separator_value"] == 24_950
    assert rewrite_file(lake, anew, lambda table: pa.compute.less(table["log_offset"], 0)) == []
    assert not (folder / anew.name).exists()


def test_what_is_thrown_away_is_gone_and_may_be_gone_before(lake: Lake) -> None:
    (file,) = write(lake, row())
    for _ in range(2):
        delete_files(lake, [file])
        assert not (Path(lake.table(TABLE)) / file.name).exists()
