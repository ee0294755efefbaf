"""Catalogue of the expectations that a suite may name, with their arguments: Great Expectations' own, and Kiln's.

Nothing here imports Great Expectations, which takes seconds. A test compares the arguments with the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["column", "number", "switch", "text", "list"]
"""Type of an argument. `column`: a column of the suite's table."""


@dataclass(frozen=True)
class Expectation:
    """An expectation by name."""

    name: str
    arguments: Mapping[str, Kind]
    required: frozenset[str] = field(default_factory=frozenset)
    description: str = ""
    rows: bool = True
    """true if Great Expectations reads each new row; else DuckDB does"""
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
)

EXPECTATIONS: Final[Mapping[str, Expectation]] = {expectation.name: expectation for expectation in (*_STOCK, *_KILN)}
"""by name, as suites write it"""
