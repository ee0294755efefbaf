"""How many bytes the node captures of what peers send and how much CPU that takes, and whom it keeps out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from math import exp, inf
from typing import Final, Generic, TypeVar

_HOUR: Final = 3600.0  # seconds
_MINUTE: Final = 60.0  # seconds: over which use is averaged, and whose share a peer may leave unused and take later
_LOOK: Final = 1.0  # seconds between two looks at who uses how much
_TO_SHARE: Final = 0.9  # of the rate of all, while all are over: the rest pays back
_MOST_KNOWN: Final = 10_000  # peers


class _Account:
    __slots__ = ("at", "held", "own", "share", "use")

    def __init__(self, own: float, at: float) -> None:
        self.own = own
        self.share = 0.0
        self.use = 0.0  # bytes; those of a minute ago count by 1/e
        self.held = False  # by the budget of all
        self.at = at


class CaptureBudget:
    """Bytes an hour, or CPU, of one peer and of all together. A period's worth may come at once; after that the rate
    holds.

    Nothing is dropped: `spend` says how long bytes that came are to wait, and meanwhile the peer is not read. While all
    together are over their budget, the rate is shared so that the smallest shares are as great as can be (max-min
    fairness). Who uses less than a share is read at once, whatever others send, and what it leaves goes to the others:
    neither floods nor hundreds of silent peers hold it back. A stranger has nothing saved, so new keys bring nothing.
    A peer that comes again finds its account as it was. Time is the caller's, in seconds.
    """

    def __init__(self, of_peer: float, of_all: float, period: float = _HOUR) -> None:
        """`of_peer`, `of_all`: in `period` seconds."""
        self._of_peer = of_peer
        self._of_all = of_all
        self._period = period
        self._left = float(of_all)
        self._at: float | None = None
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()
        self._share = inf  # bytes a second
        self._looked = -inf

    def spend(self, peer: bytes, size: float, connected: Collection[bytes], now: float) -> float:
        """`size` bytes of a peer have come. `connected`: all peers. The seconds for which the bytes are to wait.

        To be asked again after a second, with no bytes: when others go, it is sooner.
        """
        rate = self._of_all / self._period
        elapsed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._left = min(self._of_all, self._left + elapsed * rate) - size
        if now - self._looked >= _LOOK:
            self._looked = now
            self._share = self._fair_share(connected, now)
        account = self._account(peer, now)
        elapsed = max(0.0, now - account.at)
        account.at = now
        own_rate = self._of_peer / self._period
        account.own = min(self._of_peer, account.own + elapsed * own_rate) - size
        account.use = account.use * exp(-elapsed / _MINUTE) + size
        saved = max(account.share, _MINUTE * rate / max(1, len(connected)))
        account.share = min(saved, account.share + elapsed * self._share)
        pause = 0.0
        if self._left < 0:
            account.share -= size
            pause = max(0.0, -account.share / self._share)
        account.held = pause > 0
        return max(pause, -account.own / own_rate)

    def _fair_share(self, connected: Collection[bytes], now: float) -> float:
        """Bytes a second: those who use more get so much, and all together get what is to be shared."""
        accounts = [account for account in map(self._accounts.get, connected) if account is not None]
        # nobody knows how much a peer wants that is held back
        wants = sorted(inf if a.held else a.use * exp((a.at - now) / _MINUTE) / _MINUTE for a in accounts)
        left = self._of_all / self._period * _TO_SHARE
        for number, want in enumerate(wants):
            sharing = len(wants) - number
            if want * sharing >= left:
                return left / sharing
            left -= want
        return left + (wants[-1] if wants else 0.0)

    def _account(self, peer: bytes, now: float) -> _Account:
        account = self._accounts.get(peer)
        if account is None:
            account = self._accounts[peer] = _Account(self._of_peer, now)
            if len(self._accounts) > _MOST_KNOWN:
                self._accounts.popitem(last=False)
        else:
            self._accounts.move_to_end(peer)
        return account


_Peer = TypeVar("_Peer", bound=Hashable)


class UnfinishedRpcs(Generic[_Peer]):
    """Bytes of RPCs that have begun and not ended. Each peer may have one of the longest under way, and hundreds of
    silent peers with one each would fill the memory."""

    def __init__(self, most: int) -> None:
        """`most`: of all together."""
        self._most = most
        self._held: dict[_Peer, int] = {}
        self._sum = 0

    def holds(self, peer: _Peer, size: int) -> _Peer | None:
        """So many are of this peer now. Who holds most, where all together are over the bound: its are to go."""
        before = self._held.pop(peer, 0)
        if size:
            self._held[peer] = size
        self._sum += size - before
        return max(self._held, key=self._held.__getitem__) if self._sum > self._most else None


class BanList:
    """Peers that are kept out, each for so many seconds. Holds so many peers; the longest banned goes first."""

    def __init__(self, seconds: float, most: int = _MOST_KNOWN) -> None:
        self._seconds = seconds
        self._most = most
        self._until: dict[bytes, float] = {}

    def add(self, peer: bytes, now: float) -> None:
        self._until.pop(peer, None)
        self._until[peer] = now + self._seconds
        if len(self._until) > self._most:
            del self._until[next(iter(self._until))]

    def left(self, peer: bytes, now: float) -> float:
        """For how many seconds more the peer is kept out; 0.0: it may come."""
        until = self._until.get(peer)
        if until is None:
            return 0.0
        if until <= now:
            del self._until[peer]
            return 0.0
        return until - now

    def count(self, now: float) -> int:
        """How many peers are kept out now."""
        while self._until and self._until[oldest := next(iter(self._until))] <= now:
            del self._until[oldest]
        return len(self._until)
