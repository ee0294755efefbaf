"""What `kiln backfill run` shows of its run."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from kiln.pipelines.backfill.run import RunOutcome, RunProgress


class ProgressFormatter:
    """Says how far a run is, how fast it goes, and how long the step that it is at will take."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._step = ""
        self._began = 0.0
        self._first = RunProgress("", 0, 0)

    def words(self, progress: RunProgress) -> str:
        """A line."""
        now = self._now()
        if progress.step != self._step:
            self._step, self._began, self._first = progress.step, now, progress
        seconds, done = now - self._began, progress.done - self._first.done
        words = [f"{progress.step}: {progress.done} of {progress.total}"]
        if progress.done_until is not None:
            upto = datetime.fromtimestamp(progress.done_until / 1_000_000, UTC)
            words.append(f"up to {upto:%Y-%m-%d %H:%M:%S}")
        if progress.rows:
            words.append(f"{progress.rows:,} rows")
        frames = progress.frames - self._first.frames
        if frames and seconds > 0:
            words.append(f"{frames / seconds:,.0f} frames/s")
        if done > 0 and progress.total > progress.done:
            left = timedelta(seconds=round(seconds / done * (progress.total - progress.done)))
            words.append(f"{left} left in this step")
        return ", ".join(words)


def describe_outcome(outcome: RunOutcome, publish: bool = False) -> str:
    """The end of a run in words. `publish`: its batches were to be published."""
    tables = ", ".join(f"{rows:,} {table}" for table, rows in sorted(outcome.rows.items()))
    words = f"the run {outcome.name} is done: {tables or 'no rows'}"
    if not outcome.rows_written:
        words = f"the run {outcome.name} was done already: nothing is written"
    if outcome.lost:
        words += f"; when it began, its source lacked: {'; '.join(outcome.lost)}"
    if publish:
        words += f"; {outcome.published:,} batches are handed to the bridge to be published"
    return words


def encode_outcome(outcome: RunOutcome) -> dict[str, object]:
    """The end of a run, for --json."""
    return {
        "run": outcome.name,
        "wrote": outcome.rows_written,
        "frames": outcome.frames,
        "rows": dict(outcome.rows),
        "published": outcome.published,
        "gone": list(outcome.lost),
    }
