"""Nodes of libtorrent's DHT on 127.0.0.1.

The nodes are started without public routers, so they contact none.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import TypeVar

import libtorrent as lt
from nacl.signing import SigningKey

from kiln.schemas.dht.items import Item
from kiln.schemas.dht.krpc import DhtAddress

PATIENCE = 240.0
"""timeout in s, long enough for a busy machine"""

LOOPBACK: lt.settings_pack = {
    "listen_interfaces": "127.0.0.1:0",
    "dht_bootstrap_nodes": "",  # the default is a public router
    "enable_dht": True,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_ip_notifier": False,
    "dht_restrict_routing_ips": False,  # one IP has them all
    "dht_restrict_search_ips": False,
    "dht_block_ratelimit": 100_000,
    "dht_upload_rate_limit": 10_000_000,
    "alert_mask": int(lt.alert.category_t.dht_notification | lt.alert.category_t.dht_operation_notification),
}

T = TypeVar("T")


class Torrent:
    """A node of libtorrent's DHT."""

    def __init__(self) -> None:
        self.session = lt.session(LOOPBACK)
        self.port: int = self.session.listen_port()

    @property
    def address(self) -> DhtAddress:
        return DhtAddress.parse("127.0.0.1", self.port)

    def know(self, *others: Torrent) -> None:
        for other in others:
            self.session.add_dht_node(("127.0.0.1", other.port))

    def nodes(self) -> int:
        """Return the number of nodes in the routing table."""
        self.session.post_dht_stats()
        stats = self._alert(lambda each: each if isinstance(each, lt.dht_stats_alert) else None)
        return sum(bucket["num_nodes"] for bucket in stats.routing_table)

    def put(self, seed: bytes, salt: bytes, text: bytes) -> None:
        """Store a byte string, and wait until at least one other node has it."""
        scalar = bytearray(hashlib.sha512(seed).digest())  # the expanded key (RFC 8032, 5.1.5)
        scalar[0] &= 248
        scalar[31] = scalar[31] & 63 | 64
        public = SigningKey(seed).verify_key.encode()
        self.session.dht_put_mutable_item(bytes(scalar), public, text, salt)
        stored = self._alert(lambda each: each if isinstance(each, lt.dht_put_alert) else None)
        assert stored.num_success > 0

    def get(self, public: bytes, salt: bytes) -> Item:
        """Return an item as libtorrent finds it, with the signature, which libtorrent has verified."""
        self.session.dht_get_mutable_item(public, salt)
        found = self._alert(
            lambda each: each if isinstance(each, lt.dht_mutable_item_alert) and each.authoritative else None
        )
        assert found.item is not None
        return Item(bytes(found.key), salt, found.seq, lt.bencode(found.item), bytes(found.signature))

    def _alert(self, wanted: Callable[[object], T | None]) -> T:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self.session.wait_for_alert(200)
            for alert in self.session.pop_alerts():
                found = wanted(alert)
                if found is not None:
                    return found
        raise AssertionError("libtorrent has not told what was awaited")
