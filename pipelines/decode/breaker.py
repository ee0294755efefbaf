"""Circuit breaker: stops a query when our own decoding is at fault, and not when peers send garbage (decision 6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kiln.schemas.reject import Rejected
from kiln.schemas.wire.pubsub import read_message

_STREAM = "kjzl6cwe1jw145as2el62s5k2n5xwij7snqu1mngluhpr05xy5wylfswe1zvq39"
_TIP = "bafyreigtsyqmmvgtal3y2ahcs277xjk5prvb673lb3li2i2egz2nhp6u4y"
_MODEL = "k2t6wz4z9kggqqnbn3vqggh2z4fe9jctr9vvbc1em2yho0qnzzrtzz1n2hr4lq"

SAMPLES = (
    ("UPDATE", f'{{"typ":0,"stream":"{_STREAM}","tip":"{_TIP}","model":"{_MODEL}"}}'),
    ("UPDATE", f'{{"typ":0,"doc":"{_STREAM}","tip":"{_TIP}"}}'),
    ("QUERY", f'{{"typ":1,"stream":"{_STREAM}","id":"EiDJzhPfx5LNWKc2G49O42NvgfXb76bhKwTTdXapSujoGg"}}'),
    ("RESPONSE", f'{{"typ":2,"id":"1","tips":{{"{_STREAM}":"{_TIP}"}}}}'),
    ("KEEPALIVE", '{"typ":3,"ts":1646925968077,"ver":"2.35.0","ipfsVer":"0.20.0"}'),
    ("BATCH_UPDATE", f'{{"typ":3,"sep":"model/{_MODEL}","batch":"{_TIP}"}}'),
)


class DecodingBrokenError(RuntimeError):
    """Kiln's own decoding is at fault. The query stops before valid messages fill the quarantine.

    Once Kiln is fixed, the query continues from its checkpoint.
    """


def check_samples() -> None:
    """Decode messages known to be valid.

    Raises:
        DecodingBrokenError: A sample does not decode.
    """
    for kind, text in SAMPLES:
        read = read_message(text.encode())
        if not isinstance(read, Rejected) and read.type != kind:
            raise DecodingBrokenError(f"this build is broken: it decodes a valid {kind} as {read.type}")
        if isinstance(read, Rejected):
            raise DecodingBrokenError(
                f"this build is broken: it cannot decode a valid {kind} ({read.reason}: {read.detail})"
            )


class AuthorTally(NamedTuple):
    """Counts of one author's messages with a valid signature in one micro-batch."""

    author: str
    decoded: int
    failed: int


@dataclass
class DecodeBreaker:
    """Trips when the messages of many authors, which used to decode, no longer do.

    An author has stopped when `streak` messages in a row failed after some that decoded. The breaker trips when at
    least `authors` authors have stopped, and they are more than half of all recent authors whose messages used to
    decode. So neither one peer nor a crowd of new peers that send nothing but garbage can stop the query.
    """

    authors: int = 3
    streak: int = 100
    forget_after: int = 360
    """micro-batches without a message after which an author no longer counts: an hour, by default"""
    _failing: dict[str, int] = field(default_factory=dict)
    _last_seen: dict[str, int] = field(default_factory=dict)
    _observed: int = 0

    def observe(self, tallies: Iterable[AuthorTally]) -> None:
        """Count a micro-batch, even one without faults: an author can stop only after messages that decoded.

        Raises:
            DecodingBrokenError: The breaker trips.
        """
        self._observed += 1
        for tally in tallies:
            if tally.decoded:
                self._failing[tally.author] = 0
            elif tally.author in self._failing:
                self._failing[tally.author] += tally.failed
            else:
                continue
            self._last_seen[tally.author] = self._observed
        for author in [name for name, seen in self._last_seen.items() if seen <= self._observed - self.forget_after]:
            del self._last_seen[author], self._failing[author]
        stopped = [author for author, failures in self._failing.items() if failures >= self.streak]
        if len(stopped) >= self.authors and len(stopped) * 2 > len(self._failing):
            raise DecodingBrokenError(
                f"{len(stopped)} of {len(self._failing)} authors whose messages used to decode have each sent "
                f"{self.streak} or more messages in a row that fail, although their signatures are valid: their "
                "format is new, or this build is broken"
            )
