"""`kiln trace`: follow an id through the tables, in steps of one query each.

Pure functions plan the next steps from the id and the rows of earlier steps. In the query of a step, all ids, times and
positions are literals. So the query also runs in `kiln sql`, and DuckDB skips files and row groups that cannot contain
the literals. With a join instead of literals, DuckDB would read these files too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

import duckdb

from kiln.conf.process.errors import KilnError
from kiln.deploy.query.ask import Answer
from kiln.deploy.query.ask import Row as Cells
from kiln.deploy.query.trace_ids import CidRef, FrameRef, Id, MessageRef, StreamRef
from kiln.pipelines.delta.duckdb_tables import allow_only, create_views
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.wire.cid import cid_bytes, cid_text
from kiln.schemas.wire.streamid import StreamID, StreamIdError

Row: TypeAlias = Mapping[str, object]
StepRows: TypeAlias = Mapping[str, Sequence[Row]]
"""Rows of the steps that have run, by name of the step."""

MESSAGES: Final = 25
"""Number of newest messages whose copies and frames are shown, and of batches whose publications are shown."""

_NAMED: Final = 200
"""Maximum number of updates whose ids or offsets are literals in a query."""

_AFTER: Final = timedelta(minutes=2)
"""Time after a publication during which peers may request its announcement (IWANT)."""

_CLOCKS: Final = timedelta(minutes=1)
"""Assumed maximum difference between the clocks of two brokers, or of broker and bridge."""


@dataclass(frozen=True)
class TraceStep:
    """A query of a trace. `says` is its title, and `nothing` is shown instead of an empty result."""

    name: str
    says: str
    nothing: str
    sql: str


_TITLES: Final = {
    "messages": ("Messages, each from its first valid copy", "no valid message"),
    "copies": ("Copies of the messages, with the sending peer, the time and the verdict", "no copy"),
    "frames": ("Frames of the copies, with their bytes", "not in the table frames"),
    "separator": ("Separator of the updates, its source, and the verified genesis", "no update in kiln.updates"),
    "updates": ("Updates, with their offsets in kiln.updates", "no update in kiln.updates"),
    "batches": ("Window and batch of each update", "in no batch"),
    "batch": ("Batch: its window in event time, and its block", "not a batch of this Kiln"),
    "block": ("Tips in the block", "no tips in the table batch_tips"),
    "publications": ("Receipts of the attempts to publish the batch", "not published by the bridge"),
    "sent": (
        "Outgoing frames that announce the newest batch, with the peers they were sent to",
        "no outgoing frame announces the batch",
    ),
    "announcements": (
        "Received announcements of the batch, including the bridge's own that peers sent back",
        "none received",
    ),
    "tips": ("Sources of the tips", "not in the table tips"),
    "quarantine": ("Quarantined records", "none"),
}

STEPS: Final = tuple(_TITLES)
"""Names of the steps in the order of the output."""


def describe_kind(subject: Id, found: StepRows) -> str:
    """Return the kind of the traced id: batch, tip, stream, message or frame."""
    match subject:
        case CidRef():
            return "batch" if _is_batch(found) else "tip"
        case StreamRef():
            return "stream"
        case MessageRef():
            return "message"
        case FrameRef():
            return "frame" if subject.index is None else "message"


def list_steps(subject: Id, found: StepRows) -> list[str]:
    """List the steps to show, in order. For a tip, the step that searched for a batch with this CID is left out."""
    hidden = {"batch"} if isinstance(subject, CidRef) and not _is_batch(found) else set()
    return [name for name in STEPS if name in found and name not in hidden]


# ---------------------------------------------------------------- which steps


def _plan_steps(subject: Id, found: StepRows, most: int) -> Iterator[TraceStep]:
    """Plan the steps that can run, given the rows of the steps that have run.

    At most `most` messages are shown with copies and frames, and as many batches with publications.
    """
    match subject:
        case CidRef(cid):
            yield _batch(cid)
            yield _announcements([cid])
            if "batch" not in found or "announcements" not in found:
                return
            if _is_batch(found):
                yield from _steps_of_a_batch(cid, found)
            else:
                yield from _steps_of_updates(f"tip = {_text(cid)}", found)
                yield _messages(f"tip = {_text(cid)}")
                yield _tips(f"tip = {_text(cid)}")
        case StreamRef(stream):
            yield from _steps_of_updates(f"stream = {_text(stream)}", found)
            yield _messages(f"stream = {_text(stream)}", data=False)
            yield _tips(f"stream = {_text(stream)}")
        case MessageRef(message_id):
            yield from _steps_of_updates(f"message_id = {_text(message_id)}", found)
            yield _messages(f"message_id = {_text(message_id)}")
            yield _copies(f"message_id = {_text(message_id)}")
        case FrameRef():
            here = _at(subject)
            if subject.index is not None:  # a row of quarantine may be for another copy of the message
                here += f"\n   OR (network, message_id) IN (SELECT (network, message_id) FROM copies WHERE {here})"
            yield _copies(here)
            if "copies" in found:
                same = f"message_id IN (SELECT message_id FROM copies WHERE {_at(subject)})"
                yield from _steps_of_updates(same, found)
                yield _messages(same if found["copies"] else _at(subject))
    if "messages" in found:
        newest = _newest(found, most)
        yield _copies(_in("message_id", _texts(newest, "message_id")))
        yield from _steps_of_publications(subject, found, most)
        if "copies" in found:
            yield from _steps_of_places(subject, found, newest)


def _is_batch(found: StepRows) -> bool:
    return bool(found.get("batch") or found.get("announcements"))


def _steps_of_a_batch(cid: str, found: StepRows) -> Iterator[TraceStep]:
    yield _step("block", f"SELECT stream, tip\nFROM batch_tips\nWHERE batch_cid = {_text(cid)}\nORDER BY stream, tip")
    if not found["batch"]:  # Kiln's own batches are no source of new tips
        yield _tips(f"batch_cid = {_text(cid)}")
    members = f"SELECT {_UPDATE}\nFROM updates AS u\nWHERE false"
    if found["batch"]:
        # The log time of an update of the window lies between the opening of the window and the time when the broker
        # received the batch. Of a tip in several windows, the last update before this window closed counts.
        since, until = _span(found["batch"], "opened_at", "emitted_at", _CLOCKS)
        members = f"""SELECT {_UPDATE}
