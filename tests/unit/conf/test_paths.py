"""Paths of settings files and state folders on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kiln.conf.process.state_folder import claim_state_folder
from kiln.deploy.cli.app import run_command


def test_the_settings_may_come_through_a_pipe_of_the_shell() -> None:
    """Such as of a program that decrypts them."""
    text = "[batch]\nwindow = '7s'\n"
    kiln = f'"{sys.executable}" -m kiln.deploy.cli'
    script = f'{kiln} config show --diff --config <(printf "%s" "$1") && {kiln} config check <(printf "%s" "$1")'
    done = subprocess.run(["bash", "-c", script, "-", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 'window = "7s"' in done.stdout
    assert ": fine" in done.stdout


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
