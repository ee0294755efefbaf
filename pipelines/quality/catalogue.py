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
        "Each value is a peer id, or empty: the files of some programs name no peers.",
        _MAP,
        "column",
        rows=True,
    ),
    _define_own(
        "expect_column_pair_cid_to_be_of_block",
        "`column_A` is the CID of the block in `column_B`: the hash of its bytes.",
        _PAIR,
        "column_A",
        "column_B",
        rows=True,
    ),
    _define_own(
        "expect_rows_to_hold",
        "The `rule`, a condition in DuckDB's SQL over the columns of the table, is not false for any row.",
        {"rule": "text"},
        "rule",
    ),
    _define_own("expect_table_to_have_its_columns", "The table has the columns and types of docs/TABLES.md.", {}),
    _define_own(
        "expect_keys_to_be_unique",
        "No two rows have the same `columns` (default: the key of the table). `within`: two rows whose times differ by "
        "more are two. `parts_of`: a row may be there again where one of these tables has more than one row of the "
        "same `named_by`. `where` picks the rows.",
        {"columns": "columns", "within": "duration", "parts_of": "tables", "named_by": "columns", "where": "text"},
    ),
    _define_own(
        "expect_sequences_without_gaps",
        "The frames of a connection in one direction are numbered 1, 2, 3 …, and none is missing. Frames from files "
        "are not judged, because their numbers are line numbers.",
        {},
    ),
    _define_own(
        "expect_connections_to_be_closed",
        "Where one direction of a connection has ended for longer than `settle`, the other has ended too.",
        {"settle": "duration"},
    ),
    _define_own(
        "expect_offsets_without_holes",
        "Each offset of a partition of Kafka between the first and the last is a row, or a whole frame in quarantine.",
        {},
    ),
    _define_own(
        "expect_rows_in_tables",
        "Each row's `columns` are a row's `their_columns` (default: the same names) in one of `tables`, after `settle` "
        "at the latest; or its `or_columns` are a row's in one of `or_tables`. `where` picks the rows. Rows of the "
        "other tables stay in the state for `remember` (7d); older ones are searched for in the tables. Rows are not "
        "judged whose counterpart may have expired (`lake.retention`), nor tips of batches that a swap replaced.",
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
        "The windows of `updates`, by the rule of decision 1, are the batches, after `settle` at the latest. Windows "
        "are not judged at the start of a range that a swap replaced, nor if their updates may have expired.",
        {"settle": "duration"},
    ),
    _define_own(
        "expect_claims_to_agree_with_geneses",
        "No update claims another separator than the verified genesis of its stream names.",
        {},
    ),
    _define_own(
        "expect_old_messages_not_to_flood",
        "Fewer than `most` copies of a message come later than `after` behind its first copy. What is older than a day "
        "is forgotten.",
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
        "In the last 10 minutes of the table, the stamps of bridge and broker on each bridge's quickest LIVE "
        "frame differ by at most `within`.",
        {"within": "duration"},
        "within",
    ),
    _define_own(
        "expect_lateness_to_be_at_most",
        "Of the LIVE batches of the last hour of the table, 99 of 100 were in Kafka within `most` after their window's "
        "end. Late batches of no more than `minutes` minutes (5) are no fault: a start makes some.",
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
        "In the last whole hour, each type of LIVE message came at most `factor` times as often, and at least "
        "1/`factor` times as often, as in the median of that hour on up to 7 days before. With fewer than 3 such days, "
        "or fewer than `least` messages, nothing is judged.",
        {"factor": "number", "least": "number"},
        "factor",
    ),
    _define_own(
        "expect_announced_messages_to_come",
        "Of the message ids that peers announced with IHAVE in the last 24 hours of the table, at most `share` are in "
        "no row of `copies` after `settle`. Fewer than `least` missing ids are not judged.",
        {"share": "number", "least": "number", "settle": "duration"},
    ),
    _define_own(
        "expect_quarantine_share_to_be_at_most",
        "For each reason, the rows of the last 24 hours of the table are at most `share` of the copies of messages in "
        "that time. Fewer than `least` rows are not judged.",
        {"share": "number", "least": "number"},
        "share",
    ),
)

EXPECTATIONS: Final[Mapping[str, Expectation]] = {each.name: each for each in (*_STOCK, *_KILN)}
"""by name, as suites write it"""
