"""The commands in the documents: in shell blocks, and between backticks in the text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`((?:kiln|make) [^`\n]+)`(?!`)")
_HERE_DOCUMENT = re.compile(r"<<-?\s*'?(\w+)'?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


class DocCommand(NamedTuple):
    """A command of a page. `words` are unquoted, without assignments and redirections."""

    page: Path
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The program's name, without its folder."""
        return self.words[0].rpartition("/")[2]


def block_commands(page: Path) -> Iterator[DocCommand]:
    """Yield the commands in the shell blocks of a page.

    Raises:
        ValueError: A block has an open quote.
    """
    for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        for words in commands_of(block[1]):
            yield DocCommand(page, words)


def inline_commands(page: Path) -> Iterator[DocCommand]:
    """Yield each `kiln …` and `make …` in the text of a page. These may have placeholders."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for found in _INLINE.finditer(text):
        for words in commands_of(found[1].replace("\\|", "|")):
            yield DocCommand(page, words)


def commands_of(script: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands of a shell script, one for each part of a pipe or a list.

    Raises:
        ValueError: A quote is left open.
    """
    lines = iter(script.replace("\\\n", " ").splitlines())
    for line in lines:
        statement = line
        while (words := _words(statement)) is None:
            following = next(lines, None)
            if following is None:
                raise ValueError(f"a quote is left open: {statement}")
            statement += "\n" + following
        here = _HERE_DOCUMENT.search(statement)
        if here:
            while next(lines, here[1]) != here[1]:
                pass
        yield from _simple_commands(words)


def _words(statement: str) -> list[str] | None:
    lexer = shlex.shlex(statement, posix=True, punctuation_chars="|&;<>")
    lexer.commenters = ""
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        # a comment may have an apostrophe
        bare = re.sub(r"(^|\s)#.*$", "", statement)
        return _words(bare) if bare != statement else None
    for number, word in enumerate(words):
        if word.startswith("#"):
            return words[:number]
    return words


def _simple_commands(words: list[str]) -> Iterator[tuple[str, ...]]:
    command: list[str] = []
    redirected = False
    for word in [*words, ";"]:
        if word and not set(word) - set("|&;"):
            while command and _ASSIGNMENT.fullmatch(command[0]):
                del command[0]
            if command:
                yield tuple(command)
            command, redirected = [], False
        elif word and not set(word) - set("<>"):
            redirected = True
        elif redirected:  # the file
            redirected = False
        else:
            command.append(word)
