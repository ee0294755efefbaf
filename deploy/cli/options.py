"""Parts that all commands share: options, loading of settings, exit codes, and consoles for output.

Exit codes: 0 success; 1 failure; 2 invalid command line or settings; 3 a missing requirement (Python packages, Java,
jars, a free port, a Kafka broker); 130 interrupted. `kiln run` exits with 0 on Ctrl-C, because that is how it normally
ends. The exception classes with these codes are in `kiln.conf.process.errors`.

Every start of `kiln` imports all modules of commands. So they import slow modules (settings, Spark, DuckDB, Kafka,
rich) only inside the functions that need them.
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
    """Parse a path of the command line, and reject an empty one: `Path` would take it for the current folder.

    Raises:
        UsageError: The text is empty, for example because a shell variable is not set.
    """
    if not text:
        raise UsageError('a path is empty on the command line. Pass a path, such as "." for the current folder')
    return Path(text)


# kiln.conf.settings reads the variables KILN_STATE and KILN_CONFIG, so the options have no `envvar` of typer
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        parser=parse_path,
        help="State folder, with checkpoints and lake [env: KILN_STATE]. Default: state.",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", parser=parse_path, help="Settings file [env: KILN_CONFIG]. Default: conf/kiln.toml."
    ),
]
SampleOption = Annotated[bool, typer.Option("--sample", help="Read the sample tables that come with Kiln.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def loaded(config: Path | None, state: Path | None, network: str | None = None) -> LoadedSettings:
    """Load the settings, with the source of each value: command line, environment, file or default."""
    from kiln.conf.settings.reading import load

    return load(config, state=state, network=network)


def settings_of(config: Path | None, state: Path | None, network: str | None = None) -> Settings:
    """Load the settings, and check that this version of Kiln can use the state folder.

    Raises:
        SettingsError: A setting is invalid.
        StateVersionError: The state folder has the format of an older or newer Kiln.
    """
    from kiln.conf.process.state_folder import check_state_version

    settings = loaded(config, state, network).settings
    check_state_version(settings.state)
    return settings


def reading_settings(config: Path | None, state: Path | None, *, sample: bool) -> Settings:
    """Load the settings for a command that only reads the lake (the folder of the Delta tables).

    Args:
        config: Settings file.
        state: State folder.
        sample: Use the sample lake instead of the lake of the settings.

    Raises:
        UsageError: Both `state` and `sample` are given.
        SettingsError: A setting is invalid.
        StateVersionError: The state folder has the format of an older or newer Kiln.
    """
    if not sample:
        return settings_of(config, state)
    if state is not None:
        raise UsageError("--sample and --state cannot be combined. Pass one of them")
    from kiln.deploy.query.sample import SAMPLE_LAKE

    settings = loaded(config, None).settings
    return settings.model_copy(update={"lake": settings.lake.model_copy(update={"uri": str(SAMPLE_LAKE)})})


def lake_of(settings: Settings) -> Lake:
    """Return the lake, the folder of the Delta tables, that these settings name."""
    from kiln.pipelines.delta.lake import Lake

    return Lake.from_location(settings.lake_root)


def length_of(text: str, option: str = "--for") -> timedelta:
    """Parse the duration of an option, such as `60s`.

    Raises:
        UsageError: The text is not a duration, or the duration is 0.
    """
    from kiln.conf.settings.durations import parse_duration

    try:
        duration = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: expected {error}") from None
    if not duration:
        raise UsageError(f"{option} {text}: the duration must be greater than zero")
    return duration


def parse_time(text: str, option: str) -> datetime:
    """Parse the time of an option: a duration before now, such as `1h`, or ISO 8601. A time without a zone is in UTC.

    Raises:
        UsageError: The text has neither form.
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
        raise UsageError(
            f"{option} {text}: expected a duration before now such as 1h, or a time such as 2026-11-01 or "
            "2026-11-01T12:00:00Z"
        ) from None


def micros_of(text: str, option: str) -> int:
    """Parse the ISO 8601 time of an option to µs since the epoch. A time without a zone is in UTC.

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
    """Add the path of a file to errors raised in this context. The system reports a full disk without the path."""
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
    """Return a function that prints a message, unless an earlier one had the same text before its colon.

    So messages that report progress after the colon, such as `jars: fetched 3 of 20`, take one line in total.
    """
    printed: set[str] = set()

    def say(words: str) -> None:
        kind = words.split(":")[0]
        if kind not in printed:
            printed.add(kind)
            console.print(words, style="dim")

    return say


def discard_output() -> None:
    """Discard all further output to stdout, including the flush at exit. Call this when the reader of a pipe is gone,
    because each write would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
