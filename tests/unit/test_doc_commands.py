"""Every command of the documents is one that its program takes: `kiln`, `make`, and modules of ours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from kiln.deploy.cli.app import app
from kit.doc_commands import DocCommand, block_commands, commands_of, inline_commands
from kit.questions import PAGES

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z0-9-]+):(?!=)", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z]+) \?=", MAKEFILE, re.MULTILINE))
KILN = typer.main.get_command(app)

# the changelog names what was
NOW = [page for page in PAGES if page.name != "CHANGELOG.md"]
IN_BLOCKS = [command for page in NOW for command in block_commands(page)]
IN_TEXT = [command for page in NOW for command in inline_commands(page)]


def wrong(words: Sequence[str]) -> str:
    """What `kiln` would say against a command line, without doing what it says; empty: nothing."""
    command, name, arguments = KILN, "kiln", list(words)
    context = None
    try:
        while True:
            context = command.make_context(name, arguments, parent=context)
            if not isinstance(command, typer.core.TyperGroup):
                return ""
            rest = [*context._protected_args, *context.args]
            found, inner, arguments = command.resolve_command(context, rest)
            if found is None or inner is None:
                return f"no command in {' '.join(words)}"
            name, command = found, inner
    except typer.exceptions.TyperException as error:
        return error.format_message()
    except typer.Exit as over:  # --help
        return "" if over.exit_code == 0 else f"exit code {over.exit_code}"


def unknown_option(words: Sequence[str]) -> str:
    """The first word of a command line with placeholders that names no command or option of `kiln`; empty: none."""
    command = KILN
    for word in words:
        if isinstance(command, typer.core.TyperGroup):
            if not re.fullmatch(r"[a-z][a-z-]*", word):
                return ""
            if word not in command.commands:
                return word
            command = command.commands[word]
        elif re.fullmatch(r"--?[a-z][a-z-]*", word):
            options = {
                option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
            }
            if word not in options | {"-h", "--help"}:
                return word
    return ""


def wrong_make(words: Sequence[str]) -> str:
    """Why `make` would not take a command line; empty: it does."""
    for word in words:
        variable, is_variable, value = word.partition("=")
        if is_variable:
            if variable not in VARIABLES:
                return f"make {variable}=…"
            if "run" in words and variable == "ARGS":
                return wrong(["run", *shlex.split(value)])
        elif word not in TARGETS:
            return f"make {word}"
    return ""


def test_there_are_commands_to_try() -> None:
    assert len([each for each in IN_BLOCKS if each.program == "kiln"]) > 40
    assert len([each for each in IN_BLOCKS if each.program == "make"]) > 5
    assert len(IN_TEXT) > 100


@pytest.mark.parametrize("page", NOW, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_in_a_block_is_one_that_its_program_takes(page: Path) -> None:
    for each in IN_BLOCKS:
        if each.page == page:
            assert fault(each) == "", shlex.join(each.words)


def fault(each: DocCommand) -> str:
    """What is wrong with a command of a block; empty: nothing that can be told without running the command."""
    match each.program, each.words[1:]:
        case "kiln", arguments:
            return wrong(arguments)
        case "make", arguments:
            return wrong_make(arguments)
        case "python", ("-m", module, *_) if module.partition(".")[0] in ("bench", "conf", "deploy", "schemas"):
            return "" if find_spec(module) else f"no module {module}"
    if each.words[0].startswith((".ci/", "bench/", "deploy/", "tests/")):
        return "" if (ROOT / each.words[0]).exists() else f"no file {each.words[0]}"
    return ""


@pytest.mark.parametrize("page", NOW, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_in_the_text_exists(page: Path) -> None:
    for each in IN_TEXT:
        if each.page == page:
            say = unknown_option if each.program == "kiln" else wrong_make_target
            assert say(each.words[1:]) == "", shlex.join(each.words)


def wrong_make_target(words: Sequence[str]) -> str:
    """The first word of a command line of `make` that is no target; empty: none."""
    return next((word for word in words if re.fullmatch(r"[a-z][a-z-]*", word) and word not in TARGETS), "")


@pytest.mark.parametrize(
    "words",
    ["runn", "run --form 60s", "run --for", "backfill", "backfill rin", "sql --json a b", "quarantine list --reasons"],
)
def test_a_command_that_kiln_would_refuse_is_found(words: str) -> None:
    assert wrong(words.split()) != ""


@pytest.mark.parametrize(
    ("script", "commands"),
    [
        ("A=1 B='x y' kiln run  # it's a comment\nmake test", [("kiln", "run"), ("make", "test")]),
        ("kiln sql \"SELECT 1;\n  SELECT '#'\" | head", [("kiln", "sql", "SELECT 1;\n  SELECT '#'"), ("head",)]),
        (
            "cat > f <<END\nkiln nonsense\nEND\nkiln doctor && kiln status",
            [("cat",), ("kiln", "doctor"), ("kiln", "status")],
        ),
        ("kiln replay \\\n  a.gz b.gz > out", [("kiln", "replay", "a.gz", "b.gz")]),
    ],
)
def test_commands_are_read_as_a_shell_reads_them(script: str, commands: list[tuple[str, ...]]) -> None:
    got = [tuple(word for word in each if word != "END") for each in commands_of(script)]
    assert got == commands
