"""What stands in the way of a start after a power cut, or after somebody put back an older checkpoint, or deleted a
topic and created it again; what can be done about it, so that nothing is lost and nothing comes twice; and doing it
(decision 19).

`mend` does what is right in any case, at each start. `go_back` lets a query begin again where its checkpoint ends well:
the tables become what they were then, and the query does anew what came since, from what Kafka holds. `go_on` lets
`updates`, which has no table, begin behind what it wrote, with what it remembers of copies read again. `read_anew` lets
a query go on in another topic of the same name, with tables, state and memory as they are.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import msgspec

from kiln.conf.process.disk import to_disk
from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import Location
from kiln.pipelines.delta.lake import Lake, locate_commit, locate_log
from kiln.pipelines.delta.log_faults import TableLog, find_version_before, inspect_log, find_newest_write, restore_version
from kiln.pipelines.runtime.checkpoint import REPLACED_EPOCH_FILE, Checkpoint
from kiln.pipelines.runtime.checkpoint_faults import (
    LastGoodBatch,
    list_files_after,
    find_claimed_end,
    is_whole,
    read_newest_commit_time,
    find_sound_end,
    list_torn_files,
)
from kiln.pipelines.runtime.dedup_store import FILE_NAME, DedupStoreError, read_marked_epoch, release_positions, has_dedup_state
from kiln.pipelines.runtime.progress_marker import ProgressReport
from kiln.pipelines.runtime.topics import TopicState, find_misfits, note_topics, read_noted
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka import topics as log
from kiln.schemas.kafka.records import Epoch
from kiln.schemas.queries import QUERIES


class DamageError(KilnError):
    """Something is damaged, or older than what goes with it, and Kiln does not mend it without being asked."""


@dataclass(frozen=True)
class DamageLocation:
    """Where things are. `state`: the state folder; `checkpoints`: a folder with one for each query."""

    state: Path
    checkpoints: Location
    lake: Lake


@dataclass(frozen=True)
class Damage:
    """What was found of one query, or of one table that no query writes. `files`: those in question. `back_to`: where
    the query can begin again, which `go_back` does; `on_from`: where the query can go on, which `go_on` does; None:
    nowhere. `set_aside`: what to move away where that alone mends it, which `mend` does."""

    query: str
    found: str
    remedy: str
    files: tuple[Path, ...] = ()
    set_aside: tuple[Path, ...] = ()
    back_to: LastGoodBatch | None = None
    on_from: ProgressReport | None = None
    anew: Mapping[str, TopicState] = field(default_factory=dict)
    """by full name, topics that the query goes on to read at the offsets `begin`, which `read_anew` does"""

    @property
    def mends_itself(self) -> bool:
        return bool(self.set_aside)

    @property
    def can_be_put_right(self) -> bool:
        return self.mends_itself or self.back_to is not None or self.on_from is not None or bool(self.anew)


def examine(
    place: DamageLocation,
    names: Iterable[str],
    told: ProgressReport | None = None,
    topics: Mapping[str, Mapping[str, TopicState]] | None = None,
) -> list[Damage]:
    """What is wrong with the checkpoints of these queries and with their tables; at most one `Damage` a query. And what
    is torn of the tables that no query writes.

    `told`: how far `updates` got, as Kafka has it; None: Kafka does not know, or was not asked. `topics`: those that
    each query reads, by full name; None: Kafka was not asked.
    """
    found: list[Damage | None] = []
    for name in names:
        damage = _examine(place, name)
        if damage is None or not damage.mends_itself:
            told_of = told if name == "updates" else None
            other = _of_other_topics(place, name, (topics or {}).get(name, {}))
            damage = _without_the_log(damage, other) or other or _not_as_told(place, name, told_of)
        found.append(damage)
    found += (_of_no_query(place.lake, table) for table in _OF_NO_QUERY)
    return [damage for damage in found if damage is not None]


def mend(
    place: DamageLocation,
    names: Iterable[str],
    told: ProgressReport | None = None,
    topics: Mapping[str, Mapping[str, TopicState]] | None = None,
) -> list[str]:
    """Mends what is right to mend in any case, and says what it did. DamageError: something else is wrong.

    `told`, `topics`: as `examine` takes them.
    """
    damages = examine(place, names, told, topics)
    for damage in damages:
        if not damage.mends_itself:
            raise DamageError(
                f"{damage.query} cannot start: {damage.found}. Type kiln recover, which says what can be done"
            )
    return [set_aside(place, damage) for damage in damages]


def set_aside(place: DamageLocation, damage: Damage) -> str:
    """Moves the files away that are in the way, and says so."""
    for path in damage.set_aside:
        _move_away(place, path)
    return f"{damage.query}: {damage.found}. {damage.remedy}"


def go_back(place: DamageLocation, damage: Damage, oldest: log.Offsets) -> None:
    """Lets a query begin again at `damage.back_to`. `oldest`: the first offsets that Kafka holds, by full topic name.

    May be cut short, and then be done again. DamageError: that would lose something; nothing was changed.
    """
    ending, lake = damage.back_to, place.lake
    if ending is None:
        raise DamageError(f"{damage.query}: {damage.remedy}")
    checkpoint = Checkpoint(place.checkpoints / damage.query)
    _refuse_what_kafka_lost(damage.query, _starts(checkpoint, ending.next), oldest)
    logs = _logs(lake, damage.query)
    for table, each in logs.items():
        for version in each.torn:
            _move_away(place, _entry(lake, table, version))
    versions = {table: _base(lake, table, checkpoint.query_id, ending.next) for table in logs}
    for table, version in versions.items():
        restore_version(lake, table, version)
    folder = Path(checkpoint.path.uri)
    for path in list_files_after(folder, ending):
        _move_away(place, path)
    _rename(place, folder)


def go_on(place: DamageLocation, damage: Damage, since: log.Offsets, now: int) -> None:
    """Lets a query go on from `damage.on_from` with a checkpoint of its own. Its first micro-batch reads from `since`
    up to there, and only remembers what it reads. Those after it go on with the epochs of the old checkpoint, which is
    set aside: what the query had written beyond `damage.on_from` bears the next one (decision 7). `now`: µs.

    May be cut short, and then be done again.
    """
    if damage.on_from is None:
        raise DamageError(f"{damage.query}: {damage.remedy}")
    checkpoints = Path(place.checkpoints.uri)
    old = Checkpoint(place.checkpoints / damage.query)
    began = old.replaced_epoch or Epoch(old.query_id, 0)
    fresh = checkpoints / f"{damage.query}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    # as Spark leaves them that was stopped in its first micro-batch (OffsetSeq)
    first = {"batchWatermarkMs": 0, "batchTimestampMs": now // 1_000, "conf": old.conf}
    files = {
        "metadata": json.dumps({"id": str(uuid4())}),
        "sources/0/0": f"{_SOURCE_HEAD}{json.dumps(since)}",
        "offsets/0": f"v1\n{json.dumps(first)}\n{json.dumps(damage.on_from.ends)}",
        REPLACED_EPOCH_FILE: msgspec.json.encode(Epoch(began.query, began.batch + damage.on_from.batch)).decode(),
    }
    for name, text in files.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        to_disk(path)
    for folder in ("sources/0", "sources", "offsets", "."):
        to_disk(fresh / folder)
    _move_away(place, checkpoints / damage.query)
    fresh.rename(checkpoints / damage.query)
    to_disk(checkpoints)


def read_anew(place: DamageLocation, damage: Damage) -> None:
    """Let a query go on in the topics of `damage.anew`, at their offsets `begin`.

    The newest finished micro-batch then ends there, so the next one reads on from there. A micro-batch that was begun
    and not finished keeps its id, and reads nothing of these topics when Spark repeats it. Tables, state and memory
    stay as they are. May be cut short, and then be done again.
    """
    checkpoint = Checkpoint(place.checkpoints / damage.query)
    planned, done = checkpoint.planned, checkpoint.planned == checkpoint.committed
    if checkpoint.path.folder is not None:
        _release_places(place, damage, checkpoint, () if done else damage.anew)
    begin = {topic: state.begin for topic, state in damage.anew.items()}
    for batch in (planned,) if done else (planned - 1, planned):
        if batch >= 0:
            _replace_offsets(place, checkpoint, checkpoint.path / "offsets" / str(batch), begin)
    first = checkpoint.path / "sources" / "0" / "0"
    if checkpoint.committed < 0 and first.exists():
        _replace_offsets(place, checkpoint, first, begin)
    note_topics(checkpoint.path, {topic: state.id for topic, state in damage.anew.items()})


def _release_places(place: DamageLocation, damage: Damage, checkpoint: Checkpoint, unfinished: Iterable[str]) -> None:
    """What passed in an unfinished micro-batch passes again, unless it is in the table: its records are gone from
    Kafka, so whoever sends them again must not be taken for a repeat. `sink` keeps its rows by themselves, as they come
    from Kiln alone."""
    ends = checkpoint.ends(checkpoint.planned)
    lost: log.Offsets = {topic: ends.get(topic, {}) for topic in unfinished}
    starts = _starts(checkpoint, checkpoint.planned) if lost and checkpoint.planned >= 0 else {}
    logs = {table: each for table, each in _logs(place.lake, damage.query).items() if table == "messages"}
    is_written = _newest_write(place.lake, checkpoint.query_id, logs)[0] >= checkpoint.planned
    reads = QUERIES[damage.query].reads
    names = {read for read in reads for topic in damage.anew if topic.endswith(read)}

    def is_of_topic(text: str) -> bool:
        return len(reads) == 1 or text.split("/")[0] in names

    def is_lost(text: str) -> bool:
        if is_written or len(reads) > 1:
            return False
        part, offset = map(int, text.split("/")[:2])
        return any(starts.get(topic, {}).get(part, 0) <= offset < ends.get(part, 0) for topic, ends in lost.items())

    folder = checkpoint.path.folder
    assert folder is not None
    release_positions(folder, is_of_topic, is_lost)


def _replace_offsets(place: DamageLocation, checkpoint: Checkpoint, path: Location, offsets: log.Offsets) -> None:
    """In a file of Spark's, take these offsets for their topics. The file as it was goes to `set-aside`."""
    old = path.read()
    *head, last = old.decode().splitlines()
    source = json.loads(last)
    source |= {topic: {str(part): at for part, at in parts.items()} for topic, parts in offsets.items()}
    kept = place.state / "set-aside" / str(time.time_ns()) / checkpoint.path.name / path.name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(old)
    if path.folder is not None:  # first: the new file does not go with the old check sums, as a torn one does not
        path.folder.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        to_disk(path.folder.parent)
    path.write(["\n".join([*head, json.dumps(source)]).encode()])


