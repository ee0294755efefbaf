"""A quixstreams application with a sink that appends to Delta tables.

    python -m bench.peers.quix SERVERS TOPIC RECORDS LAKE

Reads RECORDS records from the beginning of a topic, and prints how many seconds this took. Runs in a separate
environment (`quix.lock`), because quixstreams needs other versions of packages than Kiln. Copies are recognised by a
set in memory, which is lost at a restart. The state of quixstreams cannot replace the set: it is separate for each
record key, which is the connection, but the copies of a message come over several connections.

`quix.lock` is regenerated with

    printf 'quixstreams\\ndeltalake\\npyarrow\\nbase58\\norjson\\nprotobuf>=6.33,<7\\n' |
      .venv/bin/uv pip compile --universal --python-version 3.11 --no-header --no-annotate --generate-hashes - \\
      -o bench/peers/quix.lock

The environment variable `BENCH_KAFKA` has kafka-python's login options, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import UTC, datetime

# These packages are not in Kiln's environment.
from quixstreams import Application, message_context  # type: ignore[import-not-found, unused-ignore]  # in an environment of its own
from quixstreams.kafka import ConnectionConfig  # type: ignore[import-not-found, unused-ignore]  # in an environment of its own
from quixstreams.sinks import BatchingSink, SinkBatch  # type: ignore[import-not-found, unused-ignore]  # in an environment of its own

from bench.peers.append import CHUNK, Tables
from bench.peers.by_hand import Rows, read


class DeltaSink(BatchingSink):  # type: ignore[misc, unused-ignore]  # in an environment of its own
    """Sink that appends rows to Delta tables. quixstreams calls it separately for each partition."""

    def __init__(self, lake: str) -> None:
        super().__init__()
        self._tables = Tables(lake)

    def write(self, batch: SinkBatch) -> None:
        """Append all rows since the last commit of offsets. quixstreams commits offsets after this call."""
        self._tables.append(item.value for item in batch)


def _rows(value: bytes, key: bytes, stamp: int, headers: object) -> Rows:
    context = message_context()
    return read(value, context.partition, context.offset, datetime.fromtimestamp(stamp / 1000, UTC))


def run(servers: str, topic: str, records: int, lake: str) -> None:
    """Read this number of records, and append their rows to the tables of the lake."""
    login = json.loads(os.environ["BENCH_KAFKA"])
    application = Application(
        broker_address=ConnectionConfig(
            bootstrap_servers=servers,
            security_protocol=login["security_protocol"].lower(),
            sasl_mechanism=login["sasl_mechanism"],
            sasl_username=login["sasl_plain_username"],
            sasl_password=login["sasl_plain_password"],
        ),
        consumer_group=f"quix-{lake}",
        auto_offset_reset="earliest",
        commit_every=CHUNK,
        commit_interval=60.0,
        loglevel="WARNING",
    )
    frames = application.topic(topic, value_deserializer="bytes", key_deserializer="bytes")
    application.dataframe(frames).apply(_rows, metadata=True).sink(DeltaSink(lake))
    application.run(count=records)


if __name__ == "__main__":
    started = time.perf_counter()
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    print(json.dumps({"seconds": time.perf_counter() - started}))
