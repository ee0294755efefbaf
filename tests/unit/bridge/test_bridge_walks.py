"""The functions and files of the bridge that a frame goes through (kit.bridge_walks)."""

from __future__ import annotations

from kit.bridge_walks import walk_capture


def test_a_frame_does_not_go_round_about_to_kafka() -> None:
    walk = walk_capture()
    assert len(walk.functions) <= 30, walk.functions
    assert len(walk.files) <= 12, walk.files
    assert ("bridge/capture/sink.py", "FrameSink.put") in walk.functions
