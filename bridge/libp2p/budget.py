"""Limits per peer and for all peers: budgets of bytes and CPU, the memory for incomplete RPCs, and bans."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from math import exp, inf
from typing import Final, Generic, TypeVar

from kiln.conf.process.bounded_dict import BoundedDict

_HOUR: Final = 3600.0  # seconds
_MINUTE: Final = 60.0  # seconds over which use is averaged, and for which a peer may save its unused share
_SHARE_EVERY: Final = 1.0  # seconds between two computations of the fair share
# part of the total rate that peers share while the total is exceeded; the rest reduces the excess
_SHARED_PART: Final = 0.9
_MAX_PEERS: Final = 10_000


class _Account:
    __slots__ = ("at", "own", "share", "throttled", "use")

    def __init__(self, own: float, at: float) -> None:
        self.own = own
        self.share = 0.0
        self.use = 0.0  # amount used; amounts from a minute ago count 1/e
        self.throttled = False  # by the total budget
        self.at = at


class CaptureBudget:
    """A budget of bytes, or of seconds of CPU, for each peer and for all peers together.

    Nothing is dropped: `spend` returns how long a peer must wait, and until then the caller does not read from the peer
    (or write to it). While all peers together exceed the total, they share its rate with max-min fairness. A peer that
    uses less than its share does not wait, however much other peers send, and the others get the unused part. A new
    peer has no saved share, so an attacker gains no share by a change of its key. A peer that reconnects keeps its
    balance.

    Args:
        per_peer: Amount that one peer may use in a period, even all at once.
        total: Amount that all peers together may use in a period, even all at once.
        period: Length of the period in seconds.
    """

    def __init__(self, per_peer: float, total: float, period: float = _HOUR) -> None:
        self._per_peer = per_peer
        self._total = total
        self._period = period
        self._left = float(total)
        self._at: float | None = None
        self._accounts = BoundedDict[bytes, _Account](_MAX_PEERS)
        self._share = inf  # per second
        self._shared_at = -inf

    def spend(self, peer: bytes, size: float, connected: Collection[bytes], now: float) -> float:
        """Charge bytes, or seconds of CPU, to a peer, and return for how many seconds the peer must wait.

        While a peer waits, call this again each second with `size` 0: the wait shortens when other peers disconnect.

        Args:
            connected: All connected peers.
            now: Time in seconds of the caller's clock.
        """
        rate = self._total / self._period
        elapsed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._left = min(self._total, self._left + elapsed * rate) - size
        if now - self._shared_at >= _SHARE_EVERY:
            self._shared_at = now
            self._share = self._fair_share(connected, now)
        account = self._account(peer, now)
        elapsed = max(0.0, now - account.at)
        account.at = now
        own_rate = self._per_peer / self._period
        account.own = min(self._per_peer, account.own + elapsed * own_rate) - size
        account.use = account.use * exp(-elapsed / _MINUTE) + size
        saved = max(account.share, _MINUTE * rate / max(1, len(connected)))
        account.share = min(saved, account.share + elapsed * self._share)
        pause = 0.0
        if self._left < 0:
            account.share -= size
            pause = max(0.0, -account.share / self._share)
        account.throttled = pause > 0
        return max(pause, -account.own / own_rate)

    def _fair_share(self, connected: Collection[bytes], now: float) -> float:
        """Return the amount per second to which a peer is limited, so that all peers together stay within the total."""
        accounts = [account for account in map(self._accounts.get, connected) if account is not None]
        # a throttled peer would use more than it does, so its demand is unknown
        demands = sorted(inf if a.throttled else a.use * exp((a.at - now) / _MINUTE) / _MINUTE for a in accounts)
        remaining = self._total / self._period * _SHARED_PART
        for number, demand in enumerate(demands):
            sharers = len(demands) - number
            if demand * sharers >= remaining:
                return remaining / sharers
            remaining -= demand
        return remaining + (demands[-1] if demands else 0.0)

    def _account(self, peer: bytes, now: float) -> _Account:
        account = self._accounts.get(peer)
        if account is None:
            account = self._accounts[peer] = _Account(self._per_peer, now)
        else:
            self._accounts.move_to_end(peer)
        return account


_Peer = TypeVar("_Peer", bound=Hashable)


class UnfinishedRpcs(Generic[_Peer]):
    """Size of the incomplete RPCs that are buffered, with a limit in bytes for all peers together.

    Without it, hundreds of peers could fill the memory, each with a large RPC that it never completes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: dict[_Peer, int] = {}
        self._sum = 0

    def set_size(self, peer: _Peer, size: int) -> _Peer | None:
        """Set the number of buffered bytes of a peer. If the limit is exceeded, return the peer with the most bytes."""
        before = self._sizes.pop(peer, 0)
        if size:
            self._sizes[peer] = size
        self._sum += size - before
        return max(self._sizes, key=self._sizes.__getitem__) if self._sum > self._limit else None


class BanList:
    """Peers that are banned for `seconds` each. Beyond `limit` peers, the oldest ban ends."""

    def __init__(self, seconds: float, limit: int = _MAX_PEERS) -> None:
        self._seconds = seconds
        self._until = BoundedDict[bytes, float](limit)

    def add(self, peer: bytes, now: float) -> None:
        self._until[peer] = now + self._seconds

    def remaining(self, peer: bytes, now: float) -> float:
        """Return the number of seconds for which the peer is still banned, or 0."""
        until = self._until.get(peer)
        if until is None:
            return 0.0
        if until <= now:
            del self._until[peer]
            return 0.0
        return until - now

    def count(self, now: float) -> int:
        """Return the number of banned peers."""
        while self._until and self._until[oldest := next(iter(self._until))] <= now:
            del self._until[oldest]
        return len(self._until)
