"""The identity key: kept, private, and never replaced in silence."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.bridge.libp2p.keys import KeyFileError, derive_author_keys, load_or_create_key
from kiln.schemas.wire.identity import compute_peer_id


def test_authors_are_the_identity_and_keys_that_the_identity_alone_makes() -> None:
    identity, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    peers = [compute_peer_id(key) for key in derive_author_keys(identity, 5)]
    assert peers == [compute_peer_id(key) for key in derive_author_keys(identity, 5)]
    assert peers[0] == compute_peer_id(identity)
    assert len({*peers, *(compute_peer_id(key) for key in derive_author_keys(other, 5))}) == 10


def test_the_identity_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "state" / "identity.key"
    first = compute_peer_id(load_or_create_key(path))
    assert compute_peer_id(load_or_create_key(path)) == first
    assert compute_peer_id(load_or_create_key(tmp_path / "other.key")) != first


def test_only_the_owner_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    old = os.umask(0)
    try:
        load_or_create_key(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["identity.key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_may_use_is_refused_and_left_alone(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    load_or_create_key(path)
    content = path.read_bytes()
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"chmod 600 {path}"):
        load_or_create_key(path)
    assert path.read_bytes() == content
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize(
    "damage", [lambda raw: b"", lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda raw: b"x" + raw[1:]]
)
def test_what_is_no_key_is_refused_and_left_alone(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "identity.key"
    load_or_create_key(path)
    assert callable(damage)
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with pytest.raises(KeyFileError, match="not a libp2p Ed25519 private key"):
        load_or_create_key(path)
    assert path.read_bytes() == damaged


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    load_or_create_key(path)
    raw = bytearray(path.read_bytes())
    raw[10] ^= 1
    path.write_bytes(raw)
    with pytest.raises(KeyFileError, match="damaged"):
        load_or_create_key(path)


def test_a_folder_a_fifo_and_a_dangling_link_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("folder", "fifo", "link"):
        with pytest.raises(KeyFileError, match=name):
            load_or_create_key(tmp_path / name)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"")
    with pytest.raises(KeyFileError, match="identity"):
        load_or_create_key(tmp_path / "state" / "identity.key")


def test_a_key_of_other_libp2p_software_is_read(tmp_path: Path) -> None:
    # libp2p specs, peer-ids/peer-ids.md, Test vectors: Ed25519
    path = tmp_path / "identity.key"
    path.touch(mode=0o600)
    path.write_bytes(
        bytes.fromhex(
            "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
            "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
        )
    )
    public = "080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    assert compute_peer_id(load_or_create_key(path)).hex() == "0024" + public
