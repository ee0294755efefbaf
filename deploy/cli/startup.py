"""Preparation of the command's process: standard streams, encoding, SIGHUP and proxies."""

from __future__ import annotations

import codecs
import io
import locale
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Final

from kiln.conf.process.proxies import exempt_loopback

_UTF8: Final = "C.UTF-8"
_ENCODING: Final = "PYTHONIOENCODING"


def prepare_process() -> str:
    """Prepare this process and its children for the command. May replace the process by one with another locale.

    Returns:
        Why the command cannot run; empty if it can.
    """
    if sys.stdout is None:
        return "stdout is closed. Pass a file, such as >/dev/null"
    _open_streams()
    _use_utf8()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # output never fails because of a character
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # else `nohup` ignores it
        signal.signal(signal.SIGHUP, partial(_hang_up, [stream for stream in (1, 2) if os.isatty(stream)]))
    exempt_loopback(os.environ)
    os.environ["PYTHONSAFEPATH"] = "1"  # child processes never import from the current folder
    return ""


def discard_output() -> None:
    """Discard pending and later output to stdout, also what is flushed at exit: its reader is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Open stdin and stderr if they are closed. Otherwise the next opened file gets their descriptor, and child
    processes write to it."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the life of the process


def _use_utf8() -> None:
    """Encode paths in UTF-8 in any locale. Otherwise delta-rs, which uses UTF-8, opens other files, and Java replaces
    characters. Only the terminal keeps its encoding."""
    if codecs.lookup(locale.getencoding()).name == "utf-8" or os.environ.get("LC_ALL") == _UTF8:
        os.environ.pop(_ENCODING, None)  # children write to log files
        return
    os.environ["LC_ALL"] = _UTF8
    if not sys.flags.utf8_mode:  # Python has read paths and arguments in the other encoding
        os.environ.setdefault(_ENCODING, f"{sys.stdout.encoding}:backslashreplace")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _hang_up(terminals: Sequence[int], number: int, frame: FrameType | None) -> None:
    """End as by SIGTERM when the terminal is closed, without output to it."""
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        for stream in terminals:
            os.dup2(nothing.fileno(), stream)
    signal.raise_signal(signal.SIGTERM)