FROM (FROM batch_tips WHERE batch_cid = {_text(cid)}) AS t
     JOIN (FROM batches WHERE batch_cid = {_text(cid)}) AS b USING (batch_cid)
     JOIN updates AS u USING (network, origin, separator_key, separator_value, stream, tip)
WHERE u.log_time BETWEEN {_time(since)} AND {_time(until)} AND {_HEARD} < b.closed_at
QUALIFY {_HEARD} >= b.opened_at
     OR row_number() OVER (PARTITION BY network, origin, stream, tip, b.opened_at ORDER BY {_HEARD} DESC) = 1"""
    yield _step("updates", f"{members}\nORDER BY heard_at, message_id")
    if "updates" in found:
        yield _separator(members)
        yield _messages(_messages_of(found["updates"], members), data=False)


def _steps_of_updates(which: str, found: StepRows) -> Iterator[TraceStep]:
    chosen = f"SELECT {_UPDATE}\nFROM updates AS u\nWHERE {which}"
    yield _step("updates", f"{chosen}\nORDER BY heard_at, message_id")
    if "updates" in found:
        if found["updates"]:  # these bounds let DuckDB skip files without such updates
            since, until = _span(found["updates"], "log_time", "log_time")
            chosen += f" AND log_time BETWEEN {_time(since)} AND {_time(until)}{_at_offsets(found['updates'])}"
        yield _separator(chosen)
        # a batch whose window closed before the event time of an update does not contain the update
        yield _step(
            "batches",
            f"""SELECT heard_at, {_WINDOW}, stream, tip, message_id
FROM ({chosen}) AS u JOIN batch_tips AS t USING (stream, tip)
     JOIN batches AS b USING (network, origin, separator_key, separator_value, batch_cid)
