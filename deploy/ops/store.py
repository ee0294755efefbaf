"""Probe of an object store with a temporary table: does it support a lake?"""

from __future__ import annotations

from uuid import uuid4

from deltalake import CommitProperties
from deltalake.exceptions import CommitFailedError, DeltaError

from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import shorten_error
from kiln.pipelines.delta.lake import Lake

_TABLE = "bundles"  # any


def probe_store(lake: Lake) -> str:
    """Test with a temporary table whether a lake's store supports safe commits.

    A commit needs a store that rejects the second of two writes of one key, and permission to write, list and remove.

    Returns:
        Why Kiln must not commit there; empty if it can.
    """
    probe = Lake.from_location(lake.root / f"doctor-{uuid4().hex}")
    try:
        probe.create((_TABLE,))
        for is_conflict in (False, True):
            table = probe.open(_TABLE)
            if is_conflict:
                table.load_as_version(0)  # like a writer that has not read the first commit
            try:
                table.create_write_transaction(
                    [], "append", table.schema(), commit_properties=CommitProperties(max_commit_retries=0)
                )
            except CommitFailedError:
                if not is_conflict:
                    raise
            else:
                if is_conflict:
                    return "the store lets a second writer overwrite a commit, so commits would be lost"
        probe.root.remove_all()
    except (DeltaError, KilnError, OSError) as error:
        return shorten_error(error)
    return ""
