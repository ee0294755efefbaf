"""Terms of a backfill run: the options and settings on which its result depends. Times are µs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.decode.decoder import DecodeConfig

Source = Literal["frames", "kafka", "files"]

CHUNK: Final = 1_000_000
"""Number of frames that a run processes at once, in one chunk"""

_LATENESS: Final = 600_000_000
"""Longest delay (µs) of updates in `kiln.updates` with which windows at the edges of a run are still exact"""

UPDATES_PER_STEP: Final = 2_000_000
"""Number of updates whose windows are built at once"""


class TimeRange(NamedTuple):
    """A time range from `low` (inclusive) to `high` (exclusive), in µs."""

    low: int
    high: int

    def __contains__(self, at: object) -> bool:
        return isinstance(at, int) and self.low <= at < self.high


def count_pieces(count: int, size: int) -> int:
    """Compute the number of pieces into which `count` items are divided, with at most `size` items each; at least 1."""
    return max(1, -(-count // size))


def split_range(whole: TimeRange, split_times: list[int]) -> list[TimeRange]:
    """Split a time range at the times that are within it."""
    edges = [whole.low, *sorted({at for at in split_times if whole.low < at < whole.high}), whole.high]
    return [TimeRange(low, high) for low, high in pairwise(edges)]


@dataclass(frozen=True)
class RunTerms:
    """Terms of a backfill run: the options and settings on which its result depends. Times are µs."""

    name: str
    span: TimeRange
    """time range whose rows the run makes"""
    decoding: DecodeConfig
    batching: BatchConfig = field(default_factory=BatchConfig)
    source: Source = "frames"
    files: tuple[str, ...] = ()
    """absolute paths, if the source is files"""
    network: str | None = None
    """network of the frames to process, or `None` for all. If the source is files, network of messages whose topic does
    not name a network"""
    as_of: int | None = None
    """only separators that were verified by this time count as verified; `None` for the start of the run"""
    fetch: bool = False
    """true if the bridge can fetch blocks, as in `SeparatorConfig`"""
    signed_horizon: int = 86_400_000_000
    """time during which a copy of a signed message is recognised as a repeat"""
    chunk: int = CHUNK
    """number of frames in a chunk"""

    @property
    def margin(self) -> int:
        """Time (µs) that the run reads beyond both ends of its range, for windows and late updates there."""
        return _LATENESS + self.batching.window + self.batching.grace

    @property
    def read_span(self) -> TimeRange:
        """Time range of the frames that the run reads: `span`, and some time before and after it."""
        # If the source is the table `frames`, earlier messages are in the live tables.
        before = self.margin if self.source == "frames" else self.margin + self.signed_horizon
        return TimeRange(self.span.low - before, self.span.high + self.margin)

    def to_details(self) -> dict[str, object]:
        """Convert the terms to a dict for the run's log, in the event `begun`."""
        config, batching = self.decoding, self.batching
        authors = batching.update_filter.authors
        return {
            "source": self.source,
            "files": list(self.files),
            "network": self.network,
            "window_us": batching.window,
            "grace_us": batching.grace,
            "as_of": self.as_of,
            "settings": {
                "batch.max_block_bytes": batching.block_limit,
                "batch.authors": ["*"] if authors is None else sorted(authors),
                "batch.only_verified": batching.update_filter.only_verified,
                "batch.typ": config.batch_typ,
                "policy.default": config.default_policy,
                "policy.networks": dict(sorted(config.policies.items())),
                **({"policy.topics": dict(sorted(config.topic_policies.items()))} if config.topic_policies else {}),
                "dedupe.signed_ttl": self.signed_horizon,
                "dedupe.unsigned_ttl": config.unsigned_horizon,
                "topic_table.bundles": sorted(bundle.hex() for bundle, _ in config.bundles.items()),
                "ipfs": self.fetch,
                # absent on a Ceramic network, so that runs from before these settings continue
                **({"network.message_id": config.message_ids.text} if config.message_ids.by_content else {}),
                **({} if config.ceramic else {"network.kind": "gossip", "network.decoder": config.decoder}),
            },
        }


def describe_differences(details: Mapping[str, object], span: TimeRange, terms: RunTerms) -> list[str]:
    """Describe how the terms of a run that was begun differ from other terms; empty if they are equal.

    Args:
        details: Details of the run's event `begun`.
        span: Time range of the run.
    """
    differences = []
    if span != terms.span:
        differences.append("it has another time range")
    mine = terms.to_details()
    for key, name in _TERM_NAMES.items():
        if details.get(key) != mine[key]:
            differences.append(f"its {name} is {_format(details.get(key))}, not {_format(mine[key])}")
    then, now = details.get("settings"), mine["settings"]
    if isinstance(then, dict) and isinstance(now, dict):
        differences += [
            f"its setting {key} is {_format(then.get(key))}, not {_format(now.get(key))}"
            for key in {**then, **now}
            if then.get(key) != now.get(key)
        ]
    return differences


_TERM_NAMES: Final = {
    "source": "source",
    "files": "list of files",
    "network": "network",
    "window_us": "window length in µs",
    "grace_us": "grace in µs",
    "as_of": "--as-of in µs",
}


def _format(value: object) -> str:
    return "none" if value in (None, []) else str(value)
