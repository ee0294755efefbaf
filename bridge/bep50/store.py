"""Files with the state for a restart: the node id, and the newest item and contacts of each topic.

BEP 50: "Clients SHOULD store the latest value of the mutable item associated with the topic at all times." Each topic
has a file ``<target>.item``: a bencoded dictionary with the fields of the item, as in a put (k, salt, seq, sig, v), and
with ``contacts``, a list of compact addresses. Files are replaced atomically.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kiln.conf.process.files import replace_file
from kiln.schemas.dht import bencode
from kiln.schemas.dht.bencode import BencodeError, Value
from kiln.schemas.dht.items import Item, build_put_fields, find_refusal, read_item
from kiln.schemas.dht.krpc import ID_SIZE, DhtAddress, KrpcRefusal, read_addresses


class TopicStoreError(Exception):
    """A file of the store is damaged. The message has the path and the remedy."""


class StoredTopic(NamedTuple):
    """Stored state of a topic."""

    item: Item | None
    contacts: list[DhtAddress]


def encode_topic(stored: StoredTopic) -> bytes:
    """Encode the contents of a topic's file."""
    fields = build_put_fields(stored.item) if stored.item is not None else {}
    contacts: list[Value] = [contact.compact for contact in stored.contacts]
    return bencode.encode(fields | {b"contacts": contacts})


def decode_topic(data: bytes) -> StoredTopic:
    """Decode a topic's file, and verify its item.

    Raises:
        ValueError: The file is damaged.
    """
    fields = bencode.decode(data)
    if not isinstance(fields, dict):
        raise BencodeError("it is not a bencoded dictionary")
    item = read_item(fields) if b"v" in fields else None
    refusal = find_refusal(item) if isinstance(item, Item) else item
    if refusal is not None:
        raise ValueError(f"its item is not valid: {refusal.text.decode()}")
    assert not isinstance(item, KrpcRefusal)
    return StoredTopic(item, read_addresses(fields.get(b"contacts")))


class TopicStore:
    """The files of all topics in one folder. Only one process may use the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def load_node_id(self, new_id: bytes) -> bytes:
        """Load our node id. At the first start there is none, so store and return ``new_id``.

        Raises:
            TopicStoreError: The file has the wrong size.
        """
        path = self._folder / "node.id"
        if not path.exists():
            replace_file(path, new_id)
        node_id = path.read_bytes()
        if len(node_id) != ID_SIZE:
            raise TopicStoreError(
                f"cannot read the node id: {path} has {len(node_id)} bytes, not {ID_SIZE}. Delete the file; the next "
                "start creates a new id."
            )
        return node_id

    def load(self, target: bytes) -> StoredTopic:
        """Load the item and the contacts of a topic. A new topic has neither.

        Raises:
            TopicStoreError: The file is damaged.
        """
        path = self._path(target)
        if not path.exists():
            return StoredTopic(None, [])
        try:
            stored = decode_topic(path.read_bytes())
            if stored.item is not None and stored.item.target != target:
                raise ValueError(f"its item belongs to target {stored.item.target.hex()}")
        except ValueError as error:
            raise TopicStoreError(
                f"cannot read {path} ({error}). Delete the file; the item will be fetched from other nodes."
            ) from error
        return stored

    def save(self, target: bytes, item: Item | None, contacts: Sequence[DhtAddress]) -> None:
        """Store a topic's newest item and its contacts durably."""
        replace_file(self._path(target), encode_topic(StoredTopic(item, list(contacts))))

    def _path(self, target: bytes) -> Path:
        return self._folder / f"{target.hex()}.item"
