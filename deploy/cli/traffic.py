"""`kiln replay` (capture file to Kafka), `kiln capture` (stored frames to a capture file) and `kiln generate`
(synthetic traffic to a capture file)."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import typer

from kiln.conf.process.errors import KilnError
from kiln.conf.process.extras import require_extras
from kiln.deploy.cli.options import (
    ConfigOption,
    JsonOption,
    SampleOption,
    StateOption,
    UsageError,
    lake_of,
    length_of,
    loaded,
    micros_of,
    name_file,
    note_once,
    notes,
    reading_settings,
    settings_of,
)

commands = typer.Typer()


@commands.command()
def replay(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Capture files (*.rpc.gz).")],
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="NAME", help="Network of the frames. Default: the network in their topics."),
    ] = None,
    pace: Annotated[
        float | None,
        typer.Option("--speed", metavar="X", help="Speed: 1 as captured, 2 twice as fast. Default: unlimited."),
    ] = None,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Write captured frames to Kafka, for kiln run --catch-up.

    The command ends when the broker has acknowledged all frames. If a file cannot be read, no frame is sent.
    """
    if pace is not None and not pace > 0:
        raise UsageError(f"--speed {pace:g}: must be greater than zero. Pass 1 for the speed of the capture")
    for file in files:
        _check_capture_path(file)
    require_extras("bridge")
    settings = settings_of(config, state)
    import time

    from kiln.deploy.demo.traffic.capture_files import replay as replay_file
    from kiln.deploy.demo.traffic.capture_files import survey_file
    from kiln.schemas.captures.kiln_capture import CaptureError

    surveys = []
    for file in files:  # check every file before a broker is started
        try:
            surveys.append(survey_file(file))
        except CaptureError as error:
            raise KilnError(f"{file}: {error}") from error
    from kiln.bridge.kafka.producers import connect
    from kiln.deploy.stack.kafka_broker import start_broker

    out = notes()
    with start_broker(settings, note_once(out)) as servers:
        topic = settings.kafka.topic("frames")
        for file, found in zip(files, surveys, strict=True):
            producing = connect({**settings.broker.security_options(), "bootstrap_servers": servers}, topic)
            with producing as producer, out.status(file.name) as shown:

                def progress(records: int, name: str = file.name, total: int = found.records) -> None:
                    if records % 2_000 == 0:
                        shown.update(f"{name}: {records:,} of {total:,} records")

                try:
                    frames = replay_file(
                        file,
                        producer.send,
                        found=found,
                        network=network,
                        fallback=settings.network.name,
                        pace=pace,
                        now=time.monotonic,
                        sleep=time.sleep,
                        progress=progress,
                    )
                except CaptureError as error:
                    raise KilnError(f"{file}: {error}") from error
                producer.flush()
            out.print(
                f"{file}: read {found.records:,} records of {found.connections:,} connections, and wrote {frames:,} "
                f"frames to {topic}, as network {network or found.select_network(settings.network.name)}"
            )
    out.print("next: kiln run --catch-up", style="dim")


