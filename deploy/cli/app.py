"""The `kiln` command.

Exit codes: 0 done; 1 it failed; 2 the command line or the settings are wrong; 3 something it needs is missing (Java,
jars, a free port, a broker); 130 interrupted (a `kiln run` that is stopped by Ctrl-C has done its work: 0).

Whatever takes long to import (Spark, DuckDB, Kafka) is imported by the command that needs it: `kiln --help` is quick.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, cast

import typer
from rich.console import Console

from conf.errors import KilnError
from schemas.queries import QUERIES

if TYPE_CHECKING:
    from conf.settings.model import JobName, Settings
    from conf.settings.reading import Loaded
    from deploy.run.network import Source
    from pipelines.lake.lake import Lake

OK, FAILED, USAGE, ENVIRONMENT, INTERRUPTED = 0, 1, 2, 3, 130

app = typer.Typer(
    name="kiln",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Ceramic pubsub traffic into Delta tables, and its updates into CIP-123 batches.\n\n"
    "Exit codes: 0 done, 1 failed, 2 wrong command line or settings, 3 something needed is missing (Java, broker …).",
)
config_app = typer.Typer(no_args_is_help=True, help="Look at the settings, and check them.", rich_markup_mode=None)
app.add_typer(config_app, name="config")
quarantine_app = typer.Typer(
    no_args_is_help=True, help="Look at what could not be used, and bring it back.", rich_markup_mode=None
)
app.add_typer(quarantine_app, name="quarantine")

# kiln.toml and KILN_STATE, KILN_CONFIG are read by conf.settings, so they are no `envvar` here
StateOption = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="Folder of broker data, lake, checkpoints and logs [KILN_STATE]."),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings file [KILN_CONFIG], else conf/kiln.toml.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class UsageError(KilnError):
    """The command line makes no sense."""

    exit_code = USAGE


def _load(config: Path | None, state: Path | None, network: str | None = None) -> "Loaded":
    from conf.settings.reading import load

    return load(config, state=state, network=network)


def _settings(config: Path | None, state: Path | None, network: str | None = None) -> "Settings":
    return _load(config, state, network).settings


def _lake(settings: "Settings") -> "Lake":
    from pipelines.lake.lake import Lake

    return Lake(str(settings.lake))


def _duration(text: str) -> timedelta:
    from conf.settings.durations import parse_duration

    try:
        duration = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--for {text}: expected {error}") from None
    if not duration:
        raise UsageError(f"--for {text}: expected more than nothing")
    return duration


def _job_name(name: str) -> "JobName":
    from conf.settings.keys import nearest

    for job in QUERIES:
        if job == name:
            return job
    raise UsageError(f"there is no query {name}{nearest(name, QUERIES)}; there are {', '.join(QUERIES)}")


def _console() -> Console:
    return Console(highlight=False)


def _notes() -> Console:
    """For words that are not the answer, so that the answer can be piped."""
    return Console(stderr=True, highlight=False)


# ---------------------------------------------------------------- running


@app.command()
def run(
    duration: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="Stop after this time (60s, 5m); else at Ctrl-C.")
    ] = None,
    catch_up: Annotated[
        bool, typer.Option("--catch-up", help="Process all that Kafka holds, with no traffic, and stop.")
    ] = False,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(
            "--bootstrap", metavar="ADDR", help="Peer of a network to join (/ip4/…/tcp/…/p2p/…); may be repeated."
        ),
    ] = None,
    no_network: Annotated[bool, typer.Option("--no-network", help="No bridge: process what comes into Kafka.")] = False,
    network: Annotated[str | None, typer.Option("--network", help="Name of the network.")] = None,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Run everything: broker, bridge and all queries, with a screen that shows how it goes.

    With no peer to dial it makes a network of its own on this machine, and publishes its batches there.
    """
    if duration is not None and catch_up:
        raise UsageError("--for and --catch-up: choose one; catching up ends by itself")
    length = None if duration is None else _duration(duration)
    settings = _settings(config, state, network)
    if bootstrap:
        settings = settings.model_copy(
            update={"bridge": settings.bridge.model_copy(update={"bootstrap": tuple(bootstrap)})}
        )
    # made-up traffic must not go where others listen
    elsewhere = settings.bridge.bootstrap or settings.bep50.enabled
    source: Source = "network" if elsewhere else "demo" if settings.traffic.enabled else "none"
    raise typer.Exit(_run(settings, settings.jobs.run, length, catch_up, "none" if no_network or catch_up else source))


