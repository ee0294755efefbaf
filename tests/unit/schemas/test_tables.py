"""schemas.tables: what docs/design promises of the lake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schemas.tables import TABLES, Column, Table

# docs/design/contracts.md, Delta tables: the columns others rely on
PROMISED = {
    "frames": "network connection direction local_peer remote_peer protocol observed_at sequence payload hello_in "
    "hello_out verdicts origin remote_address kafka_partition kafka_offset kafka_timestamp declared_length",
    "copies": "network message remote_peer observed_at kafka_partition kafka_offset message_index verdict",
    "messages": "message network origin topic topic_source type from_peer seqno stream tip model sep batch data "
    "observed_at kafka_partition kafka_offset message_index query_id tips ts ver ipfs_ver verdict remote_peer",
    "updates": "network origin message separator_key separator_value separator_source stream tip updated_at "
    "log_partition log_offset from_peer observed_at",
    "batches": "cid network origin separator_key separator_value opened_at closed_at streams tips bytes block "
    "emitted_at",
    "batch_tips": "cid stream tip",
    "publications": "cid transport topic published_at error target peers",
    "tips": "network stream tip source cid observed_at",
    "streams": "network stream separator_key separator_value source",
    "bundles": "hash name topics first_seen",
    "quarantine": "kafka_partition kafka_offset message_index stage reason detail data observed_at cid",
    "quality_results": "run_id run_at table_name expectation column_name success observed_value unexpected_count "
    "details",
    "runs": "run event happened_at range_from range_to rows details",
}
KEYS = {
    "frames": "connection direction sequence",
    "messages": "network message",
    "updates": "network origin message",
    "batches": "network origin separator_key separator_value opened_at cid",
    "batch_tips": "cid stream tip",
    "publications": "cid transport topic published_at",
    "quarantine": "",
}
BASE_TYPES = re.compile(
    r"string|binary|boolean|int|bigint|timestamp|array<string>|map<string,string>"
)  # no TIMESTAMP_NTZ, no VARIANT: any reader opens these


def test_the_lake_holds_the_promised_tables() -> None:
    assert set(TABLES) == set(PROMISED)
    assert all(table.name == name for name, table in TABLES.items())


@pytest.mark.parametrize("name", PROMISED)
def test_the_promised_columns_are_there(name: str) -> None:
    assert {column.name for column in TABLES[name].columns} == set(PROMISED[name].split())


@pytest.mark.parametrize("name", KEYS)
def test_the_keys_are_as_promised(name: str) -> None:
    assert list(TABLES[name].key) == KEYS[name].split()


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_every_table_and_column_can_be_read_about_and_by_anyone(table: Table) -> None:
    names = [column.name for column in table.columns]
    assert len(set(names)) == len(names)
    assert set(table.key) <= set(names)
    assert len(table.comment) > 10
    for column in table.columns:
        assert BASE_TYPES.fullmatch(column.type), column
        assert len(column.comment) > 5, column
        assert column.comment != column.name


def test_ddl_names_type_nullability_and_comment() -> None:
    table = Table("t", "…", (Column("a", "int", "it's a \\", nullable=False), Column("b", "string", "b")), ())
    assert table.ddl == "`a` int NOT NULL COMMENT 'it\\'s a \\\\', `b` string COMMENT 'b'"


def test_the_table_names_are_the_design_s() -> None:
    design = Path(__file__).resolve().parents[3] / "docs" / "design" / "contracts.md"
    listed = re.search(r"one folder a table: (.*?)\.\n", design.read_text(), re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed.group(1))) == set(TABLES)