WHERE heard_at < closed_at
QUALIFY row_number() OVER (PARTITION BY network, origin, message_id ORDER BY closed_at) = 1
ORDER BY heard_at, message_id""",
        )


def _at_offsets(updates: Sequence[Row]) -> str:
    offsets = sorted({offset for row in updates if isinstance(offset := row["log_offset"], int)})
    return f"\n  AND log_offset IN ({', '.join(map(str, offsets))})" if 0 < len(offsets) <= _NAMED else ""


def _messages_of(updates: Sequence[Row], members: str) -> str:
    if not updates:
        return "false"
    if len(updates) > _NAMED:
        return f"(network, message_id) IN (SELECT (network, message_id) FROM ({members}))"
    pairs = sorted({(str(row["network"]), str(row["message_id"])) for row in updates})
    # the ids first, because DuckDB cannot skip files by a pair of columns
    ids = _in("message_id", list(dict.fromkeys(message_id for _, message_id in pairs)))
    return f"{ids}\n  AND (network, message_id) IN ({', '.join(f'({_text(a)}, {_text(b)})' for a, b in pairs)})"


def _steps_of_publications(subject: Id, found: StepRows, most: int) -> Iterator[TraceStep]:
    heard = _texts(found["messages"], "batch_cid")
    if isinstance(subject, CidRef) and _is_batch(found):
        cids = [subject.text]
    elif "batches" in found:
        cids = list(dict.fromkeys([*_texts(found["batches"], "batch_cid")[-most:], *heard[-most:]]))
        yield _announcements(cids)
        yield _tips(_in("batch_cid", heard[-most:]))
    else:
        return
    yield _step(
        "publications",
        f"""SELECT published_at, transport, topic, target, peer_count, error, batch_cid
FROM publications
WHERE {_in("batch_cid", cids)}
ORDER BY published_at""",
    )
    if "publications" in found:
        yield _sent(found["publications"])


def _steps_of_places(subject: Id, found: StepRows, newest: Sequence[Row]) -> Iterator[TraceStep]:
    copied = set(_texts(found["copies"], "message_id"))
    rows = [*found["copies"], *(row for row in newest if row["message_id"] not in copied)]
    places = [place for row in rows if (place := _place(row))]
    if isinstance(subject, FrameRef):
        places.append(subject)
    yield _frames(places)
    streams = (
        [subject.text] if isinstance(subject, StreamRef) else _texts([*newest, *found.get("updates", ())], "stream")
    )
    cids = [subject.text] if isinstance(subject, CidRef) else [cid for stream in streams for cid in _genesis(stream)]
    yield _quarantine(places, list(dict.fromkeys([*cids, *_texts(newest, "batch_cid")])))


def _newest(found: StepRows, most: int) -> list[Row]:
    rows = [*found["messages"], *found.get("announcements", ())]
    by_id = {row["message_id"]: row for row in rows}
    return sorted(by_id.values(), key=lambda row: _span([row], "observed_at", "observed_at"), reverse=True)[:most]


def _genesis(stream: str) -> list[str]:
    """Return the CID of a stream's genesis, as the table `quarantine` has it; empty if the text is not a StreamID."""
    try:
        return [cid_text(StreamID.parse(stream).genesis)]
    except StreamIdError:
        return []


# ---------------------------------------------------------------- queries

_HEARD: Final = "least(u.observed_at, u.log_time)"
_UPDATE: Final = f"""{_HEARD} AS heard_at, network, origin, stream, tip, separator_source, separator_key,
       separator_value, log_partition, log_offset, u.log_time, u.from_peer, u.message_id"""
_WINDOW: Final = """network, origin, separator_key, separator_value, opened_at, closed_at, emitted_at,
       round((epoch_us(emitted_at) - epoch_us(closed_at)) / 1000, 1) AS late_ms, stream_count, tip_count,
       block_bytes, batch_cid"""
_PLACE: Final = "kafka_partition, kafka_offset, message_index"


def _step(name: str, sql: str) -> TraceStep:
    says, nothing = _TITLES[name]
    return TraceStep(name, says, nothing, sql)


def _messages(which: str, *, data: bool = True) -> TraceStep:
    """Build the step for messages. Without `data`, leave out their bytes: for many messages these are slow to read."""
    content = "octet_length(data) AS bytes, data" if data else "ver"
    return _step(
        "messages",
        f"""SELECT observed_at, network, origin, type, from_peer, topic, topic_source, stream, tip, model, sep,
       batch_cid, verdict, message_id, {_PLACE}, {content}
FROM messages
WHERE {which}
ORDER BY observed_at, message_id""",
    )


def _copies(which: str) -> TraceStep:
    return _step(
        "copies",
        f"""SELECT observed_at, remote_peer, verdict,
       count(*) OVER of_message AS copies, row_number() OVER (of_message ORDER BY observed_at, {_PLACE}) AS copy,
       round((epoch_us(observed_at) - min(epoch_us(observed_at)) OVER of_message) / 1000, 1) AS behind_ms,
       network, message_id, {_PLACE}
FROM copies
WHERE {which}
WINDOW of_message AS (PARTITION BY network, message_id)
ORDER BY observed_at, {_PLACE}""",
    )


