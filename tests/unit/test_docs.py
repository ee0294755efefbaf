"""The documents say what is there: tables, questions to them, reasons, settings, decisions, files, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from kiln.conf.settings.keys import list_keys, name_variable
from kiln.deploy.cli.app import app
from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import markdown
from kiln.schemas.delta.views import markdown as views_table
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kit.questions import PAGES, QUESTIONS, Question
from kit.small_lake import small_lake

ROOT = Path(__file__).resolve().parents[2]
DESIGN = ROOT / "docs" / "design"
DECISIONS = sorted(DESIGN.glob("[0-9][0-9]-*.md"))

ROOMS = ("schemas", "conf", "bridge", "pipelines", "deploy", "tests", "bench")
CODE = (".py", ".pyi", ".proto", ".toml")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_page_of_the_tables_is_made_from_the_tables() -> None:
    assert text("docs/TABLES.md") == markdown(), "regenerate it: make pages"


def test_the_page_of_questions_has_every_view() -> None:
    assert views_table() in text("docs/SQL.md"), "regenerate it: make pages"


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Every table, with rows."""
    return small_lake(str(tmp_path_factory.mktemp("lake")))


def test_there_are_questions_to_try() -> None:
    assert len(QUESTIONS) >= 20
    # all of a block, and none half: each block of SQL.md is one question
    assert sum(each.page.name == "SQL.md" for each in QUESTIONS) == text("docs/SQL.md").count("```sh")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda each: f"{each.page.name}: {each.title}")
def test_the_tables_have_an_answer_to_every_question(question: Question, lake: Lake) -> None:
    assert list(query_lake(lake, question.sql).rows()), "the question finds no row in a lake with rows"


def test_a_shell_takes_each_question_as_it_is() -> None:
    assert [each.title for each in QUESTIONS if set(each.sql) & set('"$`!\\')] == []


def test_the_design_has_the_frame_that_is_in_use() -> None:
    block = re.search(r"message Frame \{(.*?)\n\}", text("docs/design/contracts.md"), re.DOTALL)
    assert block is not None
    listed = re.findall(r"^  (?:optional )?\w+ +(\w+) *= (\d+);", block[1], re.MULTILINE)
    assert listed == [(field.name, str(field.number)) for field in Frame.DESCRIPTOR.fields]


def test_every_decision_that_the_code_refers_to_has_a_page() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).glob("**/*") if path.suffix in CODE and path.is_file()]
    named = {
        (int(number), name_of(path))
        for path in files
        for numbers in re.findall(r"\bdecisions? (\d+(?:(?:, | and )\d+)*)", path.read_text(encoding="utf-8"))
        for number in re.findall(r"\d+", numbers)
    }
    assert len({number for number, _ in named}) >= 5, "the code refers to decisions by number"
    numbers = {int(page.name[:2]) for page in DECISIONS}
    assert [each for each in sorted(named) if each[0] not in numbers] == []


def test_the_page_of_commands_has_every_command() -> None:
    page = text("docs/commands.md")
    kiln = typer.main.get_command(app)
    assert isinstance(kiln, typer.core.TyperGroup)
    assert [name for name in kiln.commands if f"`kiln {name}" not in page] == []


# the changelog names what was, the runbook files of the state folder
NAMING_FILES = [page for page in PAGES if page.name not in ("CHANGELOG.md", "RUNBOOK.md")]


@pytest.mark.parametrize("page", NAMING_FILES, ids=name_of)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(ROOMS)}|docs)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    # NAME stands for a name of the reader's own
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []


def test_every_setting_that_is_named_exists() -> None:
    known = set(list_keys())
    sections = {keys[0] for keys in known if len(keys) > 1}
    of_tests = re.findall(r"\bKILN_TEST_[A-Z_]+\b", text("tests/conftest.py") + text("tests/store/test_races.py"))
    of_tables = tuple(f"{name_variable(keys)}__" for keys, free in list_keys().items() if free)
    variables = {*map(name_variable, known), "KILN_CONFIG", *of_tests}
    for page in PAGES:
        words = page.read_text(encoding="utf-8")
        for name in re.findall(r"\bKILN_[A-Z_]+\b", words):
            known_name = name in variables or name.startswith(of_tables) or name == "KILN_"
            assert known_name, f"{name_of(page)}: {name}"
        for name in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)`", words):
            keys = tuple(name.split("."))
            # these are files, and settings of Spark's
            if keys[0] in sections and not {"py", "toml", "sql", "databricks"} & set(keys):
                assert keys in known, f"{name_of(page)}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_the_pages_lead_somewhere(page: Path) -> None:
    shown = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path, anchor in LINK.findall(shown):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
