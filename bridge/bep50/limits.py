"""What one address may ask of us: write tokens (BEP 5, get_peers) and a bound on the rate of its queries."""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import Final

TOKEN_EPOCH: Final = 300.0
"""BEP 5: the secret changes every five minutes, and tokens up to ten minutes old are taken."""
MAX_SOURCES: Final = 4096


class WriteTokens:
    """Tokens that show that who writes has received at the IP it writes from. Nothing is kept for each: a token is a
    keyed hash of the IP, the target and the epoch, and the key is drawn at the start."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def create_token(self, ip: bytes, target: bytes, now: float) -> bytes:
        return self._token(ip, target, int(now // TOKEN_EPOCH))

    def is_valid(self, token: bytes, ip: bytes, target: bytes, now: float) -> bool:
        """Whether this token was given to this IP for this target in this epoch or the last."""
        epoch = int(now // TOKEN_EPOCH)
        return any(hmac.compare_digest(token, self._token(ip, target, each)) for each in (epoch, epoch - 1))

    def _token(self, ip: bytes, target: bytes, epoch: int) -> bytes:
        said = ip + target + epoch.to_bytes(8, "big", signed=True)  # a clock may start below zero
        return blake2b(said, key=self._secret, digest_size=8).digest()


class RateLimits:
    """A token bucket for each source: ``rate`` a second, ``burst`` at once. A source is an IPv4 address or a /64 of
    IPv6, which one host can use all of."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: dict[bytes, tuple[float, float]] = {}

    def allows(self, ip: bytes, now: float) -> bool:
        """Take one from the source's bucket; False if it is empty."""
        source = ip if len(ip) == 4 else ip[:8]
        left, since = self._buckets.pop(source, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        allowed = left >= 1
        if len(self._buckets) >= MAX_SOURCES:  # dictionaries keep their order: the one that asked longest ago goes
            del self._buckets[next(iter(self._buckets))]
        self._buckets[source] = (left - allowed, now)
        return allowed
