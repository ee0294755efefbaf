"""`make docs`: the site has every page, mkdocs has nothing against one, and a link to nowhere is found.

With KILN_TEST_SITE set, the command itself runs: it fetches what draws the diagrams from npm, and follows every link.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mkdocs.config import load_config

from kiln.deploy.packaging.site.build import (
    CONFIG,
    SiteError,
    add_space_before_lists,
    build_navigation,
    build_site,
    check_links,
    list_pages,
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; nothing draws its diagrams."""
    folder = tmp_path_factory.mktemp("site")
    script = folder / "nothing.js"
    script.write_text("", encoding="utf-8")
    assert build_site(folder / "site", script) == len(list_pages())
    return folder / "site"


class _Sources(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in ("script", "img") or (tag == "link" and named.get("rel") == "stylesheet"):
            self.found.add(named.get("src") or named.get("href") or "")


def test_every_page_is_on_the_site_and_asks_no_other_host(site: Path) -> None:
    for page in list_pages():
        name = "index.html" if page == Path("README.md") else str(page.with_suffix(".html"))
        name = name.replace("docs/design/README.html", "docs/design/index.html")
        sources = _Sources()
        sources.feed((site / name).read_text(encoding="utf-8"))
        assert sources.found
        assert not [each for each in sources.found if "://" in each or each.startswith("//")], name
    concepts = (site / "docs/concepts.html").read_text(encoding="utf-8")
    assert '<pre class="mermaid">' in concepts
    assert "assets/mermaid.min.js" in concepts


def test_the_site_has_the_index_and_the_markdown_that_assistants_read(site: Path) -> None:
    index = (site / "llms.txt").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([^)]+)\)", index)
    assert {"README.md", "docs/SQL.md", "docs/reference.json", "docs/design/overview.md"} <= set(linked)
    assert [link for link in linked if not (site / link).is_file()] == []


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="other.html">other</a>', encoding="utf-8")
    (tmp_path / "other.html").write_text('<a href="index.html">back</a>', encoding="utf-8")
    check_links(tmp_path)
    (tmp_path / "other.html").write_text('<a href="nowhere.html">on</a>', encoding="utf-8")
    with pytest.raises(SiteError, match=r"nowhere\.html"):
        check_links(tmp_path)


@pytest.mark.skipif("KILN_TEST_SITE" not in os.environ, reason="KILN_TEST_SITE is not set: asks npm for a package")
def test_the_command_builds_the_whole_site_and_follows_every_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kiln.deploy.packaging.site.build", "--site", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(list_pages())} pages, no broken links: ")
    assert "mermaid" in (tmp_path / "site/assets/mermaid.min.js").read_text(encoding="utf-8")


def test_every_page_is_in_one_place_of_the_navigation(tmp_path: Path) -> None:
    documents = list_pages()
    sections = build_navigation(load_config(str(CONFIG), docs_dir=str(tmp_path)).nav or [], documents)
    named = [name for section in sections for each in section.values() for name in each]
    assert sorted(named) == sorted(map(str, documents))
    titles = [title for section in sections for title in section]
    assert titles[:3] == ["Start", "Concepts", "Tables and SQL"]
    assert {"Backfill", "Quality", "Deployment", "Protocols", "Decisions"} <= set(titles)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("Words:\n- one\n- two\n", "Words:\n\n- one\n- two\n"),
        ("Words:\n1. one\n", "Words:\n\n1. one\n"),
        ("- one\n  more\n- two\n", "- one\n  more\n- two\n"),
        ("```sh\nkiln\n- x\n```\n", "```sh\nkiln\n- x\n```\n"),
        ("| a |\n", "| a |\n"),
    ],
)
def test_a_list_after_a_paragraph_is_a_list(text: str, made: str) -> None:
    assert add_space_before_lists(text) == made
