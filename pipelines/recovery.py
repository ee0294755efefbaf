"""Detection and repair of power-loss damage, of stale checkpoints, and of re-created topics (decision 19).

No remedy loses or duplicates rows:

- `repair` applies the repairs that are safe in every case, at each start.
- `rewind_query` restarts a query at the newest micro-batch whose checkpoint is intact. It restores the tables as of
  that micro-batch, and the
  query repeats what followed from Kafka.
- `advance_query` lets `updates`, which has no table, resume after its own output, with deduplication state read again.
- `replace_dedup_store` rebuilds lost deduplication state of `archive` from its table.
- `adopt_topics` lets a query resume in re-created topics, and keeps its tables, state and deduplication state.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import msgspec

from kiln.conf.process.disk import to_disk
from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import Location
from kiln.pipelines.delta.lake import Lake, locate_commit, locate_log
from kiln.pipelines.delta.log_faults import (
    TableLog,
    find_newest_write,
    find_version_before,
    inspect_log,
    restore_version,
)
from kiln.pipelines.runtime.checkpoint import (
    FIRST_OFFSETS_FILE,
    REPLACED_EPOCH_FILE,
    Checkpoint,
    format_first_offsets,
)
from kiln.pipelines.runtime.checkpoint_faults import (
    LastGoodBatch,
    find_claimed_end,
    find_sound_end,
    is_whole,
    list_files_after,
    list_torn_files,
)
from kiln.pipelines.runtime.dedup_store import (
    FILE_NAME,
    DedupStore,
    DedupStoreConfig,
    DedupStoreError,
    find_missing_digests,
    has_dedup_state,
    read_marked_epoch,
    release_positions,
)
from kiln.pipelines.runtime.progress_marker import ProgressReport
from kiln.pipelines.runtime.table_ages import OLDER_TABLE_REMEDY, find_older_table, list_done_writes
from kiln.pipelines.runtime.topics import TopicState, find_mismatches, read_topic_ids, save_topic_ids
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
    rewind_to: LastGoodBatch | None = None
    """micro-batch that `rewind_query` can restart at"""
    advance_from: ProgressReport | None = None
    """progress that `advance_query` can resume at"""
    adopted_topics: Mapping[str, TopicState] = field(default_factory=dict)
    """re-created topics, by full name, that `adopt_topics` continues at their offsets `begin`"""
    rebuilds_dedup_state: bool = False
    """true if `replace_dedup_store` can rebuild the deduplication state from a table"""

    @property
    def is_self_repairing(self) -> bool:
        return bool(self.files_to_set_aside)

    @property
    def is_repairable(self) -> bool:
        return (
            self.is_self_repairing
            or self.rewind_to is not None
            or self.advance_from is not None
            or bool(self.adopted_topics)
            or self.rebuilds_dedup_state
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
            other = _examine_topics(location, name, (topics or {}).get(name, {}))
            damage = _withdraw_remedies(damage, other) or other or _examine_progress(location, name, query_progress)
        damages.append(damage)
    damages += (_examine_log_of(location.lake, table) for table in _UNQUERIED_TABLES)
    return [damage for damage in damages if damage is not None]


def repair(
    location: DamageLocation,
    names: Iterable[str],
    progress: ProgressReport | None = None,
    topics: Mapping[str, Mapping[str, TopicState]] | None = None,
) -> list[str]:
    """Repair what is safe to repair in every case. The arguments are those of `examine`.

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
    return [set_files_aside(location, damage) for damage in damages]


def set_files_aside(location: DamageLocation, damage: Damage) -> str:
    """Move the blocking files to `set-aside`, and describe the moves."""
    for path in damage.files_to_set_aside:
        _set_aside(location, path)
    return f"{damage.query}: {damage.problem}. {damage.remedy}"


