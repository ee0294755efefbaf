"""What a topic needs after a restart: its newest item, and contacts to begin with; and the node id.

BEP 50: "Clients SHOULD store the latest value of the mutable item associated with the topic at all times." One file a
topic, ``<target>.item``: a bencoded dictionary of the item as in a put (k, salt, seq, sig, v) and ``contacts``, compact
addresses. A file is replaced whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kiln.schemas.dht import bencode
from kiln.schemas.dht.bencode import BencodeError, Value
from kiln.schemas.dht.items import Item, find_refusal, put_fields, read_item
from kiln.schemas.dht.krpc import ID_SIZE, DhtAddress, KrpcRefusal, read_addresses


class TopicStoreError(Exception):
    """A stored file that cannot be used."""


class StoredTopic(NamedTuple):
    """What was kept of a topic."""

    item: Item | None
    contacts: list[DhtAddress]


def write_stored(stored: StoredTopic) -> bytes:
    """The contents of a topic's file."""
    fields = put_fields(stored.item) if stored.item is not None else {}
    contacts: list[Value] = [each.compact for each in stored.contacts]
    return bencode.encode(fields | {b"contacts": contacts})


def read_stored(data: bytes) -> StoredTopic:
    """Read a topic's file; the item is verified. Raises ValueError."""
    fields = bencode.decode(data)
    if not isinstance(fields, dict):
        raise BencodeError("not a dictionary")
    item = read_item(fields) if b"v" in fields else None
    wrong = find_refusal(item) if isinstance(item, Item) else item
    if isinstance(item, KrpcRefusal) or wrong is not None:
        raise ValueError(f"its item is not valid: {wrong.text.decode() if wrong else ''}")
    return StoredTopic(item, read_addresses(fields.get(b"contacts")))


class TopicStore:
    """The files of all topics, in one folder, which one process has at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def node_id(self, new: bytes) -> bytes:
        """The id of earlier runs; at the first start ``new``, which is kept. Raises StoreError."""
        path = self._folder / "node.id"
        if not path.exists():
            self._replace(path, new)
        kept = path.read_bytes()
        if len(kept) != ID_SIZE:
            raise TopicStoreError(
                f"{path} has {len(kept)} bytes, not the {ID_SIZE} of a node id: delete it, a new one is made"
            )
        return kept

    def load(self, target: bytes) -> StoredTopic:
        """What is kept of a topic: nothing, of a new one. Raises StoreError."""
        path = self._path(target)
        if not path.exists():
            return StoredTopic(None, [])
        try:
            stored = read_stored(path.read_bytes())
            if stored.item is not None and stored.item.target != target:
                raise ValueError(f"its item is of {stored.item.target.hex()}")
        except ValueError as error:
            raise TopicStoreError(
                f"{path} is damaged ({error}): delete it, the item is learned anew from others"
            ) from error
        return stored

    def save(self, target: bytes, item: Item | None, contacts: Sequence[DhtAddress]) -> None:
        """Keep a topic's newest item and its contacts. It is on the disk when this returns."""
        self._replace(self._path(target), write_stored(StoredTopic(item, list(contacts))))

    def _path(self, target: bytes) -> Path:
        return self._folder / f"{target.hex()}.item"

    def _replace(self, path: Path, data: bytes) -> None:
        new = path.with_suffix(".new")
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
