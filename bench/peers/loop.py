"""A loop that reads records with kafka-python, and appends rows to Delta tables with deltalake.

    python -m bench.peers.loop SERVERS TOPIC RECORDS LAKE

Reads RECORDS records from the beginning of a topic, and prints how many seconds this took. Copies are recognised by a
set in memory, which a restart empties.

The environment variable `BENCH_KAFKA` has kafka-python's login options, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import UTC, datetime

from bench.peers.append import CHUNK, Tables
from bench.peers.by_hand import Rows, read
from kafka import KafkaConsumer


def run(servers: str, topic: str, records: int, lake: str) -> None:
    """Read this number of records, and append their rows to the tables of the lake."""
    tables = Tables(lake)
    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=servers,
        group_id=f"loop-{lake}",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        max_partition_fetch_bytes=16 << 20,
        **json.loads(os.environ["BENCH_KAFKA"]),
    )
    done = 0
    waiting: list[Rows] = []
    while done < records:
        for part, polled in consumer.poll(timeout_ms=1000).items():
            done += len(polled)
            for record in polled:
                stamp = datetime.fromtimestamp(record.timestamp / 1000, UTC)
                waiting.append(read(record.value, part.partition, record.offset, stamp))
        if len(waiting) >= CHUNK or done >= records:
            tables.append(waiting)
            consumer.commit()
            waiting.clear()
    consumer.close()


if __name__ == "__main__":
    started = time.perf_counter()
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    print(json.dumps({"seconds": time.perf_counter() - started}))
