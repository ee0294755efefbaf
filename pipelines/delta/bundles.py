"""The table `bundles`: topic bundles that Kiln knows, including bundles that were removed from the settings
(docs/design/contracts.md). It is read and written with delta-rs, without Spark."""

from __future__ import annotations

from datetime import datetime

import pyarrow as pa
from deltalake import write_deltalake

from kiln.pipelines.delta.arrow_rows import build_arrow_schema, select_columns
from kiln.pipelines.delta.lake import Lake, read_rows
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.wire.topic_table import BundleSet

BUNDLES = select_columns(TABLES["bundles"])


def read_bundles(lake: Lake) -> BundleSet:
    """Read the bundles in the table, oldest first. Without the table, there are none.

    Raises:
        BundleError: Two rows contradict each other.
    """
    if not lake.has("bundles"):
        return BundleSet()
    batches = read_rows(lake.open("bundles"), ["hash", "name", "topics", "first_seen"])
    rows = [row for batch in batches for row in batch.to_pylist()]
    known = BundleSet()
    for row in sorted(rows, key=lambda row: (row["first_seen"], row["hash"])):
        known = known.merge(BundleSet({row["name"] or row["hash"]: row["topics"]}))
    return known


def save_bundles(lake: Lake, given: BundleSet, now: datetime) -> BundleSet:
    """Add the given bundles that the table lacks. `now`: value of `first_seen` in the new rows.

    Returns:
        All bundles: the given ones first, then the others in the table.

    Raises:
        BundleError: A given bundle has the hash of a bundle in the table, but other topics. Nothing is added.
    """
    known = read_bundles(lake)
    merged = given.merge(known)
    rows = [
        (bundle.hex(), given.name(bundle), list(topics), now) for bundle, topics in given.items() if bundle not in known
    ]
    if rows:
        schema = build_arrow_schema(BUNDLES)
        columns = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), schema, strict=True)]
        write_deltalake(
            lake.table("bundles"),
            pa.table(columns, schema=schema),
            mode="append",
            storage_options=lake.storage_options,
        )
        lake.sync_files("bundles")
        newest = lake.open("bundles").version()
        lake.sync_commits("bundles", newest, newest)
    return merged
