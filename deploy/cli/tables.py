"""`kiln sql`, `kiln estimate` and `kiln sample`: query the Delta tables, or copy the sample tables."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from kiln.conf.process.extras import require_extras
from kiln.deploy.cli.options import (
    ConfigOption,
    JsonOption,
    SampleOption,
    StateOption,
    UsageError,
    answers,
    discard_output,
    lake_of,
    note_once,
    notes,
    parse_path,
    parse_time,
    reading_settings,
)

if TYPE_CHECKING:
    from kiln.conf.settings.model import Settings
    from kiln.deploy.query.ask import Answer, AsOf
    from kiln.pipelines.delta.lake import Lake

commands = typer.Typer()


@commands.command()
def sql(
    query: Annotated[
        str | None,
        typer.Argument(metavar="[QUERY]", help='SQL, such as "SELECT * FROM batches LIMIT 5". Default: a prompt.'),
    ] = None,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=1, help="Maximum number of rows. --json and --csv print all rows.")
    ] = 100,
    as_of: Annotated[
        str | None,
        typer.Option(
            "--as-of",
            metavar="VERSION|TIME",
            help="Version number or ISO 8601 time at which to read the tables. Default: the newest version.",
        ),
    ] = None,
    on_spark: Annotated[bool, typer.Option("--spark", help="Run the query in Spark SQL. Requires Java.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="FILE.duckdb",
            parser=parse_path,
            help="DuckDB file to copy tables and views into, for BI tools.",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="With --export, only rows since this time: 7d (ago), 2026-11-01."),
    ] = None,
    tables: Annotated[
        str | None,
        typer.Option("--tables", metavar="NAME,…", help="Tables and views to export. Default: all."),
    ] = None,
    sample: SampleOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Query the Delta tables and views with DuckDB SQL.

    You can run the command while Kiln runs. Only --spark requires Java. Without QUERY, the command reads a query from
    stdin, or starts a prompt on a terminal. The query "\\d" lists tables and views, "\\d NAME" the columns of one.
    --json prints an array of objects. Times are ISO 8601 in UTC, and binary values are hex. --export replaces an
    existing FILE only when the new one is complete, and prints the version and number of rows of each table.
    """
    if as_json and as_csv:
        raise UsageError("--json and --csv cannot be combined. Pass one of them")
    if export is None and (since or tables):
        raise UsageError("--since and --tables need --export FILE. Add it, or write the condition in the query")
    if export is not None and (query is not None or on_spark):
        raise UsageError("--export copies tables without a query. Remove QUERY and --spark, or remove --export")
    settings = reading_settings(config, state, sample=sample)
    lake = lake_of(settings)
    from kiln.deploy.query.ask import parse_as_of

    try:
        moment = None if as_of is None else parse_as_of(as_of)
    except ValueError as error:
        raise UsageError(f"--as-of {as_of}: expected {error}") from None
    if export is not None:
        _show(_export(lake, export, since, tables, moment), rows, as_json=as_json, as_csv=as_csv)
        return
    prompted = query is None and sys.stdin.isatty()
    if query is None and not prompted:
        query = sys.stdin.read()
    shown = rows if prompted or not (as_json or as_csv) else None
    with ExitStack() as stack:
        run_query = _open_engine(stack, settings, lake, moment, shown, on_spark=on_spark)

        def show(question: str) -> None:
            if question.strip().startswith("\\"):  # as at the prompt
                from kiln.deploy.query.ask import list_names

                _show(list_names(lake, question), rows, as_json=as_json, as_csv=as_csv)
            else:
                _show(run_query(question), rows, as_json=as_json, as_csv=as_csv)

        if prompted:
            from kiln.deploy.cli.sql_prompt import converse

            converse(lake, None if sample else settings.state / "sql_history", show)
        elif query is not None:
            show(query)


