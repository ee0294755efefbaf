"""kiln.conf.process.backoff and kiln.deploy.stack.child_process: pauses between restarts, and logs that stay
small."""

from __future__ import annotations

from pathlib import Path

from kiln.conf.process.backoff import Backoff
from kiln.deploy.stack.child_process import rotate_log


def test_the_pause_doubles_up_to_half_a_minute() -> None:
    clock = [0.0]
    again = Backoff(lambda: clock[0])
    assert again.is_due
    pauses = []
    for _ in range(7):
        again.record_death()
        began = clock[0]
        while not again.is_due:
            clock[0] += 0.5
        pauses.append(clock[0] - began)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_what_was_well_is_started_again_soon() -> None:
    clock = [0.0]
    again = Backoff(lambda: clock[0])
    for _ in range(5):
        again.record_death()
    again.reset()
    again.record_death()
    clock[0] = 1.0
    assert again.is_due


def test_a_log_over_its_limit_is_moved_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "some.log"
    rotate_log(path, 10)
    with path.open("ab", buffering=0) as log:
        log.write(b"0123456789")
        rotate_log(path, 10)
        assert path.read_bytes() == b"0123456789"
        log.write(b"x")
        rotate_log(path, 10)
        log.write(b"after")
        assert path.read_bytes() == b"after"
        assert (tmp_path / "some.log.1").read_bytes() == b"0123456789x"
        log.write(b"wards once more")
        rotate_log(path, 10)
    assert (tmp_path / "some.log.1").read_bytes() == b"afterwards once more"
    assert path.read_bytes() == b""


def test_a_log_whose_copy_finds_no_room_is_left_alone(tmp_path: Path) -> None:
    path, copy = tmp_path / "some.log", tmp_path / "some.log.1"
    path.write_bytes(b"x" * 11)
    copy.symlink_to("/dev/full")
    rotate_log(path, 10)
    assert path.read_bytes() == b"x" * 11
    assert not copy.exists()
