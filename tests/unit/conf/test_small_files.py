"""A pipe or device in place of a small file is an error in words, and never blocks a command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kiln.conf.process.files import read_small_file
from kiln.conf.process.state_folder import claim_state_folder
from kiln.deploy.cli.app import run_command


def test_only_regular_files_of_the_limit_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_small_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_small_file(path, 4)
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_small_file(special)


def test_a_settings_file_that_is_a_pipe_or_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        assert run_command(["config", "check", path]) == 2
        assert capsys.readouterr().err == f"kiln: cannot read {path}: not a regular file\n"


def test_a_version_that_is_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "version")
    assert run_command(["status", "--state", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"kiln: {tmp_path / 'version'}: not a regular file\n"


@pytest.mark.parametrize("option", ["--state", "--config"])
def test_an_empty_path_on_the_command_line_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["status", option, ""]) == 2
    assert "a path is empty" in capsys.readouterr().err


def test_the_mode_of_a_folder_with_files_of_the_user_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "mine.txt").write_text("")
    for _ in range(2):
        claim_state_folder(tmp_path)
        assert tmp_path.stat().st_mode & 0o777 == 0o755
