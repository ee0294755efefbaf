"""Tables of the lake in DuckDB: each Delta table is a view over the Parquet files of one version.

delta-rs lists the files, and DuckDB reads them. Only some tables are read with a pyarrow dataset, which costs more than
a second of imports, and 1.5 ms per file. These are tables with partition columns, with types that `to_duckdb_type` does
not convert, with Delta features beyond reader version 1, or with paths that DuckDB would read as patterns. A table that
Kiln wrote is among them only if DuckDB would read its path as a pattern.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import duckdb

from kiln.conf.process.errors import KilnError
from kiln.conf.process.extras import require_extras
from kiln.conf.process.location import Location
from kiln.pipelines.delta.lake import (
    Lake,
    LakeError,
    build_features_error,
    build_missing_files_error,
    list_reader_features,
)
from kiln.schemas.delta.tables import TABLES

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyarrow.dataset import Dataset
    from pyarrow.fs import SubTreeFileSystem

# DuckDB types by Delta type (PROTOCOL.md, Primitive Types)
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
# DuckDB types by Spark DDL type, where they differ
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
    """Let a connection read the files of a lake in an object store."""
    root = lake.root
    if root.folder is None:
        require_extras("lake")
        from kiln.pipelines.delta.duckdb_files import StoreFiles  # needs fsspec, which a lake on a disk does not

        connection.register_filesystem(StoreFiles(root))


def create_newest_views(connection: duckdb.DuckDBPyConnection, lake: Lake, names: Iterable[str]) -> None:
    """Create a view of each named table, at its newest version."""
    create_views(connection, lake, {name: lake.open(name) for name in names})


def create_views(
    connection: duckdb.DuckDBPyConnection, lake: Lake, tables: Mapping[str, DeltaTable], *, reads_rows: bool = True
) -> list[str]:
    """Create a view of each open table, and return the files that the views read.

    Args:
        tables: Open tables by name.
        reads_rows: If false, the views are only for listing tables and columns. DuckDB then opens one file of each
            table. A query of rows then fails if the files of a table have different schemas.

    Raises:
        LakeError: A table cannot be read.
        MissingFilesError: A file of a table is missing.
    """
    register_store(connection, lake)
    files: list[str] = []
    for name, table in tables.items():
        columns = read_columns(table)
        paths = None if columns is None else _list_files(lake.table(name), table)
        if columns is None or paths is None:
            connection.register(name, _build_dataset(lake, name, table))
            continue
        rows = build_columns_query(columns, paths, union_by_name=reads_rows)
        try:
            connection.execute(f"CREATE TEMP VIEW {quote_name(name)} AS {rows}")
        except (duckdb.Error, OSError) as error:
            if missing := build_missing_files_error(lake, name, table):
                raise missing from error
            reason = str(error).split("\n")[0]
            raise LakeError(f"cannot read table {name} in {lake.path}: {reason}") from error
        files += paths
    return files


def find_reading_faults(lake: Lake) -> list[str]:
    """Return an error message for each table that can be opened but not read."""
    faults: list[str] = []
    with duckdb.connect() as connection:
        for name in lake.tables():
            with suppress(LakeError):  # a table that cannot be opened
                table = lake.open(name)
                try:
                    if missing := build_missing_files_error(lake, name, table):
                        raise missing
                    create_views(connection, lake, {name: table}, reads_rows=False)
                except KilnError as error:
                    faults.append(str(error))
    return faults


def _build_dataset(lake: Lake, name: str, table: DeltaTable) -> Dataset:
    require_extras("lake")
    from deltalake.exceptions import DeltaProtocolError

    features = list_reader_features(table)
    if table.protocol().reader_features is None and features:  # delta-rs checks only named features
        raise build_features_error(lake, name, features)
    try:
        return table.to_pyarrow_dataset(filesystem=_build_local_file_system(lake.folder(name)))
    except DeltaProtocolError as error:
        raise build_features_error(lake, name, features) from error


def _build_local_file_system(location: Location) -> SubTreeFileSystem | None:
    """Build a file system by which Arrow reads a folder without Python (reason: `kiln.pipelines.delta.lake.read_rows`).

    Returns:
        None for an object store.
    """
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

    return None if location.folder is None else SubTreeFileSystem(str(location.folder), LocalFileSystem())


def build_files_query(table: DeltaTable, paths: Sequence[str]) -> str:
    """Build a SELECT of a table's columns over some of its files.

    Raises:
        LakeError: The table has partition columns, or Delta features that DuckDB cannot read.
    """
    columns = read_columns(table)
    if columns is None:
        raise LakeError(
            f"cannot read table {table.table_uri}: it has partition columns, column types or Delta features that Kiln "
            "does not write. Another program has changed it. Restore a version from before the change"
        )
    return build_columns_query(columns, paths)


def require_columns(lake: Lake, name: str, table: DeltaTable) -> dict[str, str]:
    """Read the names and the DuckDB types of a table's columns.

    Raises:
        LakeError: DuckDB cannot read the table from its files alone, or a file is missing.
    """
    columns = read_columns(table)
    if columns is None:
        if features := list_reader_features(table):
            raise build_features_error(lake, name, features)
        raise LakeError(
            f"cannot read table {name} in {lake.path}: it has partition columns, or columns of types that Kiln does "
            "not write. Another program has changed it. Restore a version from before the change, or query it with "
            "kiln sql --spark"
        )
    if missing := build_missing_files_error(lake, name, table):
        raise missing
    return columns


def add_empty_tables(select: str, tables: Iterable[str], existing: Collection[str]) -> str:
    """Extend a SELECT over tables of Kiln: a table that does not exist is read as an empty one."""
    empty = [f"{name} AS ({_build_empty_query(name)})" for name in tables if name not in existing]
    return f"WITH {', '.join(empty)} SELECT * FROM ({select})" if empty else select


def _build_empty_query(name: str) -> str:
    columns = (f"NULL::{_DDL_TYPES.get(column.type, column.type)} AS {column.name}" for column in TABLES[name].columns)
    return f"SELECT {', '.join(columns)} WHERE false"


def allow_only(connection: duckdb.DuckDBPyConnection, files: Sequence[str]) -> None:
    """Restrict a connection to these files. Its queries can then read no other file and no Python variable. The
    restriction cannot be lifted."""
    connection.execute("SET python_enable_replacements = false")
    connection.execute(f"SET allowed_paths = {_format_list(files)}")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def to_duckdb_type(delta_type: object) -> str | None:
    """Convert a type in a Delta schema (PROTOCOL.md, Schema Serialization Format) to a DuckDB type.

    Returns:
        None if the type is not supported.
    """
    match delta_type:
        case str():
            decimal = _DECIMAL.fullmatch(delta_type)
            return f"DECIMAL({decimal[1]}, {decimal[2]})" if decimal else _TYPES.get(delta_type)
        case {"type": "array", "elementType": element}:
            element_type = to_duckdb_type(element)
            return element_type and f"{element_type}[]"
        case {"type": "map", "keyType": key, "valueType": value}:
            key_type, value_type = to_duckdb_type(key), to_duckdb_type(value)
            return f"MAP({key_type}, {value_type})" if key_type and value_type else None
    return None


def quote_name(name: str) -> str:
    """Quote a name of a table or column for SQL."""
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def quote_text(text: str) -> str:
    """Quote a text for SQL."""
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


def read_columns(table: DeltaTable) -> dict[str, str] | None:
    """Read the names and the DuckDB types of a table's columns.

    Returns:
        None if the files alone do not give the table's rows: it has partition columns, newer Delta features, or types
        that are not supported.
    """
    if table.protocol().min_reader_version > 1 or table.metadata().partition_columns:
        return None
    columns: dict[str, str] = {}
    for field in json.loads(table.schema().to_json())["fields"]:
        column_type = to_duckdb_type(field["type"])
        if column_type is None:
            return None
        columns[field["name"]] = column_type
    return columns


def _list_files(folder: str, table: DeltaTable) -> list[str] | None:
    """List the paths of a table's files. The log has them as URIs relative to `folder` (PROTOCOL.md, Add File).

    Returns:
        None if a file is outside the folder, or if DuckDB would read its path as a pattern.
    """
    relative = [unquote(str(path)) for path in table.get_add_actions(flatten=False)["path"].to_pylist()]
    paths = [f"{folder}/{path}" for path in relative]
    elsewhere = any("://" in path or PurePosixPath(path).is_absolute() for path in relative)
    return None if elsewhere or any(map(_GLOB.search, paths)) else paths


_ROW_POSITION: Final[Mapping[str, str]] = {"filename": "VARCHAR", "file_row_number": "BIGINT"}
"""Columns that DuckDB adds for the position of a row: its file, and its number in the file"""


def build_columns_query(
    columns: Mapping[str, str], files: Sequence[str], *, union_by_name: bool = True, with_positions: bool = False
) -> str:
    """Build a SELECT of columns over files. Where a file lacks a column, the column is null.

    Args:
        columns: DuckDB types by name.
        union_by_name: True if the schemas of the files may differ.
        with_positions: True to add DuckDB's columns `filename` and `file_row_number`.
    """
    columns = {**columns, **_ROW_POSITION} if with_positions else columns
    quoted = {quote_name(name): column_type for name, column_type in columns.items()}
    nulls = ", ".join(f"NULL::{column_type} AS {name}" for name, column_type in quoted.items())
    empty = f"SELECT {nulls} WHERE false"
    if not files:
        return empty
    options = "".join(f", {name} = true" for name in _ROW_POSITION) if with_positions else ""
    scan = (
        f"SELECT * FROM read_parquet({_format_list(files)}, union_by_name = {str(union_by_name).lower()}, "
        f"hive_partitioning = false{options})"
    )
    casts = ", ".join(f"{name}::{column_type} AS {name}" for name, column_type in quoted.items())
    return f"SELECT {casts} FROM ({empty} UNION ALL BY NAME {scan})"


def _format_list(texts: Iterable[str]) -> str:
    return "[" + ", ".join(map(quote_text, texts)) + "]"
