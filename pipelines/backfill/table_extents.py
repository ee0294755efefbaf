"""Definition of the rows that a backfill run replaces in each live table, and of how they are compared, as DuckDB SQL.

See docs/backfill.md, "Compare, swap, drop", and docs/design, decision 22.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kiln.pipelines.backfill.run_log import BackfillRun
from kiln.schemas.delta.tables import TABLES

FRAME_STAGES: Final = ("hello", "rpc", "topic", "signature", "message", "bep50")
"""Values of the column `stage` of `quarantine` whose rows follow from the table `frames` alone. `separator` is not
among them, because the bridge also writes such rows, about much older updates, after it has fetched a genesis."""

_TOPIC: Final = "'/sep/(.+)/([0-9a-z]+)$'"


@dataclass(frozen=True)
class TableExtent:
    """The rows that a backfill run replaces in one live table, and the columns by which they are compared."""

    table: str
    times: tuple[str, ...]
    """time columns. The earliest of them is the row's event time, which must be in the run's time range"""
    key: tuple[str, ...]
    """columns of the key, by which live rows are paired with the run's rows"""
    content: tuple[str, ...] = ()
    """other columns that are compared"""
    separator: str = "NULL::VARCHAR"
    """SQL expression of the row's separator, by which differences are grouped"""
    condition: str = "true"
    """further SQL condition: rows that do not meet it are neither compared nor replaced"""
    terms: Mapping[str, str] = field(default_factory=dict)
    """SQL expressions that are compared instead of columns, by column"""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(column.name for column in TABLES[self.table].columns)

    def term(self, column: str) -> str:
        """Return the SQL expression that stands for a column in comparisons."""
        return self.terms.get(column, column)

    @property
    def event_time(self) -> str:
        """SQL expression of a row's event time."""
        return f"least({', '.join(self.times)})"


def build_extents(run: BackfillRun) -> dict[str, TableExtent]:
    """Build the extent of each table that a backfill run replaces, by table, in the order of comparison."""
    source = run.details.get("source")
    # Only rows that are decoded from the table `frames` keep the position of their frame.
    position = ("kafka_partition", "kafka_offset") if source == "frames" else ()
    separator = "separator_key || '/' || separator_value"
    extents = (
        TableExtent(
            "frames",
            ("observed_at",),
            ("connection", "direction", "sequence"),
            _content_columns(
                "frames",
                *("connection", "direction", "sequence", "kafka_partition", "kafka_offset", "kafka_timestamp"),
            ),
        ),
        TableExtent(
            "copies",
            ("observed_at",),
            ("network", "message_id", "remote_peer", "observed_at", "message_index"),
            ("verdict", *position),
        ),
        *(
            TableExtent(
                table,
                ("observed_at",),
                ("connection", "direction", "observed_at", "entry_index"),
                (
                    *_content_columns(
                        table,
                        *("connection", "direction", "observed_at", "entry_index", "kafka_partition", "kafka_offset"),
                    ),
                    *position,
                ),
            )
            for table in ("subscriptions", "controls")
        ),
        TableExtent(
            "messages",
            ("observed_at",),
            ("network", "message_id"),
            # columns of the selected copy, not of the message
            _content_columns(
                "messages",
                *("network", "message_id", "origin", "topic_source", "verdict", "remote_peer", "observed_at"),
                *("kafka_partition", "kafka_offset", "message_index"),
            ),
            # unsigned, equal data on two topics is one message; a signature covers the topic
            terms={"topic": "CASE WHEN from_peer IS NOT NULL THEN topic END"},
            separator=f"nullif(concat_ws('/', nullif(regexp_extract(topic, {_TOPIC}, 1), ''), "
            f"nullif(regexp_extract(topic, {_TOPIC}, 2), '')), '')",
        ),
        TableExtent(
            "updates",
            ("observed_at", "log_time"),
            ("network", "origin", "message_id"),
            _content_columns("updates", "network", "origin", "message_id"),
            separator=separator,
        ),
        TableExtent(
            "batches",
            ("opened_at",),
            ("network", "origin", "separator_key", "separator_value", "opened_at"),
            ("batch_cid", "closed_at", "stream_count", "tip_count", "block_bytes", "block"),
            separator=separator,
        ),
        TableExtent("batch_tips", ("opened_at",), ("batch_cid", "stream", "tip"), separator=separator),
        TableExtent("tips", ("observed_at",), ("network", "stream", "tip", "source"), condition="source = 'update'"),
        TableExtent(
            "quarantine",
            ("observed_at",),
            ("stage", "reason", "data"),
            terms={"data": "sha256(data)"},
            condition=f"stage IN ({', '.join(map(repr, _list_stages(source)))}) AND reason <> 'gap'",
        ),
    )
    return {extent.table: extent for extent in extents}


def get_network(run: BackfillRun) -> str | None:
    """Return the network whose rows a backfill run replaces, or `None` if it replaces those of all networks."""
    network = run.details.get("network")
    return str(network) if network is not None and run.details.get("source") != "files" else None


def _list_stages(source: object) -> tuple[str, ...]:
    match source:
        case "kafka":
            return ("frame", *FRAME_STAGES)  # the table `frames` has only records that are frames
        case "files":
            return ("history", *FRAME_STAGES)
    return FRAME_STAGES


def _content_columns(table: str, *without: str) -> tuple[str, ...]:
    return tuple(column.name for column in TABLES[table].columns if column.name not in without)
