"""The state folder is for its user alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kiln.conf.process.state_folder import StateInUseError, claim_state_folder, is_private, lock_state
from kiln.deploy.cli.app import run_command
from kiln.deploy.ops.doctor_checks import check_state


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_state_folder_is_closed(tmp_path: Path) -> None:
    claim_state_folder(tmp_path / "a" / "state")
    assert mode(tmp_path / "a" / "state") == 0o700


def test_an_open_folder_is_closed_at_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with lock_state(tmp_path, "bridge"):
        assert mode(tmp_path) == 0o700
        assert is_private(tmp_path)
        with pytest.raises(StateInUseError), lock_state(tmp_path, "bridge"):
            pass


def test_a_command_that_writes_into_the_folder_closes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_STATE", str(tmp_path / "state"))
    assert run_command(["interests", "--add", "model"]) == 0
    assert mode(tmp_path / "state") == 0o700


def test_a_folder_for_all_stays_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    claim_state_folder(tmp_path)
    assert mode(tmp_path) == 0o1777
    found = check_state(tmp_path, "", is_private(tmp_path))
    assert (found.level, "chmod 700" in found.what_to_do) == ("warn", True)
