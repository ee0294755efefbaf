"""One step of a swap: files out of a live table and others into it, in one commit (docs/design, decision 22)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from kiln.conf.process.errors import KilnError
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.lake import Lake

_TRIES = 100
"""commits by others while this one tries"""


class OvertakenError(KilnError):
    """Somebody else took files out of the table meanwhile: the step is to be planned anew. Nothing was committed."""


@dataclass(frozen=True)
class SwapMarker:
    """By which a step that is repeated is known. `begun`: µs, when the run began, so that a later run of the same name
    is another."""

    run: str
    step: str
    begun: int

    @property
    def app_id(self) -> str:
        """The application of Delta's transaction (PROTOCOL.md, Transaction Identifiers); its version is `begun`."""
        return f"swap:{self.run}:{self.step}"


class FileSwap:
    """Commits that replace files of live tables. Streams append meanwhile: their commits and these do not conflict."""

    def __init__(self, lake: Lake, *, durable: bool = False) -> None:
        """`durable`: a commit is on the disk before `commit` returns."""
        self._lake = lake
        self._durable = durable

    def has(self, table: str, mark: SwapMarker) -> bool:
        """Whether the step is in the table. LakeError."""
        newest = self._lake.open(table).transaction_version(mark.app_id)
        return newest is not None and newest >= mark.begun

    def commit(
        self, table: str, read: DeltaTable, gone: Sequence[str], files: Sequence[DataFile], mark: SwapMarker
    ) -> None:
        """Takes the files `gone`, paths as in the log, out of a table, and puts `files` in. `read`: the version that
        the step was planned on; appends that came later stay as they are. OvertakenError."""
        if self._durable:
            self._lake.folder(table).sync()
        now = int(time.time() * 1000)  # a vacuum counts from here for how long a reader may still need what is gone
        actions: list[AddAction | RemoveAction] = [RemoveAction(path, True, now) for path in gone]
        actions += [AddAction(each.name, each.size, {}, now, True, each.stats) for each in files]
        # delta-rs takes it for no conflict that a compaction has removed the same files. So delta-rs is to give up
        # where anybody has committed, and this method looks for itself.
        properties = CommitProperties(
            app_transactions=[Transaction(mark.app_id, mark.begun, now)], max_commit_retries=0
        )
        for _ in range(_TRIES):
            known = read.version()
            try:
                read.create_write_transaction(
                    actions, mode="append", schema=read.schema(), commit_properties=properties
                )
                break
            except CommitFailedError:
                read.update_incremental()
                newest = read.transaction_version(mark.app_id)
                if (
                    newest is not None and newest >= mark.begun
                ):  # another swap of this run, or the store's answer got lost
                    raise OvertakenError(
                        f"table {table} in {self._lake.path} has the step {mark.step} already"
                    ) from None
                if not _paths(read).issuperset(gone):
                    raise OvertakenError(
                        f"table {table} in {self._lake.path} has other files than a moment ago"
                    ) from None
        else:
            raise OvertakenError(f"somebody commits to table {table} in {self._lake.path} all the time")
        read.update_incremental()
        if self._durable:
            self._lake.keep(table, known + 1, read.version())


def _paths(table: DeltaTable) -> set[str]:
    return set(map(str, table.get_add_actions()["path"].to_pylist()))
