"""Detection and repair of damage by power loss, of checkpoints older than their tables, and of re-created topics.

No repair duplicates rows, or loses rows that the tables or Kafka still have (decision 19):

- `repair` moves damaged files of the newest micro-batches away. It runs at each start of the queries.
- `recover_tables` restores the tables of `archive` or `sink` to the newest micro-batch that all of them have. The query
  continues after this micro-batch with a new checkpoint.
- `advance_query` is for `updates`, which has no table. The query continues after its newest output in Kafka, with a new
  checkpoint and deduplication state that is rebuilt from Kafka.
- `adopt_topics` lets a query continue in topics that were created again, with its tables and state.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from kiln.conf.process.errors import KilnError
from kiln.conf.process.files import to_disk
from kiln.conf.process.location import Location, parse_location
from kiln.pipelines.delta.lake import Lake, LakeError, locate_commit, locate_log
from kiln.pipelines.delta.log_faults import TableLog, find_newest_write, inspect_log, restore_version
from kiln.pipelines.delta.table_progress import RestoreError, RestorePoint, find_restore_point
from kiln.pipelines.runtime.checkpoint import (
    FIRST_OFFSETS_FILE,
    GENERATION_FILE,
    REPLACED_EPOCH_FILE,
    Checkpoint,
    LastIntactMicroBatch,
    find_sound_end,
    is_whole,
    list_files_after,
    list_torn_files,
    read_topic_ids,
    save_topic_ids,
    write_checkpoint,
)
from kiln.pipelines.runtime.dedup_store import (
    FILE_NAME,
    DedupStoreConfig,
    DedupStoreError,
    build_dedup_store,
    find_missing_digests,
    has_dedup_state,
    read_marked_epoch,
    release_positions,
)
from kiln.pipelines.runtime.table_ages import find_older_table, list_done_writes
from kiln.pipelines.runtime.topics import ProgressReport, TopicState, find_mismatches
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka import topics as log
from kiln.schemas.kafka.records import Epoch
from kiln.schemas.queries import QUERIES


class DamageError(KilnError):
    """A checkpoint or table is damaged or outdated, and the user must run `kiln recover`."""


@dataclass(frozen=True)
class DamageLocation:
    """State folder, checkpoints and lake that `examine` checks and the repairs change."""

    state: Path
    checkpoints: Location
    """folder with one checkpoint for each query"""
    lake: Lake


@dataclass(frozen=True)
class Damage:
    """Damage of the checkpoint or tables of one query, or of one table that no query writes."""

    query: str
    problem: str
    remedy: str
    files: tuple[Path, ...] = ()
    """damaged files"""
    files_to_set_aside: tuple[Path, ...] = ()
    """files to move away, if this alone repairs the damage; `repair` does it"""
    is_restorable: bool = False
    """true if `recover_tables` can repair the damage"""
    advance_from: ProgressReport | None = None
    """progress after which `advance_query` can let the query continue"""
    adopted_topics: Mapping[str, TopicState] = field(default_factory=dict)
    """re-created topics by name, in which `adopt_topics` can let the query continue at the offsets `begin`"""

    @property
    def is_self_repairing(self) -> bool:
        return bool(self.files_to_set_aside)

    @property
    def is_repairable(self) -> bool:
        return (
            self.is_self_repairing or self.is_restorable or self.advance_from is not None or bool(self.adopted_topics)
        )


def examine(
    location: DamageLocation,
    names: Iterable[str],
    progress: ProgressReport | None = None,
    topics: Mapping[str, Mapping[str, TopicState]] | None = None,
) -> list[Damage]:
    """Examine the checkpoints and tables of queries, and the tables that no query writes.

    Args:
        names: Queries to examine.
        progress: Progress that `updates` has committed to Kafka, or `None` if it is not known.
        topics: By query, the topics that it reads, by name with prefix; `None` if they are not known.

    Returns:
        At most one `Damage` for each query, and for each table that no query writes.
    """
    damages: list[Damage | None] = []
    for name in names:
        damage = _examine(location, name)
        if damage is None or not damage.is_self_repairing:
            query_progress = progress if name == "updates" else None
            damage = damage or _examine_topics(location, name, (topics or {}).get(name, {}))
            damage = damage or _examine_progress(location, name, query_progress)
            damage = damage and offer_restore(location, damage)
        damages.append(damage)
    damages += (_examine_log_of(location.lake, table) for table in _UNQUERIED_TABLES)
    return [damage for damage in damages if damage is not None]


def repair(
    location: DamageLocation,
    names: Collection[str],
    progress: ProgressReport | None = None,
    topics: Mapping[str, Mapping[str, TopicState]] | None = None,
) -> list[str]:
    """Repair all damage that can be repaired by moving files away. The arguments are those of `examine`.

    Returns:
        A description of each repair.

    Raises:
        DamageError: There is damage that only `kiln recover` repairs.
    """
    damages = examine(location, names, progress, topics)
    for damage in damages:
        if not damage.is_self_repairing:
            raise DamageError(
                f"{damage.query} cannot start: {damage.problem}. Run kiln recover, which lists the repairs"
            )
    repairs = [set_files_aside(location, damage) for damage in damages]
    # once a torn file is gone, more may be detected
    return repairs + repair(location, names, progress, topics) if repairs else []


def set_files_aside(location: DamageLocation, damage: Damage) -> str:
    """Repair damage by moving files to the folder `set-aside`, and return a description of the repair."""
    for path in damage.files_to_set_aside:
        _set_aside(location, path)
    return f"{damage.query}: {damage.problem}. {damage.remedy}"


def recover_tables(
    location: DamageLocation,
    name: str,
    topics: Mapping[str, TopicState],
    read_identities: Callable[[Lake], Iterable[tuple[bytes, ...]]],
    now: int,
    *,
    durable: bool,
) -> None:
    """Restore the tables of `archive` or `sink`, and give the query a new checkpoint.

    The tables are restored to the newest micro-batch that all of them have. The query then reads the later records from
    Kafka again. A call that was interrupted can be repeated.

    Args:
        topics: The topics that the query reads, by name with prefix.
        read_identities: Reads the digests of the rows in the tables, for the deduplication file.
        now: Time from which the retention of these digests counts, µs.
        durable: True if the deduplication file must survive a power cut.

    Raises:
        DamageError: Rows would be lost. Nothing was changed.
    """
    lake, checkpoints = location.lake, location.checkpoints.folder
    obstacle = _find_obstacle(location, name)
    if checkpoints is None or obstacle:
        raise DamageError(f"{obstacle}. {_RESTORE_OR_RESTART}")
    logs = _read_table_logs(lake, name)
    if any(log.within for log in logs.values()):
        damaged = [_log_entry_path(lake, table, version) for table, log in logs.items() for version in log.within]
        raise DamageError(
            f"cannot restore the tables of {name}: the commit {_list_names(damaged)} is damaged, and later commits are "
            f"intact. {_NOTHING_TO_RESTORE}"
        )
    moved = [file for path in _list_torn_logs(lake, logs) for file in _set_aside(location, path)]
    try:
        point = find_restore_point(lake, QUERIES[name].tables)
        begin, is_replaced = _find_begin(name, point, topics) if point is not None else ({}, False)
    except (DamageError, LakeError, RestoreError) as error:
        for path, aside in moved:  # whoever restores other files needs the commits that contain them
            shutil.move(aside, path)
        raise error if isinstance(error, DamageError) else DamageError(f"{error}. {_RESTORE_OR_RESTART}") from error
    old, fresh = checkpoints / name, checkpoints / f"{name}.new"
    if point is not None:
        for table, version in ({} if is_replaced else point.versions).items():
            restore_version(lake, table, version)
        lake.create(QUERIES[name].tables)
        write_checkpoint(fresh, begin, {GENERATION_FILE: str(point.generation + 1)})
        save_topic_ids(parse_location(fresh), {topic: state.id for topic, state in topics.items()})
        epoch = Epoch(Checkpoint(parse_location(fresh)).query_id, -1)
        build_dedup_store(DedupStoreConfig(str(fresh / FILE_NAME), 1, durable), read_identities(lake), epoch, now)
    if old.exists():
        _set_aside(location, old)
    if point is not None:
        fresh.rename(old)
    to_disk(checkpoints)


def _find_obstacle(location: DamageLocation, name: str) -> str:
    """Describe why a query's deduplication state cannot be rebuilt from its tables; empty if it can be rebuilt."""
    if location.checkpoints.folder is None:
        return (
            f"cannot restore the tables of {name}: its checkpoint is in an object store, so its deduplication state is "
            "in Spark's state store, which cannot be rebuilt from tables"
        )
    if (location.checkpoints.folder / name / "state").exists():
        return (
            f"cannot restore the tables of {name}: its deduplication state is in Spark's state store, which cannot be "
            "rebuilt from tables"
        )
    return ""


