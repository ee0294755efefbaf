"""The lake's tables as DuckDB reads them: each Delta table is a view over the Parquet files of one version.

delta-rs says which files those are, and DuckDB reads the files itself. The other way, a dataset of pyarrow, costs more
than a second of imports, and 1.5 ms for each file. That way is left for the tables that need it: tables with partition
columns, with columns of types beyond `duckdb_type`, or with features of Delta beyond reader version 1. Kiln writes no
such table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import duckdb
from deltalake import DeltaTable

from kiln.conf.process.location import Location
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.schemas.delta.tables import TABLES

if TYPE_CHECKING:
    from pyarrow.fs import SubTreeFileSystem

# Delta's names of types (PROTOCOL.md, Primitive Types) in DuckDB
_TYPES: Final = {
    "string": "VARCHAR",
    "long": "BIGINT",
    "integer": "INTEGER",
    "short": "SMALLINT",
    "byte": "TINYINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "boolean": "BOOLEAN",
    "binary": "BLOB",
    "date": "DATE",
    "timestamp": "TIMESTAMPTZ",
}
# names of Spark's DDL types in DuckDB, where they differ
_DDL_TYPES: Final = {
    "string": "VARCHAR",
    "binary": "BLOB",
    "timestamp": "TIMESTAMPTZ",
    "map<string,string>": "MAP(VARCHAR, VARCHAR)",
    "array<string>": "VARCHAR[]",
}
_DECIMAL: Final = re.compile(r"decimal\((\d+), *(\d+)\)")
_GLOB: Final = re.compile(r"[*?\[]")


def register_store(connection: duckdb.DuckDBPyConnection, lake: Lake) -> None:
    """From now on the connection can read the files of a lake in an object store."""
    root = lake.root
    if root.folder is None:
        from kiln.pipelines.delta.duckdb_files import (
            StoreFiles,  # not at the top: its imports would slow questions to a lake on a disk
        )

        connection.register_filesystem(StoreFiles(root))


def open_tables(connection: duckdb.DuckDBPyConnection, lake: Lake, names: Iterable[str]) -> None:
    """Make a view of each named table, at its newest version."""
    show_tables(connection, lake, {name: lake.open(name) for name in names})


def show_tables(
    connection: duckdb.DuckDBPyConnection, lake: Lake, tables: Mapping[str, DeltaTable], *, reads_rows: bool = True
) -> list[str]:
    """Make a view of each table, at the version that is open, and return the files that the views read.

    `reads_rows` False: the views are for listings of tables and columns. DuckDB then looks into one file of each table.
    A query that does read rows from a table with files of several schemas fails. LakeError.
    """
    register_store(connection, lake)
    files: list[str] = []
    for name, table in tables.items():
        columns = read_columns(table)
        paths = None if columns is None else _list_files(lake.table(name), table)
        if columns is None or paths is None:
            connection.register(name, table.to_pyarrow_dataset(filesystem=_arrows_own(lake.folder(name))))
            continue
        connection.execute(
            f"CREATE TEMP VIEW {quote_name(name)} AS {build_columns_query(columns, paths, union_by_name=reads_rows)}"
        )
        files += paths
    return files


def _arrows_own(place: Location) -> SubTreeFileSystem | None:
    """With it, Arrow reads a folder without Python (`kiln.pipelines.delta.rows` says why). None: the place is in a
    store."""
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

    return None if place.folder is None else SubTreeFileSystem(str(place.folder), LocalFileSystem())


def build_files_query(table: DeltaTable, paths: Sequence[str]) -> str:
    """A SELECT of a table's columns over these of its files. LakeError: the table takes more than reading its files."""
    columns = read_columns(table)
    if columns is None:
        raise LakeError(f"the table at {table.table_uri} was not made by Kiln: its files do not say all of its rows")
    return build_columns_query(columns, paths)


