"""`kiln quarantine`: count, show, replay and drop quarantined records."""

from __future__ import annotations

import json
import time
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from kiln.conf.process.extras import require_extras
from kiln.deploy.cli.options import (
    ConfigOption,
    JsonOption,
    StateOption,
    UsageError,
    answers,
    lake_of,
    note_once,
    notes,
    parse_time,
    settings_of,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kiln.bridge.kafka.producers import FramesProducer
    from kiln.deploy.ops.quarantine import By, QuarantineFilter, QuarantineRow, ReasonCount

_WIDE = 240
"""Width of a table in characters if stdout is no terminal: enough for two peer ids and two timestamps."""
_LINE: Final = 16
"""Bytes per line of a hex dump."""
_READABLE: Final = 0.9
"""Minimum share of printable characters in data that is shown as text instead of hex."""

commands = typer.Typer(name="quarantine", no_args_is_help=True, help="Count, show, replay or drop quarantined records.")

StageOption = Annotated[
    str | None, typer.Option("--stage", metavar="STAGE", help="Only rows of this stage, such as message.")
]
ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="REASON", help="Only rows with this reason, such as bad_tip.")
]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Start of a time range: 1h (ago), 2026-11-01, 2026-11-01T12:00:00Z."),
]
UntilOption = Annotated[
    str | None, typer.Option("--until", metavar="TIME", help="End of the range, exclusive; formats as for --since.")
]
AuthorOption = Annotated[
    str | None,
    typer.Option("--author", metavar="PEER", help="Only messages with this author. Authors may be forged."),
]
ByOption = Annotated[Literal["reason", "hour", "author"], typer.Option("--by", help="Grouping of the counts.")]


