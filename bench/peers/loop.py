"""A loop over a kafka-python consumer that appends to Delta tables with deltalake.

Copies are known by a dict in memory, which a restart empties; a crash between two appends doubles rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake
from kafka import KafkaConsumer

from bench.peers.by_hand import Row, read

CHUNK = 20_000
"""Records of one append, so that files are not too small."""


def run(servers: str, topic: str, records: int, lake: Path, schemas: Mapping[str, pa.Schema]) -> None:
    """Reads so many records from the beginning of a topic; appends to the tables that `schemas` names."""
    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=servers,
        group_id=f"loop-{lake.name}",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        max_poll_records=CHUNK,
        max_partition_fetch_bytes=16 << 20,
    )
    seen: set[str] = set()
    done = 0
    try:
        while done < records:
            rows: dict[str, list[Row]] = {name: [] for name in schemas}
            taken = 0
            while taken < CHUNK and done + taken < records:
                for part, polled in consumer.poll(timeout_ms=1000).items():
                    for record in polled:
                        found = read(record.value, part.partition, record.offset, record.timestamp * 1000)
                        rows["frames"] += found.frames
                        rows["copies"] += found.copies
                        rows["quarantine"] += found.quarantine
                        for known_as, row in found.messages:
                            if known_as not in seen:
                                seen.add(known_as)
                                rows["messages"].append(row)
                    taken += len(polled)
            for name, schema in schemas.items():
                if rows[name]:
                    columns = [
                        pa.array(column, field.type)
                        for column, field in zip(zip(*rows[name], strict=True), schema, strict=True)
                    ]
                    table = pa.Table.from_arrays(columns, schema=schema)
                    write_deltalake(str(lake / name), table, mode="append")
            consumer.commit()
            done += taken
    finally:
        consumer.close()
