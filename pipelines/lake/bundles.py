"""The table `bundles`: topic bundles once known stay known, though they leave the settings (docs/DESIGN.md, Contracts).

By delta-rs alone, so that it needs no Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from pipelines.spark.rows import arrow_schema, columns_of
from schemas.tables import TABLES
from schemas.topic_table import Bundles

BUNDLES = columns_of(TABLES["bundles"])


def read_bundles(path: str, options: Mapping[str, str] | None = None) -> Bundles:
    """Those in the table at a path, the longest known first; none where there is no table.

    BundleError: its rows contradict each other.
    """
    if not DeltaTable.is_deltatable(path, dict(options or {}) or None):
        return Bundles()
    table = DeltaTable(path, storage_options=dict(options or {}) or None).to_pyarrow_table(
        columns=["hash", "name", "topics", "first_seen"]
    )
    known = Bundles()
    for row in sorted(table.to_pylist(), key=lambda row: (row["first_seen"], row["hash"])):
        known = known.joined(Bundles({row["name"] or row["hash"]: row["topics"]}))
    return known


def remember_bundles(path: str, given: Bundles, now: datetime, options: Mapping[str, str] | None = None) -> Bundles:
    """Adds to the table those of `given` that are not in it. All there are, `given` first.

    BundleError, and nothing is added: one of them has the hash of a known one and other topics.
    """
    known = read_bundles(path, options)
    all_of_them = given.joined(known)
    rows = [(each.hex(), given.name(each), list(topics), now) for each, topics in given.items() if each not in known]
    if rows:
        schema = arrow_schema(BUNDLES)
        columns = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), schema, strict=True)]
        write_deltalake(
            path, pa.table(columns, schema=schema), mode="append", storage_options=dict(options or {}) or None
        )
    return all_of_them