def _find_begin(name: str, point: RestorePoint, topics: Mapping[str, TopicState]) -> tuple[log.Offsets, bool]:
    """Find the offsets at which a query continues after its tables are restored.

    They are the end offsets in the restored tables' commits, or the oldest offsets of a topic that was created again.

    Returns:
        The offsets, and true if a topic was created again. Its old records cannot be read again, so the tables must
            keep all their rows.

    Raises:
        DamageError: Kafka no longer has the records after these offsets, or did not answer.
    """
    if missing := sorted(point.offsets.keys() - topics.keys()):
        raise DamageError(
            f"cannot restore the tables of {name}: cannot read its topics {', '.join(missing)} from Kafka. Start the "
            "broker, or correct kafka.bootstrap, and run kiln recover again"
        )
    mismatches = find_mismatches(point.topics, point.offsets, topics)
    begin: dict[str, Mapping[int, int]] = {topic: mismatch.begin for topic, mismatch in mismatches.items()}
    for topic in topics.keys() - mismatches.keys():
        state, known = topics[topic], point.offsets.get(topic, {})
        begin[topic] = {**state.begin, **known}
        for part, at in known.items():
            oldest = state.begin.get(part, 0)
            if oldest > at:
                raise DamageError(
                    f"cannot restart {name} at the offset {at:,} of {topic}-{part}: the oldest record in Kafka has "
                    f"the offset {oldest:,}, so the records in between would be lost. {_RESTORE_OR_RESTART}"
                )
    return begin, bool(mismatches)


