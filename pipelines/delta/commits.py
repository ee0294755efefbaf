"""Identity of a commit: a write of a micro-batch, which a table has once (decisions 7 and 18)."""

from __future__ import annotations

from dataclasses import dataclass

from kiln.conf.process.errors import KilnError

MAINTENANCE_PREFIX = "kiln maintain"
"""Prefix of the `userMetadata` in commits of `kiln.pipelines.maintenance`. Such a commit adds no row."""


class SecondWriterError(KilnError):
    """Another driver committed under the same application id: it runs the same query."""


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


def build_second_writer_error(table: str, write: WriteId) -> SecondWriterError:
    """Build the error."""
    return SecondWriterError(
        f"cannot commit to table {table}: another driver runs the query {write.query_id} and has just written to it. "
        "This one has stopped, and the rows of its micro-batch are in no table. Stop one of the two drivers"
    )
