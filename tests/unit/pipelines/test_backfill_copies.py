"""kiln.pipelines.backfill.copies: rows of `frames` into copies and faults, with the native core and in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiln.deploy.demo.traffic import Traffic, TrafficOptions
from kiln.pipelines.backfill.copies import COPIES, CopyDecoder, RunTarget, decode_copies, read_copy
from kiln.pipelines.backfill.merged_rows import OUTPUT_RANK, StageOutput
from kiln.pipelines.backfill.terms import TimeRange
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.decode.frame_row import FrameRow, build_frame_row
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.native import core, library
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import compute_peer_id, peer_text, sign
from kiln.schemas.wire.message_id import parse_message_id_rule
from kit import engines
from kit.chance import new_key

pytestmark = pytest.mark.skipif(engines.core_is_missing(), reason="no native core to compare with Python")

START_NS = 1_735_689_600_000_000_000
CONFIG = DecodeConfig("either")
TABLES = ("copies", "subscriptions", "controls", "quarantine")


def read_frames(count: int) -> pa.RecordBatch:
    """Rows of `frames` as Spark hands them over: good messages, one of them with two contents, garbage, and a row that
    no Frame has."""
    traffic = Traffic(TrafficOptions(seed=9, network="local-history", checked=0.7), START_NS, 200.0, keep_ledger=False)
    rows = []
    for offset, (made, _) in enumerate(zip(traffic.frames(), range(count), strict=False)):
        frame = Frame.FromString(made.value)
        rows.append(build_frame_row(1, offset, frame.observed_at // 1000, frame))
    rows[7] = rows[7]._replace(remote_peer="0OIl")  # not base58
    checked = [row for row in rows if row.verdicts and len(RPC.FromString(row.payload).publish) == 1]
    first, other = RPC.FromString(checked[0].payload), RPC.FromString(checked[-1].payload)
    first.publish[0].data = other.publish[0].data
    rows.append(checked[0]._replace(payload=first.SerializeToString(), kafka_offset=count))  # its author signs twice
    columns = [pa.array(values) for values in zip(*rows, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=FrameRow._fields)


def decode(batches: Sequence[pa.RecordBatch], config: DecodeConfig, target: RunTarget) -> dict[str, object]:
    """The copies of a task, by their place, and the rows of its files by table."""
    decoder = CopyDecoder(config, target)
    made = [*(out for batch in batches for out in decoder.decode(batch)), *decoder.finish()]
    rows = [row for batch in made for row in batch.to_pylist()]
    (output,) = [msgspec.msgpack.decode(row["data"], type=StageOutput) for row in rows if row["rank"] == OUTPUT_RANK]
    equal = [(row["note"], decode_copies(row["data"])) for row in rows if row["rank"] == COPIES]
    messages = [(read_copy(copies.row, columns), note) for note, copies in equal for columns in copies.copies]
    found: dict[str, object] = {
        "messages": sorted(messages, key=lambda item: (item[0].kafka_partition, item[0].kafka_offset, item[0].data)),
        "frames": output.frames,
        "share": len(equal) / len(messages),
    }
    for table in TABLES:
        files = [
            pq.read_table(f"{target.run.path}/{file.table}/{file.name}") for file in output.files if file.table == table
        ]
        found[table] = sorted(map(repr, pa.concat_tables(files).to_pylist())) if files else []
    return found


@pytest.fixture
def target(tmp_path: Path) -> RunTarget:
    """A run over the middle of the frames."""
    run, beyond = Lake(str(tmp_path / "run")), Lake(str(tmp_path / "beyond"))
    run.create(TABLES)
    start = START_NS // 1000
    return RunTarget(run, beyond, TimeRange(start + 1_000_000, start + 6_000_000))


def test_both_engines_give_the_same_copies_and_faults(target: RunTarget) -> None:
    frames = read_frames(1_500)
    ours = decode([frames.slice(0, 900), frames.slice(900)], CONFIG, target)
    theirs = decode([frames], replace(CONFIG, native_core=False), target)
    shares = [found.pop("share") for found in (ours, theirs)]
    assert ours == theirs
    assert all(isinstance(share, float) and share < 0.6 for share in shares), "most copies travel without content"
    assert len(str(ours["messages"])) > 100_000
    assert all(ours[table] for table in TABLES)


def test_where_the_core_is_wrong_python_decodes(target: RunTarget) -> None:
    frames = read_frames(300)
    theirs = decode([frames], replace(CONFIG, native_core=False), target)

    def falsify(messages: pa.RecordBatch) -> pa.RecordBatch:
        at = messages.schema.get_field_index("data")
        return messages.set_column(at, "data", pa.array([b"false"] * messages.num_rows, pa.binary()))

    archive = core.Core.archive

    def lie(self: core.Core, batch: pa.RecordBatch) -> object:
        for rows in archive(self, batch):
            tables = list(rows.tables)
            tables[2] = falsify(tables[2])
            yield rows._replace(tables=tables)

    with (
        patch.object(core, "SAMPLE_ONE_IN", 1),
        patch.object(core.Core, "archive", lie),
        patch.object(library, "_turned_off", []),
    ):
        assert decode([frames], CONFIG, target) == theirs
        assert not library.find_engine().is_native


@pytest.mark.parametrize("native_core", [True, False])
def test_equal_data_of_two_authors_keeps_both_where_ids_come_from_the_data(
    native_core: bool, target: RunTarget
) -> None:
    config = DecodeConfig("either", message_ids=parse_message_id_rule("sha256_data"), native_core=native_core)
    authors = [new_key(), new_key()]
    rows = []
    for offset, author in enumerate(authors):
        message = Message(data=b'{"typ":3,"ts":1646925968077,"ver":"2.35.0"}', topic="/ceramic/n", seqno=bytes(8))
        sign(message, author)
        frame = Frame(
            connection=bytes(16),
            direction=Frame.IN,
            sequence=offset + 1,
            network="n",
            observed_at=START_NS + 2_000_000_000,
            payload=RPC(publish=[message]).SerializeToString(),
        )
        rows.append(build_frame_row(0, offset, frame.observed_at // 1000, frame))
    columns = [pa.array(values) for values in zip(*rows, strict=True)]
    found = decode([pa.RecordBatch.from_arrays(columns, names=FrameRow._fields)], config, target)["messages"]
    assert isinstance(found, list)
    assert [row.from_peer for row, _ in found] == [peer_text(compute_peer_id(author)) for author in authors]
    assert len({row.message_id for row, _ in found}) == 1