def _frames(places: Iterable[FrameRef]) -> TraceStep:
    at = list(dict.fromkeys((place.partition, place.offset) for place in places))
    offsets = ", ".join(str(offset) for _, offset in at)
    # the offsets first, because DuckDB cannot skip files by a pair of columns
    which = f"kafka_offset IN ({offsets}) AND (kafka_partition, kafka_offset) IN ({_rows(at)})" if at else "false"
    return _step(
        "frames",
        f"""SELECT observed_at, kafka_timestamp, direction, remote_peer, protocol, sequence,
       octet_length(payload) AS bytes, payload, verdicts, network, origin, connection, declared_length,
       kafka_partition, kafka_offset
FROM frames
WHERE {which}
ORDER BY observed_at, kafka_partition, kafka_offset""",
    )


def _separator(updates: str) -> TraceStep:
    return _step(
        "separator",
        f"""SELECT network, stream, u.separator_source, u.separator_key, u.separator_value, s.source AS genesis,
       s.separator_key AS genesis_key, s.separator_value AS genesis_value,
       (u.separator_key <> s.separator_key OR u.separator_value <> s.separator_value) AS contradicted,
       count(*) AS updates, min(heard_at) AS first_heard, max(heard_at) AS last_heard
FROM ({updates}) AS u LEFT JOIN streams AS s USING (network, stream)
GROUP BY ALL
ORDER BY first_heard, network, stream""",
    )


def _batch(cid: str) -> TraceStep:
    return _step(
        "batch", f"SELECT {_WINDOW}, block\nFROM batches\nWHERE batch_cid = {_text(cid)}\nORDER BY opened_at, network"
    )


def _sent(publications: Sequence[Row]) -> TraceStep:
    """Build the step for the outgoing frames of the newest published batch. Older batches would take too long,
    because searching frames is slow."""
    left = "false"
    if newest := _texts(publications[-1:], "batch_cid"):
        of_it = [row for row in publications if row["batch_cid"] in newest]
        since, until = _span(of_it, "published_at", "published_at", _AFTER)
        # a pubsub message has the CID as text, an item of the DHT as bytes
        as_text, as_bytes = f"hex(encode({_text(newest[0])}))", f"'{cid_bytes(newest[0]).hex().upper()}'"
        names = f"(contains(hex(payload), {as_text}) OR contains(hex(payload), {as_bytes}))"
        left = f"direction = 'OUT' AND observed_at BETWEEN {_time(since)} AND {_time(until)}\n  AND {names}"
    return _step(
        "sent",
        f"""SELECT observed_at, remote_peer, protocol, sequence, octet_length(payload) AS bytes, payload, network,
       kafka_partition, kafka_offset
FROM frames
WHERE {left}
ORDER BY observed_at, kafka_partition, kafka_offset""",
    )


def _announcements(cids: Sequence[str]) -> TraceStep:
    return _step(
        "announcements",
        f"""SELECT observed_at, network, origin, from_peer, verdict, topic, sep, batch_cid, message_id, {_PLACE}
FROM messages
WHERE type = 'BATCH_UPDATE' AND {_in("batch_cid", cids)}
ORDER BY observed_at, message_id""",
    )


def _tips(which: str) -> TraceStep:
    return _step(
        "tips",
        f"SELECT observed_at, network, stream, tip, source, batch_cid\nFROM tips\nWHERE {which}\n"
        "ORDER BY observed_at, tip",
    )


def _quarantine(places: Iterable[FrameRef], cids: Sequence[str]) -> TraceStep:
    at = [(place.partition, place.offset, -1 if place.index is None else place.index) for place in places]
    whole = [(partition, offset, -1) for partition, offset, _ in at]
    messages = _rows(list(dict.fromkeys([*at, *whole])))
    here = f"(kafka_partition, kafka_offset, coalesce(message_index, -1)) IN ({messages})" if at else "false"
    if any(place.index is None for place in places):
        frames = _rows([(place.partition, place.offset) for place in places if place.index is None])
        here += f"\n   OR (kafka_partition, kafka_offset) IN ({frames})"
    return _step(
        "quarantine",
        f"""SELECT observed_at, stage, reason, detail, octet_length(data) AS bytes, data, cid, {_PLACE}
FROM quarantine
WHERE {_in("cid", cids)}
   OR {here}
ORDER BY observed_at, {_PLACE}, detail""",
    )


