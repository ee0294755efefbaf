"""Kiln records gossip traffic in Delta tables, and collects its updates into CIP-123 batches.

    import kiln

    lake = kiln.sample()  # or kiln.open("state")
    lake.sql("SELECT type, count(*) AS messages FROM messages GROUP BY ALL").pandas()

Importing this module imports nothing slow: the functions import DuckDB and delta-rs when they are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kiln.conf.process.errors import KilnError

if TYPE_CHECKING:
    from kiln.deploy.query.reader import LakeReader

__all__ = ["KilnError", "open", "sample"]


def open(place: str | Path | None = None, *, options: Mapping[str, str] | None = None) -> LakeReader:  # noqa: A001 - kiln.open reads well, as gzip.open does
    """Open a lake to query it.

    Args:
        place: A state folder, the folder of the Delta tables, or its URI in an object store (`s3://BUCKET/PREFIX`). By
            default the lake of the settings, which `kiln sql` queries: KILN_STATE, KILN_CONFIG.
        options: Storage options of delta-rs for an object store, such as `aws_region` (docs/object-store.md).

    Raises:
        KilnError: There is no lake, or its tables cannot be read. The message says what to do.
    """
    from kiln.deploy.query.reader import open_lake

    return open_lake(place, options)


def sample() -> LakeReader:
    """Open the sample lake, which comes with Kiln: a minute of a demo network, its batches, and a backfill run."""
    from kiln.deploy.query.reader import open_sample

    return open_sample()