@commands.command("list")
def quarantine_list(
    by: ByOption = "reason",
    stage: StageOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    author: AuthorOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Count quarantined records by reason, hour or author."""
    require_extras("lake")
    settings = settings_of(config, state)
    wanted = _build_filter(stage, reason, since, until, author)
    from kiln.deploy.ops.quarantine import QuarantineRows

    with QuarantineRows(lake_of(settings), wanted, authors=by == "author") as picked:
        counts = picked.counts(by)
    if as_json:
        print(_encode_counts(counts, by))
    else:
        _table_on().print(_render_counts(counts, by))


@commands.command("show")
def quarantine_show(
    stage: StageOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    author: AuthorOption = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Maximum number of rows, newest first.")] = 5,
    most: Annotated[
        int, typer.Option("--bytes", metavar="N", min=0, help="Maximum bytes to show of each record; 0 for all.")
    ] = 256,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Show quarantined records with sender, bytes and suggested fix.

    Records that are mostly text are printed as text with escapes, all others in hex. --json prints complete records.
    """
    require_extras("lake")
    settings = settings_of(config, state)
    wanted = _build_filter(stage, reason, since, until, author)
    from kiln.deploy.ops.quarantine import QuarantineRows

    with QuarantineRows(lake_of(settings), wanted, authors=True) as picked:
        if as_json:
            print(_encode_objects(row._asdict() for row in picked.rows(rows)))
            return
        out = _table_on()
        out.print(_render_counts(picked.counts(), "reason"), "")
        for row in picked.rows(rows):
            out.print(_render_row(row, most), soft_wrap=True)


@commands.command("drop")
def quarantine_drop(
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="Your reason, stored in quarantine_dropped.")],
    stage: StageOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    author: AuthorOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Drop every row. Takes no filter options.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Drop the rows instead of counting them.")] = False,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Delete rows from the table quarantine permanently.

    Without --yes the command only counts the rows. Dropped rows cannot be replayed. The table quarantine_dropped
    records each of them with the hash of its bytes, the time and TEXT. You can run the command while Kiln runs.
    """
    require_extras("lake")
    settings = settings_of(config, state)
    wanted = _build_filter(stage, reason, since, until, author)
    if wanted.is_all != everything:
        raise UsageError("pass at least one of --stage, --reason, --since, --until and --author, or --all without them")
    if not why.strip():
        raise UsageError("--why is empty. Pass the reason why you drop the rows")
    from kiln.deploy.ops.quarantine import QuarantineRows

    lake, out = lake_of(settings), _table_on()
    if not yes:
        with QuarantineRows(lake, wanted) as picked:
            counts = picked.counts()
        if as_json:
            print(_encode_counts(counts, "reason"))
        else:
            out.print(_render_counts(counts, "reason"))
            out.print("no row was dropped. To drop these rows, pass --yes", style="dim")
        return
    from uuid import uuid4

    from kiln.deploy.ops.quarantine import drop_rows

    done = drop_rows(lake, wanted, why.strip(), uuid4().hex[:16], datetime.now(UTC))
    if as_json:
        print(json.dumps(done._asdict()))
    elif done.rows:
        if done.known:
            out.print(f"{done.known:,} of the rows are in quarantine_dropped already, from an interrupted drop")
        out.print(
            f"dropped {done.rows:,} rows. To list them: "
            f"kiln sql \"SELECT * FROM quarantine_dropped WHERE drop_id = '{done.drop_id}'\"",
            soft_wrap=True,
            highlight=False,
        )
    else:
        out.print("no row was dropped, because none matches the filter")


def _table_on() -> Console:
    """Return a console for tables. If stdout is no terminal, the console is so wide that no id is wrapped."""
    console = answers()
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    return console


def _build_filter(
    stage: str | None, reason: str | None, since: str | None, until: str | None, author: str | None
) -> QuarantineFilter:
    from kiln.deploy.ops.quarantine import QuarantineFilter

    return QuarantineFilter(
        stage,
        reason,
        parse_time(since, "--since") if since else None,
        parse_time(until, "--until") if until else None,
        author,
    )


@commands.command("replay")
def quarantine_replay(
    reason: Annotated[
        str,
        typer.Option(
            "--reason",
            metavar="REASON",
            help="Reason of the records, such as unknown_bundle_hash. To list reasons: kiln quarantine list.",
        ),
    ],
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Replay quarantined messages that Kiln accepts now.

    Use this after you removed the cause, such as an unknown topic bundle. The command writes the messages to Kafka.
    Then process them with kiln run --catch-up. Their batches are not published. Messages that the tables already have
    are skipped, so you can repeat the command. For records of stage fetch, the command requests the missing blocks
    again from a running bridge.
    """
    require_extras("spark")
    settings = settings_of(config, state)
    from kiln.bridge.kafka.producers import connect
    from kiln.deploy.ops.quarantine_replay import (
        QuarantineReplay,
        build_retry,
        describe_candidates,
        find_unfetched_blocks,
    )
    from kiln.deploy.stack.kafka_broker import start_broker
    from kiln.pipelines.app.launch import decode_config
    from kiln.schemas.kafka.records import encode
    from kiln.schemas.wire.topic_table import BundleError

    try:
        how = decode_config(settings)
    except BundleError as error:
        raise UsageError(f"topic_table.bundles: {error}") from error
    out = notes()

    @contextmanager
    def producing(topic: str) -> Iterator[FramesProducer]:
        with (
            start_broker(settings, note_once(out)) as servers,
            connect(
                {**settings.broker.security_options(), "bootstrap_servers": servers}, settings.kafka.topic(topic)
            ) as producer,
        ):
            yield producer
            producer.flush()

    given_up = find_unfetched_blocks(lake_of(settings), reason)
    if given_up is not None:
        missing, unreadable = given_up
        if missing:
            number = time.time_ns() // 1000
            with producing("wanted") as producer:
                for record in missing:
                    producer.send_record(record.cid.encode(), encode(build_retry(record, number)))
            out.print(f"{reason}: requested {len(missing):,} missing blocks again; the bridge fetches them")
        elif not unreadable:
            out.print(f"{reason}: no block is missing any more, so none is requested")
        if unreadable:
            out.print(
                f"{reason}: {unreadable:,} rows stay in quarantine, because this version of Kiln cannot read them"
            )
        return
    replay = QuarantineReplay(lake_of(settings), reason, how)
    found = replay.find()
    if found.back:
        with producing("frames") as producer:
            for frame in replay.frames():
                producer.send(frame)
    out.print(f"{reason}: {describe_candidates(found)}", soft_wrap=True)
    if replay.other_stages:
        stages = ", ".join(replay.other_stages)
        out.print(
            f"records of these stages cannot be replayed: {stages}. To see remedies: "
            f"kiln quarantine show --reason {reason}",
            soft_wrap=True,
        )
    if found.back:
        out.print(
            "next: kiln run --catch-up. If Kiln is running, it reads the messages by itself. If you changed settings "
            "and have not restarted it since, restart it and replay again",
            style="dim",
            soft_wrap=True,
        )


