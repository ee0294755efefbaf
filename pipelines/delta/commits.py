"""Data in each commit of a query: the identity of the write, which a table accepts only once (decisions 7 and 18), and
the progress of the query (decision 19)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kiln.conf.process.errors import KilnError
from kiln.schemas.kafka import topics as log

MAINTENANCE_PREFIX = "kiln maintain"
"""Prefix of the field `userMetadata` in commits of table maintenance. Such a commit adds no new row."""


PROGRESS_KEY: Final = "kiln.progress"
"""Key of a `BatchProgress` as JSON, in the `commitInfo` of the commits of `archive` and `sink`"""


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a query in a commit: the micro-batch, and the Kafka offsets at its start and end."""

    generation: int = 0
    """number of times that `kiln recover` has recovered the query; after each, the query has a new id"""
    query_id: str
    batch: int
    writes: Sequence[str] = ()
    """all writes of the micro-batch, as "table:name"; a table that lacks one of its writes lacks rows"""
    starts: log.Offsets
    """offsets at which the micro-batch begins, by full name of the topic"""
    ends: log.Offsets
    topics: dict[str, str] = {}
    """Kafka's ids of the topics, by full name"""


class SecondWriterError(KilnError):
    """Another driver runs the same query: it committed under the same application id."""


@dataclass(frozen=True)
class WriteId:
    """Identity of one write of one micro-batch. `name` distinguishes two writes to the same table."""

    query_id: str
    batch_id: int
    name: str = "append"

    def app_id(self, table: str) -> str:
        """Return the application id of Delta's transaction identifier (PROTOCOL.md, Transaction Identifiers). The
        identifier's version is the number of the micro-batch."""
        return f"{self.query_id}:{table}:{self.name}"


def build_second_writer_error(table: str, write_id: WriteId) -> SecondWriterError:
    """Build the error for a query that two drivers run."""
    return SecondWriterError(
        f"cannot commit to table {table}: another driver runs the query {write_id.query_id}, and has just committed to "
        "this table. So this driver has stopped. Run only one driver of the query"
    )
