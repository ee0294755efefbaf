"""The lake as delta-rs sees it: which tables there are, and one of them opened. No Java, no Spark."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import deltalake
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from conf.errors import KilnError
from pipelines.lake.append import _skipped_by
from schemas.tables import TABLES, Column


class LakeError(KilnError):
    """A table of the lake cannot be read; the message names it."""


def tables_in(lake: Path) -> tuple[str, ...]:
    """Names of the Delta tables in a lake folder, sorted; none when the folder does not exist."""
    if not lake.is_dir():
        return ()
    return tuple(sorted(path.parent.name for path in lake.glob("*/_delta_log")))


def open_table(lake: Path, name: str) -> DeltaTable:
    """A table of the lake. LakeError: it cannot be read."""
    try:
        return DeltaTable(str(lake / name))
    except (DeltaError, OSError) as error:
        raise LakeError(f"table {name} in {lake} cannot be read: {error}") from error


# Names of Spark DDL types in the Delta protocol (PROTOCOL.md, Schema Serialization Format), where they differ.
_DELTA_TYPES: dict[str, str | dict[str, object]] = {
    "int": "integer",
    "bigint": "long",
    "map<string,string>": {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True},
    "array<string>": {"type": "array", "elementType": "string", "containsNull": True},
}


@dataclass(frozen=True)
class Lake:
    """The folder of the Delta tables, one folder a table; any path Spark can write. `options`: delta-rs's for it."""

    path: str
    options: Mapping[str, str] = field(default_factory=dict)

    def table(self, name: str) -> str:
        return f"{self.path}/{name}"


def create_tables(lake: Lake, names: Iterable[str]) -> None:
    """Makes the tables that are not there yet, with their columns' comments.

    By delta-rs and not by Spark, which takes a second a table: reader and writer protocol are the base ones either way.
    """
    for name in names:
        table = TABLES[name]
        fields = [_field(column) for column in table.columns]
        deltalake.DeltaTable.create(
            lake.table(name),
            deltalake.Schema.from_json(json.dumps({"type": "struct", "fields": fields})),
            mode="ignore",
            name=name,
            description=table.comment,
            configuration={
                "delta.checkpointInterval": "50",
                "delta.dataSkippingStatsColumns": ",".join(_skipped_by(table)),
            },
            storage_options=dict(lake.options) or None,
        )


def _field(column: Column) -> dict[str, object]:
    return {
        "name": column.name,
        "type": _DELTA_TYPES.get(column.type, column.type),
        "nullable": column.nullable,
        "metadata": {"comment": column.comment},
    }


def has_rows(lake: Lake, table: str) -> bool:
    """Whether a table is there and holds anything."""
    path, options = lake.table(table), dict(lake.options) or None
    if not deltalake.DeltaTable.is_deltatable(path, options):
        return False
    return bool(deltalake.DeltaTable(path, storage_options=options).file_uris())