def _run(
    settings: "Settings", names: "Sequence[JobName]", length: timedelta | None, catch_up: bool, source: "Source"
) -> int:
    from deploy.observe.summary import read_summary, row_counts
    from deploy.run.application import run_application
    from deploy.show.screen import open_view
    from deploy.show.summary import render_summary

    console = _console()
    before = row_counts(_lake(settings))
    with open_view(console) as view:
        outcome = run_application(settings, view, names=names, duration=length, catch_up=catch_up, source=source)
    summary = read_summary(
        _lake(settings),
        elapsed=timedelta(seconds=outcome.seconds),
        first_batch=None if outcome.first_batch is None else timedelta(seconds=outcome.first_batch),
        batches=outcome.batches,
        late_p50=outcome.late_p50,
        late_p99=outcome.late_p99,
        before=before,
        errors=[outcome.error] if outcome.error else (),
    )
    console.print(render_summary(summary, command_line(sys.argv[0], settings)), soft_wrap=True)
    return FAILED if outcome.error else OK


@app.command()
def job(
    name: Annotated[str, typer.Argument(metavar="NAME", help="archive, messages, updates, batch or sink.")],
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Run one query as a Spark application of its own, until Ctrl-C or SIGTERM."""
    query = _job_name(name)
    raise typer.Exit(_run(_settings(config, state), (query,), length=None, catch_up=False, source="none"))


@app.command()
def bridge(state: StateOption = None, config: ConfigOption = None) -> None:
    """Run the bridge alone, on the network of bridge.bootstrap, until Ctrl-C or SIGTERM."""
    settings = _settings(config, state)
    from bridge.process.main import run as run_bridge
    from deploy.kafka.broker import broker

    notes = _notes()
    with broker(settings, _sayer(notes)):
        notes.print(f"the bridge says how it goes in {settings.bridge_dir / 'status.json'}; Ctrl-C stops", style="dim")
        run_bridge(settings)


@app.command()
def interests(
    add: Annotated[
        list[str] | None, typer.Option("--add", metavar="X", help="Follow this too: *, a key, or key/value.")
    ] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", metavar="X", help="Follow this no more.")] = None,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Print which separators the bridge follows; change them while it runs."""
    settings = _settings(config, state)
    from bridge.process.interests import InterestsFile
    from schemas.topics import TopicError

    file = InterestsFile(settings.bridge_dir / "interests.json", settings.bridge.interests)
    now = list(file.read())
    if file.error:
        raise KilnError(f"{file.error}. Mend it or remove it, then try again")
    if add or remove:
        unknown = [text for text in remove or () if text not in now]
        if unknown:
            raise UsageError(f"--remove {unknown[0]}: not followed; {', '.join(now) or 'nothing'} is")
        now = [text for text in [*now, *(add or ())] if text not in (remove or ())]
        try:
            file.write(now)
        except TopicError as error:
            raise UsageError(f"--add: {error}") from None
    now = list(dict.fromkeys(now))
    print(json.dumps(now) if as_json else "\n".join(now))


@app.command()
def replay(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Capture files (*.rpc.gz).")],
    network: Annotated[
        str | None, typer.Option("--network", help="Network of the frames; else the one their topics name.")
    ] = None,
    pace: Annotated[
        float | None,
        typer.Option("--pace", metavar="X", help="1 as fast as captured, 2 twice as fast; else full speed."),
    ] = None,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Put captured frames into Kafka; done when the broker has them all. Then: kiln run --catch-up."""
    if pace is not None and not pace > 0:
        raise UsageError(f"--pace {pace:g}: expected more than 0; 1 is as fast as captured")
    for file in files:
        if not file.is_file():
            raise UsageError(f"{file}: no such capture file")
    settings = _settings(config, state)
    import time

    from bridge.kafka.producers import FramesProducer, connect
    from deploy.kafka.broker import broker
    from deploy.traffic.replay import Progress
    from deploy.traffic.replay import replay as replay_file
    from schemas.capture import CaptureError

    notes = _notes()
    with broker(settings, _sayer(notes)) as servers:
        topic = settings.kafka.topic("frames")
        for file in files:
            producing = FramesProducer(connect(servers.split(","), settings.kafka.security_options()), topic)
            with producing as producer, notes.status(file.name) as shown:

                def progress(now: Progress, name: str = file.name) -> None:
                    if now.records % 2_000 == 0:
                        shown.update(f"{name}: {now.records:,} of {now.all_records:,} records")

                try:
                    sent = replay_file(
                        file,
                        producer.send,
                        network=network,
                        fallback=settings.network,
                        pace=pace,
                        now=time.monotonic,
                        sleep=time.sleep,
                        progress=progress,
                    )
                except CaptureError as error:
                    raise KilnError(f"{file}: {error}") from error
                producer.flush()
            notes.print(
                f"{file}: {sent.records:,} records, {sent.frames:,} frames of {sent.connections:,} connections "
                f"into {topic} as network {sent.network}"
            )
    notes.print("next: kiln run --catch-up", style="dim")


def _sayer(console: Console) -> Callable[[str], None]:
    """Say what is waited for; a line only once, since fetching jars says much the same many times."""
    said: set[str] = set()

    def say(words: str) -> None:
        kind = words.split(":")[0]
        if kind not in said:
            said.add(kind)
            console.print(words, style="dim")

    return say


@app.command()
def generate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Capture file to write (*.rpc.gz).")],
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="How much time the traffic covers.")] = "60s",
    rate: Annotated[
        float | None, typer.Option("--rate", help="Messages a second, before copies [traffic.rate].")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same bytes [traffic.seed].")] = None,
    start: Annotated[
        str, typer.Option("--start", metavar="TIME", help="When it begins, ISO 8601.")
    ] = "2025-01-01T00:00:00Z",
    ledger: Annotated[
        Path | None, typer.Option("--ledger", metavar="FILE", help="Also write what is true of it, as JSON lines.")
    ] = None,
    network: Annotated[str | None, typer.Option("--network", help="Network of the traffic.")] = None,
    config: ConfigOption = None,
) -> None:
    """Write made-up traffic into a capture file, for `kiln replay`. The same arguments write the same file."""
    length = _duration(duration)
    settings = _settings(config, None, network)
    import gzip
    from dataclasses import replace

    from conf.settings.durations import micros
    from deploy.traffic import Traffic, write_traffic
    from deploy.traffic.options import traffic_options

    try:
        began = datetime.fromisoformat(start)
    except ValueError:
        raise UsageError(f"--start {start}: expected a time such as 2025-01-01T00:00:00Z") from None
    began = began if began.tzinfo else began.replace(tzinfo=UTC)
    per_second = rate if rate is not None else float(settings.traffic.rate)
    try:
        options = traffic_options(settings).for_capture()
        options = options if seed is None else replace(options, seed=seed)
        traffic = Traffic(options, int(began.timestamp()) * 1_000_000_000, per_second, keep_ledger=ledger is not None)
    except ValueError as error:
        raise UsageError(str(error)) from None
    # no name and no time in the gzip header: equal traffic is to be an equal file
    with file.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
        records = write_traffic(cast(BinaryIO, packed), traffic.frames(duration_ns=micros(length) * 1_000))
    if ledger is not None and traffic.ledger is not None:
        with ledger.open("wb") as out:
            traffic.ledger.write(out)
    _notes().print(f"{file}: {records:,} records of {duration} of traffic; next: kiln replay {file}")


# ---------------------------------------------------------------- looking


@app.command()
def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help='Such as "select * from batches limit 5".')],
    as_json: JsonOption = False,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows to show at most (not with --json).")] = 100,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Ask the Delta tables a question (DuckDB's SQL). Works while Kiln runs, and needs no Java.

    --json prints an array of objects: times ISO 8601 in UTC, binary as hex.
    """
    settings = _settings(config, state)
    from deploy.show.answer import print_table, write_json
    from deploy.sql.ask import ask

    answer = ask(_lake(settings), query)
    try:
        if as_json:
            write_json(answer, sys.stdout)
        else:
            print_table(answer, _console(), rows)
        sys.stdout.flush()
    except BrokenPipeError:
        # whoever reads us has enough (`kiln sql … | head`); nothing more may be flushed into the pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command()
def estimate(
    window: Annotated[
        str, typer.Option("--window", metavar="T,…", help="How long a batch may gather updates; one T or several.")
    ] = "1s,5s,30s",
    as_json: JsonOption = False,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows by separator to show (not with --json).")] = 20,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Say what batches would save, for any T, from the updates that were heard. Needs no Java.

    Messages and bytes before, with the UPDATEs stopped that are in batches, and with them going on: in all, and by
    separator.
    """
    settings = _settings(config, state)
    from deploy.sql.estimate import estimate as savings_of
    from deploy.sql.estimate import parse_windows, print_estimate, read_heard, write_estimate

    try:
        windows = parse_windows(window)
    except ValueError as error:
        raise UsageError(f"--window {window}: expected {error}") from None
    batch = settings.batch
    savings = savings_of(read_heard(_lake(settings)), windows, typ=batch.typ, limit=batch.block_limit)
    if as_json:
        write_estimate(savings, sys.stdout)
    else:
        print_estimate(savings, _console(), rows)


@app.command()
def status(as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None) -> None:
    """Topics, how far each query is and how far behind, and the tables."""
    settings = _settings(config, state)
    from deploy.observe.status import read_status
    from deploy.show.status import render_status, status_json

    found = read_status(settings)
    if as_json:
        print(status_json(found))
    else:
        _console().print(render_status(found, datetime.now(UTC)))


@app.command()
def doctor(as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None) -> None:
    """Look for what could be in the way: Java, jars, ports, disk, broker, lake, versions. Says what to do."""
    settings = _settings(config, state)
    from deploy.observe.doctor import examine, failed
    from deploy.show.doctor import doctor_json, render_checks

    checks = examine(settings)
    if as_json:
        print(doctor_json(checks))
    else:
        _console().print(render_checks(checks))
    raise typer.Exit(ENVIRONMENT if failed(checks) else OK)


@quarantine_app.command("list")
def quarantine_list(as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None) -> None:
    """Count what is in quarantine, by stage and reason."""
    settings = _settings(config, state)
    from deploy.show.answer import print_table, write_json
    from deploy.sql.ask import ask
    from schemas.faults import CODE_IN_SQL

    answer = ask(
        _lake(settings),
        f"SELECT stage, {CODE_IN_SQL} AS reason, count(*) AS rows, max(observed_at) AS newest FROM quarantine "
        "GROUP BY ALL ORDER BY rows DESC, stage, reason",
    )
    if as_json:
        write_json(answer, sys.stdout)
    else:
        print_table(answer, _console(), 1_000)


@quarantine_app.command("replay")
def quarantine_replay(
    reason: Annotated[
        str, typer.Option("--reason", metavar="REASON", help="Such as unknown_bundle_hash; see kiln quarantine list.")
    ],
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Put messages into Kafka again that were refused for a reason and can be read now. Then: kiln run --catch-up.

    They come as origin REPLAY, so nothing of them is published. What is in the tables already is left out: doing it
    again changes nothing. What could not be fetched (stage fetch) is asked for once more: a bridge must run for that.
    """
    settings = _settings(config, state)
    from bridge.kafka.producers import FramesProducer, connect
    from deploy.kafka.broker import broker
    from deploy.quarantine.replay import Requeue, in_words, wanted_again
    from pipelines.launch import decoding
    from schemas.records import encode
    from schemas.topic_table import BundleError

    try:
        how = decoding(settings)
    except BundleError as error:
        raise UsageError(f"topic_table.bundles: {error}") from error
    notes = _notes()

    @contextmanager
    def producing(topic: str) -> Iterator[FramesProducer]:
        with (
            broker(settings, _sayer(notes)) as servers,
            FramesProducer(
                connect(servers.split(","), settings.kafka.security_options()), settings.kafka.topic(topic)
            ) as producer,
        ):
            yield producer
            producer.flush()

    wanted = wanted_again(_lake(settings), reason)
    if wanted is not None:
        missing, unreadable = wanted
        if missing:
            with producing("wanted") as producer:
                for record in missing:
                    producer.send_record(record.cid.encode(), encode(record))
            notes.print(f"{reason}: {len(missing):,} asked for again")
        elif not unreadable:
            notes.print(f"{reason}: all have come since")
        if unreadable:
            notes.print(f"{reason}: this version of Kiln cannot read {unreadable:,}; they stay in the table quarantine")
        return
    requeue = Requeue(_lake(settings), reason, how)
    found = requeue.find()
    if found.back:
        with producing("frames") as producer:
            for frame in requeue.frames():
                producer.send(frame)
    notes.print(f"{reason}: {in_words(found)}", soft_wrap=True)
    if found.back:
        notes.print("next: kiln run --catch-up; a kiln run that began before the settings changed, anew", style="dim")


@config_app.command("show")
def config_show(state: StateOption = None, config: ConfigOption = None) -> None:
    """Print the settings in force, as TOML, and where each that is not the default came from."""
    from conf.settings.printing import shown

    print(shown(_load(config, state)), end="")


@config_app.command("check")
def config_check(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Settings file; else the one in force.")] = None,
    config: ConfigOption = None,
) -> None:
    """Check a settings file, and the environment with it: each fault with its place."""
    loaded = _load(file or config, None)
    print(f"{loaded.file}: fine")


# ---------------------------------------------------------------- the edge


def command_line(program: str, settings: "Settings") -> str:
    """How to type `kiln sql` here, for these settings: with a path if the shell finds no `kiln`, --state if needed."""
    name = "kiln" if shutil.which("kiln") else os.path.relpath(program)
    default = Path("state").absolute()
    state = (
        ""
        if settings.state == default or os.environ.get("KILN_STATE")
        else f" --state {shlex.quote(str(settings.state))}"
    )
    return f"{name} sql{state}"


def run_command(arguments: Sequence[str]) -> int:
    """Run the command; known errors become one message on stderr, and the exit code is returned."""
    try:
        code = app(args=list(arguments), prog_name="kiln", standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except typer.exceptions.TyperException as error:
        _complain(f"{error.format_message()} (kiln --help)")
        return USAGE
    except KilnError as error:
        _complain(str(error))
        return error.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        # a file that was named and cannot be read or written
        _complain(f"{error.filename}: {error.strerror}")
        return FAILED
    return code if isinstance(code, int) else OK


def _complain(words: str) -> None:
    for number, line in enumerate(words.splitlines() or ["it failed"]):
        print(f"kiln: {line}" if number == 0 else f"      {line}", file=sys.stderr)


def main() -> None:
    """The entry point of the `kiln` script."""
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
