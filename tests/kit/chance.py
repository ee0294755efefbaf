"""Keys that are the same in every run of a test: conftest seeds `random` anew for each test."""

from __future__ import annotations

import random

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def new_key() -> Ed25519PrivateKey:
    """Another key with each call."""
    return Ed25519PrivateKey.from_private_bytes(random.randbytes(32))
