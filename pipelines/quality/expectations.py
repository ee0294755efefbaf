"""Runs Great Expectations on pandas frames, and defines Kiln's own expectations as classes of Great Expectations.

Importing this module registers the classes. Great Expectations runs without telemetry, progress bars and files.
"""

from __future__ import annotations

import os

# Great Expectations reads these variables when it is imported. Without them, some versions send usage statistics.
os.environ["GX_ANALYTICS_ENABLED"] = "False"
os.environ["GX_CLOUD_MODE"] = "False"

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

if "pyspark" not in sys.modules:
    # Great Expectations imports PySpark if it can, which is slow and not needed here. An entry of None makes the import
    # fail. It is removed below.
    sys.modules["pyspark"] = None  # type: ignore[assignment]  # as the import system marks it
if "rfc3987_syntax" not in sys.modules:
    # jsonschema, which Great Expectations imports, would use it to build parsers for RFC 3987, for 3 s of CPU.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # as the import system marks it

import great_expectations as gx
from great_expectations.core import ExpectationSuite, ExpectationValidationResult
from great_expectations.data_context.types.base import ProgressBarsConfig
from great_expectations.execution_engine import pandas_execution_engine
from great_expectations.execution_engine.pandas_execution_engine import PandasExecutionEngine
from great_expectations.expectations.expectation import (
    ColumnMapExpectation,
    ColumnPairMapExpectation,
    Expectation,
)
from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
from great_expectations.expectations.metrics.map_metric_provider.column_condition_partial import (
    column_condition_partial,
)
from great_expectations.expectations.metrics.map_metric_provider.column_map_metric_provider import (
    ColumnMapMetricProvider,
)
from great_expectations.expectations.metrics.map_metric_provider.column_pair_condition_partial import (
    column_pair_condition_partial,
)
from great_expectations.expectations.metrics.map_metric_provider.column_pair_map_metric_provider import (
    ColumnPairMapMetricProvider,
)
from great_expectations.expectations.registry import get_expectation_impl

from kiln.pipelines.quality.suites import SuiteCheck
from kiln.schemas.wire.cid import USUAL_TEXT, CidError, check_block, cid_bytes, cid_text, compute_cid
from kiln.schemas.wire.identity import PeerIdError, peer_bytes
from kiln.schemas.wire.streamid import StreamIdError, stream_text

for _unused in ("pyspark", "rfc3987_syntax"):
    if sys.modules[_unused] is None:
        del sys.modules[_unused]

_NODE_ID: Final = 40  # number of hex digits of a node id of the BitTorrent DHT

# Great Expectations hashes each frame up to this size twice, and never uses the hash: a quarter of its time.
pandas_execution_engine.HASH_THRESHOLD = 0


def _is_cid(text: object) -> bool:
    try:
        return isinstance(text, str) and cid_text(cid_bytes(text)) == text
    except CidError:
        return False


def _is_stream(text: object) -> bool:
    try:
        return isinstance(text, str) and stream_text(text) == text
    except StreamIdError:
        return False


def _is_peer(text: object) -> bool:
    if not isinstance(text, str):
        return False
    if not text or (len(text) == _NODE_ID and all(digit in "0123456789abcdef" for digit in text)):
        return True
    try:
        return bool(peer_bytes(text))
    except PeerIdError:
        return False


def _is_of_block(cid: object, block: object) -> bool:
    if not isinstance(cid, str) or not isinstance(block, bytes | bytearray):
        return False
    data = bytes(block)
    if cid_text(compute_cid(data)) == cid:  # half the work of parsing the CID
        return True
    try:
        return check_block(data, cid_bytes(cid)) is None
    except CidError:
        return False


def _test_values(values: pd.Series, is_valid: Callable[[object], bool], usual: str = "") -> pd.Series:
    """Test each distinct value once. Return a mask that is true for valid values.

    Args:
        usual: A regular expression that only valid texts match. Arrow strings that match need no test.
    """
    array = pa.Array.from_pandas(values)
    if not usual or not isinstance(values.dtype, pd.ArrowDtype) or not pa.types.is_string(array.type):
        return values.map({value: is_valid(value) for value in values.unique()}).astype(bool)
    mask = pc.match_substring_regex(array, rf"\A(?:{usual})\z").to_numpy(zero_copy_only=False)
    for index in (~mask).nonzero()[0]:
        mask[index] = is_valid(array[index].as_py())
    return pd.Series(mask, index=values.index)


class _Cids(ColumnMapMetricProvider):
    condition_metric_name = "column_values.kiln_cid"

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(self, column: pd.Series, **_: object) -> pd.Series:
        return _test_values(column, _is_cid, USUAL_TEXT)


class _Streams(ColumnMapMetricProvider):
    condition_metric_name = "column_values.kiln_stream_id"

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(self, column: pd.Series, **_: object) -> pd.Series:
        return _test_values(column, _is_stream)


