"""Reasons why the rows of a table cannot be read: Delta features that a read of its files would ignore, and files that
do not exist."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from kiln.pipelines.delta.lake import Lake, LakeError

if TYPE_CHECKING:
    from deltalake import DeltaTable

_COLUMN_MAPPING: Final = "columnMapping"
_MODE: Final = "delta.columnMapping.mode"


class MissingFilesError(LakeError):
    """Another program has removed data files of a table."""


def list_reader_features(table: DeltaTable) -> list[str]:
    """List the Delta features that a reader of a table needs.

    Reader version 3 names them. Version 2 implies column mapping, if the table uses it (PROTOCOL.md, Table Features).
    """
    protocol = table.protocol()
    if protocol.reader_features is not None:
        return sorted(protocol.reader_features)
    mode = table.metadata().configuration.get(_MODE, "none")
    return [_COLUMN_MAPPING] if protocol.min_reader_version > 1 and mode != "none" else []


def build_features_error(lake: Lake, name: str, features: list[str]) -> LakeError:
    """Build the error for a table with features that DuckDB cannot read."""
    return LakeError(
        f"cannot read table {name} in {lake.path}: it needs the Delta features {', '.join(features)}. Use a reader "
        "that has them, such as kiln sql --spark"
    )


def find_missing_files(lake: Lake, name: str, table: DeltaTable) -> list[str]:
    """List the files of an open table that do not exist, relative to its folder. Files elsewhere are not checked."""
    folder = lake.folder(name)
    listed = {file.name for file in folder.files()}
    paths = [unquote(str(path)) for path in table.get_add_actions(flatten=False)["path"].to_pylist()]
    inside = [path for path in paths if "://" not in path and not PurePosixPath(path).is_absolute()]
    return [path for path in inside if path not in listed and not (folder / path).exists()]


def build_missing_files_error(lake: Lake, name: str, table: DeltaTable) -> MissingFilesError | None:
    """Build the error for the files that an open table lacks, or return `None` if it lacks none."""
    missing = find_missing_files(lake, name, table)
    if not missing:
        return None
    others = f" and {len(missing) - 1:,} more files are" if len(missing) > 1 else " is"
    newest = lake.open(name).version()
    what = f"cannot read table {name} in {lake.path}: {missing[0]}{others} missing"
    if table.version() < newest:
        return MissingFilesError(
            f"{what} from version {table.version()}. Table maintenance removes files that only old versions have. Read "
            f"a later version, up to {newest}"
        )
    return MissingFilesError(
        f"{what}. Another program has removed what Kiln had committed. Restore {lake.table(name)} from a backup; the "
        "runbook has what to do without one (A table cannot be read)"
    )
