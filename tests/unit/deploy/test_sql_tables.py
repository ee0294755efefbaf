"""kiln.pipelines.delta.duckdb_tables: a Delta table read by DuckDB has the rows, columns and types that delta-rs says
it has."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.fs import DeltaStorageHandler
from deltalake.schema import PrimitiveType

from kiln.conf.settings.addresses import check_path
from kiln.deploy.ops.status import read_lake_status
from kiln.deploy.query.ask import SqlError, query_lake
from kiln.pipelines.delta.duckdb_tables import to_duckdb_type
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.schemas.delta.tables import TABLES

AT = datetime(2025, 3, 1, 12, 0, 0, 250, tzinfo=UTC)
ALL_TYPES = pa.table(
    {
        "string": ["a", None],
        "long": pa.array([2**40, None], pa.int64()),
        "integer": pa.array([-1, None], pa.int32()),
        "short": pa.array([-1, None], pa.int16()),
        "byte": pa.array([-1, None], pa.int8()),
        "float": pa.array([0.5, None], pa.float32()),
        "double": [0.1, None],
        "boolean": [True, None],
        "binary": [b"\x00\xff", None],
        "date": [date(2025, 3, 1), None],
        "timestamp": pa.array([AT, None], pa.timestamp("us", tz="UTC")),
        "decimal": pa.array([Decimal("12.34"), None], pa.decimal128(10, 2)),
        "list": pa.array([["x", None], None], pa.list_(pa.string())),
        "map": pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.string())),
    }
)


def rows(folder: Path, sql: str) -> list[dict[str, object]]:
    answer = query_lake(Lake(str(folder)), sql)
    return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows()]


def by_parquet(folder: Path, sql: str = "SELECT * FROM t") -> bool:
    """Whether DuckDB reads the files itself."""
    return "READ_PARQUET" in str(rows(folder, f"EXPLAIN {sql}")).upper().replace(" ", "_")


def test_values_and_types_are_those_of_the_table(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "t"), ALL_TYPES)
    found = rows(tmp_path, "SELECT * FROM t ORDER BY string NULLS LAST")
    assert found == ALL_TYPES.to_pylist(maps_as_pydicts="lossy")
    assert list(found[0]) == ALL_TYPES.column_names
    types = {row["column_name"]: row["column_type"] for row in rows(tmp_path, "DESCRIBE t")}
    assert (types["timestamp"], types["decimal"], types["map"]) == (
        "TIMESTAMP WITH TIME ZONE",
        "DECIMAL(10,2)",
        "MAP(VARCHAR, VARCHAR)",
    )
    assert by_parquet(tmp_path)


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_every_table_of_kiln_is_read_by_duckdb_itself(table: object, tmp_path: Path) -> None:
    name = next(each.name for each in TABLES.values() if each is table)
    Lake(str(tmp_path)).create((name,))
    columns = [column.name for column in TABLES[name].columns]
    assert [row["column_name"] for row in rows(tmp_path, f"DESCRIBE {name}")] == columns
    for field in DeltaTable(str(tmp_path / name)).schema().fields:
        assert to_duckdb_type(json.loads(field.type.to_json())) is not None


def test_files_older_than_a_column_have_nulls_in_it(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "t"), pa.table({"a": [1, 2]}))
    write_deltalake(str(tmp_path / "t"), pa.table({"a": [3], "b": ["new"]}), mode="append", schema_mode="merge")
    assert rows(tmp_path, "SELECT * FROM t ORDER BY a") == [
        {"a": 1, "b": None},
        {"a": 2, "b": None},
        {"a": 3, "b": "new"},
    ]
    assert by_parquet(tmp_path)


def test_a_column_that_no_file_has_is_null(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "t"), pa.table({"a": [1]}))
    table = DeltaTable(str(tmp_path / "t"))
    table.alter.add_columns([Field("late", PrimitiveType("string"))])
    assert rows(tmp_path, "SELECT * FROM t") == [{"a": 1, "late": None}]
    assert {row["column_name"] for row in rows(tmp_path, "SELECT column_name FROM duckdb_columns()")} >= {"a", "late"}


def test_rows_that_were_deleted_or_written_anew_are_gone(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "t"), pa.table({"a": [1, 2, 3]}))
    DeltaTable(str(tmp_path / "t")).delete("a > 1")
    assert rows(tmp_path, "SELECT * FROM t") == [{"a": 1}]
    DeltaTable(str(tmp_path / "t")).delete()
    assert rows(tmp_path, "SELECT * FROM t") == []
    write_deltalake(str(tmp_path / "t"), pa.table({"b": ["x"]}), mode="overwrite", schema_mode="overwrite")
    assert rows(tmp_path, "SELECT * FROM t") == [{"b": "x"}]


def test_a_table_with_partition_columns_has_them(tmp_path: Path) -> None:
    table = pa.table({"v": [1, 2], "k": ["a b", "ü/é%"]})
    write_deltalake(str(tmp_path / "t"), table, partition_by=["k"])
    assert rows(tmp_path, "SELECT v, k FROM t ORDER BY v") == table.to_pylist()


def test_arrows_threads_read_such_a_table_without_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a thread that reads through Python may abort the process at its end")

    monkeypatch.setattr(DeltaStorageHandler, "from_table", opened)
    write_deltalake(str(tmp_path / "t"), pa.table({"v": [1, 2], "k": ["a", "b"]}), partition_by=["k"])
    assert rows(tmp_path, "SELECT sum(v) AS v FROM t") == [{"v": 3}]


def test_a_table_of_other_types_is_read_all_the_same(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "t"), pa.table({"s": [{"x": 1}]}))
    assert rows(tmp_path, "SELECT * FROM t") == [{"s": {"x": 1}}]


@pytest.mark.parametrize("feature", ["columnMapping", "deletionVectors", "fromTheFuture"])
def test_a_table_with_features_that_nothing_here_reads_is_refused_in_a_sentence(feature: str, tmp_path: Path) -> None:
    """Neither a query nor the status ends in a trace."""
    write_deltalake(str(tmp_path / "t"), pa.table({"a": [1]}))
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": [feature], "writerFeatures": [feature]}
    commit = tmp_path / "t" / "_delta_log" / f"{1:020}.json"
    commit.write_text(json.dumps({"protocol": protocol}) + "\n", encoding="utf-8")
    with pytest.raises(LakeError, match=rf"cannot read table t in {tmp_path}: .*{feature}"):
        rows(tmp_path, "SELECT * FROM t")
    (status,) = read_lake_status(Lake(str(tmp_path)))
    assert status.rows == (None if feature == "deletionVectors" else 1) or feature in status.problem


@pytest.mark.parametrize(
    "name", ["plain", "neu é, with spaces", "it's", 'q"uote', "a%b#c:d;e&f=g+h@i~j$k`l<m>n!o(p)q%"]
)
def test_the_state_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    """Every name that the settings accept works (tests/unit/conf/test_settings_locations.py)."""
    folder = tmp_path / name
    for number in range(2):
        write_deltalake(str(folder / "t"), pa.table({"a": [number]}), mode="append")
    table = DeltaTable(str(folder / "t"))
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert rows(folder, "SELECT * FROM t ORDER BY a") == [{"a": 0}, {"a": 1}]
    check_path(str(folder))


def test_a_name_with_the_marks_of_a_pattern_names_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a*b"
    write_deltalake(str(folder / "t"), pa.table({"a": [1]}))
    assert rows(folder, "SELECT * FROM t") == [{"a": 1}]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('{outside}')",
        "SELECT * FROM '{outside}'",
        "SELECT * FROM read_parquet('{lake}/t/*.parquet')",
        "SELECT * FROM glob('{lake}/*')",
        "SELECT * FROM read_text('{lake}/t/_delta_log/00000000000000000000.json')",
        "SELECT * FROM read_text('{file}/../../../outside')",
        "SELECT count(*) FROM t, read_text('{outside}')",
    ],
)
def test_a_query_reaches_the_files_of_the_lake_alone(sql: str, tmp_path: Path) -> None:
    outside, lake = tmp_path / "outside", tmp_path / "lake"
    outside.write_text("secret", encoding="utf-8")
    write_deltalake(str(lake / "t"), pa.table({"a": [1]}))
    (file,) = (lake / "t").glob("*.parquet")
    with pytest.raises(SqlError, match=r"disabled|there is no table"):
        list(query_lake(Lake(str(lake)), sql.format(outside=outside, lake=lake, file=file)).rows())


def test_an_interval_beyond_what_python_knows_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(SqlError):
        rows(tmp_path, "SELECT INTERVAL '100000000 years' AS d")


def test_times_beyond_what_python_knows_are_text(tmp_path: Path) -> None:
    assert rows(tmp_path, "SELECT TIMESTAMPTZ '15000-01-01 00:00:00' AS t") == [{"t": "15000-01-01 00:00:00+00"}]


def test_a_query_that_names_no_table_opens_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake, opened, plain_open = Lake(str(tmp_path)), [""], Lake.open
    lake.create(("tips", "batches"))

    def record_open(self: Lake, name: str, version: int | None = None) -> DeltaTable:
        opened.append(name)
        return plain_open(self, name, version)

    monkeypatch.setattr(Lake, "open", record_open)
    assert list(query_lake(lake, "SELECT 1").rows()) == [(1,)]
    assert opened == [""]
    for query in (
        "SHOW TABLES",
        "SELECT table_name FROM information_schema.tables",
        "SELECT view_name FROM duckdb_views()",
    ):
        opened.clear()
        assert {("batches",), ("tips",)} <= set(query_lake(lake, query).rows())
        assert sorted(opened) == ["batches", "tips"]
