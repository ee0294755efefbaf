"""`kiln trace`: the path of one batch, stream, tip or message through Kiln."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from kiln.deploy.cli.options import (
    ConfigOption,
    JsonOption,
    SampleOption,
    StateOption,
    answers,
    lake_of,
    reading_settings,
)

commands = typer.Typer()


@commands.command()
def trace(
    id_: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="CID of a batch or tip, StreamID, message id, or PARTITION/OFFSET[/INDEX] in kiln.frames.",
        ),
    ],
    as_json: JsonOption = False,
    sql: Annotated[bool, typer.Option("--sql", help="Show the SQL query of each step.")] = False,
    whole: Annotated[bool, typer.Option("--full-ids", help="Show ids in full.")] = False,
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=1, help="Maximum number of rows per step. --json prints all rows.")
    ] = 10,
    messages: Annotated[
        int,
        typer.Option(
            "--messages",
            metavar="N",
            min=1,
            help="Number of latest messages and batches to show in detail.",
        ),
    ] = 25,
    sample: SampleOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Trace a batch, stream, tip or message through Kiln.

    Shows frames, peers and copies, verdict, separator and its source, offset in the log, window, block, publications,
    and quarantined records. Each step is one query of the tables, which --sql prints. Requires no Java.
    """
    settings = reading_settings(config, state, sample=sample)
    from kiln.deploy.query.trace.follow import trace_subject
    from kiln.deploy.query.trace.ids import parse_id

    found = trace_subject(lake_of(settings), parse_id(id_), messages)
    try:
        if as_json:
            from kiln.deploy.screens.trace import write_trace

            write_trace(found, sys.stdout)
        else:
            from kiln.deploy.screens.trace import print_trace

            print_trace(found, answers(), rows, sql=sql, whole_ids=whole)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has enough (`kiln trace … | head`); nothing more may be flushed into the pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
