"""Node ids of the BitTorrent DHT: their distance (BEP 5, Overview), and the ids that an IP address may have (BEP 42).

The first 21 bits of an id must be those of a CRC-32C over the masked IP and a three-bit number, which is also in the
id's last byte. So an address has only eight possible prefixes, and a node cannot choose its position in the id space.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from crc32c import crc32c

from kiln.schemas.dht.krpc import ID_SIZE

# BEP 42, Node ID restriction: masks of the bits that the holder of an address cannot choose.
_MASKS: Final = {4: bytes.fromhex("030f3fff"), 16: bytes.fromhex("0103070f1f3f7fff")}

# BEP 42, Overview: addresses without global scope may have any id.
_EXEMPT: Final = [
    ipaddress.ip_network(net)
    for net in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "127.0.0.0/8"),
        *("::1/128", "fe80::/10", "fc00::/7"),
    )
]


def compute_bound_id(ip: bytes, entropy: bytes) -> bytes:
    """Compute a node id that BEP 42 allows for an IP address.

    Args:
        ip: Packed IP, 4 or 16 bytes.
        entropy: 20 bytes for the free bits of the id. The lowest three bits of the last byte select one of the eight
            allowed prefixes.
    """
    mask = _MASKS[len(ip)]
    masked = bytearray(a & b for a, b in zip(ip, mask, strict=False))
    masked[0] |= (entropy[-1] & 7) << 5
    prefix = crc32c(masked).to_bytes(4, "big")
    return prefix[:2] + bytes([prefix[2] & 0xF8 | entropy[2] & 7]) + entropy[3:]


def is_exempt(ip: bytes) -> bool:
    """Return true if a packed IP address may have any node id, because it is loopback, private or link-local."""
    address = ipaddress.ip_address(ip)
    return any(address in net for net in _EXEMPT if net.version == address.version)


def compute_distance(one: bytes, other: bytes) -> int:
    """Compute the XOR distance of two node ids."""
    return int.from_bytes(one, "big") ^ int.from_bytes(other, "big")


def count_shared_bits(one: bytes, other: bytes) -> int:
    """Count the leading bits that two node ids have in common, 0 to 160."""
    return ID_SIZE * 8 - compute_distance(one, other).bit_length()
