"""Delta tables as other engines write them. The log entries are written here as JSON, without those engines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kiln.pipelines.delta.lake import Lake, locate_commit

DELETION_VECTOR: Final = {
    "storageType": "i",
    "pathOrInlineDv": "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L",
    "sizeInBytes": 40,
    "cardinality": 6,
}
"""An inline deletion vector of six rows (PROTOCOL.md, Deletion Vectors)."""

FEATURES: Final = ("columnMapping", "deletionVectors", "typeWidening", "v2Checkpoint")
"""Features that another engine may give to a table, and that DuckDB's read of the files would ignore."""


def add_feature(lake: Lake, name: str, feature: str, *, version: int = 3) -> None:
    """Commit a protocol that requires a table feature, and a metadata or data change that uses the feature.

    Args:
        version: Reader version: 3, which names the feature, or 2, which implies column mapping.
    """
    table = lake.open(name)
    commit = locate_commit(lake.folder(name), table.version() + 1)
    named = {"readerFeatures": [feature], "writerFeatures": [feature]} if version == 3 else {}
    protocol = {"minReaderVersion": version, "minWriterVersion": 7 if version == 3 else 5, **named}
    metadata = _read_metadata(lake, name)
    if feature == "columnMapping":
        _map_columns(metadata)
    actions: list[Mapping[str, object]] = [{"protocol": protocol}, {"metaData": metadata}]
    if feature == "deletionVectors":
        for add in _read_actions(lake, name, "add"):
            actions += [
                {"remove": {"path": add["path"], "dataChange": True, "deletionTimestamp": 1}},
                {"add": {**add, "deletionVector": DELETION_VECTOR}},
            ]
    Path(commit.uri).write_text("".join(f"{json.dumps(action)}\n" for action in actions))


def rename_column(lake: Lake, name: str, column: str, renamed: str) -> None:
    """Rename a column of a table with column mapping. The data files keep the old name."""
    metadata = _read_metadata(lake, name)
    schema = json.loads(str(metadata["schemaString"]))
    for field in schema["fields"]:
        if field["name"] == column:
            field["name"] = renamed
    metadata["schemaString"] = json.dumps(schema)
    commit = locate_commit(lake.folder(name), lake.open(name).version() + 1)
    Path(commit.uri).write_text(json.dumps({"metaData": metadata}) + "\n")


def _map_columns(metadata: dict[str, object]) -> None:
    schema = json.loads(str(metadata["schemaString"]))
    for number, field in enumerate(schema["fields"], 1):
        field["metadata"] |= {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
    configuration = metadata["configuration"]
    assert isinstance(configuration, dict)
    mapping = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": str(len(schema["fields"]))}
    metadata |= {"schemaString": json.dumps(schema), "configuration": {**configuration, **mapping}}


def _read_metadata(lake: Lake, name: str) -> dict[str, object]:
    return _read_actions(lake, name, "metaData")[-1]


def _read_actions(lake: Lake, name: str, kind: str) -> Sequence[dict[str, object]]:
    lines = [
        json.loads(line)
        for version in range(lake.open(name).version() + 1)
        for line in Path(locate_commit(lake.folder(name), version).uri).read_text().splitlines()
    ]
    return [line[kind] for line in lines if kind in line]


def list_data_files(lake: Lake, name: str) -> list[Path]:
    """List the Parquet files in the folder of a table."""
    return sorted(path for path in Path(lake.table(name)).glob("*.parquet"))