def _export(lake: Lake, target: Path, since: str | None, tables: str | None, as_of: AsOf | None) -> Answer:
    from kiln.deploy.query.export import export_lake

    start = None if since is None else parse_time(since, "--since")
    names = [] if tables is None else [name.strip() for name in tables.split(",")]
    console = notes()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the interrupt removes the unfinished file
    record = export_lake(
        lake,
        target,
        lambda words: console.print(words, style="dim", soft_wrap=True),
        names=names,
        since=start,
        as_of=as_of,
    )
    console.print(f"wrote {target} ({target.stat().st_size:,} bytes)", style="dim", soft_wrap=True)
    return record


def _open_engine(
    stack: ExitStack, settings: Settings, lake: Lake, as_of: AsOf | None, most: int | None, *, on_spark: bool
) -> Callable[[str], Answer]:
    """Return a function that runs a query in DuckDB, or in a Spark session, which `stack` stops at its end.

    The Spark session returns at most `most` + 1 rows. The extra row shows that rows are missing.
    """
    if not on_spark:
        from kiln.deploy.query.ask import query_lake

        return lambda question: query_lake(lake, question, as_of)
    require_extras("spark")
    from kiln.deploy.query.spark_sql import compile_classes, query_spark
    from kiln.deploy.stack.spark import spark_session

    # the session has its own logs and temporary files, because Kiln may be running
    scratch = Path(stack.enter_context(TemporaryDirectory(prefix="kiln-sql-")))
    apart = settings.model_copy(update={"state": scratch})
    spark = stack.enter_context(spark_session(apart, classes=[compile_classes(note_once(notes()))]))
    rows = None if most is None else most + 1
    partitions = settings.spark.shuffle_partitions
    return lambda question: query_spark(spark, lake, question, as_of, most=rows, partitions=partitions)


def _show(answer: Answer, rows: int, *, as_json: bool, as_csv: bool) -> None:
    try:
        if as_json:
            from kiln.deploy.query.answer import write_json

            write_json(answer, sys.stdout)
        elif as_csv:
            from kiln.deploy.query.answer import write_csv

            write_csv(answer, sys.stdout)
        else:
            from kiln.deploy.query.answer import print_table
            from kiln.deploy.query.ask import Listing, print_listing

            if isinstance(answer, Listing):
                print_listing(answer, answers())
            else:
                print_table(answer, answers(), rows)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()  # the reader has enough, as in `kiln sql … | head`


@commands.command()
def estimate(
    window: Annotated[
        str, typer.Option("--window", metavar="T,…", help="Window lengths, comma-separated.")
    ] = "1s,5s,30s",
    as_json: JsonOption = False,
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=1, help="Maximum number of separators. --json prints all.")
    ] = 20,
    sample: SampleOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Estimate how much traffic batches would save.

    From the archived updates, the command computes messages and bytes for three cases: only UPDATE messages, batches
    instead of UPDATEs, and both. It prints totals and a row per separator. Requires no Java.
    """
    settings = reading_settings(config, state, sample=sample)
    from kiln.deploy.query.estimate import estimate_savings as savings_of
    from kiln.deploy.query.estimate import parse_windows, print_estimate, read_received_updates, write_estimate

    try:
        windows = parse_windows(window)
    except ValueError as error:
        raise UsageError(f"--window {window}: expected {error}") from None
    batch = settings.batch
    savings = savings_of(read_received_updates(lake_of(settings)), windows, typ=batch.typ, limit=batch.max_block_bytes)
    if as_json:
        write_estimate(savings, sys.stdout)
    else:
        print_estimate(savings, answers(), rows)


@commands.command()
def sample(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", parser=parse_path, help="New state folder. The tables are in DIR/lake.")
    ],
) -> None:
    """Copy the sample lake into a new state folder.

    Any Delta reader can read the copy, and so can commands without --sample: kiln quality --state DIR.
    """
    from kiln.deploy.query.sample import copy_sample

    print(copy_sample(folder))
