"""`kiln quarantine`: count, show, replay and drop quarantined records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kiln.conf.process.extras import require_extras
from kiln.deploy.cli.exits import UsageError
from kiln.deploy.cli.options import (
    ConfigOption,
    JsonOption,
    StateOption,
    answers,
    lake_of,
    note_once,
    notes,
    parse_time,
    settings_of,
)

if TYPE_CHECKING:
    from rich.console import Console

    from kiln.bridge.kafka.producers import FramesProducer
    from kiln.deploy.ops.quarantine.picking import QuarantineFilter

_WIDE = 240
"""columns: two peer ids and two stamps"""

commands = typer.Typer(name="quarantine", no_args_is_help=True, help="Count, show, replay or drop quarantined records.")

StageOption = Annotated[str | None, typer.Option("--stage", metavar="STAGE", help="Only this stage, such as message.")]
ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="REASON", help="Only this reason, such as bad_tip.")
]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Start: 1h (ago), 2026-11-01, 2026-11-01T12:00:00Z."),
]
UntilOption = Annotated[
    str | None, typer.Option("--until", metavar="TIME", help="End, exclusive, in the formats of --since.")
]
AuthorOption = Annotated[
    str | None,
    typer.Option("--author", metavar="PEER", help="Only messages with this claimed author."),
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
    wanted = _selection(stage, reason, since, until, author)
    from kiln.deploy.ops.quarantine.picking import QuarantineRows
    from kiln.deploy.screens.quarantine import encode_counts, render_counts

    with QuarantineRows(lake_of(settings), wanted, authors=by == "author") as picked:
        counts = picked.counts(by)
    if as_json:
        print(encode_counts(counts, by))
    else:
        _table_on().print(render_counts(counts, by))


@commands.command("show")
def quarantine_show(
    stage: StageOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    author: AuthorOption = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Number of rows, newest first.")] = 5,
    most: Annotated[
        int, typer.Option("--bytes", metavar="N", min=0, help="Maximum bytes of each row; 0 for all.")
    ] = 256,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Show quarantined records with sender, bytes and suggested fix.

    Bytes that are text are printed as escaped text, all others in hex. --json prints complete rows.
    """
    require_extras("lake")
    settings = settings_of(config, state)
    wanted = _selection(stage, reason, since, until, author)
    from kiln.deploy.ops.quarantine.picking import QuarantineRows
    from kiln.deploy.screens.quarantine import encode_rows, render_counts, render_row

    with QuarantineRows(lake_of(settings), wanted, authors=True) as picked:
        if as_json:
            print(encode_rows(picked.rows(rows)))
            return
        out = _table_on()
        out.print(render_counts(picked.counts(), "reason"), "")
        for row in picked.rows(rows):
            out.print(render_row(row, most), soft_wrap=True)


@commands.command("drop")
def quarantine_drop(
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="Justification to record in quarantine_dropped.")],
    stage: StageOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    author: AuthorOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Drop all rows; required without another filter.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Drop the rows instead of counting them.")] = False,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Delete rows from quarantine permanently.

    Without --yes the command only counts. The table quarantine_dropped records each row with the hash of its bytes, the
    time and TEXT. Dropped rows cannot be replayed. The command works while Kiln runs.
    """
    require_extras("lake")
    settings = settings_of(config, state)
    wanted = _selection(stage, reason, since, until, author)
    if wanted.is_all != everything:
        raise UsageError("pass --stage, --reason, --since, --until or --author, or --all for every row")
    if not why.strip():
        raise UsageError("--why: must not be empty")
    from kiln.deploy.ops.quarantine.picking import QuarantineRows
    from kiln.deploy.screens.quarantine import encode_counts, encode_drop, render_counts

    lake, out = lake_of(settings), _table_on()
    if not yes:
        with QuarantineRows(lake, wanted) as picked:
            counts = picked.counts()
        if as_json:
            print(encode_counts(counts, "reason"))
        else:
            out.print(render_counts(counts, "reason"))
            out.print("nothing is dropped. To drop these rows, pass --yes", style="dim")
        return
    from uuid import uuid4

    from kiln.deploy.ops.quarantine.dropping import drop_rows

    done = drop_rows(lake, wanted, why.strip(), uuid4().hex[:16], datetime.now(UTC))
    if as_json:
        print(encode_drop(done))
    elif done.rows:
        if done.known:
            out.print(f"{done.known:,} of the rows had been recorded by an interrupted command")
        out.print(
            f"{done.rows:,} rows dropped. "
            f"kiln sql \"SELECT * FROM quarantine_dropped WHERE drop_id = '{done.drop_id}'\"",
            soft_wrap=True,
            highlight=False,
        )
    else:
        out.print("no such rows: nothing is dropped")


def _table_on() -> Console:
    """Return a console for tables. Off a terminal it is wide enough for ids to stay on one line."""
    console = answers()
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    return console


def _selection(
    stage: str | None, reason: str | None, since: str | None, until: str | None, author: str | None
) -> QuarantineFilter:
    from kiln.deploy.ops.quarantine.picking import QuarantineFilter

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
            "--reason", metavar="REASON", help="Reason as in kiln quarantine list, such as unknown_bundle_hash."
        ),
    ],
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Write quarantined messages that are readable now to Kafka again.

    They have origin REPLAY and are never published. Messages that are already in the tables are skipped, so a second
    replay changes nothing. For stage fetch, blocks are fetched again, which needs a running bridge. Afterwards, run
    kiln run --catch-up.
    """
    require_extras("spark")
    settings = settings_of(config, state)
    from kiln.bridge.kafka.producers import FramesProducer, connect
    from kiln.deploy.ops.quarantine.replay import QuarantineReplay, describe_candidates
    from kiln.deploy.ops.quarantine.unfetched import find_unfetched_blocks
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
            FramesProducer(
                connect(servers.split(","), settings.broker.security_options()), settings.kafka.topic(topic)
            ) as producer,
        ):
            yield producer
            producer.flush()

    given_up = find_unfetched_blocks(lake_of(settings), reason)
    if given_up is not None:
        missing, unreadable = given_up
        if missing:
            with producing("wanted") as producer:
                for record in missing:
                    producer.send_record(record.cid.encode(), encode(record))
            out.print(f"{reason}: {len(missing):,} requested again")
        elif not unreadable:
            out.print(f"{reason}: all have arrived since")
        if unreadable:
            out.print(f"{reason}: this version of Kiln cannot read {unreadable:,}; they stay in the table quarantine")
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
        out.print(f"not replayed: stage {stages}. kiln quarantine show --reason {reason} shows what to do")
    if found.back:
        out.print("next: kiln run --catch-up. Restart a kiln run that started before the settings changed", style="dim")
