"""kiln.deploy.stack.spark: no process takes another's temporary files, and what a killed one leaves goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kiln.deploy.stack.spark import create_scratch_folder

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from pathlib import Path
from kiln.deploy.stack.spark import create_scratch_folder
folder = create_scratch_folder(Path(sys.argv[1]))
(folder / "blocks").write_bytes(b"x" * 1000)
print(folder, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_left_goes_and_what_lives_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    (tmp_path / "scratch" / "spark-of-an-earlier-kiln").mkdir(parents=True)
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        ours = create_scratch_folder(tmp_path)
        assert ours != theirs
        assert (theirs / "blocks").stat().st_size == 1000
        other.kill()
        other.wait()
    again = create_scratch_folder(tmp_path)
    assert {each for each in (tmp_path / "scratch").iterdir() if each.is_dir()} == {ours, again}