def add_empty_tables(select: str, tables: Iterable[str], there: Collection[str]) -> str:
    """The SELECT over `tables` (kiln.schemas.delta.tables), those that are not `there` being empty."""
    empty = [f"{name} AS ({_build_empty_query(name)})" for name in tables if name not in there]
    return f"WITH {', '.join(empty)} SELECT * FROM ({select})" if empty else select


def _build_empty_query(name: str) -> str:
    columns = (f"NULL::{_DDL_TYPES.get(column.type, column.type)} AS {column.name}" for column in TABLES[name].columns)
    return f"SELECT {', '.join(columns)} WHERE false"


def allow_only(connection: duckdb.DuckDBPyConnection, files: Sequence[str]) -> None:
    """From now on the connection reads these files and no other, and no variable of this program. Nothing undoes it."""
    connection.execute("SET python_enable_replacements = false")
    connection.execute(f"SET allowed_paths = {_format_list(files)}")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def duckdb_type(told: object) -> str | None:
    """A type of a Delta schema (PROTOCOL.md, Schema Serialization Format) in DuckDB; None: there is none here."""
    match told:
        case str():
            decimal = _DECIMAL.fullmatch(told)
            return f"DECIMAL({decimal[1]}, {decimal[2]})" if decimal else _TYPES.get(told)
        case {"type": "array", "elementType": element}:
            of = duckdb_type(element)
            return of and f"{of}[]"
        case {"type": "map", "keyType": key, "valueType": value}:
            parts = duckdb_type(key), duckdb_type(value)
            return f"MAP({parts[0]}, {parts[1]})" if all(parts) else None
    return None


def quote_name(name: str) -> str:
    """A name of a table or column in SQL."""
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def read_columns(table: DeltaTable) -> dict[str, str] | None:
    """Columns and their types; None: the table takes more than reading its files."""
    if table.protocol().min_reader_version > 1 or table.metadata().partition_columns:
        return None
    columns: dict[str, str] = {}
    for field in json.loads(table.schema().to_json())["fields"]:
        kind = duckdb_type(field["type"])
        if kind is None:
            return None
        columns[field["name"]] = kind
    return columns


def _list_files(folder: str, table: DeltaTable) -> list[str] | None:
    """The files of the newest version, as paths; None: they are not all in the folder, or DuckDB would take one for a
    pattern. Delta's log has them as URIs, relative to the folder (PROTOCOL.md, Add File)."""
    relative = [unquote(str(path)) for path in table.get_add_actions(flatten=False)["path"].to_pylist()]
    paths = [f"{folder}/{path}" for path in relative]
    elsewhere = any("://" in path or PurePosixPath(path).is_absolute() for path in relative)
    return None if elsewhere or any(map(_GLOB.search, paths)) else paths


ROW_POSITION: Final[Mapping[str, str]] = {"filename": "VARCHAR", "file_row_number": "BIGINT"}
"""Where a row is, as DuckDB names it, in `select_columns(…, places=True)`."""


def build_columns_query(
    columns: Mapping[str, str], files: Sequence[str], *, union_by_name: bool = True, places: bool = False
) -> str:
    """The columns of the table, whichever of them a file has: a file that is older than a column has none of it.

    `places`: with the columns of ROW_PLACE.
    """
    columns = {**columns, **ROW_POSITION} if places else columns
    nothing = f"SELECT {', '.join(f'NULL::{kind} AS {quote_name(name)}' for name, kind in columns.items())} WHERE false"
    if not files:
        return nothing
    options = "".join(f", {name} = true" for name in ROW_POSITION) if places else ""
    scan = (
        f"SELECT * FROM read_parquet({_format_list(files)}, union_by_name = {str(union_by_name).lower()}, "
        f"hive_partitioning = false{options})"
    )
    wanted = ", ".join(f"{quote_name(name)}::{kind} AS {quote_name(name)}" for name, kind in columns.items())
    return f"SELECT {wanted} FROM ({nothing} UNION ALL BY NAME {scan})"


def _format_list(texts: Iterable[str]) -> str:
    return "[" + ", ".join("'" + text.replace("'", "''") + "'" for text in texts) + "]"
