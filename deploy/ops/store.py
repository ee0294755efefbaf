"""Whether an object store will do for a lake: tried, in a table that is made and removed."""

from __future__ import annotations

from uuid import uuid4

from deltalake import CommitProperties
from deltalake.exceptions import CommitFailedError, DeltaError

from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import words_of
from kiln.pipelines.delta.lake import Lake

_TABLE = "bundles"  # any


def probe_store(lake: Lake) -> str:
    """Why Kiln must not commit there; empty: the store refuses the second of two writes of one key, as each commit
    needs, and Kiln may write, list and remove."""
    probe = Lake.from_location(lake.root / f"doctor-{uuid4().hex}")
    try:
        probe.create((_TABLE,))
        for refused in (False, True):
            opened = probe.open(_TABLE)
            if refused:
                opened.load_as_version(0)  # as one who was not told of the first commit
            try:
                opened.create_write_transaction(
                    [], "append", opened.schema(), commit_properties=CommitProperties(max_commit_retries=0)
                )
            except CommitFailedError:
                if not refused:
                    raise
            else:
                if refused:
                    return "the store lets a second writer overwrite a commit: commits would be lost"
        probe.root.remove_all()
    except (DeltaError, KilnError, OSError) as error:
        return words_of(error)
    return ""
