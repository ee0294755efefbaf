"""Download of the JVM jars pinned in `conf/ivy.xml`, with the Apache Ivy that ships in pyspark.

Layout of a jars folder: `spark/*.jar` (added to Spark), `broker/*.jar` (class path of the embedded broker) and
`complete`, a stamp with a digest of the `ivy.xml` and the size of each file. The stamp is written last, so an
interrupted download is repeated, and the check of a complete folder takes a few `stat` calls and no JVM.
`conf/jars.sha256` has the checksum of each jar, so that Kiln accepts from a repository only the files that it was
tested with.

The jars for an object store are pinned in `conf/ivy-s3.xml`, are in the subfolder `s3`, and are fetched only if the
settings name a store.
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
from typing import Literal
from xml.etree import ElementTree

from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.extras import format_install_command
from kiln.deploy.stack.java import JavaError, find_java

PROJECT = Path(__file__).resolve().parents[2]
IVY_XML = PROJECT / "conf" / "ivy.xml"
IVY_S3 = PROJECT / "conf" / "ivy-s3.xml"

STAMP = "complete"
Conf = Literal["spark", "broker"]
Progress = Callable[[str], None]
Resolve = Callable[[Path, Path, Progress], None]  # ivy.xml, folder to fill with <conf>/<jar>, progress

_FOUND = re.compile(r"^\s*found \S+ in ")
_FETCHED = re.compile(r"^\s*\[SUCCESSFUL \]")


class JarsError(PrerequisiteError):
    """The jars are missing, wrong or cannot be fetched."""


def _ignore_progress(_: str) -> None:
    pass


def read_pinned_jars(ivy_xml: bytes) -> dict[str, tuple[str, ...]]:
    """Read the pinned jars of an ivy.xml.

    Returns:
        File names by Ivy conf (`spark`, `broker`), in the order of the file.

    Raises:
        JarsError: A dependency is not pinned to one version.
    """
    tree = ElementTree.fromstring(ivy_xml)
    files: dict[str, list[str]] = {conf.get("name", ""): [] for conf in tree.iter("conf")}
    for dependency in tree.iter("dependency"):
        name, revision = dependency.get("name", ""), dependency.get("rev", "")
        conf = dependency.get("conf", "").partition("->")[0]
        if conf not in files:
            raise JarsError(f'ivy.xml: {name}: conf="{conf}->…" names none of {", ".join(files)}')
        if not re.fullmatch(r"[0-9][\w.-]*", revision):
            raise JarsError(f'ivy.xml: {name}: rev="{revision}" is not one version. Pin a version, such as 1.2.3')
        files[conf].append(f"{name}-{revision}.jar")
    return {conf: tuple(names) for conf, names in files.items()}


def checksums_path(ivy_xml: Path) -> Path:
    """Return the path of an ivy.xml's checksums, in the format of sha256sum: `<sha256>  <conf>/<file name>`."""
    return ivy_xml.with_name(ivy_xml.stem.replace("ivy", "jars") + ".sha256")


def verify_checksums(root: Path, ivy_xml: Path = IVY_XML) -> None:
    """Compare each pinned jar with its checksum.

    Raises:
        JarsError: A jar has a wrong checksum, or the file of checksums does not list it.
    """
    path = checksums_path(ivy_xml)
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        expected = {name: digest for digest, name in lines}
    except (OSError, ValueError) as error:
        raise JarsError(f"cannot read the checksums in {path}: {error}. Restore the file, or run make lock") from None
    problems: list[str] = []
    for name, digest in _compute_checksums(root, ivy_xml).items():
        if name not in expected:
            problems.append(f"{name}: no line in {path.name}. If you have changed ivy.xml, run make lock")
        elif digest != expected[name]:
            problems.append(f"{name}: sha256 {digest}, expected {expected[name]}")
    if problems:
        lines_text = "".join(f"    {line}\n" for line in problems)
        raise JarsError(
            f"these jars do not match the checksums in {path}:\n{lines_text}"
            "A repository, a mirror or a cache provided other files. Remove Ivy's cache (~/.ivy2) and the folder "
            ".jars, and run make jars again. If the jars differ again, do not use them."
        )


