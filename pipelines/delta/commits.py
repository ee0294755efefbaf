"""How files become part of a table: once for each write of each micro-batch (decisions 7 and 18). Two back-ends,
`delta_rs` and `delta_spark`, do what `Commits` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kiln.conf.process.errors import KilnError
from kiln.pipelines.delta.files import DataFile

MAINTENANCE_PREFIX = "kiln maintain"
"""How the `userMetadata` of a commit of `kiln.pipelines.maintenance` begins. Such a commit adds no row."""


class SecondWriterError(KilnError):
    """Somebody else committed under the same application id: another driver runs the same query."""


@dataclass(frozen=True)
class WriteId:
    """One write of one micro-batch, by which a repeated write is known. `name` tells two writes to one table apart."""

    query_id: str
    batch_id: int
    name: str = "append"

    def app_id(self, table: str) -> str:
        """The application of Delta's transaction (PROTOCOL.md, Transaction Identifiers); its version is the batch."""
        return f"{self.query_id}:{table}:{self.name}"


class Commits(Protocol):
    """One query's commits to the tables of a lake. For one thread."""

    def commit(self, table: str, files: Sequence[DataFile], write: WriteId) -> bool:
        """Appends files to a table in one commit. False: the `WriteId` was committed before, and these files are no
        part of the table.

        SecondWriterError: another driver commits under the same query. LakeError: the table cannot be read.
        """


def build_second_writer_error(table: str, write: WriteId) -> SecondWriterError:
    """The error in words."""
    return SecondWriterError(
        f"another driver runs the query {write.query_id} and has just written to the table {table}: two of them would "
        "write rows twice. Stop one of the two. This one has stopped, and its rows of this micro-batch are in no table"
    )
