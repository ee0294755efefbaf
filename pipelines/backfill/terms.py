"""What a run is asked to do: all that its results depend on, beside what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kiln.pipelines.backfill.chunks import TimeRange, reach
from kiln.pipelines.batch.offset_range import ALL, UpdateFilter
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.schemas.wire.batch_block import MAX_BLOCK

Source = Literal["frames", "kafka", "files"]

CHUNK: Final = 1_000_000
"""Frames of a chunk."""


@dataclass(frozen=True)
class RunTerms:
    """The terms of a run. Times are µs."""

    name: str
    span: TimeRange
    """the range: from its beginning on, and before its end"""
    decoding: DecodeConfig
    window: int = 1_000_000
    grace: int = 0
    source: Source = "frames"
    files: tuple[str, ...] = ()
    """absolute paths, where the source is files"""
    network: str | None = None
    """of frames; None: all networks. Of files: the network of messages whose topic names none"""
    as_of: int | None = None
    """verified separators count that were known then; None: those known when the run begins"""
    block_limit: int = MAX_BLOCK
    which: UpdateFilter = ALL
    fetch: bool = False
    """whether blocks can be asked for, as in `Separating`"""
    remembered: int = 86_400_000_000
    chunk: int = CHUNK

    @property
    def reads(self) -> TimeRange:
        """What is read of the source: the range, and beyond both edges."""
        far = reach(self.window, self.grace)
        # what was said before the range is in the live tables, where the frames come from there too
        before = far if self.source == "frames" else far + self.remembered
        return TimeRange(self.span.low - before, self.span.high + far)

    def told(self) -> dict[str, object]:
        """The terms as the account keeps them. Runs of one name have the same terms."""
        how = self.decoding
        return {
            "source": self.source,
            "files": list(self.files),
            "network": self.network,
            "window_us": self.window,
            "grace_us": self.grace,
            "as_of": self.as_of,
            "settings": {
                "batch.block_limit": self.block_limit,
                "batch.authors": ["*"] if self.which.authors is None else sorted(self.which.authors),
                "batch.only_verified": self.which.only_verified,
                "batch.typ": how.batch_typ,
                "policy.default": how.default_policy,
                "policy.networks": dict(sorted(how.policies.items())),
                "dedupe.signed": self.remembered,
                "dedupe.unsigned": how.unsigned_horizon,
                "topic_table.bundles": sorted(each.hex() for each, _ in how.bundles.items()),
                "ipfs": self.fetch,
            },
        }


def differences(told: Mapping[str, object], span: TimeRange, terms: RunTerms) -> list[str]:
    """Where the terms of a run that was begun differ from these, in words; none: it is the same run."""
    found = []
    if span != terms.span:
        found.append("its range is another")
    mine = terms.told()
    for key, words in _WORDS.items():
        if told.get(key) != mine[key]:
            found.append(f"its {words} is {_shown(told.get(key))}, not {_shown(mine[key])}")
    then, now = told.get("settings"), mine["settings"]
    if isinstance(then, dict) and isinstance(now, dict):
        found += [
            f"its setting {key} is {_shown(then.get(key))}, not {_shown(now[key])}"
            for key in now
            if then.get(key) != now[key]
        ]
    return found


_WORDS: Final = {
    "source": "source",
    "files": "list of files",
    "network": "network",
    "window_us": "T in µs",
    "grace_us": "grace in µs",
    "as_of": "--as-of in µs",
}


def _shown(value: object) -> str:
    return "none" if value in (None, []) else str(value)
