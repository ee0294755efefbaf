"""The functions and files of the bridge that a frame and a batch go through (kit.bridge_walks)."""

from __future__ import annotations

from kit.bridge_walks import walk_batch, walk_capture


def test_a_frame_does_not_go_round_about_to_kafka() -> None:
    walk = walk_capture()
    assert len(walk.functions) <= 18, walk.functions
    assert len(walk.files) <= 12, walk.files
    assert ("bridge/capture/sink.py", "FrameSink.put") in walk.functions


def test_a_batch_does_not_go_round_about_to_a_peer() -> None:
    walk = walk_batch()
    assert len(walk.functions) <= 25, walk.functions
    assert len(walk.files) <= 17, walk.files
    assert ("bridge/publisher/batches.py", "PendingBatches.add_record") in walk.functions
    assert walk.functions[-1] == ("bridge/libp2p/links.py", "SendQueue.put")
