"""The examples of the documents on the sample lake print what the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.doc_examples import PYTHON_PAGE, README, TUTORIAL, examples, prepare, sample_examples
from kit.questions import PAGES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    prepare(folder)
    return folder


@pytest.mark.slow
def test_each_example_on_the_sample_prints_what_its_page_shows(folder: Path) -> None:
    tried = list(sample_examples())
    assert len(tried) >= 8
    for each in tried:
        printed = each.run(folder)
        if each.output is not None:
            assert each.shows(printed), f"{each.page.name} shows other than\n{printed}\nRun python -m kit.doc_examples"


def test_programs_stand_only_on_pages_whose_examples_are_run() -> None:
    """tests/spark and tests/kafka run the rest of these pages."""
    programs = [each for page in PAGES for each in examples(page) if each.code.startswith(("import ", "from "))]
    assert {each.page for each in programs} == {PYTHON_PAGE, README, TUTORIAL}
