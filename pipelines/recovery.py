"""Detection and repair of power-loss damage, of stale checkpoints, and of re-created topics (decision 19).

No remedy loses or duplicates rows:

- `repair` sets torn newest files aside, at each start.
- `recover_tables` restores the tables of `archive` or `sink` to the newest micro-batch that all of them have, and gives
  the query a new checkpoint that begins after this micro-batch.
- `advance_query` lets `updates`, which has no table, resume after its own output, with deduplication state rebuilt
  from Kafka.
- `adopt_topics` lets a query resume in re-created topics, and keeps its tables, state and deduplication state.
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
    """A checkpoint or table is damaged or stale, and needs an explicit `kiln recover`."""


@dataclass(frozen=True)
class DamageLocation:
    """Locations of state folder, checkpoints and lake."""

    state: Path
    checkpoints: Location
    """folder with one checkpoint for each query"""
    lake: Lake


@dataclass(frozen=True)
class Damage:
    """Damage of one query, or of one table that no query writes."""

    query: str
    problem: str
    remedy: str
    files: tuple[Path, ...] = ()
    """affected files"""
    files_to_set_aside: tuple[Path, ...] = ()
    """files whose removal is the whole repair, which `repair` does"""
    is_restorable: bool = False
    """true if `recover_tables` can continue the query"""
    advance_from: ProgressReport | None = None
    """progress that `advance_query` can resume at"""
    adopted_topics: Mapping[str, TopicState] = field(default_factory=dict)
    """re-created topics, by full name, that `adopt_topics` continues at their offsets `begin`"""

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
    """Examine checkpoints and tables of these queries, and the tables that no query writes.

    Args:
        location: Folders to examine.
        names: Queries to examine.
        progress: Progress of `updates` according to Kafka, or `None` if that is not known.
        topics: State of the topics that each query reads, by full name, or `None` if that is not known.

    Returns:
        At most one `Damage` for each query and table.
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
    """Repair what is safe to repair in every case. The arguments are as for `examine`.

    Returns:
        A description of each repair.

    Raises:
        DamageError: There is other damage.
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
    """Move the blocking files to `set-aside`, and describe the moves."""
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
    """Continue `archive` or `sink` after the newest micro-batch that all its tables have. The tables are restored to
    this micro-batch, and the query reads later records from Kafka again. An interrupted call can be repeated.

    Args:
        location: Folders of the query.
        name: The query.
        topics: The topics that the query reads, by full name.
        read_identities: Reads the digests of the rows in the tables, for the deduplication file.
        now: Time from which the digests are kept, µs.
        durable: True if the deduplication file must survive a power cut.

    Raises:
        DamageError: Rows would be lost. Nothing was changed, except that torn files were set aside.
    """
    lake, checkpoints = location.lake, location.checkpoints.folder
    obstacle = _find_obstacle(location, name)
    if checkpoints is None or obstacle:
        raise DamageError(f"{obstacle}. {_RESTORE_OR_RESTART}")
    logs = _read_table_logs(lake, name)
    if any(log.within for log in logs.values()):
        raise DamageError(
            f"a commit of a table of {name} is damaged, and later commits are intact. {_NOTHING_TO_RESTORE}"
        )
    for path in _list_torn_logs(lake, logs):
        _set_aside(location, path)
    try:
        point = find_restore_point(lake, QUERIES[name].tables)
    except (LakeError, RestoreError) as error:
        raise DamageError(f"{error}. {_RESTORE_OR_RESTART}") from error
    old, fresh = checkpoints / name, checkpoints / f"{name}.new"
    if point is not None:
        begin, is_replaced = _find_begin(name, point, topics)
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
    """Describe why the deduplication state of a query cannot be made from its tables; empty if it can."""
    if location.checkpoints.folder is None:
        return (
            f"the checkpoint of {name} is in an object store, so its deduplication state is Spark's, which cannot be "
            "rebuilt"
        )
    if (location.checkpoints.folder / name / "state").exists():
        return f"the deduplication state of {name} is in Spark's state, which cannot be rebuilt"
    return ""


def _find_begin(name: str, point: RestorePoint, topics: Mapping[str, TopicState]) -> tuple[log.Offsets, bool]:
    """Find the offsets at which a query continues: the offsets in the tables, or the oldest offsets of a re-created
    topic.

    Returns:
        The offsets, and true if a topic was re-created: its old records cannot be read again, so no row may be removed.

    Raises:
        DamageError: Kafka no longer has the records after the offsets in the tables, or did not answer.
    """
    if missing := sorted(point.offsets.keys() - topics.keys()):
        raise DamageError(
            f"cannot read the topics {', '.join(missing)}, from which {name} continues. Start the broker, or correct "
            "kafka.bootstrap, and repeat kiln recover"
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
                    f"{oldest:,}, and the rows in between would be lost. {_RESTORE_OR_RESTART}"
                )
    return begin, bool(mismatches)


def advance_query(location: DamageLocation, damage: Damage, since: log.Offsets, now: int) -> None:
    """Resume a query at `damage.advance_from` with a new checkpoint. An interrupted call can be repeated.

    The first micro-batch reads from `since` up to `damage.advance_from`, and only fills the deduplication state. The
    old checkpoint is set aside, and the new one continues its epochs: the first output beyond `damage.advance_from` has
    the epoch after the old checkpoint's last one (decision 7). `now` is in µs.
    """
    if damage.advance_from is None:
        raise DamageError(f"{damage.query}: {damage.remedy}")
    checkpoints = Path(location.checkpoints.uri)
    old = Checkpoint(location.checkpoints / damage.query)
    began = old.replaced_epoch or Epoch(damage.advance_from.query_id, 0)
    replaced = Epoch(began.query, began.batch + damage.advance_from.batch_id)
    fresh = checkpoints / f"{damage.query}.new"
    # the state of a query that was stopped in its first micro-batch (OffsetSeq)
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
    """Resume a query in the topics of `damage.adopted_topics`, at their offsets `begin`.

    Afterwards the newest finished micro-batch ends at these offsets, and the next one reads from them. A micro-batch
    that was begun and not finished keeps its id, and reads nothing of these topics when Spark repeats it. Tables, state
    and deduplication state stay as they are. An interrupted call can be repeated.
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
    """Replace the offsets of these topics in a Spark file, and copy the old file to `set-aside`."""
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
    """Check that the offsets of a checkpoint belong to the topics that Kafka has now."""
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
        else f". Its micro-batch {unfinished} was not finished: its records that are in no table are lost"
    )
    others = ", ".join(mismatches)
    descriptions = "; ".join(mismatch.description for mismatch in mismatches.values())
    problem = f"{descriptions}. If {name} continued at its old offsets, it would skip records"
    remedy = f"{name} keeps its tables and deduplication state, and reads {others} from the oldest new record on{lost}"
    adopted = {topic: topics[topic]._replace(begin=mismatch.begin) for topic, mismatch in mismatches.items()}
    return Damage(name, problem, remedy, adopted_topics=adopted)