class _Peers(ColumnMapMetricProvider):
    condition_metric_name = "column_values.kiln_peer_id"

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(self, column: pd.Series, **_: object) -> pd.Series:
        return _test_values(column, _is_peer)


class _Blocks(ColumnPairMapMetricProvider):
    condition_metric_name = "column_pair_values.kiln_block"
    condition_domain_keys = (
        "batch_id",
        "table",
        "column_A",
        "column_B",
        "row_condition",
        "condition_parser",
        "ignore_row_if",
    )
    condition_value_keys = ()

    @column_pair_condition_partial(engine=PandasExecutionEngine)  # type: ignore[untyped-decorator]  # it has no types
    def _pandas(self, column_A: pd.Series, column_B: pd.Series, **_: object) -> pd.Series:  # noqa: N803 - passed by name
        valid = [_is_of_block(cid, block) for cid, block in zip(column_A, column_B, strict=True)]
        return pd.Series(valid, index=column_A.index)


class ExpectColumnValuesToBeCids(ColumnMapExpectation):
    """Expectation: each value of a column is a CID in its usual form."""

    map_metric = _Cids.condition_metric_name
    success_keys = ("mostly",)


class ExpectColumnValuesToBeStreamIds(ColumnMapExpectation):
    """Expectation: each value of a column is a StreamID in its usual form."""

    map_metric = _Streams.condition_metric_name
    success_keys = ("mostly",)


class ExpectColumnValuesToBePeerIds(ColumnMapExpectation):
    """Expectation: each value of a column is a peer id, a node id of the BitTorrent DHT in hex, or empty."""

    map_metric = _Peers.condition_metric_name
    success_keys = ("mostly",)


class ExpectColumnPairCidToBeOfBlock(ColumnPairMapExpectation):
    """Expectation: the CID in `column_A` is that of the block in `column_B`."""

    ignore_row_if: Literal["either_value_is_missing"] = "either_value_is_missing"

    map_metric = _Blocks.condition_metric_name
    success_keys = ("ignore_row_if", "mostly")


@dataclass(frozen=True)
class ExpectationOutcome:
    """Outcome of an expectation on a chunk of rows."""

    success: bool
    rows: int
    failed: int | None
    """number of rows that fail; `None` if the expectation is about the chunk as a whole"""
    keys: Sequence[Mapping[str, object]]
    """key (values by column) of each failed row"""
    values: Sequence[object]
    """faulty values of the first failed rows"""
    observed: object
    """observed value, if the expectation is about the chunk as a whole"""
    error: str = ""
    """message of the exception with which the expectation failed to run, or empty"""


class RowValidator:
    """Runs expectations of Great Expectations on pandas frames, in an ephemeral context."""

    def __init__(self) -> None:
        logging.getLogger("great_expectations").setLevel(logging.ERROR)
        context = gx.get_context(mode="ephemeral")
        context.enable_analytics(False)
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        asset = context.data_sources.add_pandas("kiln").add_dataframe_asset("rows")
        self._batch = asset.add_batch_definition_whole_dataframe("chunk")

    def validate_rows(
        self, checks: Sequence[SuiteCheck], rows: pd.DataFrame, key: Sequence[str]
    ) -> list[ExpectationOutcome]:
        """Run checks on rows. Return their outcomes in the order of the checks.

        Args:
            key: Columns by which an outcome names failed rows.
        """
        suite = ExpectationSuite(
            "rows",
            expectations=[
                _get_class(check.expectation)(meta={"index": index}, **check.arguments)
                for index, check in enumerate(checks)
            ],
        )
        validation = self._batch.get_batch({"dataframe": rows}).validate(
            suite,
            result_format={
                "result_format": "COMPLETE",
                "unexpected_index_column_names": list(key),
                "return_unexpected_index_query": False,
            },
        )
        by_check: dict[int, ExpectationOutcome] = {}
        for outcome in validation.results:
            result, error = outcome.result, _get_error(outcome.exception_info)
            failed = result.get("unexpected_count")
            failed_keys = result.get("unexpected_index_list") or ()
            by_check[_get_configuration(outcome).meta["index"]] = ExpectationOutcome(
                bool(outcome.success) and not error,
                int(result.get("element_count") or len(rows)),
                None if failed is None else int(failed),
                [{name: one.get(name) for name in key} for one in failed_keys],
                list(result.get("partial_unexpected_list") or ()),
                result.get("observed_value"),
                error,
            )
        return [by_check[index] for index in range(len(checks))]


def _get_configuration(result: ExpectationValidationResult) -> ExpectationConfiguration:
    configuration = result.expectation_config
    assert configuration is not None
    return configuration


def _get_class(name: str) -> Callable[..., Expectation]:
    implementation: Callable[..., Expectation] = get_expectation_impl(name)
    return implementation


def _get_error(info: Mapping[str, object]) -> str:
    if "raised_exception" in info:
        info = {"": info}
    for exception in info.values():
        if isinstance(exception, Mapping) and exception.get("raised_exception"):
            return str(exception.get("exception_message"))
    return ""
