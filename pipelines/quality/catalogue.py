"""Catalogue of the expectations that a suite may name, with their arguments: Great Expectations' own, and Kiln's.

Nothing here imports Great Expectations, which takes seconds. A test compares the arguments with those of the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["column", "columns", "number", "switch", "text", "list", "duration", "table", "tables", "mapping"]
"""Type of an argument. `column`, `columns`: of the suite's table. `duration`: as in settings."""


@dataclass(frozen=True)
class Expectation:
    """An expectation by name."""

    name: str
    arguments: Mapping[str, Kind]
    required: frozenset[str] = field(default_factory=frozenset)
    description: str = ""
    rows: bool = True
    """true if Great Expectations reads each new row; else DuckDB finds faulty keys in whole tables, and Great
    Expectations gets those"""
    is_stock: bool = True
    """true if it is Great Expectations' own"""

    @property
    def by_value(self) -> bool:
        """True if the value of one column decides."""
        return self.rows and {"column", "mostly"} <= self.arguments.keys()


_COLUMN: Final[Mapping[str, Kind]] = {"column": "column"}
_MAP: Final[Mapping[str, Kind]] = {**_COLUMN, "mostly": "number"}
_RANGE: Final[Mapping[str, Kind]] = {
    "min_value": "number",
    "max_value": "number",
    "strict_min": "switch",
    "strict_max": "switch",
}
_PAIR: Final[Mapping[str, Kind]] = {"column_A": "column", "column_B": "column", "mostly": "number"}


def _define_stock(name: str, arguments: Mapping[str, Kind], *required: str) -> Expectation:
    always = {"column"} & arguments.keys() or {"column_A", "column_B"}
    return Expectation(name, arguments, frozenset({*always, *required}))


def _define_own(
    name: str, description: str, arguments: Mapping[str, Kind], *required: str, rows: bool = False
) -> Expectation:
    return Expectation(name, arguments, frozenset(required), description, rows, is_stock=False)


_STOCK: Final = (
    _define_stock("expect_column_values_to_not_be_null", _MAP),
    _define_stock("expect_column_values_to_be_null", _MAP),
    _define_stock("expect_column_values_to_be_in_set", {**_MAP, "value_set": "list"}, "value_set"),
    _define_stock("expect_column_values_to_not_be_in_set", {**_MAP, "value_set": "list"}, "value_set"),
    _define_stock("expect_column_values_to_be_between", {**_MAP, **_RANGE}),
    _define_stock("expect_column_value_lengths_to_equal", {**_MAP, "value": "number"}, "value"),
    _define_stock("expect_column_value_lengths_to_be_between", {**_MAP, **_RANGE}),
    _define_stock("expect_column_values_to_match_regex", {**_MAP, "regex": "text"}, "regex"),
    _define_stock("expect_column_values_to_not_match_regex", {**_MAP, "regex": "text"}, "regex"),
    _define_stock(
        "expect_column_values_to_match_regex_list", {**_MAP, "regex_list": "list", "match_on": "text"}, "regex_list"
    ),
    _define_stock("expect_column_values_to_be_json_parseable", _MAP),
    _define_stock("expect_column_min_to_be_between", {**_COLUMN, **_RANGE}),
    _define_stock("expect_column_max_to_be_between", {**_COLUMN, **_RANGE}),
    _define_stock("expect_column_mean_to_be_between", {**_COLUMN, **_RANGE}),
    _define_stock("expect_column_median_to_be_between", {**_COLUMN, **_RANGE}),
    _define_stock("expect_column_stdev_to_be_between", {**_COLUMN, **_RANGE}),
    _define_stock("expect_column_distinct_values_to_be_in_set", {**_COLUMN, "value_set": "list"}, "value_set"),
    _define_stock("expect_column_most_common_value_to_be_in_set", {**_COLUMN, "value_set": "list"}, "value_set"),
    _define_stock("expect_column_proportion_of_non_null_values_to_be_between", {**_COLUMN, **_RANGE}),
    _define_stock("expect_column_pair_values_a_to_be_greater_than_b", {**_PAIR, "or_equal": "switch"}),
    _define_stock("expect_column_pair_values_to_be_equal", _PAIR),
)

