"""An S3 object store on loopback: versitygw, which keeps objects in a folder. It is built with go.

A test module enables the fixtures with `pytest_plugins = ["kit.object_store"]`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from shutil import which

import pytest

from conftest import free_ports
from kiln.conf.process.location import Location, parse_location
from kiln.deploy.stack.ports import is_listening
from kiln.pipelines.delta.lake import Lake
from kit.awaiting import wait_until
from kit.foreign_peer import BUILT, ROOT, built_with_go

REGION = "us-east-1"
_BUCKETS = count()


@dataclass(frozen=True)
class ObjectStore:
    """A running store. `folder` has a folder with objects for each bucket."""

    endpoint: str
    folder: Path
    key: str = "kiln-test"
    secret: str = "the secret of a test"

    @property
    def options(self) -> dict[str, str]:
        """Address and credentials in the form of `lake.storage_options`."""
        return {**self.address, "aws_access_key_id": self.key, "aws_secret_access_key": self.secret}

    @property
    def address(self) -> dict[str, str]:
        """The options without credentials."""
        return {"aws_endpoint_url": self.endpoint, "aws_region": REGION}

    @property
    def credentials(self) -> dict[str, str]:
        """Credentials as environment variables."""
        return {"AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret}

    def bucket(self) -> str:
        """Create a bucket, and return its URI."""
        name = f"bucket{next(_BUCKETS)}"
        (self.folder / name).mkdir()
        return f"s3://{name}"

    def place(self) -> Location:
        """Return a location in a new bucket."""
        return parse_location(f"{self.bucket()}/some/prefix", self.options)

    def lake(self) -> Lake:
        """Return a lake in a new bucket."""
        return Lake.from_location(self.place())


@pytest.fixture(scope="session")
def versitygw() -> Path:
    """The store's binary. Skips the test if go is missing."""
    if which("go") is None:
        pytest.skip("no go toolchain to build the object store with")
    return built_with_go(
        ROOT / "tests" / "store" / "versitygw", "versitygw", "github.com/versity/versitygw/cmd/versitygw", BUILT
    )


@pytest.fixture(scope="session")
def object_store(versitygw: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A store that all tests share. Each test creates its own buckets."""
    with running(versitygw, tmp_path_factory.mktemp("store")) as store:
        yield store


@contextmanager
def running(versitygw: Path, folder: Path) -> Iterator[ObjectStore]:
    """Run a store with its objects in a folder, for the duration of the context."""
    (port,) = free_ports(1)
    store = ObjectStore(f"http://127.0.0.1:{port}", folder)
    access: Mapping[str, str] = {"ROOT_ACCESS_KEY": store.key, "ROOT_SECRET_KEY": store.secret}
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [versitygw, "--port", f"127.0.0.1:{port}", "--region", REGION, "--quiet", "posix", folder],
            env=dict(access),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until(
                lambda: process.poll() is not None or is_listening(f"127.0.0.1:{port}", 1.0), "the object store's port"
            )
            assert process.poll() is None, Path(log.name).read_text()
            yield store
        finally:
            process.terminate()
            process.wait(60)