def rewind_query(location: DamageLocation, damage: Damage, oldest: log.Offsets) -> None:
    """Restart a query at `damage.rewind_to`. An interrupted call can be repeated.

    Args:
        location: Folders of the query.
        damage: Damage to repair.
        oldest: First offsets that Kafka has, by full topic name.

    Raises:
        DamageError: Rows would be lost. Nothing was changed.
    """
    end, lake = damage.rewind_to, location.lake
    if end is None:
        raise DamageError(f"{damage.query}: {damage.remedy}")
    checkpoint = Checkpoint(location.checkpoints / damage.query)
    _check_kafka_has(damage.query, _read_starts(checkpoint, end.next), oldest)
    logs = _read_table_logs(lake, damage.query)
    for table, each in logs.items():
        for version in each.torn:
            _set_aside(location, _log_entry_path(lake, table, version))
    versions = {table: _find_base_version(lake, table, checkpoint.query_id, end.next) for table in logs}
    for table, version in versions.items():
        restore_version(lake, table, version)
    folder = Path(checkpoint.path.uri)
    for path in list_files_after(folder, end):
        _set_aside(location, path)
    _replace_query_id(location, folder)


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
    began = old.replaced_epoch or Epoch(old.query_id, 0)
    fresh = checkpoints / f"{damage.query}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    # the state of a query that was stopped in its first micro-batch (OffsetSeq)
    first = {"batchWatermarkMs": 0, "batchTimestampMs": now // 1_000, "conf": old.conf}
    files = {
        "metadata": json.dumps({"id": str(uuid4())}),
        FIRST_OFFSETS_FILE: format_first_offsets(since),
        "offsets/0": f"v1\n{json.dumps(first)}\n{json.dumps(damage.advance_from.ends)}",
        REPLACED_EPOCH_FILE: msgspec.json.encode(Epoch(began.query, began.batch + damage.advance_from.batch)).decode(),
    }
    for name, text in files.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        to_disk(path)
    for folder in ("sources/0", "sources", "offsets", "."):
        to_disk(fresh / folder)
    _set_aside(location, checkpoints / damage.query)
    fresh.rename(checkpoints / damage.query)
    to_disk(checkpoints)


def replace_dedup_store(
    location: DamageLocation, name: str, identities: Iterable[tuple[bytes, ...]], now: int, *, durable: bool
) -> None:
    """Replace a query's deduplication file by one with the digests of the rows that it has written. An interrupted call
    can be repeated.

    Args:
        location: Folders of the query.
        name: The query.
        identities: Digests of each row.
        now: µs; the digests are kept from now on.
        durable: True if the file must survive a power cut.
    """
    checkpoint = Checkpoint(location.checkpoints / name)
    folder = checkpoint.path.folder
    assert folder is not None
    fresh = folder / f"{FILE_NAME}.new"
    for path in folder.glob(f"{fresh.name}*"):
        path.unlink()
    with DedupStore(DedupStoreConfig(str(fresh), 1, durable)) as store:
        batch = iter(identities)
        while chunk := list(islice(batch, _REBUILT_AT_ONCE)):
            store.add_known(chunk, now)
        store.mark(Epoch(checkpoint.query_id, checkpoint.committed), now)
    to_disk(fresh)  # SQLite has removed its log, as no other process has the file open
    for path in (folder / f"{FILE_NAME}{end}" for end in ("", "-wal", "-shm")):
        _set_aside(location, path)
    fresh.rename(folder / FILE_NAME)
    to_disk(folder)


_REBUILT_AT_ONCE = 10_000  # rows


def adopt_topics(location: DamageLocation, damage: Damage) -> None:
    """Resume a query in the topics of `damage.adopted_topics`, at their offsets `begin`.

    Afterwards the newest finished micro-batch ends at these offsets, and the next one reads from them. A micro-batch
    that was begun and not finished keeps its id, and reads nothing of these topics when Spark repeats it. Tables, state
    and deduplication state stay as they are. An interrupted call can be repeated.
    """
    checkpoint = Checkpoint(location.checkpoints / damage.query)
    planned, done = checkpoint.planned, checkpoint.planned == checkpoint.committed
    if checkpoint.path.folder is not None:
        _release_positions(location, damage, checkpoint, () if done else damage.adopted_topics)
    begin = {topic: state.begin for topic, state in damage.adopted_topics.items()}
    for batch in (planned,) if done else (planned - 1, planned):
        if batch >= 0:
            _replace_offsets(location, checkpoint, checkpoint.path / "offsets" / str(batch), begin)
    first = checkpoint.path / FIRST_OFFSETS_FILE
    if checkpoint.committed < 0 and first.exists():
        _replace_offsets(location, checkpoint, first, begin)
    save_topic_ids(checkpoint.path, {topic: state.id for topic, state in damage.adopted_topics.items()})


def _release_positions(
    location: DamageLocation, damage: Damage, checkpoint: Checkpoint, unfinished: Iterable[str]
) -> None:
    """Release the deduplication state of an unfinished micro-batch, unless its rows are in the table.

    Its records are gone from Kafka, so they must not count as duplicates if they are sent again. `sink` is exempt, as
    its rows come only from Kiln.
    """
    ends = checkpoint.ends(checkpoint.planned)
    lost: log.Offsets = {topic: ends.get(topic, {}) for topic in unfinished}
    starts = _read_starts(checkpoint, checkpoint.planned) if lost and checkpoint.planned >= 0 else {}
    logs = {table: each for table, each in _read_table_logs(location.lake, damage.query).items() if table == "messages"}
    is_written = _find_newest_write(location.lake, checkpoint.query_id, logs).batch >= checkpoint.planned
    reads = QUERIES[damage.query].reads
    names = {read for read in reads for topic in damage.adopted_topics if topic.endswith(read)}

    def is_of_topic(text: str) -> bool:
        return len(reads) == 1 or text.split("/")[0] in names

    def is_lost(text: str) -> bool:
        if is_written or len(reads) > 1 or "/" not in text:  # the result of a task has the digest of the task
            return False
        part, offset = map(int, text.split("/")[:2])
        return any(starts.get(topic, {}).get(part, 0) <= offset < ends.get(part, 0) for topic, ends in lost.items())

    folder = checkpoint.path.folder
    assert folder is not None
    release_positions(folder, is_of_topic, is_lost)


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
    descriptions = "; ".join(each.description for each in mismatches.values())
    problem = f"{descriptions}. At its old offsets {name} would skip records"
    remedy = f"{name} keeps its tables and deduplication state, and reads {others} from the oldest new record on{lost}"
    adopted = {topic: topics[topic]._replace(begin=each.begin) for topic, each in mismatches.items()}
    return Damage(name, problem, remedy, adopted_topics=adopted)


def _withdraw_remedies(damage: Damage | None, other: Damage | None) -> Damage | None:
    """Withdraw the remedies that repeat micro-batches, which a re-created topic rules out."""
    if damage is None or other is None:
        return damage
    return replace(
        damage,
        problem=f"{damage.problem}. And {other.problem}",
        remedy=_RESTORE_OR_RESTART,
        rewind_to=None,
        advance_from=None,
        rebuilds_dedup_state=False,
    )


def _examine_progress(location: DamageLocation, name: str, progress: ProgressReport | None) -> Damage | None:
    """Check a checkpoint against the query's progress in Kafka, and its deduplication state."""
    checkpoint = Checkpoint(location.checkpoints / name)
    if not checkpoint.exists:
        return None
    if progress is not None and progress.query_id != checkpoint.query_id:
        progress = None
    if progress is not None and progress.batch > checkpoint.planned:
        problem = (
            f"the checkpoint of {name} in {checkpoint.path} is older than the query's output in Kafka: it ends with "
            f"micro-batch {checkpoint.planned}, and {name} has written micro-batch {progress.batch}. The query would "
            "repeat the output in between"
        )
    else:
        lost = _describe_lost_state(location, name, checkpoint)
        if not lost:
            return None
        problem = f"{lost}: without this deduplication state, {name} would accept repeated records as new"
        if name == "archive" and location.lake.has("messages"):
            remedy = (
                "archive continues with deduplication state that is rebuilt from the table messages. A frame that Kiln "
                "could not decode gets a second row in quarantine if it is sent again"
            )
            return Damage(name, problem, remedy, rebuilds_dedup_state=True)
    if progress is None or checkpoint.path.folder is None or checkpoint.planned < 0:
        return Damage(name, problem, _RESTORE_OR_RESTART)
    remedy = (
        f"{name} continues after micro-batch {progress.batch} with a new checkpoint. First it reads again, in one "
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
        # after `rewind_query`, the query has a new id and the file has the mark of the old one
        if marked.query in ("", checkpoint.query_id) and marked.batch < done:
            return f"{path} ends with micro-batch {marked.batch}, and the checkpoint with {done}"
        return find_missing_digests(folder)
    if has_dedup_state(folder) or checkpoint.ends(done) == checkpoint.first_offsets:
        return ""  # a query creates the file with its first records
    return f"{path} is missing"


def _examine(location: DamageLocation, name: str) -> Damage | None:
    lake, checkpoint = location.lake, Checkpoint(location.checkpoints / name)
    logs = _read_table_logs(lake, name)
    within = [_log_entry_path(lake, table, version) for table, each in logs.items() for version in each.within]
    if within:
        problem = f"{_list_names(within)} is damaged, or names a missing file, and later commits are intact"
        return Damage(name, problem, _RESTORE_OR_RESTART, tuple(within))
    if not checkpoint.path.exists():
        return _examine_missing_checkpoint(name, lake, logs)
    folder = checkpoint.path.folder
    if folder is None:
        return _examine_stored(name, checkpoint, lake, logs)
    if not is_whole(folder / "metadata"):
        return _examine_missing_metadata(name, folder)
    sound = find_sound_end(folder)
    if sound is None:
        damaged = list_torn_files(folder, None)
        problem = f"no micro-batch of {checkpoint.path} is intact. Damaged: {_list_names(damaged)}"
        return Damage(name, problem, _RESTORE_OR_RESTART, tuple(damaged))
    return _examine_end(name, checkpoint, folder, sound, lake, logs)


def _examine_end(
    name: str, checkpoint: Checkpoint, folder: Path, sound: LastGoodBatch, lake: Lake, logs: Mapping[str, TableLog]
) -> Damage | None:
    """Examine the newest micro-batches of a checkpoint in which one, `sound`, is intact."""
    torn_tables = {table for table, each in logs.items() if each.torn}
    if older := find_older_table(lake, name, checkpoint, sound.next - 1, torn_tables):
        return Damage(name, older, OLDER_TABLE_REMEDY)
    claimed, newest = find_claimed_end(folder), _find_newest_write(lake, checkpoint.query_id, logs)
    torn_logs = _list_torn_logs(lake, logs)
    files, extra = [*torn_logs], list[Path]()
    if sound != claimed:
        files += list_torn_files(folder, sound)
        extra = list_files_after(folder, sound)
    if newest.batch > claimed.batch:
        problem = _describe_older(name, checkpoint.path, claimed.batch, newest)
    elif files or extra:
        problem = _describe_torn(files or extra)
    else:
        return None
    lost = _find_lost_batch(checkpoint, sound, lake, logs)
    if lost is not None:
        rewind_to = find_sound_end(folder, lost)
    elif _can_continue(name, claimed, sound, newest.batch):
        remedy = f"These files were set aside, and {name} continues with micro-batch {sound.next}"
        return Damage(name, problem, remedy, tuple(files), (*torn_logs, *extra))
    else:
        rewind_to = sound
    if not logs or rewind_to is None:
        return Damage(name, problem, _RESTORE_OR_RESTART, tuple(files))
    remedy = (
        f"The tables of {name} are restored to before its micro-batch {rewind_to.next}, and {name} repeats the rest "
        "from Kafka"
    )
    return Damage(name, problem, remedy, tuple(files), rewind_to=rewind_to)


def _find_lost_batch(
    checkpoint: Checkpoint, sound: LastGoodBatch, lake: Lake, logs: Mapping[str, TableLog]
) -> int | None:
    """Find the first micro-batch that is done, and of which a torn commit has lost rows. A micro-batch that is not done
    is repeated, so it loses nothing."""
    done = sound.next - 1
    writes = list(list_done_writes(checkpoint, done))
    lost: list[int] = []
    for table in (table for table, each in logs.items() if each.torn):
        newest = find_newest_write(lake, table, checkpoint.query_id, logs[table])
        # A checkpoint of an earlier Kiln does not say which micro-batches had rows: any may have.
        for batches in [each.batches for each in writes if each.table == table] or [(done,)]:
            missing = [batch for batch in batches if batch > newest]
            if missing:
                lost.append(missing[0] if len(missing) < len(batches) else newest + 1)
    return min(lost, default=None)


_UNQUERIED_TABLES = tuple(TABLES.keys() - {table for query in QUERIES.values() for table in query.tables})


def _examine_log_of(lake: Lake, table: str) -> Damage | None:
    """Examine a table that no query writes. A torn commit was never reported, as its writers wait for the sync."""
    location = locate_log(lake.folder(table))
    if not location.exists():
        return None
    log = inspect_log(lake, table)
    torn = [*(_log_entry_path(lake, table, version) for version in log.torn), *log.checkpoints]
    if not torn:
        return None
    if log.newest < len(log.torn):  # no commit is whole
        return Damage(
            f"table {table}",
            _describe_torn(torn),
            "The log was set aside, and Kiln creates the table again",
            (),
            (Path(location.uri),),
        )
    remedy = "These files were set aside, and the table has its previous version"
    return Damage(f"table {table}", _describe_torn(torn), remedy, tuple(torn), tuple(torn))


def _examine_stored(name: str, checkpoint: Checkpoint, lake: Lake, logs: Mapping[str, TableLog]) -> Damage | None:
    """Examine a checkpoint in an object store: a power cut tears nothing there, but an older copy may be restored."""
    if not checkpoint.exists:
        return None
    if older := find_older_table(lake, name, checkpoint, checkpoint.committed):
        return Damage(name, older, OLDER_TABLE_REMEDY)
    newest = _find_newest_write(lake, checkpoint.query_id, logs)
    if newest.batch <= checkpoint.planned:
        return None
    return Damage(name, _describe_older(name, checkpoint.path, checkpoint.planned, newest), _RESTORE_OR_RESTART)


_RESTORE_OR_RESTART = (
    "Restore the newest copy of checkpoint and tables, or restart the query from scratch (RUNBOOK, State)"
)


def _can_continue(name: str, claimed: LastGoodBatch, sound: LastGoodBatch, newest_write: int) -> bool:
    """Return true if a query that resumes at the sound end neither loses nor repeats anything.

    A micro-batch with intact offsets reads the same records again, and the tables recognise it. A micro-batch that is
    planned again may read other records, so no table may have rows of it yet. The repeats of `updates` are recognised
    for its newest micro-batch only (decision 7). `batch` is a function of its log (decision 1).
    """
    if name == "batch":
        return True
    if name == "updates":
        return sound.next >= claimed.batch
    return newest_write < sound.next or (newest_write == sound.next and not sound.done)


def _describe_older(name: str, checkpoint: Location, planned: int, newest: TableWrite) -> str:
    return (
        f"the checkpoint of {name} in {checkpoint} is older than the table {newest.table}: it ends with micro-batch "
        f"{planned}, and the table has micro-batch {newest.batch}. The query would skip the records in between"
    )


def _describe_torn(files: Sequence[Path]) -> str:
    return f"{_list_names(files)} is empty or truncated, as by a power cut, or does not match the other files"


def _list_names(files: Sequence[Path]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return ", ".join(map(str, files[:3])) + more


def _examine_missing_checkpoint(name: str, lake: Lake, logs: Mapping[str, TableLog]) -> Damage | None:
    """Examine a query without checkpoint: it has not begun, or the checkpoint was moved (the supervisor checks)."""
    files = _list_torn_logs(lake, logs)
    if not files:
        return None
    torn = tuple(files[: sum(len(each.torn) for each in logs.values())])
    is_new = all(version == 0 for each in logs.values() for version in each.torn)
    remedy = "These files were set aside, and Kiln writes them again" if is_new else _RESTORE_OR_RESTART
    return Damage(name, _describe_torn(files), remedy, torn, tuple(files) if is_new else ())


def _examine_missing_metadata(name: str, checkpoint: Path) -> Damage | None:
    """Examine a checkpoint without intact `metadata`, which Kiln syncs before the first micro-batch."""
    metadata, claimed = checkpoint / "metadata", find_claimed_end(checkpoint)
    if claimed.batch > 0 or claimed == LastGoodBatch(0, True):
        return Damage(name, _describe_torn([metadata]), _RESTORE_OR_RESTART, (metadata,))
    if not any(checkpoint.iterdir()):
        return None
    remedy = f"The checkpoint was set aside, and {name} starts"
    return Damage(name, _describe_torn([metadata]), remedy, (metadata,), (checkpoint,))


def _list_torn_logs(lake: Lake, logs: Mapping[str, TableLog]) -> list[Path]:
    """List the torn commits of the logs of tables, and then the unreadable checkpoints."""
    torn = [_log_entry_path(lake, table, version) for table, each in logs.items() for version in each.torn]
    return torn + [path for each in logs.values() for path in each.checkpoints]


def _log_entry_path(lake: Lake, table: str, version: int) -> Path:
    """Return the path of a log entry in a lake on disk; nothing is torn in an object store."""
    return Path(locate_commit(lake.folder(table), version).uri)


def _read_table_logs(lake: Lake, name: str) -> dict[str, TableLog]:
    """Read the logs of the query's existing tables, by table."""
    existing = (table for table in QUERIES[name].tables if locate_log(lake.folder(table)).exists())
    return {table: inspect_log(lake, table) for table in existing}


class TableWrite(NamedTuple):
    """The newest micro-batch of a query in any table; -1 if there is none."""

    batch: int = -1
    table: str = ""


def _find_newest_write(lake: Lake, query_id: str, logs: Mapping[str, TableLog]) -> TableWrite:
    writes = (TableWrite(find_newest_write(lake, table, query_id, each), table) for table, each in logs.items())
    return max(writes, default=TableWrite())


def _find_base_version(lake: Lake, table: str, query_id: str, batch: int) -> int:
    version = find_version_before(lake, table, query_id, batch)
    if version is None:
        raise DamageError(
            f"cannot restore table {table} to before micro-batch {batch}: its log does not go back so far, or another "
            f"writer has changed the table since. {_RESTORE_OR_RESTART}"
        )
    return version


def _read_starts(checkpoint: Checkpoint, batch: int) -> log.Offsets:
    """Read the offsets at which a micro-batch begins."""
    if batch > 0:
        return checkpoint.ends(batch - 1)
    return checkpoint.first_offsets or {}


def _check_kafka_has(name: str, starts: log.Offsets, oldest: log.Offsets) -> None:
    for topic, parts in starts.items():
        for part, at in parts.items():
            if oldest.get(topic, {}).get(part, 0) > at:
                raise DamageError(
                    f"cannot restart {name} at the offset {at:,} of {topic}-{part}: the oldest record in Kafka has "
                    f"{oldest[topic][part]:,}, and the rows in between would be lost. {_RESTORE_OR_RESTART}"
                )


def _replace_query_id(location: DamageLocation, checkpoint: Path) -> None:
    """Give the query a new id, under which no table has a micro-batch."""
    _set_aside(location, checkpoint / "metadata")
    fresh = checkpoint / "metadata.new"
    fresh.write_text(json.dumps({"id": str(uuid4())}), encoding="utf-8")
    to_disk(fresh)
    fresh.replace(checkpoint / "metadata")
    to_disk(checkpoint)


def _set_aside(location: DamageLocation, path: Path) -> None:
    """Move a file with its checksum file to `set-aside` in the state folder."""
    for each in (path, path.with_name(f".{path.name}.crc")):
        if each.exists():
            inside = each.relative_to(location.state if each.is_relative_to(location.state) else each.anchor)
            target = location.state / "set-aside" / str(time.time_ns()) / inside
            target.parent.mkdir(parents=True)
            shutil.move(each, target)  # lake and checkpoints may be on other disks
            to_disk(each.parent)
