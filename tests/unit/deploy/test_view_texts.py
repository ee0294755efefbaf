"""Views with a text for each engine, of which DuckDB reads Spark's too: both mean the same, over any rows."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import views

VIEWS = ("batched_updates", "batch_savings")
NEEDED = sorted({name for view in VIEWS for name in views()[view].tables})

Value = str | int | bytes | None
Rows = list[dict[str, Value]]
Columns = dict[str, st.SearchStrategy[Value]]

seconds = st.integers(0, 12)
messages = st.sampled_from([f"m{number}" for number in range(8)])
streams = st.sampled_from(["k1", "k2"])
tips = st.sampled_from(["b1", "b2", "b3"])
cids = st.sampled_from(["c1", "c2", "c3", "c4"])


def some(*values: str) -> st.SearchStrategy[st.SearchStrategy[str]]:
    """The first of the values, or any of them: rows of one network meet more often."""
    return st.integers(1, len(values)).map(lambda number: st.sampled_from(values[:number]))


def few(columns: Columns, key: tuple[str, ...], most: int) -> st.SearchStrategy[Rows]:
    return st.lists(
        st.fixed_dictionaries(columns),
        min_size=most // 2,
        max_size=most,
        unique_by=lambda row: tuple(row[name] for name in key),
    )


@st.composite
def lakes(draw: st.DrawFn) -> dict[str, Rows]:
    """Rows of the tables that the views read, so few different ones that they meet. Times are in s."""
    networks, origins, values = draw(some("clay", "mainnet")), draw(some("LIVE", "REPLAY")), draw(some("k1", "k2"))
    lengths = draw(st.sampled_from([[2], [2, 5]]))
    updates: Columns = {
        "network": networks,
        "origin": origins,
        "message_id": messages,
        "separator_value": st.none() | values,
        "separator_source": st.sampled_from(["genesis", "topic", None]),
        "stream": streams,
        "tip": tips,
        "observed_at": seconds,
        "log_time": seconds,
        "log_offset": st.integers(0, 1000),
    }
    sent: Columns = {
        "network": networks,
        "origin": origins,
        "message_id": messages,
        "type": st.sampled_from(["UPDATE", "UPDATE", "QUERY"]),
        "stream": streams,
        "tip": tips,
        "data": st.binary(min_size=1, max_size=9),
        "observed_at": seconds,
    }
    batches: Columns = {
        "batch_cid": cids,
        "network": networks,
        "origin": origins,
        "separator_value": values,
        "opened_at": seconds,
        "closed_at": st.sampled_from(lengths),
        "block_bytes": st.integers(50, 60),
    }
    held: Columns = {"batch_cid": cids, "stream": streams, "tip": tips}
    found = {
        "updates": draw(few(updates, ("network", "origin", "message_id"), 10)),
        "messages": draw(few(sent, ("network", "message_id"), 10)),
        "batches": draw(few(batches, ("network", "origin", "separator_value", "opened_at", "batch_cid"), 8)),
        "batch_tips": draw(few(held, ("batch_cid", "stream", "tip"), 10)),
    }
    for row in found["updates"]:
        row["separator_key"] = row["separator_value"] and "model"
    for row in found["batches"]:
        row["separator_key"] = "model"
        row["closed_at"] = int(str(row["opened_at"])) + int(str(row["closed_at"]))
        row["emitted_at"] = row["closed_at"]
    return found


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    """A database with the tables and their views. `NAME_of_spark` is a view of `VIEWS` with Spark's text."""
    wanted = set(VIEWS)
    for each in reversed(views().values()):
        wanted |= set(each.views) if each.name in wanted else set()
    with duckdb.connect() as connection:
        for name in NEEDED:
            columns = ", ".join(
                f"{column.name} {column.type}" for column in TABLES[name].columns if not column.type.startswith("map")
            )
            connection.execute(f"CREATE TABLE {name} ({columns})")
        for each in views().values():
            if each.name in wanted:
                connection.execute(f"CREATE TEMP VIEW {each.name} AS {each.duckdb}")
        for name in VIEWS:
            connection.execute(f"CREATE TEMP VIEW {name}_of_spark AS {views()[name].spark}")
        yield connection


def fill(connection: duckdb.DuckDBPyConnection, lake: dict[str, Rows]) -> None:
    for name in NEEDED:
        connection.execute(f"DELETE FROM {name}")
        times = {column.name for column in TABLES[name].columns if column.type == "timestamp"}
        if rows := lake[name]:
            columns = list(rows[0])
            places = ", ".join("make_timestamp(1000000 * ?)" if column in times else "?" for column in columns)
            connection.execute(
                f"INSERT INTO {name} ({', '.join(columns)}) VALUES {', '.join([f'({places})'] * len(rows))}",
                [row[column] for row in rows for column in columns],
            )


def rows_of(connection: duckdb.DuckDBPyConnection, view: str) -> list[tuple[object, ...]]:
    return sorted(connection.execute(f"SELECT * FROM {view}").fetchall(), key=repr)


@pytest.mark.slow
@given(lake=lakes())
@settings(max_examples=60, deadline=None)
def test_both_texts_of_a_view_have_the_same_rows(connection: duckdb.DuckDBPyConnection, lake: dict[str, Rows]) -> None:
    fill(connection, lake)
    for view in VIEWS:
        assert rows_of(connection, view) == rows_of(connection, f"{view}_of_spark")
