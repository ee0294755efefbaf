"""`kiln sql` and `kiln estimate`: questions to the Delta tables. Neither needs Java."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from deploy.cli.exits import UsageError
from deploy.cli.options import ConfigOption, JsonOption, StateOption, answers, lake_of, settings_of

commands = typer.Typer()


@commands.command()
def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help='Such as "SELECT * FROM batches LIMIT 5".')],
    as_json: JsonOption = False,
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=1, help="Show at most N rows. --json prints all rows.")
    ] = 100,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Ask the Delta tables a question in DuckDB's SQL.

    The command works while Kiln runs, and needs no Java. --json prints an array of objects. Times are ISO 8601 in UTC,
    binary is hex.
    """
    settings = settings_of(config, state)
    from deploy.sql.ask import ask

    answer = ask(lake_of(settings), query)
    try:
        if as_json:
            from deploy.show.answer_json import write_json

            write_json(answer, sys.stdout)
        else:
            from deploy.show.answer import print_table

            print_table(answer, answers(), rows)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has enough (`kiln sql … | head`); nothing more may be flushed into the pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@commands.command()
def estimate(
    window: Annotated[
        str, typer.Option("--window", metavar="T,…", help="How long a batch gathers updates: one T or several.")
    ] = "1s,5s,30s",
    as_json: JsonOption = False,
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=1, help="Show at most N separators. --json prints all of them.")
    ] = 20,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Say what batches would save, for any T, from the updates in the tables.

    The answer has messages and bytes without batches, with batches instead of UPDATEs, and with batches beside UPDATEs:
    in all, and by separator. The command needs no Java.
    """
    settings = settings_of(config, state)
    from deploy.sql.estimate import estimate as savings_of
    from deploy.sql.estimate import parse_windows, print_estimate, read_heard, write_estimate

    try:
        windows = parse_windows(window)
    except ValueError as error:
        raise UsageError(f"--window {window}: expected {error}") from None
    batch = settings.batch
    savings = savings_of(read_heard(lake_of(settings)), windows, typ=batch.typ, limit=batch.block_limit)
    if as_json:
        write_estimate(savings, sys.stdout)
    else:
        print_estimate(savings, answers(), rows)
