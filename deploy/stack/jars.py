"""Fetch the JVM jars pinned in `conf/ivy.xml` with the Apache Ivy that ships in pyspark: no Maven, no host named here.

Layout of a jars folder: `spark/*.jar` (added to Spark), `broker/*.jar` (class path of the embedded broker) and
`complete`, a stamp that names the `ivy.xml` and the size of each file. The stamp is written last, so whatever was
interrupted is done again, and a complete folder costs a few `stat` calls and no JVM. `conf/jars.sha256` has the
checksum of each jar: what comes from a repository must be the very file that Kiln was tried with.

What Spark needs for an object store is pinned in `conf/ivy-s3.xml`, is in a jars folder of its own, `s3` in the other
one, and is fetched only where the settings name a store.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from kiln.conf.process.errors import PrerequisiteError
from kiln.deploy.stack.java import JavaError, find_java

PROJECT = Path(__file__).resolve().parents[2]
IVY_XML = PROJECT / "conf" / "ivy.xml"
IVY_S3 = PROJECT / "conf" / "ivy-s3.xml"
# Not read by Ivy's command line by itself; a user who needs a mirror of his own describes it there.
IVY_SETTINGS = Path.home() / ".ivy2" / "ivysettings.xml"

STAMP = "complete"
Progress = Callable[[str], None]
Resolve = Callable[[Path, Path, Progress], None]  # ivy.xml, folder to fill with <conf>/<jar>, progress

_FOUND = re.compile(r"^\s*found \S+ in ")
_FETCHED = re.compile(r"^\s*\[SUCCESSFUL \]")


class JarsError(PrerequisiteError):
    """The jars are not there or could not be fetched; the text says why and what to do."""


def _ignore_progress(_: str) -> None:
    pass


def read_pinned_jars(ivy_xml: bytes) -> dict[str, tuple[str, ...]]:
    """`conf -> file names` of an ivy.xml, in its order. JarsError where one is not pinned to one version."""
    tree = ElementTree.fromstring(ivy_xml)
    files: dict[str, list[str]] = {conf.get("name", ""): [] for conf in tree.iter("conf")}
    for dependency in tree.iter("dependency"):
        name, revision = dependency.get("name", ""), dependency.get("rev", "")
        conf = dependency.get("conf", "").partition("->")[0]
        if conf not in files:
            raise JarsError(f'ivy.xml: {name}: conf="{conf}->…" names none of {", ".join(files)}')
        if not re.fullmatch(r"[0-9][\w.-]*", revision):
            raise JarsError(f'ivy.xml: {name}: rev="{revision}" is not one version')
        files[conf].append(f"{name}-{revision}.jar")
    return {conf: tuple(names) for conf, names in files.items()}


def checksums_path(ivy_xml: Path) -> Path:
    """The file of checksums that goes with an ivy.xml, as sha256sum writes it: `<sha256>  <conf>/<file name>`."""
    return ivy_xml.with_name(ivy_xml.stem.replace("ivy", "jars") + ".sha256")


def verify_checksums(root: Path, ivy_xml: Path = IVY_XML) -> None:
    """Compares each pinned jar with its checksum. JarsError names those that differ, or that have no checksum."""
    place = checksums_path(ivy_xml)
    try:
        lines = [line.split() for line in place.read_text(encoding="ascii").splitlines()]
        expected = {name: digest for digest, name in lines}
    except (OSError, ValueError) as error:
        raise JarsError(f"{place}: cannot be read: {error}") from None
    wrong: list[str] = []
    for name, found in _compute_checksums(root, ivy_xml).items():
        if name not in expected:
            wrong.append(f"{name}: no line in {place.name}. After a change of ivy.xml: make lock")
        elif found != expected[name]:
            wrong.append(f"{name}: sha256 {found}, expected {expected[name]}")
    if wrong:
        listed = "".join(f"    {line}\n" for line in wrong)
        raise JarsError(
            f"refused: these jars are not the ones that {place} names:\n{listed}"
            "A repository, a mirror or a cache gave other files. Remove the cache of Ivy (~/.ivy2) and the folder "
            ".jars, and run make jars again. If the jars differ again, do not use them."
        )


def _compute_checksums(root: Path, ivy_xml: Path) -> dict[str, str]:
    files = [f"{conf}/{name}" for conf, names in read_pinned_jars(ivy_xml.read_bytes()).items() for name in names]
    return {file: hashlib.sha256((root / file).read_bytes()).hexdigest() for file in files}


def default_root() -> Path:
    """`.jars` in a checkout, else a folder of the user's cache."""
    if (PROJECT / "pyproject.toml").is_file():
        return PROJECT / ".jars"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kiln" / "jars"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kiln" / "jars"


