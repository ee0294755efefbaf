"""Recording of the sample lake (`kiln.deploy.query.sample`): `make sample`.

`kiln run` records a demo network at a low rate, `kiln backfill run` rebuilds a part of the tables with another window
length, and `kiln quality` checks the tables. Each table is then copied into one compressed file. Two recordings differ
only in times, keys and ids. `make sample ARGS="--from STATE"` packs the tables of an existing state folder instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import WriterProperties, write_deltalake

from kiln.conf.process.errors import KilnError
from kiln.deploy.query.sample import SAMPLE_LAKE
from kiln.deploy.stack.ports import find_free_ports
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.lake import Lake, locate_log
from kiln.schemas.delta.layout import LAYOUTS, Layout
from kiln.schemas.delta.tables import TABLES

MAX_BYTES: Final = 2_000_000
RUN: Final = "five-seconds"
"""Name of the backfill run."""

_RUN_LOG: Final = "backfill_runs"
_LENGTH: Final = "90s"
_SKIPPED: Final = timedelta(seconds=20)  # time for the demo network and the queries to start
_REBUILT: Final = timedelta(seconds=20)
_TRAFFIC: Final = {"RATE": "14", "SEPARATORS": "10", "STREAMS": "90"}
_COMPRESSION: Final = WriterProperties(compression="ZSTD", compression_level=19)


def record_lake(state: Path) -> Lake:
    """Record a demo network in a new state folder, and return its lake.

    Raises:
        KilnError: A command failed.
    """
    _kiln(state, "run", "--for", _LENGTH)
    first = "SELECT min(observed_at) AS first FROM updates"
    (row,) = json.loads(_kiln(state, "sql", "--json", first))
    begin = datetime.fromisoformat(row["first"]).replace(microsecond=0) + _SKIPPED
    times = ("--from", begin.isoformat(), "--to", (begin + _REBUILT).isoformat())
    _kiln(state, "backfill", "run", *times, "--window", "5s", "--run", RUN)
    _kiln(state, "quality")
    return Lake(str(state / "lake"))


def _kiln(state: Path, *arguments: str) -> str:
    ports = find_free_ports()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KILN_")},
        "KILN_STATE": str(state),
        "KILN_KAFKA__EMBEDDED_PORT": str(ports[0]),
        "KILN_KAFKA__EMBEDDED_CONTROLLER_PORT": str(ports[1]),
        "KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0",
        "KILN_MONITOR__LISTEN": "",
        **{f"KILN_TRAFFIC__{name}": value for name, value in _TRAFFIC.items()},
    }
    command = [sys.executable, "-P", "-m", "kiln.deploy.cli", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise KilnError(f"kiln {arguments[0]} exited with code {done.returncode}. Its output:\n{done.stdout}")
    return done.stdout


def pack_lake(source: Lake, target: Lake) -> None:
    """Copy each table of the lake and of the backfill run into a table of one file.

    The rows of `backfill_runs` have table versions. They are changed to the versions of the copies.
    """
    for lake, packed in ((source.locate_run(RUN), target.locate_run(RUN)), (source, target)):
        for name in sorted(lake.tables(), key=_RUN_LOG.__eq__):
            _pack_table(lake, packed, name)


def _pack_table(source: Lake, target: Lake, name: str) -> None:
    table = TABLES[name]
    source.create([name])  # adds the columns that an older recording lacks
    order = LAYOUTS.get(name, Layout()).order
    rows = source.open(name).to_pyarrow_table().select([column.name for column in table.columns])
    rows = rows.cast(build_arrow_schema(table.columns, strict=True))
    if name == "quality_results":  # this table has the path of each suite
        at = rows.column_names.index("details")
        relative = pc.replace_substring_regex(rows["details"], r'"[^"]*/conf/quality/', '"conf/quality/')
        rows = rows.set_column(at, rows.schema.field(at), relative)
    if name == _RUN_LOG:
        details = [_renumber(json.loads(text), target) for text in rows["details"].to_pylist()]
        rows = rows.set_column(
            rows.column_names.index("details"), rows.schema.field("details"), pa.array(details, pa.string())
        )
    if order:
        rows = rows.sort_by([(column, "ascending") for column in order])
    target.create([name])
    if rows.num_rows:
        write_deltalake(target.table(name), rows, mode="append", writer_properties=_COMPRESSION)
    log = locate_log(target.folder(name)).folder
    assert log is not None
    for commit in log.glob("*.json"):
        lines = map(_drop_location, commit.read_text(encoding="utf-8").splitlines())
        commit.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _renumber(details: dict[str, object], packed: Lake) -> str:
    """Replace the table versions in an event of the backfill run with the versions of the packed tables."""
    inputs = details.get("inputs")
    if isinstance(inputs, dict):
        inputs["live"] = {name: packed.open(name).version() for name in inputs["live"]}
    versions = details.get("versions")
    if isinstance(versions, dict):
        run = packed.locate_run(RUN)
        details["versions"] = {name: run.open(name).version() if run.has(name) else at for name, at in versions.items()}
    return json.dumps(details, sort_keys=True)


def _drop_location(action: str) -> str:
    """Drop the path of the table, which delta-rs writes into the commit that creates the table."""
    record = json.loads(action)
    record.get("commitInfo", {}).get("operationParameters", {}).pop("location", None)
    return json.dumps(record, separators=(",", ":"))


def measure_folder(folder: Path) -> int:
    """Return the total size of a folder's files in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main(arguments: Sequence[str] | None = None) -> int:
    """Record the sample lake, and replace the sample lake in the checkout."""
    parser = argparse.ArgumentParser(prog="make sample", description="Record the sample lake.")
    parser.add_argument("--from", dest="state", type=Path, metavar="STATE", help="existing state folder to pack")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kiln-sample-") as scratch:
        try:
            source = Lake(str(options.state / "lake")) if options.state else record_lake(Path(scratch) / "state")
            packed = Path(scratch) / "packed"
            packed.mkdir()
            pack_lake(source, Lake(str(packed)))
            if (size := measure_folder(packed)) > MAX_BYTES:
                raise KilnError(f"the sample lake would have {size:,} bytes; the limit is {MAX_BYTES:,}. Record less")
        except KilnError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        shutil.rmtree(SAMPLE_LAKE, ignore_errors=True)
        shutil.copytree(packed, SAMPLE_LAKE)
    print(f"{size:,} bytes in {SAMPLE_LAKE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