_KILN: Final = (
    _define_own("expect_column_values_to_be_cids", "Each value is a CID in its usual form.", _MAP, "column", rows=True),
    _define_own(
        "expect_column_values_to_be_stream_ids",
        "Each value is a StreamID in its usual form.",
        _MAP,
        "column",
        rows=True,
    ),
    _define_own(
        "expect_column_values_to_be_peer_ids",
        "Each value is a peer id or empty. Empty is allowed because the files of some programs do not name peers.",
        _MAP,
        "column",
        rows=True,
    ),
    _define_own(
        "expect_column_pair_cid_to_be_of_block",
        "`column_A` is the CID of the block in `column_B`, that is, its hash matches the bytes of the block.",
        _PAIR,
        "column_A",
        "column_B",
        rows=True,
    ),
    _define_own(
        "expect_rows_to_hold",
        "`rule`, a condition in DuckDB's SQL over the columns of the table, is not false for any row.",
        {"rule": "text"},
        "rule",
    ),
    _define_own("expect_table_to_have_its_columns", "The table has the columns and types of docs/TABLES.md.", {}),
    _define_own(
        "expect_keys_to_be_unique",
        "No two rows have the same `columns` (default: the key of the table). With `within`, equal rows count as "
        "duplicates only if their times differ by no more than that. With `parts_of`, a row may be repeated if one of "
        "these tables has more than one row with the same `named_by`. `where` selects the rows.",
        {"columns": "columns", "within": "duration", "parts_of": "tables", "named_by": "columns", "where": "text"},
    ),
    _define_own(
        "expect_sequences_without_gaps",
        "The frames of a connection in one direction are numbered 1, 2, 3 … without a gap. Frames from files are not "
        "checked, because their numbers are line numbers.",
        {},
    ),
    _define_own(
        "expect_connections_to_be_closed",
        "If one direction of a connection ended more than `settle` ago, the other direction has ended too.",
        {"settle": "duration"},
    ),
    _define_own(
        "expect_offsets_without_holes",
        "For each Kafka partition, every offset between the first and the last has a row in the table, or a whole "
        "frame in quarantine.",
        {},
    ),
    _define_own(
        "expect_rows_in_tables",
        "For each row, one of `tables` has a row whose `their_columns` (default: the same names) equal the row's "
        "`columns`, after `settle` at the latest. Alternatively, one of `or_tables` has a row that matches its "
        "`or_columns`. `where` selects the rows. Rows of the other tables stay in the state for `remember` (7d); "
        "older ones are looked up in the tables. Rows whose counterpart may have expired (`lake.retention`) and tips "
        "of batches that a swap replaced are not checked.",
        {
            "columns": "columns",
            "tables": "tables",
            "their_columns": "list",
            "or_columns": "columns",
            "or_tables": "tables",
            "where": "text",
            "settle": "duration",
            "remember": "duration",
        },
        "columns",
        "tables",
    ),
    _define_own(
        "expect_batches_to_follow_from_updates",
        "The batches are those that decision 1 derives from `updates`, after `settle` at the latest. Windows at the "
        "start of a range that a swap replaced, and windows whose updates may have expired, are not checked.",
        {"settle": "duration"},
    ),
    _define_own(
        "expect_claims_to_agree_with_geneses",
        "No update claims a separator other than the one in the verified genesis of its stream.",
        {},
    ),
    _define_own(
        "expect_old_messages_not_to_flood",
        "Fewer than `most` copies of a message arrive more than `after` after its first copy. The check drops data "
        "that is older than a day.",
        {"after": "duration", "most": "number"},
    ),
    _define_own(
        "expect_copies_of_a_message_to_be_at_most",
        "Over the last 24 hours of the table, a message has at most `most` copies on average.",
        {"most": "number"},
        "most",
    ),
    _define_own(
        "expect_clocks_to_agree",
        "In the last 10 minutes of the table, the timestamps of bridge and broker on the fastest LIVE frame of each "
        "bridge differ by at most `within`.",
        {"within": "duration"},
        "within",
    ),
    _define_own(
        "expect_lateness_to_be_at_most",
        "In the last hour of the table, 99% of the LIVE batches were in Kafka at most `most` after the end of their "
        "window. Late batches in no more than `minutes` minutes (5) are ignored, because a start causes some.",
        {"most": "duration", "minutes": "number"},
        "most",
    ),
    _define_own(
        "expect_table_to_keep_up",
        "The newest LIVE row is at most `within` older than the newest LIVE row of the table `than`.",
        {"than": "table", "within": "duration"},
        "than",
        "within",
    ),
    _define_own(
        "expect_table_to_be_fresh",
        "While a bridge runs, the newest LIVE row is at most `within` old.",
        {"within": "duration"},
        "within",
    ),
    _define_own(
        "expect_volume_as_on_days_before",
        "In the last full hour, the number of LIVE messages of each type was at most `factor` times, and at least "
        "1/`factor` of, the median for the same hour on up to 7 previous days. The check is skipped with fewer than 3 "
        "such days or fewer than `least` messages.",
        {"factor": "number", "least": "number"},
        "factor",
    ),
    _define_own(
        "expect_announced_messages_to_come",
        "Of the message ids that peers announced with IHAVE in the last 24 hours of the table, at most the fraction "
        "`share` is missing from `copies` after `settle`. Fewer than `least` missing ids are ignored.",
        {"share": "number", "least": "number", "settle": "duration"},
    ),
    _define_own(
        "expect_quarantine_share_to_be_at_most",
        "For each reason, the number of rows in the last 24 hours of the table is at most the fraction `share` of the "
        "copies of messages in that time. Fewer than `least` rows are ignored.",
        {"share": "number", "least": "number"},
        "share",
    ),
)

EXPECTATIONS: Final[Mapping[str, Expectation]] = {each.name: each for each in (*_STOCK, *_KILN)}
"""by name, as suites write it"""