def is_complete(root: Path, ivy_xml: Path = IVY_XML) -> bool:
    """Whether the folder holds all that this `ivy.xml` names, whole."""
    try:
        stamp = json.loads((root / STAMP).read_bytes())
        return bool(stamp == _build_stamp(root, ivy_xml))
    except (OSError, ValueError):
        return False


def ensure_jars(
    root: Path | None = None,
    progress: Progress = _ignore_progress,
    ivy_xml: Path = IVY_XML,
    resolve: Resolve | None = None,
) -> Path:
    """Fetch what is missing, if anything is, and return the folder. Safe to call from several processes at once.

    `progress` is called with a line of text now and then. JarsError says why it failed; calling again goes on from what
    Ivy's own cache (`~/.ivy2`) already has.
    """
    root = default_root() if root is None else root
    if is_complete(root, ivy_xml):
        return root
    with _lock_folder(root):
        if is_complete(root, ivy_xml):  # another process did it while we waited
            return root
        files = read_pinned_jars(ivy_xml.read_bytes())
        for leftover in root.glob("fetching-*"):
            shutil.rmtree(leftover)
        fresh = Path(tempfile.mkdtemp(prefix="fetching-", dir=root))
        try:
            (resolve or run_ivy)(ivy_xml, fresh, progress)
            missing = [name for conf in files for name in files[conf] if not (fresh / conf / name).is_file()]
            if missing:
                raise JarsError(f"Ivy ended well but without {', '.join(missing)}: check their lines in {ivy_xml}")
            verify_checksums(fresh, ivy_xml)
            (root / STAMP).unlink(missing_ok=True)
            for conf in files:
                shutil.rmtree(root / conf, ignore_errors=True)
                (fresh / conf).rename(root / conf)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        unfinished = root / f"{STAMP}.new"
        unfinished.write_text(json.dumps(_build_stamp(root, ivy_xml), indent=1), encoding="utf-8")
        unfinished.replace(root / STAMP)
    progress(f"jars complete: {root}")
    return root


def list_spark_jars(root: Path | None = None) -> list[Path]:
    """The jars that Kiln adds to Spark's. JarsError when the folder is not complete."""
    return _list_jars("spark", root)


def s3_root(root: Path | None = None) -> Path:
    """The folder of the jars for an object store, whether it is there or not."""
    return (root or default_root()) / "s3"


def list_jars(*, uses_store: bool, progress: Progress = _ignore_progress) -> list[Path]:
    """The jars that Kiln adds to Spark's; with `uses_store`, those for an object store too. Fetches what is missing.
    JarsError."""
    jars = list_spark_jars(ensure_jars(progress=progress))
    return [*jars, *_list_jars("spark", ensure_jars(s3_root(), progress, IVY_S3), IVY_S3)] if uses_store else jars


def spark_archive_path(root: Path | None = None) -> Path:
    """The file of Spark's classes, whether it is there or not (deploy/run/spark_classes.py)."""
    return (root or default_root()) / "spark" / "classes.jsa"


def list_broker_jars(root: Path | None = None) -> list[Path]:
    """The jars the embedded broker runs on. JarsError when the folder is not complete."""
    return _list_jars("broker", root)


def run_ivy(ivy_xml: Path, into: Path, progress: Progress) -> None:
    """Have Ivy fill `into/<conf>/` with the jars of every conf, by its default chain of resolvers or the user's own."""
    try:
        java = find_java().executable
    except JavaError as error:
        raise JarsError(str(error)) from None
    files = read_pinned_jars(ivy_xml.read_bytes())
    total = sum(map(len, files.values()))
    command = [
        str(java),
        "-XX:TieredStopAtLevel=1",
        "-cp",
        str(_find_ivy_jar()),
        "org.apache.ivy.Main",
        "-ivy",
        str(ivy_xml),
    ]
    command += ["-settings", str(IVY_SETTINGS)] if IVY_SETTINGS.is_file() else []
    command += ["-confs", *files, "-types", "jar", "bundle"]
    command += ["-retrieve", f"{into}/[conf]/[artifact]-[revision].[ext]"]
    said: list[str] = []
    looked_up = fetched = 0
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as ivy:
        if ivy.stdout is None:
            raise AssertionError("stdout is piped")
        for line in ivy.stdout:
            said.append(line.rstrip())
            if _FOUND.match(line):
                looked_up += 1
                progress(f"jars: looked up {looked_up} of {total}")
            elif _FETCHED.match(line):
                fetched += 1
                progress(f"jars: fetched {fetched} of {total}")
    if ivy.returncode != 0:
        raise JarsError(explain_ivy_failure(said, ivy.returncode))