_SOURCE_HEAD = "\0v1\n"
"""What Spark writes before the offsets where a query begins (KafkaSourceInitialOffsetWriter)."""


def _of_other_topics(place: DamageLocation, name: str, topics: Mapping[str, TopicState]) -> Damage | None:
    """Find out whether the offsets of a checkpoint are of other topics than those that are in Kafka."""
    checkpoint = Checkpoint(place.checkpoints / name)
    if not topics or not checkpoint.exists:
        return None
    try:
        ends = checkpoint.ends(checkpoint.planned)
    except (OSError, ValueError, IndexError):  # torn, which `_examine` reports
        return None
    misfits = find_misfits(read_noted(checkpoint.path), ends, topics)
    if not misfits:
        return None
    unfinished = checkpoint.planned if checkpoint.planned > checkpoint.committed else None
    lost = (
        ""
        if unfinished is None
        else f". Its micro-batch {unfinished} was not finished: what it read there and is in no table is lost"
    )
    others = ", ".join(misfits)
    words = f"{'; '.join(each.words for each in misfits.values())}. At its old offsets {name} would skip records"
    remedy = f"{name} keeps its tables and what it remembers, and reads {others} from the oldest new record on{lost}"
    anew = {topic: topics[topic]._replace(begin=each.begin) for topic, each in misfits.items()}
    return Damage(name, words, remedy, anew=anew)


