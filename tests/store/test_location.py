"""A place on a disk and a place in an object store are the same to who reads and writes there."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import S3FileSystem

from kiln.conf.process.location import Location, parse_location
from kit.object_store import REGION, ObjectStore

pytest_plugins = ["kit.object_store"]


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty folder."""
    if request.param == "disk":
        return parse_location(tmp_path)
    store: ObjectStore = request.getfixturevalue("object_store")
    return store.place()


def filled(place: Location, names: list[str]) -> None:
    for name in names:
        above = (place / name).folder
        if above is not None:
            above.parent.mkdir(parents=True, exist_ok=True)
        (place / name).write([name.encode()])


def test_what_is_written_is_read_and_a_second_write_takes_its_place(place: Location) -> None:
    file = place / "file"
    file.write([b"one", b" and two"])
    assert file.read() == b"one and two"
    file.write([])
    assert file.read() == b""
    assert [(found.name, found.size) for found in place.files()] == [("file", 0)]


def test_files_and_folders_are_told_apart_and_nothing_deeper_is_told(place: Location) -> None:
    filled(place, ["a", "folder/b", "folder/deeper/c", "folder2/d"])
    before = time.time_ns() // 1_000
    (found,) = place.files()
    assert (found.name, found.size) == ("a", 1)
    assert abs(found.modified - before) < 60_000_000
    assert sorted(place.folders()) == ["folder", "folder2"]
    assert [each.name for each in (place / "folder").files()] == ["b"]
    assert [(place / name).exists() for name in ("a", "folder", "folder/deeper", "fold", "b")] == [
        *(True, True, True),
        *(False, False),
    ]


def test_what_is_not_there_is_told_as_of_a_disk(place: Location) -> None:
    none = place / "none"
    assert (list(none.files()), list(none.folders()), none.exists()) == ([], [], False)
    with pytest.raises(FileNotFoundError):
        none.read()
    with pytest.raises(FileNotFoundError):
        none.open()
    none.remove()
    none.remove_all()


def test_files_go_alone_and_folders_with_all_that_is_in_them(place: Location) -> None:
    filled(place, ["a", "folder/b", "folder/deeper/c", "folder2/d"])
    (place / "a").remove()
    (place / "folder").remove_all()
    assert (list(place.files()), list(place.folders())) == ([], ["folder2"])


def test_the_marker_of_a_folder_is_no_file(object_store: ObjectStore) -> None:
    """Hadoop's file system makes an object `KEY/` for an empty folder, and leaves it when the folder fills."""
    place = object_store.place()
    hadoop = S3FileSystem(
        access_key=object_store.key,
        secret_key=object_store.secret,
        endpoint_override=object_store.endpoint,
        region=REGION,
    )
    hadoop.create_dir((place / "folder").uri.removeprefix("s3://"))
    filled(place, ["folder/a", "folder/deeper/b"])
    assert [file.name for file in (place / "folder").files()] == ["a"]
    assert list((place / "folder").folders()) == ["deeper"]
    (place / "folder").remove_all()
    assert [list(found.files()) for found in (place, place / "folder", place / "folder" / "deeper")] == [[], [], []]


def test_parquet_is_written_and_read_in_place(place: Location) -> None:
    rows = pa.table({"number": range(100_000), "text": [f"row {number}" for number in range(100_000)]})
    out = (place / "rows.parquet").create()
    with pq.ParquetWriter(out, rows.schema) as writer:
        for batch in rows.to_batches(10_000):
            writer.write_batch(batch)
    size = out.tell()
    out.close()
    assert [found.size for found in place.files()] == [size]
    with (place / "rows.parquet").open() as opened, pq.ParquetFile(opened) as file:
        assert file.read() == rows
        assert file.read_row_group(3).slice(7, 1).to_pylist() == [{"number": 30_007, "text": "row 30007"}]


def test_a_place_goes_to_tasks_and_shows_no_secret(place: Location) -> None:
    assert pickle.loads(pickle.dumps(place / "a")) == place / "a"
    assert "secret" not in repr(place / "a")
    assert "secret" not in str(place / "a")
