"""Protection against abuse from one address: write tokens (BEP 5, get_peers), and a rate limit for queries."""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import Final

from kiln.conf.process.bounded_dict import BoundedDict

TOKEN_EPOCH: Final = 300.0
"""Seconds after which new tokens are issued. A token is accepted for five to ten minutes (BEP 5)."""
MAX_SOURCES: Final = 4096  # addresses whose rate is remembered


class WriteTokens:
    """Issues and checks write tokens. A token in a put proves that the sender receives datagrams at its IP.

    Tokens are not stored. A token is a hash of the IP, the target and the epoch, keyed with a secret.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def create_token(self, ip: bytes, target: bytes, now: float) -> bytes:
        return self._token(ip, target, int(now // TOKEN_EPOCH))

    def is_valid(self, token: bytes, ip: bytes, target: bytes, now: float) -> bool:
        """Return true if this token was issued to this IP for this target, in this epoch or the one before."""
        epoch = int(now // TOKEN_EPOCH)
        return any(hmac.compare_digest(token, self._token(ip, target, number)) for number in (epoch, epoch - 1))

    def _token(self, ip: bytes, target: bytes, epoch: int) -> bytes:
        message = ip + target + epoch.to_bytes(8, "big", signed=True)  # a clock may start below zero
        return blake2b(message, key=self._secret, digest_size=8).digest()


class RateLimits:
    """Limits the queries of each source to ``rate`` per second, with bursts of up to ``burst`` queries.

    A source is an IPv4 address or an IPv6 network of /64, because one host can use a whole /64.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets = BoundedDict[bytes, tuple[float, float]](MAX_SOURCES)  # the oldest query first

    def allows(self, ip: bytes, now: float) -> bool:
        """Count a query from an IP. Return false if the source is over its limit."""
        source = ip if len(ip) == 4 else ip[:8]
        tokens, refilled = self._buckets.get(source, (self._burst, now))
        tokens = min(self._burst, tokens + (now - refilled) * self._rate)
        allowed = tokens >= 1
        self._buckets[source] = (tokens - allowed, now)
        return allowed
