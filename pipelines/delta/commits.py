"""Identity of a commit: a write of a micro-batch, which a table has only once (decisions 7 and 18). Also the progress
of the query, which each commit carries (decision 19)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kiln.conf.process.errors import KilnError
from kiln.schemas.kafka import topics as log

MAINTENANCE_PREFIX = "kiln maintain"
"""Prefix of the `userMetadata` in commits of `kiln.pipelines.maintenance`. Such a commit adds no row."""


PROGRESS_KEY: Final = "kiln.progress"
"""Key of a `BatchProgress` as JSON, in the `commitInfo` of the commits of `archive` and `sink`"""


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The micro-batch that a commit belongs to."""

    generation: int = 0
    """number of times that the query was recovered before; each recovery gives it a new id"""
    query_id: str
    batch: int
    writes: Sequence[str] = ()
    """all writes of the micro-batch, as "table:name". A table that lacks one of its writes lacks rows."""
    starts: log.Offsets
    """offsets at which the micro-batch begins, by full topic name"""
    ends: log.Offsets
    topics: dict[str, str] = {}
    """ids of the topics to which the offsets belong"""


class SecondWriterError(KilnError):
    """Another driver committed under the same application id, so it runs the same query."""


@dataclass(frozen=True)
class WriteId:
    """One write of one micro-batch, which identifies a repeated write. `name` distinguishes two writes to one table."""

    query_id: str
    batch_id: int
    name: str = "append"

    def app_id(self, table: str) -> str:
        """Return the application id of Delta's transaction (PROTOCOL.md, Transaction Identifiers). Its version is
        the batch id."""
        return f"{self.query_id}:{table}:{self.name}"


def build_second_writer_error(table: str, write_id: WriteId) -> SecondWriterError:
    """Build the error for a query that two drivers run."""
    return SecondWriterError(
        f"cannot commit to table {table}: another driver runs the query {write_id.query_id} and has just written to "
        "it. This driver has stopped, and the rows of its micro-batch are in no table. Stop one of the two drivers"
    )