def _without_the_log(damage: Damage | None, other: Damage | None) -> Damage | None:
    """A query whose topic is another one cannot do anew what it did."""
    if damage is None or other is None:
        return damage
    return replace(damage, found=f"{damage.found}. And {other.found}", remedy=_ELSE, back_to=None, on_from=None)


def _not_as_told(place: DamageLocation, name: str, told: ProgressReport | None) -> Damage | None:
    """Whether a query had got further than its checkpoint says, or has lost what it had let through."""
    checkpoint = Checkpoint(place.checkpoints / name)
    if not checkpoint.exists:
        return None
    if told is not None and told.query_id != checkpoint.query_id:
        told = None
    if told is not None and told.batch > checkpoint.planned:
        found = (
            f"the checkpoint of {name} in {checkpoint.path} is older than what {name} wrote to Kafka: it ends with the "
            f"micro-batch {checkpoint.planned}, and {name} had written the micro-batch {told.batch}. The query would "
            "announce once more what it announced in between"
        )
    else:
        lost = _lost(place, name, checkpoint)
        if not lost:
            return None
        found = f"{lost}: {name} remembers there what it has let through, and would take for new what comes again"
    if told is None or checkpoint.path.folder is None or checkpoint.planned < 0:
        return Damage(name, found, _ELSE)
    remedy = (
        f"{name} goes on behind the micro-batch {told.batch}, with a checkpoint of its own. First {name} reads again, "
        "in one micro-batch, the frames whose updates it is to remember"
    )
    return Damage(name, found, remedy, on_from=told)


