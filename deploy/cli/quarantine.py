"""`kiln quarantine list` and `kiln quarantine replay`: what Kiln could not use, counted and brought back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.exits import UsageError
from deploy.cli.options import (
    ConfigOption,
    JsonOption,
    StateOption,
    answers,
    lake_of,
    note_once,
    notes,
    settings_of,
)

if TYPE_CHECKING:
    from bridge.kafka.producers import FramesProducer

commands = typer.Typer(
    name="quarantine", no_args_is_help=True, help="Count what Kiln could not use, and bring it back."
)


@commands.command("list")
def quarantine_list(as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None) -> None:
    """Count what is in quarantine, by stage and reason."""
    settings = settings_of(config, state)
    from deploy.sql.ask import ask
    from schemas.faults import CODE_IN_SQL

    answer = ask(
        lake_of(settings),
        f"SELECT stage, {CODE_IN_SQL} AS reason, count(*) AS rows, max(observed_at) AS newest FROM quarantine "
        "GROUP BY ALL ORDER BY rows DESC, stage, reason",
    )
    if as_json:
        from deploy.show.answer_json import write_json

        write_json(answer, sys.stdout)
    else:
        from deploy.show.answer import print_table

        print_table(answer, answers(), 1_000)


@commands.command("replay")
def quarantine_replay(
    reason: Annotated[
        str,
        typer.Option(
            "--reason", metavar="REASON", help="Such as unknown_bundle_hash. kiln quarantine list has the reasons."
        ),
    ],
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Put messages into Kafka again that Kiln refused for REASON and can read now.

    The messages come as origin REPLAY, so Kiln publishes nothing of them. What is in the tables already is left out, so
    that a second replay changes nothing. Blocks that nobody gave (stage fetch) are asked for once more, which needs a
    bridge that runs. Afterwards, type kiln run --catch-up.
    """
    settings = settings_of(config, state)
    from bridge.kafka.producers import FramesProducer, connect
    from deploy.kafka.broker import broker
    from deploy.quarantine.replay import QuarantineReplay, in_words
    from deploy.quarantine.unfetched import unfetched
    from pipelines.launch import decoding
    from schemas.records import encode
    from schemas.topic_table import BundleError

    try:
        how = decoding(settings)
    except BundleError as error:
        raise UsageError(f"topic_table.bundles: {error}") from error
    out = notes()

    @contextmanager
    def producing(topic: str) -> Iterator[FramesProducer]:
        with (
            broker(settings, note_once(out)) as servers,
            FramesProducer(
                connect(servers.split(","), settings.broker.security_options()), settings.kafka.topic(topic)
            ) as producer,
        ):
            yield producer
            producer.flush()

    given_up = unfetched(lake_of(settings), reason)
    if given_up is not None:
        missing, unreadable = given_up
        if missing:
            with producing("wanted") as producer:
                for record in missing:
                    producer.send_record(record.cid.encode(), encode(record))
            out.print(f"{reason}: {len(missing):,} asked for again")
        elif not unreadable:
            out.print(f"{reason}: all have come since")
        if unreadable:
            out.print(f"{reason}: this version of Kiln cannot read {unreadable:,}; they stay in the table quarantine")
        return
    replay = QuarantineReplay(lake_of(settings), reason, how)
    found = replay.find()
    if found.back:
        with producing("frames") as producer:
            for frame in replay.frames():
                producer.send(frame)
    out.print(f"{reason}: {in_words(found)}", soft_wrap=True)
    if found.back:
        out.print(
            "next: kiln run --catch-up. Start a kiln run again that began before the settings changed", style="dim"
        )
