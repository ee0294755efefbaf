"""kiln.pipelines.delta.duckdb_tables: what DuckDB reads out of an object store. The store itself is in tests/store."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

from kiln.pipelines.delta.duckdb_files import SharedFile


def test_each_thread_reads_at_its_own_place() -> None:
    file = SharedFile(io.BytesIO(b"0123456789"))
    with ThreadPoolExecutor(1) as other:
        file.seek(2)
        other.submit(file.seek, 7).result()
        assert file.read(2) == b"23"
        assert other.submit(file.read, 2).result() == b"78"
        assert file.read() == b"456789"
        assert (file.tell(), other.submit(file.tell).result()) == (10, 9)