# ---------------------------------------------------------------- literals and values


def _text(text: str) -> str:
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


def _time(at: datetime) -> str:
    return f"TIMESTAMPTZ '{at.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}+00'"


def _in(column: str, texts: Sequence[str]) -> str:
    match texts:
        case []:
            return "false"
        case [one]:
            return f"{column} = {_text(one)}"
    return f"{column} IN ({', '.join(map(_text, texts))})"


def _rows(rows: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(f"({', '.join(map(str, row))})" for row in rows)


def _at(place: FrameRef) -> str:
    index = "" if place.index is None else f" AND message_index = {place.index}"
    return f"kafka_partition = {place.partition} AND kafka_offset = {place.offset}{index}"


def _texts(rows: Iterable[Row], column: str) -> list[str]:
    return list(dict.fromkeys(value for row in rows if isinstance(value := row.get(column), str)))


def _place(row: Row) -> FrameRef | None:
    match row["kafka_partition"], row["kafka_offset"], row["message_index"]:
        case int(partition), int(offset), int(index):
            return FrameRef(partition, offset, index)
    return None


def _span(rows: Sequence[Row], first: str, last: str, margin: timedelta = timedelta(0)) -> tuple[datetime, datetime]:
    """Compute the range from the earliest `first` to the latest `last`, extended by `margin`.

    Raises:
        ValueError: There is no row.
    """
    since = min(value for row in rows if isinstance(value := row[first], datetime))
    until = max(value for row in rows if isinstance(value := row[last], datetime))
    return since - margin, until + margin


TABLES = (
    *("batch_tips", "batches", "copies", "frames", "messages", "publications", "quarantine", "streams", "tips"),
    "updates",
)
"""The tables that the steps query."""


class TraceError(KilnError):
    """No table contains the id, or a table is missing or cannot be read."""


class StepAnswer(Answer):
    """Result of a step, read completely."""

    def __init__(self, step: TraceStep, columns: tuple[str, ...], cells: list[Cells]) -> None:
        super().__init__(columns, cells)
        self.step = step
        self.cells = cells


@dataclass(frozen=True)
class Trace:
    """Result of a trace: the id, its kind, and the results of the steps in order."""

    subject: Id
    kind: str
    steps: tuple[StepAnswer, ...]


def trace_subject(lake: Lake, subject: Id, most: int = MESSAGES) -> Trace:
    """Trace an id through the tables.

    Args:
        subject: Id to trace.
        most: Maximum number of messages with copies and frames in the result, and of batches with publications.

    Raises:
        TraceError: No table has the id, or a table is missing.
        LakeError: A table cannot be read.
    """
    opened = {name: lake.open(name) for name in lake.tables() if name in TABLES}
    missing = set(TABLES) - set(opened)
    if missing:
        raise TraceError(
            f"there is no table {', '.join(sorted(missing))} in {lake.path} yet. kiln run creates missing tables when "
            "it starts"
        )
    answers: dict[str, StepAnswer] = {}
    found: dict[str, list[Row]] = {}
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET parquet_metadata_cache = true")  # the steps read the same files
        allow_only(connection, create_views(connection, lake, opened))
        while steps := [step for step in _plan_steps(subject, found, most) if step.name not in found]:
            for step in steps:
                if step.name not in found:  # two conditions may plan the same step
                    answers[step.name] = answer = _run_step(connection, step)
                    found[step.name] = [dict(zip(answer.columns, cells, strict=True)) for cells in answer.cells]
    if not any(found.values()):
        raise TraceError(
            f"no table in {lake.path} has {subject.text}. Check the id, or wait until its rows are committed"
        )
    return Trace(subject, describe_kind(subject, found), tuple(answers[name] for name in list_steps(subject, found)))


def _run_step(connection: duckdb.DuckDBPyConnection, step: TraceStep) -> StepAnswer:
    try:
        connection.execute(step.sql)
        columns = tuple(str(column[0]) for column in connection.description or ())
        return StepAnswer(step, columns, connection.fetchall())
    except (duckdb.Error, OSError) as error:
        raise TraceError(f"the query of the step {step.name} failed: {error}") from error
