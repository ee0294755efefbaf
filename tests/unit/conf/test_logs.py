"""kiln.conf.process.logs: a line an event, as text and as JSON, whatever strangers put into it, and few of a kind."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest

from kiln.conf.process.logs import (
    Format,
    Level,
    LogFile,
    ProblemLog,
    RateLimitFilter,
    configure_logs,
    is_news,
    log_event,
)

LOG = logging.getLogger("kiln.bridge.libp2p")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, levels = (
        root.handlers[:],
        {name: logging.getLogger(name).level for name in ("kiln", "kiln.bridge.libp2p", "")},
    )
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def logged(form: Format, level: Level = "info", levels: dict[str, Level] | None = None) -> StringIO:
    out = StringIO()
    logging.getLogger().handlers.clear()  # those of pytest
    configure_logs(form, level, levels or {}, logging.StreamHandler(out))
    return out


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_event_is_one_line_that_a_terminal_obeys_nothing_of(form: Format) -> None:
    out = logged(form)
    log_event(LOG, "peer connected", peer="12D3", agent="kubo\n\x1b[2J\x7f\u202e", dialled=True)
    line = out.getvalue()
    assert line.isascii()
    assert line.rstrip("\n").isprintable()
    assert line.count("\n") == 1
    assert is_news(line)
    if form == "text":
        assert ' level=info part=kiln.bridge.libp2p event="peer connected" peer="12D3" agent="kubo\\n\\u001b[2J' in line
    else:
        told = json.loads(line)
        assert (told["event"], told["peer"], told["dialled"]) == ("peer connected", "12D3", True)
        assert told["agent"] == "kubo\n\x1b[2J\x7f\u202e"


def test_a_trace_is_part_of_its_line() -> None:
    out = logged("json")
    try:
        raise ValueError("what")
    except ValueError:
        LOG.exception("fetching %s", "a block")
    told = json.loads(out.getvalue())
    assert told["event"] == "fetching a block"
    assert "ValueError: what" in told["trace"]
    assert not is_news(out.getvalue())


def test_levels_of_parts_and_of_libraries() -> None:
    out = logged("text", "warning", {"kiln.bridge.libp2p": "debug"})
    log_event(LOG, "heard", logging.DEBUG)
    log_event(logging.getLogger("kiln.bridge.app"), "unheard")
    logging.getLogger("somebody").warning("unheard")
    logging.getLogger("somebody").error("an error of a library")
    assert [line.split(" event=")[1] for line in out.getvalue().splitlines()] == [
        '"heard"',
        '"an error of a library"',
    ]


def record(event: str, at: float) -> logging.LogRecord:
    made = logging.LogRecord("kiln.bridge.libp2p", logging.INFO, "", 0, event, (), None)
    made.created = at
    return made


def test_of_many_lines_of_a_kind_twenty_come_and_what_is_left_out_is_counted() -> None:
    limit = RateLimitFilter()
    first = [record("peer connected", number / 100) for number in range(1_000)]
    passed = [each for each in first if limit.filter(each)]
    assert len(passed) == 20
    assert [each for each in passed if hasattr(each, "fields")] == [passed[-1]]
    assert limit.filter(record("peer disconnected", 10.0)), "another kind"
    later = record("peer connected", 61.0)
    assert limit.filter(later)
    assert later.__dict__["fields"] == {"left_out": 980}


def test_a_problem_is_told_when_it_comes_and_when_it_goes() -> None:
    out = logged("text")
    problems = ProblemLog(logging.getLogger("kiln.bridge.app"))
    for seen in ([], ["Kafka is away"], ["Kafka is away"], []):
        problems.see(seen)
    assert [line.split(" event=")[1] for line in out.getvalue().splitlines()] == [
        '"problem" error="Kafka is away"',
        '"problem resolved" error="Kafka is away"',
    ]


def test_a_problem_that_is_worded_anew_is_the_same_and_another_is_not() -> None:
    """A broker that was killed: the reason changes with each second, and with each attempt."""
    out = logged("text")
    problems = ProblemLog(logging.getLogger("kiln.bridge.app"))
    waiting = [f"frames wait for Kafka, topic kiln.frames: no acknowledgement for {seconds} s" for seconds in (2, 3)]
    refused = "frames wait for Kafka, topic kiln.frames: FramesProducerError('cannot write to Kafka at 127.0.0.1:9')"
    peers = [f"cannot reach bootstrap peer /ip4/10.0.0.{n}/tcp/4001/p2p/12D3: refused" for n in (1, 2)]
    many = [f"{number:,} peers send more than bridge.max_bytes_per_hour allow" for number in (3, 1_024)]
    for seen in ([waiting[0]], [waiting[1]], [refused, many[0]], [refused, many[1], peers[0]], [peers[1]], []):
        problems.see(seen)
    told = [line.split(" event=")[1] for line in out.getvalue().splitlines()]
    assert told[0] == f'"problem" error="{waiting[0]}"'
    assert sorted(told) == sorted(
        f'"{event}" error="{error}"'
        for error in (waiting[0], many[0], *peers)
        for event in ("problem", "problem resolved")
    )


def test_lines_that_a_full_disk_takes_no_more_are_counted_and_not_told_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "driver.log").symlink_to("/dev/full")
    logging.getLogger().handlers.clear()
    kept = LogFile(tmp_path / "driver.log")
    configure_logs("json", "info", {}, kept)
    for number in range(3):
        log_event(LOG, "peer connected", number=number)
    with suppress(OSError):  # what waits cannot be written now either
        kept.close()
    (tmp_path / "driver.log").unlink()  # there is room again
    log_event(LOG, "peer connected", number=3)
    log_event(LOG, "peer connected", number=4)
    kept.close()
    told = [json.loads(line) for line in (tmp_path / "driver.log").read_text().splitlines()]
    assert [(line["number"], line.get("lines_lost")) for line in told] == [(3, 3), (4, None)]
    assert capsys.readouterr() == ("", "")