def _lost(place: DamageLocation, name: str, checkpoint: Checkpoint) -> str:
    """In words, what is amiss with the file of what a query has let through; empty: nothing."""
    folder, done = checkpoint.path.folder, checkpoint.committed
    if name == "batch" or folder is None or done < 0:
        return ""
    path = folder / FILE_NAME
    if path.exists():
        try:
            ended = read_marked_epoch(folder)
        except DedupStoreError as error:
            return str(error)
        if ended.query == checkpoint.query_id and ended.batch < done:
            return f"{path} ends with the micro-batch {ended.batch}, and the checkpoint with {done}"
        return ""
    if has_dedup_state(folder):
        return ""
    if name == "archive":
        log = _logs(place.lake, name).get("messages")  # the query of 0.1 wrote none, and remembered nothing
        if log is None or find_newest_write(place.lake, "messages", checkpoint.query_id, log) < 0:
            return ""
    return f"{path} is gone"


def _examine(place: DamageLocation, name: str) -> Damage | None:
    lake, checkpoint = place.lake, Checkpoint(place.checkpoints / name)
    logs = _logs(lake, name)
    within = [_entry(lake, table, version) for table, each in logs.items() for version in each.within]
    torn = [_entry(lake, table, version) for table, each in logs.items() for version in each.torn]
    summaries = [path for each in logs.values() for path in each.checkpoints]
    if within:
        words = f"{_names(within)} is damaged, or names a file that is gone, and later commits are whole"
        return Damage(name, words, _ELSE, tuple(within))
    if not checkpoint.path.exists():
        return _without_checkpoint(name, torn, summaries)
    messages = place.checkpoints / "messages"
    if torn and name == "archive" and messages.exists():  # of 0.1: two queries wrote these tables
        return Damage(name, _torn(torn), _ELSE, tuple(torn))
    folder = checkpoint.path.folder
    if folder is None:
        return _older_in_store(name, checkpoint, lake, logs)
    claimed, sound = find_claimed_end(folder), find_sound_end(folder)
    if not is_whole(folder / "metadata"):
        return _without_metadata(name, folder, claimed)
    if sound is None:
        bad = list_torn_files(folder, None)
        return Damage(name, f"no micro-batch of {checkpoint.path} is whole; torn: {_names(bad)}", _ELSE, tuple(bad))
    wrote, by = _newest_write(lake, checkpoint.query_id, logs)
    extra = [] if sound == claimed else list_files_after(folder, sound)
    files = [*torn, *summaries, *([] if sound == claimed else list_torn_files(folder, sound))]
    if not files and not extra and wrote <= claimed.batch:
        return None
    words = _older(name, checkpoint.path, claimed.batch, wrote, by) if wrote > claimed.batch else _torn(files or extra)
    committed = read_newest_commit_time(folder, sound)
    since = min((each.torn_since for each in logs.values() if each.torn_since is not None), default=None)
    newer = since is None or committed is None or since > committed
    if newer and _goes_on(name, claimed, sound, wrote):
        remedy = f"These files were set aside, and {name} goes on with the micro-batch {sound.next}"
        return Damage(name, words, remedy, tuple(files), (*torn, *extra, *summaries))
    back = sound if newer else find_sound_end(folder, since)
    if not logs or back is None:
        return Damage(name, words, _ELSE, tuple(files))
    remedy = (
        f"The tables of {name} become what they were before its micro-batch {back.next}, and {name} does what came "
        "since anew, from what Kafka holds"
    )
    return Damage(name, words, remedy, tuple(files), back_to=back)


