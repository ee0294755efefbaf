"""The documents say what is there: tables, questions to them, settings, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conf.settings import known_keys, variable
from deploy.sql import ask
from pipelines.sinks import Lake, create_tables
from schemas.proto.kiln.frame_pb2 import Frame
from schemas.tables import TABLES, markdown

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]

QUESTION = re.compile(r'kiln sql(?: --json)? "(.+?)"\s', re.DOTALL)
QUESTIONS = [
    (page, question.strip())
    for page in PAGES
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for question in QUESTION.findall(block)
]

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_page_of_the_tables_is_made_from_the_tables() -> None:
    assert text("docs/TABLES.md") == markdown(), "write it anew: python -m schemas.tables > docs/TABLES.md"


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every table, with no rows."""
    folder = tmp_path_factory.mktemp("lake")
    create_tables(Lake(str(folder)), TABLES)
    return folder


def test_there_are_questions_to_try() -> None:
    assert len(QUESTIONS) >= 20
    # all of a block, and none half: each block of SQL.md is one question
    assert sum(page.name == "SQL.md" for page, _ in QUESTIONS) == text("docs/SQL.md").count("```sh")


@pytest.mark.parametrize(
    ("page", "question"), QUESTIONS, ids=[f"{page.name}-{number}" for number, (page, _) in enumerate(QUESTIONS)]
)
def test_the_tables_have_an_answer_to_every_question(page: Path, question: str, lake: Path) -> None:
    answer = ask(lake, question)
    assert answer.columns
    list(answer.rows())


@pytest.mark.parametrize(("page", "question"), QUESTIONS, ids=[str(number) for number in range(len(QUESTIONS))])
def test_a_shell_takes_each_question_as_it_is(page: Path, question: str) -> None:
    assert not set(question) & set('"$`!\\')


def test_the_design_has_the_frame_that_is_in_use() -> None:
    block = re.search(r"message Frame \{(.*?)\n\}", text("docs/DESIGN.md"), re.DOTALL)
    assert block is not None
    listed = re.findall(r"^  \w+ +(\w+) *= (\d+);", block[1], re.MULTILINE)
    assert listed == [(field.name, str(field.number)) for field in Frame.DESCRIPTOR.fields]


def test_every_setting_that_is_named_exists() -> None:
    known = set(known_keys())
    sections = {keys[0] for keys in known if len(keys) > 1}
    variables = {*map(variable, known), "KILN_CONFIG"}
    for page in PAGES:
        words = page.read_text(encoding="utf-8")
        for name in re.findall(r"\bKILN_[A-Z_]+\b", words):
            assert name in variables or name == "KILN_", f"{page.name}: {name}"
        for name in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)`", words):
            keys = tuple(name.split("."))
            # these are files, and settings of Spark's
            if keys[0] in sections and not {"py", "toml", "sql", "databricks"} & set(keys):
                assert keys in known, f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
