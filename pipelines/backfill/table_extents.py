"""Rows of each table that a run replaces, and the columns that are compared with the live tables, as SQL for DuckDB.

See docs/backfill.md, "Compare, swap, drop", and docs/design, decision 22.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kiln.pipelines.backfill.run_log import BackfillRun
from kiln.schemas.delta.tables import TABLES

FRAME_STAGES: Final = ("hello", "rpc", "topic", "signature", "message", "bep50")
"""Stages of quarantine that decoding the table `frames` reproduces. `separator` is not one of them: the bridge also
writes such rows, about much older updates, after it has fetched a genesis."""

_TOPIC: Final = "'/sep/(.+)/([0-9a-z]+)$'"


@dataclass(frozen=True)
class TableExtent:
    """The rows of one table that a run replaces."""

    table: str
    times: tuple[str, ...]
    """time columns; the least of them is the event time, which must be in the range"""
    key: tuple[str, ...]
    """two rows of one key count as one row that differs"""
    content: tuple[str, ...] = ()
    """columns that must also be equal"""
    separator: str = "NULL::VARCHAR"
    condition: str = "true"
    """further condition, which all rows that a run can produce meet"""
    terms: Mapping[str, str] = field(default_factory=dict)
    """SQL expressions of columns that are not compared as they are"""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table."""
        return tuple(column.name for column in TABLES[self.table].columns)

    def term(self, column: str) -> str:
        """Return the SQL expression with which a column is compared."""
        return self.terms.get(column, column)

    @property
    def event_time(self) -> str:
        """SQL expression of a row's event time."""
        return f"least({', '.join(self.times)})"


def build_extents(run: BackfillRun) -> dict[str, TableExtent]:
    """Build the extents by table, in the order of comparison."""
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
    """Return the network of the run, or `None` if the run covers all networks."""
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
