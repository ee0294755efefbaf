"""Builds the snapshots of a run from its queries, topics and bridge."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

from kiln.conf.settings.model import JobName, Settings
from kiln.deploy.ops.snapshot import BridgeInRun, QualityInRun, Snapshot
from kiln.deploy.ops.watch import TopicWatch
from kiln.pipelines.app.supervisor import Supervisor
from kiln.pipelines.runtime.query_status import QueryState, QueryWatch
from kiln.pipelines.runtime.topic_ends import Ends
from kiln.schemas.queries import CONTROL_PREFIX, QUERIES

_RATE_SECONDS: Final = 60.0


class SnapshotBuilder:
    """Builds snapshots with `build`, from counts that queries report to `count` in any thread."""

    def __init__(
        self,
        settings: Settings,
        names: Sequence[JobName],
        watch: TopicWatch,
        *,
        mode: str,
        duration: timedelta | None,
        started: float,
    ) -> None:
        """Create the builder.

        Args:
            settings: The settings.
            names: Queries, in the order of the screen.
            watch: Counts of the topics.
            mode: Source of frames.
            duration: Duration limit of the run.
            started: Start of the run, monotonic s.
        """
        self._settings = settings
        self._names = names
        self._watch = watch
        self.mode = mode
        """source of frames, or "draining"; may be changed"""
        self._duration = duration
        self._started = started
        self._messages: dict[str, int] = {}
        self._copies: int | None = None
        self._core_differences = 0
        self._control_entries: dict[str, int] = {}
        self._earlier_entries: deque[tuple[float, dict[str, int]]] = deque([(started, {})])
        self._counting = threading.Lock()
        self._watches = {name: QueryWatch(name, map(settings.kafka.topic, QUERIES[name].reads)) for name in names}
        self._first_end: int | None = None
        self._last_count: tuple[float, int] = (started, 0)  # time and number of frames
        self._rate: float | None = None
        self.frames = 0
        """frames written to Kafka since the first snapshot"""

    def count(self, query: str, counts: Mapping[str, int]) -> None:
        """Add the counts that a query reports for a micro-batch."""
        with self._counting:
            self._core_differences += counts.get("core_differences", 0)
        if query == "archive":
            with self._counting:
                self._copies = (self._copies or 0) + counts.get("copies", 0)
                for name, number in counts.items():
                    if name.isupper():  # types; reasons are counted from the topic `quarantine`
                        self._messages[name] = self._messages.get(name, 0) + number
                    elif name.startswith(CONTROL_PREFIX):
                        kind = name.removeprefix(CONTROL_PREFIX)
                        self._control_entries[kind] = self._control_entries.get(kind, 0) + number

    @property
    def messages(self) -> dict[str, int]:
        """Valid messages of this run by type, without duplicates."""
        with self._counting:
            return dict(self._messages)

    def build(
        self,
        now: float,
        ends: Ends,
        queries: Supervisor,
        bridge: BridgeInRun | None,
        errors: Sequence[str],
        broker: str = "",
        quality: QualityInRun | None = None,
    ) -> Snapshot:
        """Build a snapshot.

        Args:
            now: Monotonic s.
            ends: End offsets of the topics.
            queries: The queries.
            bridge: State of the bridge, if there is one.
            errors: Errors of other components than the queries.
            broker: Problem with the broker, which is also one of `errors`.
            quality: Last check of the tables.
        """
        self._count_frames(now, sum(ends.get(self._settings.kafka.topic("frames"), {}).values()))
        counts, messages = self._watch.counts, self.messages
        with self._counting:
            entries = dict(self._control_entries)
        return Snapshot(
            network=self._settings.network.name,
            is_ceramic=self._settings.is_ceramic,
            mode=self.mode,
            elapsed=timedelta(seconds=now - self._started),
            duration=self._duration,
            frames=self.frames,
            frames_rate=self._rate,
            messages=messages,
            copies=self._copies,
            core_differences=self._core_differences,
            control_entries=entries,
            control_rates=self._compute_rates(now, entries),
            open_separators=len(self._watch.open_windows),
            batches=counts.batches,
            newest_batches=tuple(counts.newest),
            window=self._settings.batch.window,
            late_p50=counts.percentile(0.5),
            late_p99=counts.percentile(0.99),
            late_by_bucket=tuple(counts.late_by_bucket),
            late_sum=counts.late_sum,
            tips=counts.tips,
            quarantine=dict(counts.quarantine),
            queries=[self._line(now, name, ends, queries) for name in self._names],
            bridge=bridge,
            quality=quality,
            broker=broker,
            errors=[*(f"{name}: {text}" for name, text in queries.errors.items()), *errors],
        )

    def _line(self, now: float, name: JobName, ends: Ends, queries: Supervisor) -> QueryState:
        return self._watches[name].build_state(
            now,
            ends,
            queries.progress.get(name),
            restarts=queries.restarts.get(name, 0),
            error=queries.errors.get(name, ""),
            tripped=name in queries.held_queries,
        )

    def _compute_rates(self, now: float, entries: dict[str, int]) -> dict[str, float]:
        """Compute the entries per second since a minute ago, or since the start of the run."""
        earlier = self._earlier_entries
        if now - earlier[-1][0] >= 1:
            earlier.append((now, entries))
        while len(earlier) > 1 and now - earlier[1][0] >= _RATE_SECONDS:
            earlier.popleft()
        then, before = earlier[0]
        return {kind: (number - before.get(kind, 0)) / max(1.0, now - then) for kind, number in entries.items()}

    def _count_frames(self, now: float, frames: int) -> None:
        if self._first_end is None:
            self._first_end = frames
        then, last_frames = self._last_count
        if last_frames and now > then:
            self._rate = (frames - last_frames) / (now - then)
        self._last_count = (now, frames)
        self.frames = frames - self._first_end