def advance_query(location: DamageLocation, damage: Damage, since: log.Offsets, now: int) -> None:
    """Let a query without tables continue after its newest output in Kafka, with a new checkpoint.

    The first micro-batch of the new checkpoint rereads records whose output exists, only to rebuild the deduplication
    state. The next one writes output, with the epoch number after that of `advance_from`, so that consumers do not take
    it for a repeat (decision 7). The old checkpoint is moved away. A call that was interrupted can be repeated.

    Args:
        damage: The damage. `advance_from` is the progress after which the query continues.
        since: Offsets at which the first micro-batch begins. It ends at `advance_from`.
        now: The time, µs.
    """
    if damage.advance_from is None:
        raise DamageError(f"{damage.query}: {damage.remedy}")
    checkpoints = Path(location.checkpoints.uri)
    old = Checkpoint(location.checkpoints / damage.query)
    began = old.replaced_epoch or Epoch(damage.advance_from.query_id, 0)
    replaced = Epoch(began.query, began.batch + damage.advance_from.batch_id)
    fresh = checkpoints / f"{damage.query}.new"
    # the files of a query that was stopped in its first micro-batch (OffsetSeq)
    first = {"batchWatermarkMs": 0, "batchTimestampMs": now // 1_000, "conf": old.conf if old.planned >= 0 else {}}
    others = {
        "offsets/0": f"v1\n{json.dumps(first)}\n{json.dumps(damage.advance_from.ends)}",
        REPLACED_EPOCH_FILE: msgspec.json.encode(replaced).decode(),
    }
    write_checkpoint(fresh, since, others)
    _set_aside(location, checkpoints / damage.query)
    fresh.rename(checkpoints / damage.query)
    to_disk(checkpoints)


def adopt_topics(location: DamageLocation, damage: Damage) -> None:
    """Let a query continue in topics that were created again: `damage.adopted_topics`, at their offsets `begin`.

    The checkpoint is changed so that the newest finished micro-batch ends at these offsets. If Spark repeats an
    unfinished micro-batch, it reads nothing of these topics. Tables and state stay, but the deduplication file forgets
    the records of the unfinished micro-batch. A call that was interrupted can be repeated.
    """
    checkpoint = Checkpoint(location.checkpoints / damage.query)
    planned, done = checkpoint.planned, checkpoint.planned == checkpoint.committed
    if checkpoint.path.folder is not None:
        # the records of an unfinished micro-batch are gone: they are no duplicates if they are sent again
        starts, ends = ({}, {}) if done else (checkpoint.starts(planned), checkpoint.ends(planned))
        lost = {
            part: range(starts.get(topic, {}).get(part, 0), end)
            for topic in damage.adopted_topics
            for part, end in ends.get(topic, {}).items()
        }
        release_positions(checkpoint.path.folder, lost)
    begin = {topic: state.begin for topic, state in damage.adopted_topics.items()}
    for batch in (planned,) if done else (planned - 1, planned):
        if batch >= 0:
            _replace_offsets(location, checkpoint, checkpoint.path / "offsets" / str(batch), begin)
    first = checkpoint.path / FIRST_OFFSETS_FILE
    if checkpoint.committed < 0 and first.exists():
        _replace_offsets(location, checkpoint, first, begin)
    save_topic_ids(checkpoint.path, {topic: state.id for topic, state in damage.adopted_topics.items()})


def _replace_offsets(location: DamageLocation, checkpoint: Checkpoint, path: Location, offsets: log.Offsets) -> None:
    """Replace the offsets of some topics in a file of a checkpoint, and copy the old file to the folder `set-aside`."""
    old = path.read()
    *head, last = old.decode().splitlines()
    source = json.loads(last)
    source |= {topic: {str(part): at for part, at in parts.items()} for topic, parts in offsets.items()}
    backup = location.state / "set-aside" / str(time.time_ns()) / checkpoint.path.name / path.name
    backup.parent.mkdir(parents=True)
    backup.write_bytes(old)
    if path.folder is not None:  # first: the old checksums do not match the new file
        path.folder.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        to_disk(path.folder.parent)
    path.write(["\n".join([*head, json.dumps(source)]).encode()])


def _examine_topics(location: DamageLocation, name: str, topics: Mapping[str, TopicState]) -> Damage | None:
    """Detect topics that were created again, or have lost records, since the checkpoint stored their offsets."""
    checkpoint = Checkpoint(location.checkpoints / name)
    if not topics or not checkpoint.exists:
        return None
    try:
        ends = checkpoint.ends(checkpoint.planned)
    except (OSError, ValueError, IndexError):  # torn, which `_examine` reports
        return None
    mismatches = find_mismatches(read_topic_ids(checkpoint.path), ends, topics)
    if not mismatches:
        return None
    unfinished = checkpoint.planned if checkpoint.planned > checkpoint.committed else None
    lost = (
        ""
        if unfinished is None
        else f". The records of its unfinished micro-batch {unfinished} are lost, unless a table already has their rows"
    )
    others = ", ".join(mismatches)
    descriptions = "; ".join(mismatch.description for mismatch in mismatches.values())
    problem = f"{descriptions}. If {name} continued at its old offsets, it would skip records"
    remedy = f"{name} keeps its tables and deduplication state, and reads {others} from the oldest new record{lost}"
    adopted = {topic: topics[topic]._replace(begin=mismatch.begin) for topic, mismatch in mismatches.items()}
    return Damage(name, problem, remedy, adopted_topics=adopted)


def offer_restore(location: DamageLocation, damage: Damage) -> Damage:
    """Propose `recover_tables` as the repair if the query's tables can be restored. Else return `damage` unchanged."""
    name = damage.query
    if not QUERIES[name].tables or _find_obstacle(location, name) or damage.remedy == _NOTHING_TO_RESTORE:
        return damage
    begin = (
        f"{name} keeps the rows of its tables, and reads {', '.join(damage.adopted_topics)} from the oldest new "
        "record. The records of an unfinished micro-batch are lost, unless a table already has their rows"
        if damage.adopted_topics
        else f"The tables of {name} are restored to the newest micro-batch that all of them have, and {name} reads the "
        "later records from Kafka again"
    )
    remedy = f"{begin}. The query gets a new checkpoint, with deduplication state that is rebuilt from its tables"
    return replace(damage, remedy=remedy, adopted_topics={}, is_restorable=True)


def _examine_progress(location: DamageLocation, name: str, progress: ProgressReport | None) -> Damage | None:
    """Detect a checkpoint that is older than the query's output in Kafka, or that lacks deduplication state."""
    checkpoint = Checkpoint(location.checkpoints / name)
    if progress is not None and checkpoint.exists and progress.query_id != checkpoint.query_id:
        progress = None
    if progress is not None and progress.batch_id > checkpoint.planned:
        older = f"is older than the query's output in Kafka: the checkpoint ends with micro-batch {checkpoint.planned}"
        problem = (
            f"the checkpoint of {name} in {checkpoint.path} {older if checkpoint.exists else 'does not exist'}, but "
            f"{name} has written micro-batch {progress.batch_id}. The query would repeat the output in between"
        )
    else:
        lost = _describe_lost_state(location, name, checkpoint)
        if not lost:
            return None
        problem = f"{lost}. Without this deduplication state, {name} would accept repeated messages as new"
    if progress is None or checkpoint.path.folder is None:
        return Damage(name, problem, _RESTORE_OR_RESTART)
    remedy = (
        f"{name} continues after micro-batch {progress.batch_id} with a new checkpoint. First, it reads older frames "
        "again in one micro-batch, to rebuild its deduplication state"
    )
    return Damage(name, problem, remedy, advance_from=progress)


def _describe_lost_state(location: DamageLocation, name: str, checkpoint: Checkpoint) -> str:
    """Describe how a query's deduplication file is damaged, missing or outdated; empty if it is sound."""
    folder, done = checkpoint.path.folder, checkpoint.committed
    if name == "batch" or folder is None or done < 0:
        return ""
    path = folder / FILE_NAME
    has_read = checkpoint.ends(done) != checkpoint.first_offsets
    if path.exists():
        try:
            marked = read_marked_epoch(folder)
        except DedupStoreError as error:
            return str(error)
        if marked.batch < done and has_read:  # a first micro-batch without records has no task that would mark the file
            return (
                f"the deduplication file {path} ends with micro-batch {marked.batch}, but the checkpoint ends with "
                f"micro-batch {done}"
            )
        return find_missing_digests(folder)
    if has_dedup_state(folder) or not has_read:
        return ""  # a query creates the file with its first records
    return f"the deduplication file {path} is missing"


def _examine(location: DamageLocation, name: str) -> Damage | None:
    lake, checkpoint = location.lake, Checkpoint(location.checkpoints / name)
    logs = _read_table_logs(lake, name)
    within = [_log_entry_path(lake, table, version) for table, log in logs.items() for version in log.within]
    if within:
        problem = (
            f"the commit {_list_names(within)} is damaged, or a file that it adds is missing, although later commits "
            "are intact"
        )
        return Damage(name, problem, _NOTHING_TO_RESTORE, tuple(within))
    if not checkpoint.path.exists():
        return _examine_missing_checkpoint(name, checkpoint, lake, logs)
    folder = checkpoint.path.folder
    if folder is not None and not is_whole(folder / "metadata"):
        return _examine_missing_metadata(name, checkpoint, folder)
    if not checkpoint.exists:
        return None
    claimed = LastIntactMicroBatch(checkpoint.planned, checkpoint.planned == checkpoint.committed)
    sound = claimed if folder is None else find_sound_end(folder)  # a power cut tears nothing in an object store
    if folder is not None and sound is None:
        damaged = list_torn_files(folder, None)
        problem = f"no micro-batch in the checkpoint {checkpoint.path} is intact. Damaged files: {_list_names(damaged)}"
        return Damage(name, problem, _RESTORE_OR_RESTART, tuple(damaged))
    return _examine_end(name, checkpoint, claimed, sound or claimed, lake, logs)


def _examine_end(
    name: str,
    checkpoint: Checkpoint,
    claimed: LastIntactMicroBatch,
    sound: LastIntactMicroBatch,
    lake: Lake,
    logs: Mapping[str, TableLog],
) -> Damage | None:
    """Compare the newest micro-batch of a checkpoint with its intact files, and with the query's tables.

    Args:
        claimed: The newest micro-batch according to the names of the checkpoint's files.
        sound: The newest micro-batch whose files are intact.
        logs: Logs of the query's tables.
    """
    torn_tables = {table for table, log in logs.items() if log.torn}
    if older := find_older_table(lake, name, checkpoint, sound.next - 1, torn_tables):
        return Damage(name, older, _RESTORE_OR_RESTART)
    writes = {table: find_newest_write(lake, table, checkpoint.query_id, log) for table, log in logs.items()}
    newest = max(writes.values(), default=-1)
    torn_logs = _list_torn_logs(lake, logs)
    files, extra = [*torn_logs], list[Path]()
    folder = checkpoint.path.folder
    if folder is not None and sound != claimed:
        files += list_torn_files(folder, sound)
        extra = list_files_after(folder, sound)
    if newest > claimed.batch_id:
        table = max(writes, key=writes.__getitem__)
        problem = (
            f"the checkpoint of {name} in {checkpoint.path} is older than the table {table}: the checkpoint ends with "
            f"micro-batch {claimed.batch_id}, and the table has micro-batch {newest}. The query would skip the records "
            "in between"
        )
    elif files or extra:
        problem = _describe_torn(files or extra, logs)
    else:
        return None
    # a torn commit may have lost rows of a finished micro-batch; Spark repeats an unfinished one
    done_writes = list_done_writes(checkpoint, sound.next - 1)
    has_lost_rows = any(done.batch_id > writes[done.table] for done in done_writes if done.table in torn_tables)
    if not has_lost_rows and _can_continue(name, claimed, sound, newest):
        remedy = f"Kiln moves these files to the folder set-aside, and {name} continues with micro-batch {sound.next}"
        return Damage(name, problem, remedy, tuple(files), (*torn_logs, *extra))
    return Damage(name, problem, _RESTORE_OR_RESTART, tuple(files))


_UNQUERIED_TABLES = tuple(TABLES.keys() - {table for query in QUERIES.values() for table in query.tables})


def _examine_log_of(lake: Lake, table: str) -> Damage | None:
    """Examine a table that no query writes.

    A damaged newest commit can be moved away, because its writer has not reported success yet.
    """
    location = locate_log(lake.folder(table))
    if not location.exists():
        return None
    log = inspect_log(lake, table)
    torn = [*(_log_entry_path(lake, table, version) for version in log.torn), *log.checkpoints]
    if not torn:
        return None
    remedy = (
        "Kiln moves these files to the folder set-aside. The table then has its previous version. If it has none, Kiln "
        "creates the table again"
    )
    files = torn if log.newest >= len(log.torn) else [Path(location.uri)]  # the whole log if no commit is intact
    return Damage(f"table {table}", _describe_torn(torn), remedy, tuple(torn), tuple(files))


_NOTHING_TO_RESTORE = (
    "Restore the newest backup of the table, or move the query's checkpoint and all its tables away (docs/RUNBOOK.md, "
    "State)"
)
_RESTORE_OR_RESTART = (
    "Restore the newest backup of checkpoint and tables, or restart the query from scratch (docs/RUNBOOK.md, State)"
)


def _can_continue(name: str, claimed: LastIntactMicroBatch, sound: LastIntactMicroBatch, newest_write: int) -> bool:
    """Return true if a query that continues after its newest intact micro-batch neither loses nor repeats rows.

    If Spark repeats a micro-batch from intact offsets, it reads the same records, and the tables recognise the repeat.
    If the offsets are lost, the micro-batch may read other records, so no table may have rows of it yet. Consumers of
    `updates` recognise a repeat of its newest micro-batch only (decision 7). `batch` may repeat everything, because the
    same records always give the same batches (decision 1).

    Args:
        claimed: The newest micro-batch according to the names of the checkpoint's files.
        sound: The newest micro-batch whose files are intact.
        newest_write: The newest micro-batch in a table; -1 if there is none.
    """
    if name == "batch":
        return True
    if name == "updates":
        return sound.next >= claimed.batch_id
    return newest_write < sound.next or (newest_write == sound.next and not sound.done)


def _describe_torn(files: Sequence[Path], logs: Mapping[str, TableLog] | None = None) -> str:
    named = [name for log in (logs or {}).values() for name in log.files]
    missing = f" ({', '.join(named[:3])})" if named else ""
    are = "is" if len(files) == 1 else "are"
    names = _list_names(files)
    return f"{names} {are} empty or truncated, as after a power cut, or inconsistent with other files{missing}"


def _list_names(files: Sequence[Path]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return ", ".join(map(str, files[:3])) + more


def _examine_missing_checkpoint(
    name: str, checkpoint: Checkpoint, lake: Lake, logs: Mapping[str, TableLog]
) -> Damage | None:
    """Examine a query without checkpoint: either the query has never started, or its checkpoint is lost."""
    files = _list_torn_logs(lake, logs)
    if not files:
        full = [table for table in QUERIES[name].appends if _has_rows(lake, table)]
        problem = (
            f"the checkpoint {checkpoint.path} does not exist, but the tables {', '.join(full)} in {lake.path} have "
            f"rows. {name} would write these rows again"
        )
        return Damage(name, problem, _RESTORE_OR_RESTART) if full else None
    torn = tuple(files[: sum(len(log.torn) for log in logs.values())])
    is_new = all(version == 0 for log in logs.values() for version in log.torn)
    remedy = "Kiln moves these files to the folder set-aside, and writes new ones" if is_new else _RESTORE_OR_RESTART
    return Damage(name, _describe_torn(files, logs), remedy, torn, tuple(files) if is_new else ())


def _has_rows(lake: Lake, table: str) -> bool:
    try:
        return lake.has_rows(table)
    except LakeError:  # which its readers report
        return False


def _examine_missing_metadata(name: str, checkpoint: Checkpoint, folder: Path) -> Damage | None:
    """Examine a checkpoint whose file `metadata`, with the query id, is missing or damaged."""
    metadata = folder / "metadata"
    if checkpoint.planned > 0 or checkpoint.committed >= 0:
        return Damage(name, _describe_torn([metadata]), _RESTORE_OR_RESTART, (metadata,))
    if not any(folder.iterdir()):
        return None
    remedy = f"Kiln moves the checkpoint to the folder set-aside, and {name} starts from the beginning"
    return Damage(name, _describe_torn([metadata]), remedy, (metadata,), (folder,))


def _list_torn_logs(lake: Lake, logs: Mapping[str, TableLog]) -> list[Path]:
    """List the damaged commits of the logs of tables, and then their unreadable Delta checkpoints."""
    torn = [_log_entry_path(lake, table, version) for table, log in logs.items() for version in log.torn]
    return torn + [path for log in logs.values() for path in log.checkpoints]


def _log_entry_path(lake: Lake, table: str, version: int) -> Path:
    return Path(locate_commit(lake.folder(table), version).uri)


def _read_table_logs(lake: Lake, name: str) -> dict[str, TableLog]:
    existing = (table for table in QUERIES[name].tables if locate_log(lake.folder(table)).exists())
    return {table: inspect_log(lake, table) for table in existing}


def _set_aside(location: DamageLocation, path: Path) -> list[tuple[Path, Path]]:
    """Move a file, with Hadoop's checksum file of it, to the folder `set-aside` in the state folder.

    Returns:
        The old and the new path of each file.
    """
    moved = []
    for file in (path, path.with_name(f".{path.name}.crc")):
        if file.exists():
            inside = file.relative_to(location.state if file.is_relative_to(location.state) else file.anchor)
            target = location.state / "set-aside" / str(time.time_ns()) / inside
            target.parent.mkdir(parents=True)
            shutil.move(file, target)  # lake and checkpoints may be on other disks
            to_disk(file.parent)
            moved.append((file, target))
    return moved