def explain_ivy_failure(said: list[str], status: int) -> str:
    """Words for a failed run out of what Ivy printed."""
    told = "\n".join(said)
    if re.search(
        r"UnknownHost|Connection refused|timed? ?out|unreachable|Server access error|SSLHandshake", told, re.I
    ):
        cause = (
            "the jars could not be downloaded: the repository did not answer. With a network, run it again: it goes on "
            "where it stopped.\nBehind a proxy: JAVA_TOOL_OPTIONS='-Dhttps.proxyHost=… -Dhttps.proxyPort=…'. With a "
            f"mirror of your own: an Ivy settings file at {IVY_SETTINGS}. With no network at all: copy the folder "
            ".jars of a checkout that has it."
        )
    elif "UNRESOLVED DEPENDENCIES" in told or "FAILED DOWNLOADS" in told:
        cause = "some of the jars pinned in conf/ivy.xml are not in the repository, or did not pass their checksum"
    else:
        cause = f"Ivy ended with status {status}"
    wanted = ("::", "WARN", "ERROR", "problem", "not found", "Exception", "denied", "No space")
    detail = [line.strip() for line in said if any(word in line for word in wanted) and line.strip(": \t")]
    return "\n".join([cause, "What Ivy said:", *(f"    {line}" for line in (detail or said)[:5])])


def _find_ivy_jar() -> Path:
    spec = find_spec("pyspark")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for jar in (found for folder in folders for found in sorted(Path(folder, "jars").glob("ivy-*.jar"))):
        return jar
    raise JarsError("pyspark, whose Ivy fetches the jars, is not installed here: make setup")


def _build_stamp(root: Path, ivy_xml: Path) -> dict[str, object]:
    text = ivy_xml.read_bytes()
    sizes = {
        f"{conf}/{name}": (root / conf / name).stat().st_size
        for conf, names in read_pinned_jars(text).items()
        for name in names
    }
    return {"ivy.xml": hashlib.sha256(text).hexdigest(), "files": sizes}


def _list_jars(conf: str, root: Path | None, ivy_xml: Path = IVY_XML) -> list[Path]:
    root = default_root() if root is None else root
    if not is_complete(root, ivy_xml):
        raise JarsError(
            f"the jars in {root} are not complete: make jars (or python -m kiln.deploy.stack.jars) fetches them"
        )
    return [root / conf / name for name in read_pinned_jars(ivy_xml.read_bytes())[conf]]


@contextmanager
def _lock_folder(root: Path) -> Iterator[None]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_checksums = (root / "lock").open("a")
    except OSError as error:
        raise JarsError(f"no room for the jars: {error}") from None
    with write_checksums:
        fcntl.flock(write_checksums, fcntl.LOCK_EX)
        yield


def write_checksums(ivy_xml: Path = IVY_XML, resolve: Resolve = run_ivy) -> None:
    """Writes the checksums of the jars that the repository has now. Whoever commits them says that they are good."""
    with tempfile.TemporaryDirectory() as fresh:
        resolve(ivy_xml, Path(fresh), _ignore_progress)
        lines = [f"{digest}  {name}\n" for name, digest in _compute_checksums(Path(fresh), ivy_xml).items()]
    checksums_path(ivy_xml).write_text("".join(lines), encoding="ascii")


def main() -> int:
    """Fetch the jars into the default folder, with a line of progress; 1 with the words why not. With --s3, those for
    an object store.

    Where they are complete, only compares them with their checksums.
    """
    parser = argparse.ArgumentParser(description="Fetch the jars that conf/ivy.xml pins.")
    parser.add_argument("--lock", action="store_true", help="write the checksums in conf anew")
    parser.add_argument("--s3", action="store_true", help="the jars for an object store")
    options = parser.parse_args()
    ivy_xml, root = (IVY_S3, s3_root()) if options.s3 else (IVY_XML, default_root())

    def show(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    try:
        if options.lock:
            write_checksums(ivy_xml)
            return 0
        if is_complete(root, ivy_xml):
            verify_checksums(root, ivy_xml)
            return 0
        ensure_jars(root, show, ivy_xml)
    except JarsError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(f"{chr(13) if sys.stderr.isatty() else ''}jars: {root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
