"""Circuit breaker: stops a query if Kiln's own decoder is at fault, but not if peers send invalid messages (decision
6)."""

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
    """Kiln's own decoder is at fault. The query stops, before valid messages fill the quarantine.

    With a fixed Kiln, the query continues from its checkpoint.
    """


def check_samples() -> None:
    """Decode messages that are known to be valid.

    Raises:
        DecodingBrokenError: One of them cannot be decoded.
    """
    for kind, text in SAMPLES:
        read = read_message(text.encode())
        if not isinstance(read, Rejected) and read.type != kind:
            raise DecodingBrokenError(
                f"this build is broken: it decodes a valid {kind} as {read.type}. Run make setup, or install Kiln again"
            )
        if isinstance(read, Rejected):
            raise DecodingBrokenError(
                f"this build is broken: it cannot decode a valid {kind} ({read.reason}: {read.detail}). Run make "
                "setup, or install Kiln again"
            )


class AuthorTally(NamedTuple):
    """Numbers of an author's messages in one micro-batch that could and could not be decoded. All have a valid
    signature."""

    author: str
    decoded: int
    failed: int


@dataclass
class DecodeBreaker:
    """Circuit breaker that trips when the messages of many authors can no longer be decoded.

    An author counts as broken after `streak` failed messages in a row, if a message of the author was decoded before.
    The breaker trips when at least `authors` authors are broken, and these are more than half of all recent authors of
    decoded messages. So neither a single peer nor a crowd of new peers that send only invalid messages can stop the
    query.
    """

    authors: int = 3
    streak: int = 100
    forget_after: int = 360
    """number of micro-batches without a message of an author after which the author is forgotten: an hour, by
    default"""
    _failing: dict[str, int] = field(default_factory=dict)
    _last_seen: dict[str, int] = field(default_factory=dict)
    _observed: int = 0

    def observe(self, tallies: Iterable[AuthorTally]) -> None:
        """Count the messages of a micro-batch. Call it for each micro-batch, even one without failures, because an
        author counts only after one of the author's messages was decoded.

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
                f"{self.streak} or more messages in a row that cannot be decoded, although the signatures are valid: "
                "their format is new, or this build is broken"
            )
