"""Entry point of the command `kiln`: sets up the process, runs a command, and prints errors as messages.

To add a command, write it in the module of its group. To add a group, write a module with a `typer.Typer` named
`commands`, and add the module to `GROUPS`.
"""

from __future__ import annotations

import codecs
import errno
import gc
import io
import locale
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Annotated, Final

import typer

from kiln.conf.process.errors import KilnError
from kiln.conf.process.extras import format_install_command, read_version
from kiln.conf.process.proxies import exempt_loopback
from kiln.deploy.cli import (
    backfill,
    broker,
    config,
    doctor,
    interests,
    maintain,
    quality,
    quarantine,
    recover,
    run,
    status,
    tables,
    trace,
    traffic,
)
from kiln.deploy.cli.options import ENVIRONMENT, FAILED, INTERRUPTED, OK, USAGE, discard_output
from kiln.schemas.printable import printable_lines

GROUPS = (
    run,
    interests,
    traffic,
    tables,
    trace,
    quality,
    backfill,
    status,
    doctor,
    maintain,
    recover,
    quarantine,
    config,
    broker,
)
"""Modules of commands, in the order in which `kiln --help` lists the commands."""

_WRITE_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

app = typer.Typer(
    name="kiln",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Archive the pubsub traffic of a Ceramic network in Delta tables and publish CIP-123 batches.\n\n"
    "Exit codes: 0 success; 1 failure; 2 invalid command line or settings; 3 missing requirement (Python packages, "
    "Java, jars, a free port, a Kafka broker); 130 interrupted.",
)
for group in GROUPS:
    app.add_typer(group.commands)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kiln {read_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print version and commit.")
    ] = False,
) -> None:
    """Accept the options that stand before the name of a command."""


def run_command(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. Print errors that a user can fix to stderr, without a traceback."""
    try:
        code = app(args=list(arguments), prog_name="kiln", standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except typer.exceptions.TyperException as error:
        _complain(f"{error.format_message()} (see kiln --help)")
        return USAGE
    except KilnError as error:
        _complain(str(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kiln"):
            raise
        _complain(f"the Python module {error.name} is not installed. Install it: {format_install_command('all')}")
        return ENVIRONMENT
    except BrokenPipeError:
        discard_output()  # the reader has enough, as in `kiln status | head`
        return OK
    except _load_table_errors() as error:
        _complain(_describe_table_error(error))
        return FAILED
    except OSError as error:
        if not _explain_file_error(error):
            raise
        return FAILED
    return code if isinstance(code, int) else OK


def _load_table_errors() -> tuple[type[Exception], ...]:
    """Return the exception class of delta-rs, or nothing if this command has not imported delta-rs: importing it is
    slow."""
    return (sys.modules["deltalake.exceptions"].DeltaError,) if "deltalake.exceptions" in sys.modules else ()


def _describe_table_error(error: Exception) -> str:
    from kiln.conf.process.location import find_os_error, shorten_error

    cause = find_os_error(error)
    if cause:
        return f"cannot write the Delta tables: {cause}. Free disk space or grant write permission, and try again"
    return f"cannot read or write the Delta tables: {shorten_error(error)}. To check them: kiln doctor"


def _explain_file_error(error: OSError) -> bool:
    """Print the reason why a file cannot be read or written. Print nothing and return false if the error is not about
    a file."""
    if error.filename is not None:
        _complain(f"{error.filename}: {error.strerror}")
    elif error.errno in _WRITE_ERRORS:
        _complain(f"cannot write the output: {error.strerror}. Redirect it to another file")
        discard_output()
    else:
        return False
    return True


def _complain(words: str) -> None:
    for number, line in enumerate(printable_lines(words).splitlines() or ["the command failed without a message"]):
        print(f"kiln: {line}" if number == 0 else f"      {line}", file=sys.stderr)


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    # imports make 40,000 objects that stay, and by default the garbage collector walks them many times
    gc.set_threshold(10_000)
    problem = prepare_process()
    if problem:
        _complain(problem)
        sys.exit(FAILED)
    sys.exit(run_command(sys.argv[1:]))


_UTF8: Final = "C.UTF-8"
_ENCODING: Final = "PYTHONIOENCODING"


def prepare_process() -> str:
    """Set up the streams, locale and signals of this process, and environment variables for its children.

    If the encoding of the locale is not UTF-8, this may restart the program with another locale.

    Returns:
        The reason why the command cannot run; empty if it can.
    """
    if sys.stdout is None:
        return "stdout is closed. Redirect it to a file, such as >/dev/null"
    _open_streams()
    _use_utf8()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # output never fails because of a character
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not so under `nohup`, which ignores SIGHUP
        signal.signal(signal.SIGHUP, partial(_hang_up, [stream for stream in (1, 2) if os.isatty(stream)]))
    exempt_loopback(os.environ)
    os.environ["PYTHONSAFEPATH"] = "1"  # child processes never import from the current folder
    return ""


def _open_streams() -> None:
    """Open stdin and stderr as /dev/null if they are closed. Otherwise the next file that Kiln opens would get their
    descriptor, and child processes would write errors into that file."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the life of the process


def _use_utf8() -> None:
    """Encode paths in UTF-8 whatever the locale is, if necessary by restarting the program with LC_ALL=C.UTF-8.

    In another encoding, delta-rs would open files with other names, because it always uses UTF-8, and Java would
    replace characters. Output to the terminal keeps the encoding of the locale.
    """
    if codecs.lookup(locale.getencoding()).name == "utf-8" or os.environ.get("LC_ALL") == _UTF8:
        os.environ.pop(_ENCODING, None)  # not for children: they write to log files, not to the terminal
        return
    os.environ["LC_ALL"] = _UTF8
    if not sys.flags.utf8_mode:  # Python has decoded paths and arguments with the encoding of the locale
        os.environ.setdefault(_ENCODING, f"{sys.stdout.encoding}:backslashreplace")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _hang_up(terminals: Sequence[int], number: int, frame: FrameType | None) -> None:
    """Handle SIGHUP, the signal of a closed terminal: stop writing to the terminal, then end as on SIGTERM."""
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        for stream in terminals:
            os.dup2(nothing.fileno(), stream)
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
