"""kiln.schemas.delta.tables: what docs/design promises of the lake."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import get_args

import pytest

from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, FrameDecoder
from kiln.schemas.delta.tables import TABLES, Column, Table, markdown
from kiln.schemas.kafka.frames import CONNECTION_BYTES, DIRECTIONS, ORIGINS
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.queries import QUERIES
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.batch_block import is_block_cid, read_block
from kiln.schemas.wire.cid import cid_bytes
from kiln.schemas.wire.control import Kind
from kiln.schemas.wire.identity import VERDICT_NAMES, parse_author, peer_bytes
from kiln.schemas.wire.pubsub import read_message
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topic_table import bundle_hash, parse_hello
from kiln.schemas.wire.topics import Topic, parse_separator, parse_topic
from kit.batch_blocks import write_blocks

# docs/design/contracts.md, Delta tables: the columns others rely on
PROMISED = {
    "frames": "network connection direction local_peer remote_peer protocol observed_at sequence payload hello_in "
    "hello_out verdicts origin remote_address kafka_partition kafka_offset kafka_timestamp declared_length "
    "agent end_reason dialled",
    "copies": "network message_id remote_peer observed_at kafka_partition kafka_offset message_index verdict",
    "subscriptions": "network origin connection direction local_peer remote_peer observed_at subscribe topic "
    "topic_source topic_index raw wire_bytes kafka_partition kafka_offset entry_index",
    "controls": "network origin connection direction local_peer remote_peer observed_at kind topic topic_source "
    "topic_index message_ids message_id_count peer_count backoff raw wire_bytes kafka_partition kafka_offset "
    "entry_index",
    "messages": "message_id network origin topic topic_source type from_peer seqno stream tip model sep batch_cid data "
    "observed_at kafka_partition kafka_offset message_index query_id tips ts ver ipfs_ver verdict remote_peer decoded",
    "updates": "network origin message_id separator_key separator_value separator_source stream tip log_time "
    "log_partition log_offset from_peer observed_at",
    "batches": "batch_cid network origin separator_key separator_value opened_at closed_at stream_count tip_count "
    "block_bytes block emitted_at",
    "batch_tips": "batch_cid stream tip",
    "publications": "batch_cid transport topic published_at error target peer_count",
    "tips": "network stream tip source batch_cid observed_at",
    "streams": "network stream separator_key separator_value source",
    "bundles": "hash name topics first_seen",
    "quarantine": "kafka_partition kafka_offset message_index stage reason detail data observed_at cid",
    "quarantine_dropped": "drop_id dropped_at why kafka_partition kafka_offset message_index cid stage reason detail "
    "bytes sha256 observed_at",
    "quality_results": "run_id run_at table_name expectation column_name success observed_value unexpected_count "
    "details",
    "backfill_runs": "run event happened_at range_from range_to rows details",
}
KEYS = {
    "frames": "connection direction sequence",
    "subscriptions": "kafka_partition kafka_offset entry_index",
    "controls": "kafka_partition kafka_offset entry_index",
    "messages": "network message_id",
    "updates": "network origin message_id",
    "batches": "network origin separator_key separator_value opened_at batch_cid",
    "batch_tips": "batch_cid stream tip",
    "publications": "batch_cid transport topic published_at",
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
    written = re.search(r"\| writer \| tables \|\n(.*?)\n\n", design.read_text(), re.DOTALL)
    assert written is not None
    cells = (line.split("|")[2].partition(";")[0] for line in written.group(1).splitlines())
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == set(TABLES)


# ---------------------------------------------------------------- examples

COLUMNS = {f"{table.name}.{column.name}": column for table in TABLES.values() for column in table.columns}


def binary(text: str) -> bytes:
    """The bytes of an example, which may be cut."""
    assert text.startswith("0x")
    return bytes.fromhex(text[2:].removesuffix("…"))


READ_AS: dict[str, Callable[[str], object]] = {
    "string": str,
    "binary": binary,
    "boolean": ("true", "false").index,
    "int": int,
    "bigint": int,
    "timestamp": datetime.fromisoformat,
    "array<string>": json.loads,
    "map<string,string>": json.loads,
}


def separator(value: str) -> object:
    return parse_separator(f"model/{value}")


def one_of(*values: str) -> Callable[[str], object]:
    return values.index


IDS: dict[str, Callable[[str], object]] = {
    "stream": StreamID.parse,
    "model": StreamID.parse,
    "tip": cid_bytes,
    "cid": cid_bytes,
    "batch_cid": cid_bytes,
    "local_peer": peer_bytes,
    "remote_peer": peer_bytes,
    "from_peer": peer_bytes,
    "sep": parse_separator,
    "separator_value": separator,
    "direction": one_of(*DIRECTIONS),
    "origin": one_of(*ORIGINS),
    "type": one_of("UPDATE", "QUERY", "RESPONSE", "KEEPALIVE", "BATCH_UPDATE"),
    "topic_source": one_of("name", "index"),
    "kind": one_of(*get_args(Kind)),
    "transport": one_of("gossipsub", "bep50"),
    "separator_source": one_of("genesis", "topic", "model"),
    "verdict": one_of(*VERDICT_NAMES),
}
"""By name of the column, what must take the example without an error."""


def example(name: str) -> str:
    return COLUMNS[name].example


@pytest.mark.parametrize("name", COLUMNS)
def test_every_column_has_an_example_of_its_type(name: str) -> None:
    column = COLUMNS[name]
    assert column.example
    READ_AS[column.type](column.example)
    IDS.get(column.name, str)(column.example)
    if column.name == "message_id":
        assert parse_author(column.example) is not None
    if column.name == "topic":
        assert isinstance(parse_topic(column.example), Topic)


def test_the_examples_of_bytes_are_what_their_columns_hold() -> None:
    assert len(binary(example("frames.connection"))) == CONNECTION_BYTES
    assert RPC.FromString(binary(example("frames.payload"))).control.graft
    hashes = parse_hello(binary(example("frames.hello_in")))
    topics = json.loads(example("bundles.topics"))
    assert hashes == [bundle_hash(topics)] == [bytes.fromhex(example("bundles.hash"))]
    assert topics == sorted(topics)
    assert not isinstance(read_message(binary(example("messages.data"))), Rejected)
    assert len(bytes.fromhex(example("publications.target"))) == 20  # sha1


def test_the_example_of_a_batch_is_the_batch_of_the_example_of_an_update() -> None:
    stream, tip = example("updates.stream"), example("updates.tip")
    (block,) = write_blocks({stream: [cid_bytes(tip)]})
    assert is_block_cid(cid_bytes(block.cid))
    assert read_block(block.data) == {stream: [tip]}
    assert block.cid == example("batches.batch_cid") == example("batch_tips.batch_cid") == example("messages.batch_cid")
    assert block.data.startswith(binary(example("batches.block")))
    assert (example("batches.block_bytes"), example("batches.stream_count"), example("batches.tip_count")) == (
        str(len(block.data)),
        "1",
        "1",
    )


def test_the_example_of_a_message_id_is_the_one_of_its_author_and_seqno() -> None:
    message = Message(seqno=binary(example("messages.seqno")), data=binary(example("messages.data")), signature=b"x")
    setattr(message, "from", peer_bytes(example("messages.from_peer")))
    message.topic = example("messages.topic")
    frame = Frame(network="n", connection=bytes(16), sequence=1, verdicts=b"\x01")
    frame.payload = RPC(publish=[message]).SerializeToString()
    (found,) = FrameDecoder(DecodeConfig()).decode_frame(frame, 0, 0)
    assert isinstance(found, DecodedMessage)
    assert (found.message_id, found.network) == (example("messages.message_id"), example("messages.network"))


def test_the_page_has_each_example_and_says_which_query_fills_a_table() -> None:
    page = markdown()
    for table in TABLES.values():
        section = page.partition(f"\n## {table.name}\n")[2].partition("\n## ")[0]
        writers = [query.name for query in QUERIES.values() if table.name in query.tables]
        assert section.count("Filled by the query `") == len(writers)
        assert all(f"Filled by the query `{writer}`." in section for writer in writers)
        assert writers or "No streaming query fills the table." in section
        for column in table.columns:
            (line,) = [line for line in section.splitlines() if line.startswith(f"| `{column.name}` |")]
            assert line.endswith(f"| `{column.example}` |")
