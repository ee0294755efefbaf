"""Keys that are the same in every run of a test, because conftest seeds `random` before each test."""

from __future__ import annotations

import random

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def new_key() -> Ed25519PrivateKey:
    """Derive a key from `random`, another one with each call."""
    return Ed25519PrivateKey.from_private_bytes(random.randbytes(32))
