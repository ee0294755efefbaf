"""Blocks of batches stay in IPFS for a set time."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.bridge.ipfs import BlockStoreUnavailableError
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.publisher.pins import BlockPins

S = 1_000_000
START = 1_000 * S


class TellingBlocks(FolderBlockStore):
    """Blocks that tell what is done with them."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.said: list[str] = []
        self.away = False

    def _say(self, what: str) -> None:
        if self.away:
            raise BlockStoreUnavailableError("gone")
        self.said.append(what)

    def put(self, cid: str, data: bytes) -> None:
        self._say(f"put {cid}")

    def get(self, cid: str, timeout: float, limit: int = 0) -> bytes:
        raise AssertionError("nobody asks for a block")

    def remove(self, cid: str) -> None:
        self._say(f"remove {cid}")


def test_pins_last_for_their_time_over_restarts(tmp_path: Path) -> None:
    node = TellingBlocks()
    pins = BlockPins(node, tmp_path / "bridge" / "pins.sqlite", pin_duration=100 * S)
    pins.store_and_pin("one", b"1", START)
    pins.store_and_pin("two", b"2", START + 50 * S)
    assert node.said == ["put one", "put two"]
    assert pins.unpin_expired(START + 99 * S) == 0
    pins.close()
    again = BlockPins(node, tmp_path / "bridge" / "pins.sqlite", pin_duration=100 * S)
    node.away = True
    with pytest.raises(BlockStoreUnavailableError):
        again.unpin_expired(START + 100 * S)
    node.away = False
    assert again.unpin_expired(START + 100 * S) == 1
    assert node.said[2:] == ["remove one"]
    again.store_and_pin("two", b"2", START + 120 * S)  # published once more: as long as if for the first time
    assert again.unpin_expired(START + 219 * S) == 0
    assert again.unpin_expired(START + 220 * S) == 1
    assert again.unpin_expired(START + 999 * S) == 0
