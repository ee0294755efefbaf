"""Kiln's expectations as classes of Great Expectations, which finds them by name once this module is imported, and the
one way in which Kiln lets Great Expectations look at rows.

Great Expectations runs without telemetry, progress bars and files: in an ephemeral context, over pandas frames.
"""

from __future__ import annotations

import os

# Great Expectations reads these when it is imported, and asks nobody: without them some of its versions report use.
os.environ["GX_ANALYTICS_ENABLED"] = "False"
os.environ["GX_CLOUD_MODE"] = "False"

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

if "pyspark" not in sys.modules:
    # Great Expectations imports much of PySpark where it is installed, for an engine of which these checks have no use.
    # With None in its place an import fails, until the imports below are done.
    sys.modules["pyspark"] = None  # type: ignore[assignment]  # as the import system marks it

import great_expectations as gx
from great_expectations.core import ExpectationSuite, ExpectationValidationResult
from great_expectations.core.metric_domain_types import MetricDomainTypes
from great_expectations.data_context.types.base import ProgressBarsConfig
from great_expectations.execution_engine import pandas_execution_engine
from great_expectations.execution_engine.execution_engine import ExecutionEngine
from great_expectations.execution_engine.pandas_execution_engine import PandasExecutionEngine
from great_expectations.expectations.expectation import (
    BatchExpectation,
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
from great_expectations.expectations.metrics.metric_provider import metric_value
from great_expectations.expectations.metrics.table_metric_provider import TableMetricProvider
from great_expectations.expectations.registry import get_expectation_impl

from kiln.pipelines.quality.catalogue import EXPECTATIONS
from kiln.pipelines.quality.suites import SuiteCheck
from kiln.schemas.wire.cid import USUAL_TEXT, CidError, block_cid, cid_bytes, cid_text, verify
from kiln.schemas.wire.identity import PeerIdError, peer_bytes
from kiln.schemas.wire.streamid import StreamIdError, stream_text

if sys.modules["pyspark"] is None:
    del sys.modules["pyspark"]

_NODE_ID: Final = 40  # hex digits of a node id of the BitTorrent DHT

# Great Expectations takes a digest of each frame up to this size, twice, and nobody reads it: a quarter of the time.
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
    if len(text) == _NODE_ID and all(digit in "0123456789abcdef" for digit in text):
        return True
    try:
        return bool(peer_bytes(text))
    except PeerIdError:
        return False


def _is_of_block(cid: object, block: object) -> bool:
    if not isinstance(cid, str) or not isinstance(block, bytes | bytearray):
        return False
    data = bytes(block)
    if cid_text(block_cid(data)) == cid:  # half the work of taking the CID apart
        return True
    try:
        return verify(data, cid_bytes(cid)) is None
    except CidError:
        return False


def _each(values: pd.Series, good: Callable[[object], bool], usual: str = "") -> pd.Series:
    """Return true if each value is good; each distinct value is looked at once. `usual`: a regular expression of texts
    that are good; it saves the look at each where the values are strings in Arrow's memory."""
    held = pa.Array.from_pandas(values)
    if not usual or not isinstance(values.dtype, pd.ArrowDtype) or not pa.types.is_string(held.type):
        return values.map({value: good(value) for value in values.unique()}).astype(bool)
    found = pc.match_substring_regex(held, rf"\A(?:{usual})\z").to_numpy(zero_copy_only=False)
    for at in (~found).nonzero()[0]:
        found[at] = good(held[at].as_py())
    return pd.Series(found, index=values.index)


class _Cids(ColumnMapMetricProvider):
    condition_metric_name = "column_values.kiln_cid"

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(self, column: pd.Series, **_: object) -> pd.Series:
        return _each(column, _is_cid, USUAL_TEXT)


class _Streams(ColumnMapMetricProvider):
    condition_metric_name = "column_values.kiln_stream_id"

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(self, column: pd.Series, **_: object) -> pd.Series:
        return _each(column, _is_stream)


class _Peers(ColumnMapMetricProvider):
    condition_metric_name = "column_values.kiln_peer_id"

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(self, column: pd.Series, **_: object) -> pd.Series:
        return _each(column, _is_peer)


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
        good = [_is_of_block(cid, block) for cid, block in zip(column_A, column_B, strict=True)]
        return pd.Series(good, index=column_A.index)


class ExpectColumnValuesToBeCids(ColumnMapExpectation):
    """Each value is a CID in its usual form."""

    map_metric = _Cids.condition_metric_name
    success_keys = ("mostly",)


class ExpectColumnValuesToBeStreamIds(ColumnMapExpectation):
    """Each value is a StreamID in its usual form."""

    map_metric = _Streams.condition_metric_name
    success_keys = ("mostly",)


class ExpectColumnValuesToBePeerIds(ColumnMapExpectation):
    """Each value is a peer id, or a node id of the BitTorrent DHT in hex."""

    map_metric = _Peers.condition_metric_name
    success_keys = ("mostly",)


class ExpectColumnPairCidToBeOfBlock(ColumnPairMapExpectation):
    """The CID in `column_A` is that of the block in `column_B`."""

    ignore_row_if: Literal["either_value_is_missing"] = "either_value_is_missing"

    map_metric = _Blocks.condition_metric_name
    success_keys = ("ignore_row_if", "mostly")


class _FailedRowCounts(TableMetricProvider):
    """Row count of each check, by the column `id`."""

    metric_name = "table.kiln_found"

    @metric_value(engine=PandasExecutionEngine)
    def _pandas(
        cls,  # noqa: N805 - Great Expectations passes `cls` by name
        execution_engine: PandasExecutionEngine,
        metric_domain_kwargs: dict[str, object],
        **_: object,
    ) -> dict[str, int]:
        frame, *_rest = execution_engine.get_compute_domain(metric_domain_kwargs, domain_type=MetricDomainTypes.TABLE)
        return {str(name): int(count) for name, count in frame["id"].value_counts().items()}


class NothingFound(BatchExpectation):
    """The batch has what finders found (`kiln.pipelines.quality.finders`), a row for each key at fault. The check of
    this id found none."""

    of: str = ""
    metric_dependencies = (_FailedRowCounts.metric_name,)
    success_keys = ("of",)

    def _validate(
        self,
        metrics: dict[str, object],
        runtime_configuration: dict[str, object] | None = None,
        execution_engine: ExecutionEngine[object] | None = None,
    ) -> dict[str, object]:
        counts = metrics[_FailedRowCounts.metric_name]
        found = counts.get(self.of, 0) if isinstance(counts, dict) else 0
        return {"success": not found, "result": {"observed_value": found}}


def _spanning(name: str) -> type[NothingFound]:
    """A class for an expectation on what spans rows. Great Expectations makes the name out of the name of the class."""
    title = "".join(part.capitalize() for part in name.split("_"))
    return type(title, (NothingFound,), {"__doc__": EXPECTATIONS[name].says, "__module__": __name__})


SPANNING: Final = {name: _spanning(name) for name, each in EXPECTATIONS.items() if not each.rows}
"""Kiln's expectations on what spans rows, by name."""


@dataclass(frozen=True)
class ExpectationOutcome:
    """Outcome of one expectation on one chunk of rows. `failed`: rows that do not meet the
    expectation; None: the expectation is on the chunk as a whole."""

    success: bool
    rows: int
    failed: int | None
    keys: Sequence[Mapping[str, object]]
    values: Sequence[object]
    observed: object
    error: str = ""


class RowValidator:
    """Great Expectations, asked about frames of rows."""

    def __init__(self) -> None:
        logging.getLogger("great_expectations").setLevel(logging.ERROR)
        context = gx.get_context(mode="ephemeral")
        context.enable_analytics(False)
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        asset = context.data_sources.add_pandas("kiln").add_dataframe_asset("rows")
        self._batch = asset.add_batch_definition_whole_dataframe("chunk")

    def rows(self, checks: Sequence[SuiteCheck], rows: pd.DataFrame, key: Sequence[str]) -> list[ExpectationOutcome]:
        """Validate rows, and return the outcome of each check in order."""
        suite = ExpectationSuite(
            "rows",
            expectations=[
                _impl(check.expectation)(meta={"at": at}, **check.arguments) for at, check in enumerate(checks)
            ],
        )
        told = self._batch.get_batch({"dataframe": rows}).validate(
            suite,
            result_format={
                "result_format": "COMPLETE",
                "unexpected_index_column_names": list(key),
                "return_unexpected_index_query": False,
            },
        )
        by_check: dict[int, ExpectationOutcome] = {}
        for each in told.results:
            result, raised = each.result, _raised(each.exception_info)
            failed = result.get("unexpected_count")
            found = result.get("unexpected_index_list") or ()
            by_check[_asked(each).meta["at"]] = ExpectationOutcome(
                bool(each.success) and not raised,
                int(result.get("element_count") or len(rows)),
                None if failed is None else int(failed),
                [{name: one.get(name) for name in key} for one in found],
                list(result.get("partial_unexpected_list") or ()),
                result.get("observed_value"),
                raised,
            )
        return [by_check[at] for at in range(len(checks))]

    def found(self, checks: Sequence[SuiteCheck], found: Iterable[tuple[str, str, str]]) -> dict[str, bool]:
        """Whether each check on what spans rows is met, by id. `found`: id, key and words of all that was found."""
        frame = pd.DataFrame(list(found), columns=["id", "key", "words"])
        expectations: list[Expectation] = [SPANNING[check.expectation](of=check.id) for check in checks]
        told = self._batch.get_batch({"dataframe": frame}).validate(
            ExpectationSuite("found", expectations=expectations)
        )
        for each in told.results:
            if raised := _raised(each.exception_info):
                raise RuntimeError(f"{_asked(each).type}: {raised}")
        return {_asked(each).kwargs["of"]: bool(each.success) for each in told.results}


def _asked(result: ExpectationValidationResult) -> ExpectationConfiguration:
    """Return the check that a result belongs to."""
    asked = result.expectation_config
    assert asked is not None
    return asked


def _impl(name: str) -> Callable[..., Expectation]:
    found: Callable[..., Expectation] = get_expectation_impl(name)
    return found


def _raised(info: Mapping[str, object]) -> str:
    if "raised_exception" in info:
        info = {"": info}
    for each in info.values():
        if isinstance(each, Mapping) and each.get("raised_exception"):
            return str(each.get("exception_message"))
    return ""
