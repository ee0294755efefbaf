"""One step of a swap: files out of a live table and others into it, in one commit (docs/design, decision 22)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from conf.disk import to_disk
from conf.errors import KilnError
from pipelines.lake.files import DataFile
from pipelines.lake.lake import Lake


class OvertakenError(KilnError):
    """Somebody else took files out of the table meanwhile: the step is to be planned anew. Nothing was committed."""


@dataclass(frozen=True)
class Mark:
    """By which a step that is repeated is known. `begun`: µs, when the run began, so that a later run of the same name
    is another."""

    run: str
    step: str
    begun: int

    @property
    def app_id(self) -> str:
        """The application of Delta's transaction (PROTOCOL.md, Transaction Identifiers); its version is `begun`."""
        return f"swap:{self.run}:{self.step}"


class Exchange:
    """Commits that replace files of live tables. Streams append meanwhile: their commits and these do not conflict."""

    def __init__(self, lake: Lake, *, durable: bool = False) -> None:
        """`durable`: a commit is on the disk before `commit` returns."""
        self._lake = lake
        self._durable = durable

    def has(self, table: str, mark: Mark) -> bool:
        """Whether the step is in the table. LakeError."""
        newest = self._lake.open(table).transaction_version(mark.app_id)
        return newest is not None and newest >= mark.begun

    def commit(self, table: str, read: DeltaTable, gone: Sequence[str], files: Sequence[DataFile], mark: Mark) -> None:
        """Takes the files `gone`, paths as in the log, out of a table, and puts `files` in. `read`: the version that
        the step was planned on; appends that came later stay as they are. OvertakenError."""
        if self._durable:
            to_disk(Path(self._lake.table(table)))
        now = int(time.time() * 1000)  # a vacuum counts from here for how long a reader may still need what is gone
        actions: list[AddAction | RemoveAction] = [RemoveAction(path, True, now) for path in gone]
        actions += [AddAction(each.name, each.size, {}, now, True, each.stats) for each in files]
        known = read.version()
        try:
            read.create_write_transaction(
                actions,
                mode="append",
                schema=read.schema(),
                commit_properties=CommitProperties(app_transactions=[Transaction(mark.app_id, mark.begun, now)]),
            )
        except CommitFailedError as error:
            raise OvertakenError(f"table {table} in {self._lake.path} changed while {mark.app_id} went on") from error
        read.update_incremental()
        if self._durable:
            self._lake.keep(table, known + 1, read.version())
