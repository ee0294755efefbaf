"""CAR files, version 1, as the vectors are kept in (https://ipld.io/specs/transport/car/carv1)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import dag_cbor
from multiformats import varint

from kiln.schemas.wire.cid import find_cid_end


class Car(NamedTuple):
    roots: list[bytes]
    blocks: dict[bytes, bytes]


def read_car(path: Path) -> Car:
    """The roots and blocks of a file, by CID; hashes are not looked at."""
    data = path.read_bytes()
    size, _, rest = varint.decode_raw(data)
    header = dag_cbor.decode(bytes(rest[:size]))
    assert isinstance(header, dict)
    assert header["version"] == 1
    blocks: dict[bytes, bytes] = {}
    rest = rest[size:]
    while len(rest):
        size, _, rest = varint.decode_raw(rest)
        section = bytes(rest[:size])
        assert len(section) == size
        end = find_cid_end(section)
        blocks[section[:end]] = section[end:]
        rest = rest[size:]
    return Car([bytes(root) for root in header["roots"]], blocks)