# ---------------------------------------------------------------- output: bytes of peers as `printable` text or hex


def _render_counts(counts: Sequence[ReasonCount], by: By) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from kiln.deploy.ops.quarantine import GROUPS
    from kiln.deploy.query.answer import format_cell

    if not counts:
        return Text("no quarantined records match")
    table = Table(header_style="bold", pad_edge=False, show_edge=False)
    for name in GROUPS[by]:
        table.add_column(name.replace("_", " "), overflow="fold")
    table.add_column("rows", justify="right")
    for name in ("oldest", "newest"):
        table.add_column(name)
    for count in counts:
        table.add_row(*map(Text, map(format_cell, (*count.of, count.rows, count.oldest, count.newest))))
    return Group(table, Text(f"({sum(count.rows for count in counts):,} rows)", style="dim"))


def _encode_counts(counts: Iterable[ReasonCount], by: By) -> str:
    from kiln.deploy.ops.quarantine import GROUPS

    return _encode_objects(
        dict(zip(GROUPS[by], count.of, strict=True))
        | {"rows": count.rows, "oldest": count.oldest, "newest": count.newest}
        for count in counts
    )


def _encode_objects(objects: Iterable[dict[str, object]]) -> str:
    from kiln.deploy.query.answer import encode_value

    return json.dumps([{name: encode_value(value) for name, value in pairs.items()} for pairs in objects], indent=1)


def _render_row(row: QuarantineRow, limit: int) -> RenderableType:
    """Render a row: one value per line, the first `limit` bytes of its data (0 for all), and what to do about it."""
    from rich.console import Group
    from rich.text import Text

    from kiln.deploy.query.answer import format_cell
    from kiln.schemas.faults import FAULTS
    from kiln.schemas.printable import printable

    lines = [Text(f"── {printable(row.stage)}: {printable(row.reason)}", "bold")]
    for name, value in zip(row._fields[2:-1], row[2:-1], strict=True):
        if value is not None:
            lines.append(Text.assemble((f"{name:<15}", "dim"), "  ", format_cell(value)))
    lines += [Text(line) for line in format_data(row.data, limit)]
    for fault in FAULTS:
        if (fault.stage, fault.reason) == (row.stage, row.reason) and fault.what_to_do:
            lines.append(Text(f"→ {fault.what_to_do}", "dim"))
    return Group(*lines, "")


def format_data(data: bytes, limit: int) -> Iterator[str]:
    """Format the first `limit` bytes (0 for all) as text if most are printable, else as lines of hex and ASCII."""
    from kiln.schemas.printable import printable

    shown = data[:limit] if limit else data
    text = getincrementaldecoder("utf-8")("replace").decode(shown, final=len(shown) == len(data))
    plain = sum(character.isprintable() or character in "\n\t" for character in text)
    if shown and "�" not in text and plain >= _READABLE * len(text):
        yield printable(text)
    else:
        for start in range(0, len(shown), _LINE):
            line = shown[start : start + _LINE]
            ascii_part = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in line)
            yield f"{start:08x}  {line.hex(' '):<{3 * _LINE - 1}}  {ascii_part}"
    if len(shown) < len(data):
        yield f"… {len(data) - len(shown):,} more of {len(data):,} bytes; --bytes 0 shows all"
    if not data:
        yield "(empty)"