def offer_restore(location: DamageLocation, damage: Damage) -> Damage:
    """Offer `recover_tables` for a query whose tables show where it can continue."""
    name = damage.query
    if not QUERIES[name].tables or _find_obstacle(location, name) or damage.remedy == _NOTHING_TO_RESTORE:
        return damage
    topics = (
        f"{name} reads {', '.join(damage.adopted_topics)} from the oldest new record on, and recognises what its tables"
        " have. The records of an unfinished micro-batch that are in no table are lost"
        if damage.adopted_topics
        else f"{name} reads the later records from Kafka again"
    )
    remedy = (
        f"The tables of {name} are restored to the newest micro-batch that all of them have, and {topics}. The query "
        "gets a new checkpoint, with deduplication state from its tables"
    )
    return replace(damage, remedy=remedy, adopted_topics={}, is_restorable=True)


def _examine_progress(location: DamageLocation, name: str, progress: ProgressReport | None) -> Damage | None:
    """Compare a checkpoint with the query's progress in Kafka, and check the deduplication state."""
    checkpoint = Checkpoint(location.checkpoints / name)
    if progress is not None and checkpoint.exists and progress.query_id != checkpoint.query_id:
        progress = None
    if progress is not None and progress.batch_id > checkpoint.planned:
        end = f"ends with micro-batch {checkpoint.planned}" if checkpoint.exists else "does not exist"
        problem = (
            f"the checkpoint of {name} in {checkpoint.path} is older than the query's output in Kafka: it {end}, and "
            f"{name} has written micro-batch {progress.batch_id}. The query would repeat the output in between"
        )
    else:
        lost = _describe_lost_state(location, name, checkpoint)
        if not lost:
            return None
        problem = f"{lost}: without this deduplication state, {name} would accept repeated records as new"
    if progress is None or checkpoint.path.folder is None:
        return Damage(name, problem, _RESTORE_OR_RESTART)
    remedy = (
        f"{name} continues after micro-batch {progress.batch_id} with a new checkpoint. First it reads again, in one "
        "micro-batch, the frames whose updates belong to its deduplication state"
    )
    return Damage(name, problem, remedy, advance_from=progress)


