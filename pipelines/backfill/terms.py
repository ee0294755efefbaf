"""Terms of a run: everything that its results depend on, except its inputs; and the chunks of a run. Times are µs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.decode.decoder import DecodeConfig

Source = Literal["frames", "kafka", "files"]

CHUNK: Final = 1_000_000
"""Frames of a chunk."""

_LATENESS: Final = 600_000_000
"""Maximum disorder of updates in the log up to which windows at the edges of a run are exact."""

UPDATES_PER_STEP: Final = 2_000_000
"""Updates whose windows one step builds."""


class TimeRange(NamedTuple):
    """The times from `low` to before `high`."""

    low: int
    high: int

    def __contains__(self, at: object) -> bool:
        return isinstance(at, int) and self.low <= at < self.high


def count_pieces(count: int, size: int) -> int:
    """Count the pieces of `size` that hold `count` items; at least one."""
    return max(1, -(-count // size))


def split_range(whole: TimeRange, split_times: list[int]) -> list[TimeRange]:
    """Split a range at the times within it. Empty chunks are left out."""
    edges = [whole.low, *sorted({at for at in split_times if whole.low < at < whole.high}), whole.high]
    return [TimeRange(low, high) for low, high in pairwise(edges)]


@dataclass(frozen=True)
class RunTerms:
    """The terms of a run. Times are µs."""

    name: str
    span: TimeRange
    """the range"""
    decoding: DecodeConfig
    batching: BatchConfig = field(default_factory=BatchConfig)
    source: Source = "frames"
    files: tuple[str, ...] = ()
    """absolute paths, where the source is files"""
    network: str | None = None
    """network of the frames, or `None` for all; with files, the network of messages whose topic names none"""
    as_of: int | None = None
    """time as of which verified separators are known, or `None` for the begin of the run"""
    fetch: bool = False
    """true if blocks can be fetched, as in `SeparatorConfig`"""
    signed_horizon: int = 86_400_000_000
    chunk: int = CHUNK

    @property
    def margin(self) -> int:
        """Time that the run reads beyond both edges of its range, because of open windows and disorder there, µs."""
        return _LATENESS + self.batching.window + self.batching.grace

    @property
    def read_span(self) -> TimeRange:
        """The range that the run reads of its source: `span` and its margins."""
        # If the source is the table `frames`, earlier messages are in the live tables.
        before = self.margin if self.source == "frames" else self.margin + self.signed_horizon
        return TimeRange(self.span.low - before, self.span.high + self.margin)

    def to_details(self) -> dict[str, object]:
        """Convert the terms to the details of the event `begun`."""
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
    """Describe how the terms of a begun run, `details` and `span`, differ from `terms`; empty for the same run."""
    differences = []
    if span != terms.span:
        differences.append("its range is different")
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
    "window_us": "T in µs",
    "grace_us": "grace in µs",
    "as_of": "--as-of in µs",
}


def _format(value: object) -> str:
    return "none" if value in (None, []) else str(value)