_OF_NO_QUERY = tuple(TABLES.keys() - {table for query in QUERIES.values() for table in query.tables})


def _of_no_query(lake: Lake, table: str) -> Damage | None:
    """Who writes such a table goes on when the commit is on the disk: of one that is torn, nobody was told."""
    place = locate_log(lake.folder(table))
    if not place.exists():
        return None
    log = inspect_log(lake, table)
    torn = [*(_entry(lake, table, version) for version in log.torn), *log.checkpoints]
    if not torn:
        return None
    if log.newest < len(log.torn):  # no commit is whole
        return Damage(
            f"table {table}",
            _torn(torn),
            "The log was set aside, and Kiln makes the table anew",
            (),
            (Path(place.uri),),
        )
    remedy = "These files were set aside, and the table is as it was before"
    return Damage(f"table {table}", _torn(torn), remedy, tuple(torn), tuple(torn))


def _older_in_store(name: str, checkpoint: Checkpoint, lake: Lake, logs: Mapping[str, TableLog]) -> Damage | None:
    """No power cut tears what is in a store, but somebody may have put back an older checkpoint there."""
    wrote, by = _newest_write(lake, checkpoint.query_id, logs) if checkpoint.exists else (-1, "")
    if wrote <= checkpoint.planned:
        return None
    return Damage(name, _older(name, checkpoint.path, checkpoint.planned, wrote, by), _ELSE)


_ELSE = "Put the newest copy of checkpoint and tables back, or begin the query anew (RUNBOOK, State)"


def _goes_on(name: str, claimed: LastGoodBatch, sound: LastGoodBatch, wrote: int) -> bool:
    """Whether a query that goes on at the sound ending loses nothing and doubles nothing.

    A micro-batch whose offsets are whole reads the same records again, and a table knows it. One that is planned anew
    may read others, so nothing of it may be in a table. `updates` knows repeats of its newest micro-batch alone
    (decision 7). `batch` is a function of its log (decision 1).
    """
    if name == "batch":
        return True
    if name == "updates":
        return sound.next >= claimed.batch
    return wrote < sound.next or (wrote == sound.next and not sound.done)


def _older(name: str, checkpoint: Location, planned: int, wrote: int, table: str) -> str:
    return (
        f"the checkpoint of {name} in {checkpoint} is older than the table {table}: it ends with the micro-batch "
        f"{planned}, and the table has the micro-batch {wrote}. The query would skip what comes in between"
    )


def _torn(files: Sequence[Path]) -> str:
    return f"{_names(files)} is empty or cut off, as a power cut leaves files, or does not go with what is"