def _describe_lost_state(location: DamageLocation, name: str, checkpoint: Checkpoint) -> str:
    """Describe the damage of a query's deduplication state; empty if there is none."""
    folder, done = checkpoint.path.folder, checkpoint.committed
    if name == "batch" or folder is None or done < 0:
        return ""
    path = folder / FILE_NAME
    if path.exists():
        try:
            marked = read_marked_epoch(folder)
        except DedupStoreError as error:
            return str(error)
        if marked.batch < done:
            return f"{path} ends with micro-batch {marked.batch}, and the checkpoint with {done}"
        return find_missing_digests(folder)
    if has_dedup_state(folder) or checkpoint.ends(done) == checkpoint.first_offsets:
        return ""  # a query creates the file with its first records
    return f"{path} is missing"


def _examine(location: DamageLocation, name: str) -> Damage | None:
    lake, checkpoint = location.lake, Checkpoint(location.checkpoints / name)
    logs = _read_table_logs(lake, name)
    within = [_log_entry_path(lake, table, version) for table, log in logs.items() for version in log.within]
    if within:
        problem = f"{_list_names(within)} is damaged, or names a missing file, and later commits are intact"
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
        problem = f"no micro-batch of {checkpoint.path} is intact. Damaged: {_list_names(damaged)}"
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
    """Examine the end of a checkpoint: `claimed` according to file names, `sound` according to intact files."""
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
            f"the checkpoint of {name} in {checkpoint.path} is older than the table {table}: it ends with micro-batch "
            f"{claimed.batch_id}, and the table has micro-batch {newest}. The query would skip the records in between"
        )
    elif files or extra:
        problem = _describe_torn(files or extra, logs)
    else:
        return None
    # a torn commit may have lost rows of a micro-batch that is done; one that is not done is repeated
    done_writes = list_done_writes(checkpoint, sound.next - 1)
    has_lost_rows = any(done.batch_id > writes[done.table] for done in done_writes if done.table in torn_tables)
    if not has_lost_rows and _can_continue(name, claimed, sound, newest):
        remedy = f"Kiln moves these files to the folder set-aside, and {name} continues with micro-batch {sound.next}"
        return Damage(name, problem, remedy, tuple(files), (*torn_logs, *extra))
    return Damage(name, problem, _RESTORE_OR_RESTART, tuple(files))


_UNQUERIED_TABLES = tuple(TABLES.keys() - {table for query in QUERIES.values() for table in query.tables})


def _examine_log_of(lake: Lake, table: str) -> Damage | None:
    """Examine a table that no query writes. A torn commit was never reported as done, as writers wait for the sync."""
    location = locate_log(lake.folder(table))
    if not location.exists():
        return None
    log = inspect_log(lake, table)
    torn = [*(_log_entry_path(lake, table, version) for version in log.torn), *log.checkpoints]
    if not torn:
        return None
    remedy = (
        "Kiln moves these files to the folder set-aside. The table then has its previous version, or Kiln creates it "
        "again"
    )
    files = torn if log.newest >= len(log.torn) else [Path(location.uri)]  # the whole log if no commit is intact
    return Damage(f"table {table}", _describe_torn(torn), remedy, tuple(torn), tuple(files))


