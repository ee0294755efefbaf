"""Versions of the state folder and of the tables: an older one is taken on, a newer one refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from kiln.conf.process.locks import locked
from kiln.conf.process.state_version import STATE_VERSION, NewerStateError
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.schemas.delta.tables import TABLES_VERSION


@pytest.mark.parametrize("before", [None, "", "0\n", f"{STATE_VERSION}\n"])
def test_a_folder_is_taken_on(tmp_path: Path, before: str | None) -> None:
    if before is not None:
        (tmp_path / "version").write_text(before)
    with locked(tmp_path, "archive"), locked(tmp_path, "bridge"):
        assert (tmp_path / "version").read_text() == f"{STATE_VERSION}\n"


def test_a_folder_of_a_newer_kiln_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "version").write_text(f"{STATE_VERSION + 1}\n")
    words = rf"is of version {STATE_VERSION + 1}, and this Kiln knows up to version {STATE_VERSION}: a newer Kiln"
    with pytest.raises(NewerStateError, match=words), locked(tmp_path, "archive"):
        pytest.fail("held")
    assert (tmp_path / "version").read_text() == f"{STATE_VERSION + 1}\n"


def test_a_table_without_a_version_is_taken_on_and_read_as_before(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    lake.create(("tips",))
    made = lake.open("tips")
    assert made.metadata().configuration["kiln.version"] == str(TABLES_VERSION)
    other = Lake(str(tmp_path / "older"))
    DeltaTable.create(other.table("tips"), made.schema())
    for _ in range(2):
        other.create(("tips",))
        opened = other.open("tips")
        assert opened.metadata().configuration["kiln.version"] == str(TABLES_VERSION)
        assert opened.version() == 1
        assert (opened.protocol().min_reader_version, opened.protocol().min_writer_version) == (1, 2)
        assert opened.protocol().reader_features is None


def test_a_table_of_a_newer_kiln_is_refused(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    lake.create(("tips",))
    newer = {"kiln.version": str(TABLES_VERSION + 1)}
    lake.open("tips").alter.set_table_properties(newer, raise_if_not_exists=False)
    with pytest.raises(LakeError, match=r"^table tips in .* is of version 2, and this Kiln knows up to version 1"):
        lake.create(("tips",))
