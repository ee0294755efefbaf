"""Reference for assistants: docs/reference.json, docs/llms.txt, and the lists of docs/assistants.md.

All three are made from what the code reads itself: the command line, the tables and views, the settings with their
comments in conf/kiln.toml, and the navigation of the site. `python -m kiln.deploy.packaging.reference` writes them, as
`make pages` does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

import typer

from kiln.conf.process.extras import DISTRIBUTION
from kiln.conf.settings.durations import duration_text
from kiln.conf.settings.keys import get_value, join_key, list_keys, name_variable
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import DEFAULT_FILE
from kiln.deploy.cli.app import app
from kiln.deploy.packaging.site.build import INDEX, REFERENCE, list_pages, read_navigation
from kiln.deploy.query.ask import read_view_columns
from kiln.deploy.stack.jars import PROJECT
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import views
from kiln.schemas.faults import FAULTS

PAGE: Final = PROJECT / "docs" / "assistants.md"
BEGIN: Final = "<!-- Made by `make pages` from the code: do not edit it here. -->"
END: Final = "<!-- End of what is made. -->"

_COMMENT: Final = re.compile(r"^# ?(.*)$")
_SECTION: Final = re.compile(r"^\[([a-z0-9_.]+)\]$")
_KEY: Final = re.compile(r"^([a-z0-9_]+) = ")
_HEADING: Final = re.compile(r"^# (.+)$", re.MULTILINE)
_PARAGRAPH: Final = re.compile(r"^(?![#<\n]).+?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\[([^\]]+)\]\([^)]+\)")

Record = dict[str, object]


# ---------------------------------------------------------------- the data


def build_reference() -> Record:
    """Build the content of docs/reference.json."""
    return {
        "distribution": DISTRIBUTION,
        "help": app.info.help,
        "commands": list(_list_commands(typer.main.get_command(app), "kiln")),
        "tables": [
            {
                "name": table.name,
                "content": table.comment,
                "key": list(table.key),
                "columns": [
                    {"name": each.name, "type": each.type, "null": each.nullable, "content": each.comment}
                    for each in table.columns
                ],
            }
            for table in TABLES.values()
        ],
        "views": [
            {"name": name, "content": views()[name].sentence, "row": views()[name].grain, "columns": list(columns)}
            for name, columns in sorted(read_view_columns().items())
        ],
        "settings": list(_list_settings()),
        "quarantine": [{"stage": each.stage, "reason": each.reason, "meaning": each.meaning} for each in FAULTS],
    }


def _list_commands(command: object, name: str) -> Iterator[Record]:
    if isinstance(command, typer.core.TyperGroup):
        for word, below in command.commands.items():
            yield from _list_commands(below, f"{name} {word}")
        return
    assert isinstance(command, typer.core.TyperCommand)
    arguments = [each for each in command.params if isinstance(each, typer.core.TyperArgument)]
    options = [each for each in command.params if isinstance(each, typer.core.TyperOption)]
    yield {
        "command": " ".join([name, *(str(each.metavar) for each in arguments)]),
        "help": command.help,
        "arguments": {str(each.metavar): each.help for each in arguments},
        "options": [
            {"option": ", ".join(each.opts), "value": None if each.is_flag else each.metavar, "help": each.help}
            for each in options
        ],
    }


def _list_settings() -> Iterator[Record]:
    comments = read_comments(DEFAULT_FILE.read_text(encoding="utf-8"))
    defaults = Settings()
    for keys in list_keys():
        value = get_value(defaults, keys)
        yield {
            "key": join_key(keys),
            "variable": name_variable(keys),
            "default": duration_text(value) if isinstance(value, timedelta) else _to_json(value),
            "content": comments[join_key(keys)],
        }


def _to_json(value: object) -> object:
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, tuple | list):
        return list(value)
    return dict(value) if isinstance(value, dict) else os.fspath(value) if isinstance(value, Path) else str(value)


def read_comments(text: str) -> dict[str, str]:
    """Read the comment above each key of a settings file."""
    comments: dict[str, str] = {}
    section, lines = "", list[str]()
    for line in text.splitlines():
        if comment := _COMMENT.match(line):
            lines.append(comment[1])
            continue
        if heading := _SECTION.match(line):
            section = f"{heading[1]}."
        elif key := _KEY.match(line):
            comments[section + key[1]] = " ".join(lines)
        lines = []
    return comments


# ---------------------------------------------------------------- the pages


def insert_lists(page: str, reference: Record) -> str:
    """Replace the lists of docs/assistants.md."""
    before, _, rest = page.partition(BEGIN)
    return "".join(
        [before, BEGIN, "\n\n", *(f"{line}\n" for line in _format_lists(reference)), END, rest.partition(END)[2]]
    )


def _format_lists(reference: Record) -> Iterator[str]:
    data = json.loads(json.dumps(reference))
    yield from ("### Commands", "")
    for each in data["commands"]:
        options = " ".join(f"`{option['option']}`" for option in each["options"])
        yield f"- `{each['command']}`: {_first_sentence(each['help'])} {options}".rstrip()
    yield from ("", "### Tables", "")
    for each in data["tables"]:
        columns = ", ".join(f"`{column['name']}` {column['type']}" for column in each["columns"])
        yield f"- `{each['name']}`: {each['content']}. Columns: {columns}."
    yield from ("", "### Views", "")
    for each in data["views"]:
        columns = ", ".join(f"`{column}`" for column in each["columns"])
        yield f"- `{each['name']}`, one row per {each['row']}: {columns}."
    yield from ("", "### Settings", "")
    for each in data["settings"]:
        yield f"- `{each['key']}` = `{json.dumps(each['default'])}`: {_first_sentence(each['content'])}"
    yield ""


def build_index() -> str:
    """Build docs/llms.txt: the pages of the site by section, with the first sentence of each (llmstxt.org)."""
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    lines = ["# Kiln", "", f"> {_first_paragraph(readme)}", ""]
    lines += [
        "Begin with [assistants.md](assistants.md): how to use Kiln without Java or a network, and what to avoid."
    ]
    lines += ["[reference.json](reference.json) has all commands, tables, views and settings as data."]
    for section in read_navigation(list_pages()):
        for title, pages in section.items():
            lines += ["", f"## {title}", ""]
            for name in pages:
                text = (PROJECT / name).read_text(encoding="utf-8")
                heading = _HEADING.search(text)
                assert heading is not None, name
                link = os.path.relpath(name, "docs")
                lines.append(f"- [{heading[1]}]({link}): {_first_sentence(_first_paragraph(text))}")
    return "\n".join([*lines, ""])


def _first_paragraph(page: str) -> str:
    found = _PARAGRAPH.search(page, page.index("\n"))
    return " ".join(_LINK.sub(r"\1", found[0] if found else "").split())


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def main() -> None:
    """Write the three files."""
    reference = build_reference()
    (PROJECT / REFERENCE).write_text(json.dumps(reference, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(insert_lists(PAGE.read_text(encoding="utf-8"), reference), encoding="utf-8")
    (PROJECT / INDEX).write_text(build_index(), encoding="utf-8")


if __name__ == "__main__":
    main()
