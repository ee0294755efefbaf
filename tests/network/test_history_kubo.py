"""What a real Kubo's pubsub/sub answers, kept in a file, through the reader and the live decoder.

Run with Kubo 0.43: `KILN_TEST_KUBO=… .venv/bin/python -m pytest tests/network/test_history_kubo.py`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from kiln.pipelines.decode.decoder import DecodedMessage
from kiln.schemas.captures.formats import detect_format
from kiln.schemas.captures.lines import WHOLE
from kiln.schemas.wire.identity import peer_text
from kit.awaiting import wait_until
from kit.history import SOURCE, decoded, message_of, multibase, only_frames
from kit.kubo_daemon import Daemon, program

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

TOPIC = "/ceramic/local-history"
COUNT = 5


@pytest.fixture
def near_and_far(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """Two daemons that are connected."""
    with ExitStack() as running:
        near, far = Daemon(program(), tmp_path / "near"), Daemon(program(), tmp_path / "far")
        for daemon in (near, far):
            running.callback(daemon.stop)
            daemon.start().close()
        far.connect(near.address)
        yield near, far


def test_a_kept_answer_of_kubo_is_a_file_of_history(near_and_far: tuple[Daemon, Daemon]) -> None:
    near, far = near_and_far
    topic, kept = {"arg": multibase(TOPIC.encode())}, b""
    with httpx.stream("POST", f"{near.url}/api/v0/pubsub/sub", params=topic, timeout=60) as answer:

        def known() -> bool:
            peers = httpx.post(f"{far.url}/api/v0/pubsub/peers", params=topic, timeout=60).json()
            return bool(peers["Strings"])

        wait_until(known, lambda: "the far Kubo knows that the near one listens")
        for number in range(COUNT):
            said = {"file": b'{"typ":3,"ts":%d}' % number}
            httpx.post(f"{far.url}/api/v0/pubsub/pub", params=topic, files=said, timeout=60).raise_for_status()
        for piece in answer.iter_bytes():
            kept += piece
            if kept.count(b"\n") == COUNT:
                break
    file = io.BytesIO(kept)
    found = detect_format(file)
    assert found is not None
    assert found.name == "kubo-sub"
    frames = only_frames(found.read(file, SOURCE, WHOLE))
    author = far.address.rpartition("/")[2]
    assert {peer_text(getattr(message_of(frame), "from")) for frame in frames} == {author}
    heard = [decoded(frame) for frame in frames]
    assert sorted(each.content.ts or 0 for each in heard if isinstance(each, DecodedMessage)) == list(range(COUNT))
    assert len({each.message_id for each in heard if isinstance(each, DecodedMessage)}) == COUNT
