"""Shared parts of the commands: options, the settings that they select, exit codes, and consoles for output.

Exit codes: 0 done; 1 the command failed; 2 the command line or the settings are wrong; 3 something that Kiln needs is
missing (an extra, Java, jars, a free port, a broker); 130 interrupted. `kiln run` exits with 0 when Ctrl-C stops it,
because that is how it normally ends. The errors with these codes are in `kiln.conf.process.errors`.

Files of commands are imported at every start of `kiln`, so slow modules (settings, Spark, DuckDB, Kafka, rich) are
imported inside the functions that need them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kiln.conf.process.errors import KilnError

if TYPE_CHECKING:
    from rich.console import Console

    from kiln.conf.settings.model import Settings
    from kiln.conf.settings.reading import LoadedSettings
    from kiln.pipelines.delta.lake import Lake

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
ENVIRONMENT: Final = 3
INTERRUPTED: Final = 130


class UsageError(KilnError):
    """The command line is invalid."""

    exit_code = USAGE


def parse_path(text: str) -> Path:
    """Parse the path of an option. An empty path, as from an unset variable, would mean the current folder.

    Raises:
        UsageError: The text is empty.
    """
    if not text:
        raise UsageError('a path is empty: write "." for the current folder')
    return Path(text)


# kiln.conf.settings reads the variables KILN_STATE and KILN_CONFIG, so the options have no `envvar` of typer
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        parser=parse_path,
        help="State folder [KILN_STATE]. Default: state.",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", parser=parse_path, help="Settings file [KILN_CONFIG]. Default: conf/kiln.toml."
    ),
]
SampleOption = Annotated[bool, typer.Option("--sample", help="Read the sample lake, which comes with Kiln.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def loaded(config: Path | None, state: Path | None, network: str | None = None) -> LoadedSettings:
    """Load the settings in force with their sources."""
    from kiln.conf.settings.reading import load

    return load(config, state=state, network=network)


def settings_of(config: Path | None, state: Path | None, network: str | None = None) -> Settings:
    """Return the settings in force, after checking the version of the state folder.

    Raises:
        SettingsError: The settings cannot be used.
        StateVersionError: An older or a newer Kiln wrote the state folder.
    """
    from kiln.conf.process.state_folder import check_state_version

    settings = loaded(config, state, network).settings
    check_state_version(settings.state)
    return settings


def reading_settings(config: Path | None, state: Path | None, *, sample: bool) -> Settings:
    """Return the settings in force for a command that only reads the lake.

    Args:
        config: Settings file.
        state: State folder.
        sample: Use the sample lake instead of the lake of the settings.

    Raises:
        UsageError: Both `state` and `sample` name a lake.
        SettingsError: The settings cannot be used.
        StateVersionError: An older or a newer Kiln wrote the state folder.
    """
    if not sample:
        return settings_of(config, state)
    if state is not None:
        raise UsageError("--sample and --state: choose one")
    from kiln.deploy.query.sample import SAMPLE_LAKE

    settings = loaded(config, None).settings
    return settings.model_copy(update={"lake": settings.lake.model_copy(update={"uri": str(SAMPLE_LAKE)})})


def lake_of(settings: Settings) -> Lake:
    """Open the lake of these settings."""
    from kiln.pipelines.delta.lake import Lake

    return Lake.from_location(settings.lake_root)


def length_of(text: str, option: str = "--for") -> timedelta:
    """Parse a duration option.

    Raises:
        UsageError: The text is not a duration, or the duration is 0.
    """
    from kiln.conf.settings.durations import parse_duration

    try:
        duration = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: expected {error}") from None
    if not duration:
        raise UsageError(f"{option} {text}: must be greater than zero")
    return duration


def parse_time(text: str, option: str) -> datetime:
    """Parse the time of an option, as a duration before now or in ISO 8601, in UTC by default.

    Raises:
        UsageError: The text is neither.
    """
    from kiln.conf.settings.durations import parse_duration
    from kiln.conf.settings.durations import parse_time as parse_iso_time

    try:
        return datetime.now(UTC) - parse_duration(text)
    except (ValueError, OverflowError):
        pass
    try:
        return parse_iso_time(text)
    except ValueError:
        raise UsageError(f"{option} {text}: expected 1h (ago), 2026-11-01 or 2026-11-01T12:00:00Z") from None


def micros_of(text: str, option: str) -> int:
    """Parse the time of an option in ISO 8601, in UTC by default, as µs since the epoch.

    Raises:
        UsageError: The text is no time.
    """
    from kiln.conf.settings.durations import parse_micros

    try:
        return parse_micros(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: expected {error}") from None


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Add the name of a file to errors such as a full disk, which the system reports without the name of the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def answers() -> Console:
    """Return the console for results: stdout."""
    from kiln.deploy.cli.console import PlainConsole

    return PlainConsole()


def notes() -> Console:
    """Return the console for messages: stderr, so that results can be piped."""
    from kiln.deploy.cli.console import PlainConsole

    return PlainConsole(stderr=True)


def note_once(console: Console) -> Callable[[str], None]:
    """Build a printer of progress messages that prints messages with the same text before the colon only once."""
    said: set[str] = set()

    def say(words: str) -> None:
        kind = words.split(":")[0]
        if kind not in said:
            said.add(kind)
            console.print(words, style="dim")

    return say


def discard_output() -> None:
    """Discard pending and later output to stdout, including the flush at exit, because the reader of stdout is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