def _names(files: Sequence[Path]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return ", ".join(map(str, files[:3])) + more


def _without_checkpoint(name: str, torn: Sequence[Path], summaries: Sequence[Path]) -> Damage | None:
    """The query has not begun, or somebody has moved its checkpoint away, which the supervisor looks at."""
    if not torn and not summaries:
        return None
    made = all(int(path.stem) == 0 for path in torn)
    remedy = "These files were set aside, and Kiln makes them anew" if made else _ELSE
    return Damage(name, _torn([*torn, *summaries]), remedy, tuple(torn), (*torn, *summaries) if made else ())


def _without_metadata(name: str, checkpoint: Path, claimed: LastGoodBatch) -> Damage | None:
    """Spark writes `metadata` first, and Kiln syncs it before the first micro-batch does anything."""
    files = list(checkpoint.iterdir())
    if claimed.batch > 0 or claimed == LastGoodBatch(0, True):
        return Damage(name, _torn([checkpoint / "metadata"]), _ELSE, (checkpoint / "metadata",))
    if not files:
        return None
    remedy = f"The checkpoint was set aside, and {name} begins"
    return Damage(name, _torn([checkpoint / "metadata"]), remedy, (checkpoint / "metadata",), (checkpoint,))


def _entry(lake: Lake, table: str, version: int) -> Path:
    """Of a lake on a disk: nothing is torn in a store."""
    return Path(locate_commit(lake.folder(table), version).uri)


def _logs(lake: Lake, name: str) -> dict[str, TableLog]:
    """By table, of the tables that are there."""
    there = (table for table in QUERIES[name].tables if locate_log(lake.folder(table)).exists())
    return {table: inspect_log(lake, table) for table in there}


def _newest_write(lake: Lake, query_id: str, logs: Mapping[str, TableLog]) -> tuple[int, str]:
    """The newest micro-batch that is in a table, and the table; -1: none is."""
    return max(((find_newest_write(lake, table, query_id, each), table) for table, each in logs.items()), default=(-1, ""))


def _base(lake: Lake, table: str, query_id: str, batch: int) -> int:
    version = find_version_before(lake, table, query_id, batch)
    if version is None:
        raise DamageError(
            f"the log of the table {table} does not say how it was before the micro-batch {batch}, or somebody else "
            f"has changed the table since. {_ELSE}"
        )
    return version


def _starts(checkpoint: Checkpoint, batch: int) -> log.Offsets:
    """Where a micro-batch begins to read."""
    if batch > 0:
        return checkpoint.ends(batch - 1)
    first = (checkpoint.path / "sources" / "0" / "0").read().decode().splitlines()[-1]
    return {topic: {int(part): at for part, at in parts.items()} for topic, parts in json.loads(first).items()}


def _refuse_what_kafka_lost(name: str, starts: log.Offsets, oldest: log.Offsets) -> None:
    for topic, parts in starts.items():
        for part, at in parts.items():
            if oldest.get(topic, {}).get(part, 0) > at:
                raise DamageError(
                    f"{name} would begin again at the record {at:,} of {topic}-{part}, and the oldest that Kafka holds "
                    f"is {oldest[topic][part]:,}: the rows in between would be lost. {_ELSE}"
                )


def _rename(place: DamageLocation, checkpoint: Path) -> None:
    """Gives the query a new id, under which no table has a micro-batch."""
    _move_away(place, checkpoint / "metadata")
    fresh = checkpoint / "metadata.new"
    fresh.write_text(json.dumps({"id": str(uuid4())}), encoding="utf-8")
    to_disk(fresh)
    fresh.replace(checkpoint / "metadata")
    to_disk(checkpoint)


def _move_away(place: DamageLocation, path: Path) -> None:
    """Into `set-aside` in the state folder, with the check sums beside it."""
    for each in (path, path.with_name(f".{path.name}.crc")):
        if each.exists():
            inside = each.relative_to(place.state if each.is_relative_to(place.state) else each.anchor)
            target = place.state / "set-aside" / str(time.time_ns()) / inside
            target.parent.mkdir(parents=True)
            shutil.move(each, target)  # lake and checkpoints may be on other disks
            to_disk(each.parent)
