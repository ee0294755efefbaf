"""Detection and repair of damaged checkpoints and tables, while no query runs (`kiln recover`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final, Self

import pyarrow as pa
from kafka.errors import KafkaError

from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.state_folder import lock_state
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Settings
from kiln.deploy.ops.maintenance import LOCK as MAINTAIN
from kiln.deploy.stack.kafka_broker import Say, start_broker
from kiln.pipelines.app.supervisor import build_damage_location, read_progress_report, read_topics
from kiln.pipelines.decode.identities import compute_column_identities
from kiln.pipelines.delta.lake import Lake, LakeError, build_missing_files_error, read_rows
from kiln.pipelines.recovery import (
    Damage,
    DamageError,
    adopt_topics,
    advance_query,
    examine,
    offer_restore,
    recover_tables,
    set_files_aside,
)
from kiln.pipelines.runtime.topics import KafkaTopics, ProgressMarker, TopicState
from kiln.pipelines.sink.rows import read_stored_identities
from kiln.schemas.kafka import topics as log
from kiln.schemas.queries import QUERIES
from kiln.schemas.wire.identity import VERDICT_NAMES, Verdict


def read_message_identities(lake: Lake, horizon: int) -> Iterator[tuple[bytes, ...]]:
    """Compute the deduplication digests of all rows of `messages`, by which `archive` recognises later copies.
    `horizon` is `dedupe.unsigned_ttl` in µs."""
    columns = ["network", "message_id", "verdict", "observed_at"]
    for batch in read_rows(lake.open("messages"), columns):
        times = batch.column("observed_at").cast(pa.int64()).to_pylist()
        texts = (batch.column(name).to_pylist() for name in columns[:3])
        for network, message_id, verdict, observed_at in zip(*texts, times, strict=True):
            is_signed = verdict == _SIGNED
            yield compute_column_identities(network, message_id, is_signed, observed_at, "", horizon)


_SIGNED: Final = VERDICT_NAMES[Verdict.VALID]


def _examine_table(lake: Lake, table: str) -> list[Damage]:
    """Return the damage of a table that cannot be opened or lacks data files; empty if there is none."""
    try:
        error: LakeError | None = build_missing_files_error(lake, table, lake.open(table))
    except LakeError as cause:
        error = cause
    return [Damage(f"table {table}", str(error), 'See "A table cannot be read" in docs/RUNBOOK.md')] if error else []


class Recovery:
    """Finds and repairs damage. In its context, no query and no table maintenance can run on the state folder.

    Raises:
        StateInUseError: A query or table maintenance runs. Raised when the context is entered.
    """

    def __init__(self, settings: Settings, say: Say) -> None:
        self._settings = settings
        self._location = build_damage_location(settings)
        self._say = say
        self._locks = ExitStack()
        self._topics: dict[str, dict[str, TopicState]] = {}
        """state of the topics that each query reads, by query and topic"""

    def __enter__(self) -> Self:
        with ExitStack() as locks:
            for name in (*QUERIES, MAINTAIN):
                locks.enter_context(lock_state(self._settings.state, name))
            self._locks = locks.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._locks.close()

    def find(self, query: str = "") -> list[Damage]:
        """Find damage of checkpoints and tables, also by comparison with Kafka, if this Kiln has a broker.

        An embedded broker is started for that.

        Args:
            query: Restrict the search to this query. A query that can be restored is returned even if it is undamaged,
                so that the user can restore it.

        Returns:
            At most one `Damage` for each query, and one for each other table that cannot be read.
        """
        progress = None
        if query or self._settings.kafka.bootstrap or (self._settings.state / "broker").is_dir():
            kafka = KafkaTopics(self._settings.broker.client_options)
            try:
                self._locks.enter_context(start_broker(self._settings, self._say, check_topics=False))
                self._topics = read_topics(self._settings, kafka, QUERIES)
                progress = read_progress_report(self._settings)
            except (PrerequisiteError, KafkaError) as error:
                self._say(f"cannot compare the checkpoints with Kafka, so stale checkpoints are not found: {error}")
            finally:
                kafka.close()
        damages = [*examine(self._location, QUERIES, progress, self._topics)]
        problems = " ".join(damage.problem for damage in damages)
        lake = self._location.lake
        for table in lake.tables():
            if lake.table(table) not in problems:
                damages += _examine_table(lake, table)
        if not query:
            return damages
        undamaged = offer_restore(self._location, Damage(query, "no damage was found", ""))
        return [damage for damage in damages if damage.query == query] or [undamaged] * undamaged.is_restorable

    def repair(self, damages: Sequence[Damage], now: int) -> list[Damage]:
        """Repair damages that `find` returned. `now` is the current time in µs.

        Returns:
            The damages that remain. If a repair failed, `remedy` has the error.
        """
        left: list[Damage] = []
        for damage in damages:
            try:
                if damage.is_self_repairing:
                    set_files_aside(self._location, damage)
                elif damage.advance_from is not None:
                    advance_query(self._location, damage, self._find_state_start(damage.advance_from.ends, now), now)
                elif damage.adopted_topics:
                    adopt_topics(self._location, damage)
                elif damage.is_restorable:
                    self._recover_tables(damage.query, now)
                else:
                    left.append(damage)
            except DamageError as error:
                left.append(
                    replace(damage, remedy=str(error), is_restorable=False, advance_from=None, adopted_topics={})
                )
        return left

    def _recover_tables(self, query: str, now: int) -> None:
        dedupe, durable, master = (
            self._settings.dedupe,
            self._settings.durability == "power",
            self._settings.spark.master,
        )
        if not master.startswith("local"):
            raise DamageError(
                f"cannot rebuild the deduplication state of {query}: with spark.master = {master}, it is in Spark's "
                "state store. Restart the query from scratch (docs/RUNBOOK.md, State)"
            )
        read_identities = (
            read_stored_identities
            if query == "sink"
            else partial(read_message_identities, horizon=micros(dedupe.unsigned_ttl))
        )
        recover_tables(self._location, query, self._topics.get(query, {}), read_identities, now, durable=durable)

    def _find_state_start(self, ends: log.Offsets, now: int) -> log.Offsets:
        """Find the offsets from which `updates` must read again to rebuild its deduplication state. It has read up to
        `ends`."""
        kafka = self._settings.broker
        try:
            with ProgressMarker(kafka.client_options(), kafka.topic("updates")) as marker:
                return marker.find_offsets_since(ends, (now - micros(self._settings.dedupe.signed_ttl)) // 1_000)
        except KafkaError as error:
            raise DamageError(
                f"cannot read offsets from the broker {kafka.servers}: {error}. Check the broker and try again"
            ) from error
