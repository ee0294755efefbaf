"""Which rows of a table a run stands for, and what of a row counts when the run is compared with live
(docs/backfill.md, "Compare, swap, drop"; docs/design, decision 22). SQL for DuckDB."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kiln.pipelines.backfill.account import BackfillRun
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.faults import CODE_IN_SQL

FRAME_STAGES: Final = ("hello", "rpc", "topic", "signature", "message", "bep50")
"""Stages of quarantine whose rows come out of decoding the table `frames`. `separator` is no such stage: the bridge
writes rows of it too, when it has fetched a genesis, about updates that were heard long before."""

_TOPIC: Final = "'/sep/(.+)/([0-9a-z]+)$'"


@dataclass(frozen=True)
class TableExtent:
    """What a run has to say of a table."""

    table: str
    times: tuple[str, ...]
    """columns of time; the least of a row's must be in the range"""
    key: tuple[str, ...]
    """two rows with one key are told as one row that differs"""
    content: tuple[str, ...] = ()
    """what else must be equal"""
    separator: str = "NULL::VARCHAR"
    condition: str = "true"
    """what else makes a row one that a run can make"""
    terms: Mapping[str, str] = field(default_factory=dict)
    """of columns that are compared as something else"""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the table."""
        return tuple(column.name for column in TABLES[self.table].columns)

    def term(self, column: str) -> str:
        """What a column of the key or the content is compared as."""
        return self.terms.get(column, column)

    @property
    def heard(self) -> str:
        """When a row was heard."""
        return f"least({', '.join(self.times)})"


def extents(run: BackfillRun) -> dict[str, TableExtent]:
    """By table, in the order in which they are told."""
    source = run.details.get("source")
    # Rows that come out of the table `frames` keep the place of their frame. Other sources have no such places.
    place = ("kafka_partition", "kafka_offset") if source == "frames" else ()
    named = "separator_key || '/' || separator_value"
    found = (
        TableExtent(
            "frames",
            ("observed_at",),
            ("connection", "direction", "sequence"),
            _content(
                "frames",
                *("connection", "direction", "sequence", "kafka_partition", "kafka_offset", "kafka_timestamp"),
            ),
        ),
        TableExtent(
            "copies",
            ("observed_at",),
            ("network", "message", "remote_peer", "observed_at", "message_index"),
            ("verdict", *place),
        ),
        TableExtent(
            "messages",
            ("observed_at",),
            ("network", "message"),
            # not of the message, but of the copy of it that was kept
            _content(
                "messages",
                *("network", "message", "origin", "topic_source", "verdict", "remote_peer", "observed_at"),
                *("kafka_partition", "kafka_offset", "message_index"),
            ),
            # the signature covers the topic; unsigned, the same data on two topics is one message
            terms={"topic": "CASE WHEN from_peer IS NOT NULL THEN topic END"},
            separator=f"nullif(concat_ws('/', nullif(regexp_extract(topic, {_TOPIC}, 1), ''), "
            f"nullif(regexp_extract(topic, {_TOPIC}, 2), '')), '')",
        ),
        TableExtent(
            "updates",
            ("observed_at", "updated_at"),
            ("network", "origin", "message"),
            _content("updates", "network", "origin", "message"),
            separator=named,
        ),
        TableExtent(
            "batches",
            ("opened_at",),
            ("network", "origin", "separator_key", "separator_value", "opened_at"),
            ("cid", "closed_at", "streams", "tips", "bytes", "block"),
            separator=named,
        ),
        TableExtent("batch_tips", ("opened_at",), ("cid", "stream", "tip"), separator=named),
        TableExtent("tips", ("observed_at",), ("network", "stream", "tip", "source"), condition="source = 'update'"),
        TableExtent(
            "quarantine",
            ("observed_at",),
            ("stage", "reason", "data"),
            terms={"reason": CODE_IN_SQL, "data": "sha256(data)"},
            condition=f"stage IN ({', '.join(map(repr, _stages(source)))}) AND reason <> 'gap'",
        ),
    )
    return {extent.table: extent for extent in found}


def network_of(run: BackfillRun) -> str | None:
    """The one network that the run is of; None: of all that it found."""
    network = run.details.get("network")
    return str(network) if network is not None and run.details.get("source") != "files" else None


def _stages(source: object) -> tuple[str, ...]:
    match source:
        case "kafka":
            return ("frame", *FRAME_STAGES)  # the table `frames` has no record that is no Frame
        case "files":
            return ("history", *FRAME_STAGES)
    return FRAME_STAGES


def _content(table: str, *without: str) -> tuple[str, ...]:
    return tuple(column.name for column in TABLES[table].columns if column.name not in without)