@commands.command()
def capture(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Capture file to write (*.rpc.gz).")],
    low: Annotated[str, typer.Option("--from", metavar="TIME", help="Start of the range (ISO 8601, default UTC).")],
    high: Annotated[str, typer.Option("--to", metavar="TIME", help="End of the range, exclusive.")],
    network: Annotated[
        str | None, typer.Option("--network", metavar="NAME", help="Only frames of this network.")
    ] = None,
    as_json: JsonOption = False,
    sample: SampleOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Write stored frames to a capture file, for kiln replay.

    The file has the exact bytes of the gossipsub RPCs. For connections that began before the range, it also has the
    first RPC in each direction, because later RPCs may refer to topics in it. Requires no Java.
    """
    begin, end = micros_of(low, "--from"), micros_of(high, "--to")
    if begin >= end:
        raise UsageError(f"--from {low} --to {high}: the range is empty, because --to is exclusive. Pass a later --to")
    settings = reading_settings(config, state, sample=sample)
    import json
    from dataclasses import asdict

    from kiln.deploy.demo.traffic.capture_files import ExportCounts, ExportedFrame, build_export_query, convert_frames
    from kiln.deploy.query.ask import query_lake
    from kiln.schemas.captures.kiln_capture import CaptureRecord, write_capture

    lake, counts, partial = lake_of(settings), ExportCounts(), file.with_name(f"{file.name}.partial")
    rows = map(ExportedFrame._make, query_lake(lake, build_export_query(begin, end, network)).rows())
    out = notes()
    with out.status(file.name) as shown:

        def report(records: Iterable[CaptureRecord]) -> Iterator[CaptureRecord]:
            for number, record in enumerate(records, 1):
                if number % 2_000 == 0:
                    shown.update(f"{file.name}: {number:,} records, up to {_format_nanos(record.observed_at)}")
                yield record

        try:
            with name_file(file), partial.open("wb") as raw:
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                    write_capture(cast(BinaryIO, packed), report(convert_frames(rows, counts)))
                if counts.records > counts.earlier:
                    partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    if as_json:
        print(json.dumps({"file": str(file), **asdict(counts)}))
    left_out = counts.from_logs + counts.truncated
    reasons = f"{counts.from_logs:,} come from logs of other programs, and {counts.truncated:,} are stored only in part"
    if counts.records == counts.earlier:
        if left_out:
            raise KilnError(
                f"cannot write any of the {left_out:,} frames from {low} to {high}: {reasons}. Pass another range"
            )
        raise KilnError(
            f"no frame from {low} to {high} is in {lake.path}. To see the times of its frames: "
            'kiln sql "SELECT min(observed_at), max(observed_at) FROM frames"'
        )
    text = (
        f"{file}: wrote {counts.records:,} records, {counts.earlier:,} of them from before the range: the first "
        "records of connections"
    )
    out.print(text + (f"; left out {left_out:,} frames: {reasons}" if left_out else ""), soft_wrap=True)


def _format_nanos(time: int) -> str:
    return f"{datetime.fromtimestamp(time // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _check_capture_path(file: Path) -> None:
    """Check that a capture is a regular file, because it is read twice.

    Raises:
        UsageError: The path does not exist, or is a folder, a pipe or a device.
    """
    if not file.exists():
        raise UsageError(f"{file}: no such capture file")
    if file.is_dir():
        raise UsageError(f"{file} is a folder. Name the capture files in it: kiln replay {file}/*.rpc.gz")
    if not file.is_file():
        raise UsageError(
            f"{file} is a pipe or a device, but a capture is read twice. Save the capture to a file, and replay that "
            "file"
        )


@commands.command()
def generate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Capture file to write (*.rpc.gz).")],
    duration: Annotated[str, typer.Option("--for", metavar="DURATION", help="Duration of the traffic.")] = "60s",
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", metavar="N", help="Messages per second, without copies. Default: the setting traffic.rate."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Random seed. Default: the setting traffic.seed.")
    ] = None,
    start: Annotated[
        str, typer.Option("--start", metavar="TIME", help="Time of the first frame, ISO 8601.")
    ] = "2025-01-01T00:00:00Z",
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", metavar="FILE", help="File for a list of the generated messages (JSON lines)."),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="NAME", help="Network name, as in /ceramic/NAME [env: KILN_NETWORK]."),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Write synthetic traffic to a capture file, for kiln replay.

    Two runs with the same arguments and settings write identical files.
    """
    length = length_of(duration)
    settings = loaded(config, None, network).settings
    from dataclasses import replace

    from kiln.conf.settings.durations import micros
    from kiln.deploy.demo.traffic import Traffic, write_traffic
    from kiln.deploy.demo.traffic.options import traffic_options

    began = micros_of(start, "--start") // 1_000_000  # whole seconds
    per_second = rate if rate is not None else float(settings.traffic.rate)
    try:
        options = traffic_options(settings).for_capture()
        options = options if seed is None else replace(options, seed=seed)
        traffic = Traffic(options, began * 1_000_000_000, per_second, keep_ledger=ledger is not None)
    except ValueError as error:
        raise UsageError(str(error)) from None
    # without name and time in the gzip header, equal traffic gives equal files
    with name_file(file), file.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
        records = write_traffic(cast(BinaryIO, packed), traffic.frames(duration_ns=micros(length) * 1_000))
    if ledger is not None and traffic.ledger is not None:
        with name_file(ledger), ledger.open("wb") as lines:
            traffic.ledger.write(lines)
    notes().print(f"{file}: wrote {records:,} records, {duration} of traffic. Next: kiln replay {file}")
