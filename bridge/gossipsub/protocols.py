"""Pubsub protocols that the router supports, newest first, and the gossipsub versions that introduced features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

VERSIONS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "/meshsub/1.3.0": 13,
        "/meshsub/1.2.0": 12,
        "/meshsub/1.1.0": 11,
        "/meshsub/1.0.0": 10,
        "/floodsub/1.0.0": 0,
    }
)
"""The gossipsub version of each protocol, times ten; 0 is floodsub."""

BACKOFF_VERSION: Final = 11
"""The first version with a back-off field in PRUNE."""
IDONTWANT_VERSION: Final = 12
EXTENSIONS_VERSION: Final = 13
_OTHER_VERSION: Final = 11  # for a network's own protocol, such as Waku's relay


def select_versions(protocols: Iterable[str]) -> Mapping[str, int]:
    """Return the gossipsub version of each protocol, times ten (12 for 1.2), in the given order.

    Any protocol id that `VERSIONS` does not list, such as one that a network has defined, counts as gossipsub 1.1.
    """
    return {protocol: VERSIONS.get(protocol, _OTHER_VERSION) for protocol in protocols}