_NOTHING_TO_RESTORE = "Restore the newest copy of the table, or move all tables of the query away (RUNBOOK, State)"
_RESTORE_OR_RESTART = (
    "Restore the newest copy of checkpoint and tables, or restart the query from scratch (RUNBOOK, State)"
)


def _can_continue(name: str, claimed: LastIntactMicroBatch, sound: LastIntactMicroBatch, newest_write: int) -> bool:
    """Return true if a query that resumes at the sound end neither loses nor repeats anything.

    A micro-batch with intact offsets reads the same records again, and the tables recognise it. A micro-batch that is
    planned again may read other records, so no table may have rows of it yet. The repeats of `updates` are recognised
    for its newest micro-batch only (decision 7). `batch` is a function of its log (decision 1).
    """
    if name == "batch":
        return True
    if name == "updates":
        return sound.next >= claimed.batch_id
    return newest_write < sound.next or (newest_write == sound.next and not sound.done)


def _describe_torn(files: Sequence[Path], logs: Mapping[str, TableLog] | None = None) -> str:
    named = [name for log in (logs or {}).values() for name in log.files]
    missing = f" ({', '.join(named[:3])})" if named else ""
    return f"{_list_names(files)} is empty or truncated, as by a power cut, or does not match the other files{missing}"


def _list_names(files: Sequence[Path]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return ", ".join(map(str, files[:3])) + more


def _examine_missing_checkpoint(
    name: str, checkpoint: Checkpoint, lake: Lake, logs: Mapping[str, TableLog]
) -> Damage | None:
    """Examine a query without checkpoint: it has not begun, or the checkpoint is lost."""
    files = _list_torn_logs(lake, logs)
    if not files:
        full = [table for table in QUERIES[name].appends if _has_rows(lake, table)]
        problem = (
            f"there is no checkpoint {checkpoint.path}, yet the tables {', '.join(full)} in {lake.path} have rows. The "
            "query would write them again"
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
    """Examine a checkpoint without intact `metadata`, which Kiln syncs before the first micro-batch."""
    metadata = folder / "metadata"
    if checkpoint.planned > 0 or checkpoint.committed >= 0:
        return Damage(name, _describe_torn([metadata]), _RESTORE_OR_RESTART, (metadata,))
    if not any(folder.iterdir()):
        return None
    remedy = f"Kiln moves the checkpoint to the folder set-aside, and {name} starts from the beginning"
    return Damage(name, _describe_torn([metadata]), remedy, (metadata,), (folder,))


def _list_torn_logs(lake: Lake, logs: Mapping[str, TableLog]) -> list[Path]:
    """List the torn commits of the logs of tables, and then the unreadable checkpoints."""
    torn = [_log_entry_path(lake, table, version) for table, log in logs.items() for version in log.torn]
    return torn + [path for log in logs.values() for path in log.checkpoints]


def _log_entry_path(lake: Lake, table: str, version: int) -> Path:
    """Return the path of a log entry in a lake on disk; nothing is torn in an object store."""
    return Path(locate_commit(lake.folder(table), version).uri)


def _read_table_logs(lake: Lake, name: str) -> dict[str, TableLog]:
    """Read the logs of the query's existing tables, by table."""
    existing = (table for table in QUERIES[name].tables if locate_log(lake.folder(table)).exists())
    return {table: inspect_log(lake, table) for table in existing}


def _set_aside(location: DamageLocation, path: Path) -> None:
    """Move a file with its checksum file to `set-aside` in the state folder."""
    for file in (path, path.with_name(f".{path.name}.crc")):
        if file.exists():
            inside = file.relative_to(location.state if file.is_relative_to(location.state) else file.anchor)
            target = location.state / "set-aside" / str(time.time_ns()) / inside
            target.parent.mkdir(parents=True)
            shutil.move(file, target)  # lake and checkpoints may be on other disks
            to_disk(file.parent)
