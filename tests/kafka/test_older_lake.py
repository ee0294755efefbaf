"""The lake of a state folder that this version refuses: its tables are rebuilt from its frames. Commit 542f68e9 wrote
the lake."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

from conftest import free_ports
from kiln.conf.process.state_folder import StateVersionError, check_state_version
from kiln.deploy.query.ask import query_lake
from kiln.deploy.stack.kafka_broker import start_broker
from kiln.pipelines.delta.lake import Lake
from kit.kiln_process import Kiln

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(400)]

PACKED = Path(__file__).with_name("kept") / "lake_of_version_3.tar.xz"

QUERIES = (
    "select network, message_id, topic, type, stream, tip, data from messages where topic is not null order by all",
    "select network, message_id, remote_peer, verdict from copies order by all",
    "select distinct network, origin, stream, tip from updates order by all",
)


def test_the_tables_of_a_refused_folder_are_rebuilt_from_its_frames(
    broker_classpath: list[Path], tmp_path: Path
) -> None:
    with tarfile.open(PACKED) as packed:
        packed.extractall(tmp_path, filter="data")
    old, new = (tmp_path / "state").rename(tmp_path / "old"), tmp_path / "new"
    remedy = f"copy the table {old}/lake/frames into its lake and run kiln backfill run --source frames"
    with pytest.raises(StateVersionError, match=remedy):
        check_state_version(old)

    (new / "lake").mkdir(parents=True)
    shutil.copytree(old / "lake" / "frames", new / "lake" / "frames")
    kiln = Kiln(new, free_ports(2))
    with start_broker(kiln.settings(), lambda words: None):  # once for all commands
        kiln.run_kept("run", "--catch-up")
        span = ("--from", "2024-12-31", "--to", "2027-01-01")
        kiln.run_kept("backfill", "run", "--source", "frames", *span, "--run", "old")
        kiln.run_kept("backfill", "swap", "old")
        kiln.run_kept("recover")
    for query in QUERIES:
        rows = list(query_lake(Lake(str(old / "lake")), query).rows())
        assert rows
        assert kiln.sql(query)
        assert list(query_lake(Lake(str(new / "lake")), query).rows()) == rows