def _compute_checksums(root: Path, ivy_xml: Path) -> dict[str, str]:
    files = [f"{conf}/{name}" for conf, names in read_pinned_jars(ivy_xml.read_bytes()).items() for name in names]
    return {file: hashlib.sha256((root / file).read_bytes()).hexdigest() for file in files}


def default_root() -> Path:
    """Return the default jars folder: `.jars` in a checkout, else a folder in the user's cache."""
    if (PROJECT / "pyproject.toml").is_file():
        return PROJECT / ".jars"
    cache = os.environ.get("XDG_CACHE_HOME", "") if sys.platform != "darwin" else ""
    if not cache:
        home = find_home()
        if home is None:
            raise JarsError(
                "there is no folder for the jars: this user has no home folder. Set HOME to a writable folder"
            )
        cache = str(home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache")
    return Path(cache) / "kiln" / "jars"


def find_home() -> Path | None:
    """Find the user's home folder; `None` without HOME and without an entry in /etc/passwd, as in some containers."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def find_ivy_settings() -> Path:
    """Return the path of the file in which a user sets up Ivy, for example with a mirror. The file may not exist.

    Ivy's command line reads the file only if it is passed as an option.
    """
    return (find_home() or Path("/")) / ".ivy2" / "ivysettings.xml"


def is_complete(root: Path, ivy_xml: Path = IVY_XML) -> bool:
    """Return true if the folder has all jars of this `ivy.xml`."""
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
    """Fetch missing jars and return the folder. Several processes can call this at the same time.

    After an interruption, another call fetches only the jars that Ivy's cache (`~/.ivy2`) lacks.

    Args:
        root: Jars folder, by default `default_root`.
        progress: Called with lines of text.
        ivy_xml: File that pins the jars.
        resolve: Function that fetches the jars, by default `run_ivy`.

    Raises:
        JarsError: The jars cannot be fetched.
    """
    root = default_root() if root is None else root
    if is_complete(root, ivy_xml):
        return root
    with _lock_folder(root):
        if is_complete(root, ivy_xml):  # another process fetched them meanwhile
            return root
        files = read_pinned_jars(ivy_xml.read_bytes())
        for leftover in root.glob("fetching-*"):
            shutil.rmtree(leftover)
        fresh = Path(tempfile.mkdtemp(prefix="fetching-", dir=root))
        try:
            (resolve or run_ivy)(ivy_xml, fresh, progress)
            missing = [name for conf in files for name in files[conf] if not (fresh / conf / name).is_file()]
            if missing:
                raise JarsError(f"Ivy did not fetch {', '.join(missing)}. Check their lines in {ivy_xml}")
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


def list_jars(conf: Conf, root: Path | None = None, ivy_xml: Path = IVY_XML) -> list[Path]:
    """List the jars of an Ivy conf. Those of `spark` are added to Spark's own jars; those of `broker` run the embedded
    broker.

    Raises:
        JarsError: The folder is incomplete.
    """
    root = default_root() if root is None else root
    if not is_complete(root, ivy_xml):
        raise JarsError(
            f"the jars in {root} are incomplete. Fetch them with make jars, or python -m kiln.deploy.stack.jars"
        )
    return [root / conf / name for name in read_pinned_jars(ivy_xml.read_bytes())[conf]]


def s3_root() -> Path:
    """Return the folder of the jars for an object store. The folder may not exist."""
    return default_root() / "s3"


def spark_archive_path(root: Path | None = None) -> Path:
    """Return the path of the CDS archive of Spark's classes (deploy/run/spark_classes.py). It may not exist."""
    return (root or default_root()) / "spark" / "classes.jsa"


def run_ivy(ivy_xml: Path, into: Path, progress: Progress) -> None:
    """Run Ivy to fetch the jars of every conf into `into/<conf>/`, from Maven Central or the user's resolvers."""
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
    ivy_settings = find_ivy_settings()
    command += ["-settings", str(ivy_settings)] if ivy_settings.is_file() else []
    command += ["-confs", *files, "-types", "jar", "bundle"]
    command += ["-retrieve", f"{into}/[conf]/[artifact]-[revision].[ext]"]
    output: list[str] = []
    looked_up = fetched = 0
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as ivy:
        if ivy.stdout is None:
            raise AssertionError("stdout is piped")
        for line in ivy.stdout:
            output.append(line.rstrip())
            if _FOUND.match(line):
                looked_up += 1
                progress(f"jars: looked up {looked_up} of {total}")
            elif _FETCHED.match(line):
                fetched += 1
                progress(f"jars: fetched {fetched} of {total}")
    if ivy.returncode != 0:
        raise JarsError(explain_ivy_failure(output, ivy.returncode))


def explain_ivy_failure(output: list[str], status: int) -> str:
    text = "\n".join(output)
    if re.search(
        r"UnknownHost|Connection refused|timed? ?out|unreachable|Server access error|SSLHandshake", text, re.I
    ):
        cause = (
            "cannot download the jars: the repository does not answer. Check the network and run this again: it "
            "continues where it stopped.\nBehind a proxy, set JAVA_TOOL_OPTIONS='-Dhttps.proxyHost=… "
            f"-Dhttps.proxyPort=…'. To use a mirror, write Ivy's settings to {find_ivy_settings()}. "
            "Without a network, copy the folder .jars of another checkout."
        )
    elif "UNRESOLVED DEPENDENCIES" in text or "FAILED DOWNLOADS" in text:
        cause = (
            "some of the jars pinned in conf/ivy.xml are not in the repository, or have a wrong checksum. Check the "
            "repository or mirror"
        )
    else:
        cause = f"Ivy exited with code {status}"
    signs = ("::", "WARN", "ERROR", "problem", "not found", "Exception", "denied", "No space")
    details = [line.strip() for line in output if any(sign in line for sign in signs) and line.strip(": \t")]
    return "\n".join([cause, "Output of Ivy:", *(f"    {line}" for line in (details or output)[:5])])


def _find_ivy_jar() -> Path:
    spec = find_spec("pyspark")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for jar in sorted(Path(folder, "jars").glob("ivy-*.jar")):
            return jar
    raise JarsError(f"pyspark, whose Ivy fetches the jars, is not installed: {format_install_command('spark')}")


def _build_stamp(root: Path, ivy_xml: Path) -> dict[str, object]:
    text = ivy_xml.read_bytes()
    sizes = {
        f"{conf}/{name}": (root / conf / name).stat().st_size
        for conf, names in read_pinned_jars(text).items()
        for name in names
    }
    return {"ivy.xml": hashlib.sha256(text).hexdigest(), "files": sizes}


@contextmanager
def _lock_folder(root: Path) -> Iterator[None]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / "lock").open("a")
    except OSError as error:
        raise JarsError(f"cannot create the folder of the jars, {root}: {error}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_checksums(ivy_xml: Path = IVY_XML, resolve: Resolve = run_ivy) -> None:
    """Fetch the pinned jars and write their checksums to `conf`. Whoever commits the checksums trusts these jars."""
    with tempfile.TemporaryDirectory() as fresh:
        resolve(ivy_xml, Path(fresh), _ignore_progress)
        lines = [f"{digest}  {name}\n" for name, digest in _compute_checksums(Path(fresh), ivy_xml).items()]
    checksums_path(ivy_xml).write_text("".join(lines), encoding="ascii")


def main() -> int:
    """Fetch missing jars into the default folder, or verify the checksums of existing jars. Return 1 on an error."""
    parser = argparse.ArgumentParser(description="Fetch the jars that conf/ivy.xml pins.")
    parser.add_argument("--lock", action="store_true", help="fetch all jars again, and write their checksums to conf")
    parser.add_argument("--s3", action="store_true", help="use the jars for an object store (conf/ivy-s3.xml)")
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
