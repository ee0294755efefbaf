"""Conversion of declared metric families to those of prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kiln.schemas.exposition import FAMILIES

Values = Iterable[tuple[tuple[str, ...], float]]
"""Label values, in the family's order, and the value."""


def build_family(name: str, values: Values) -> Metric:
    """Build a counter or gauge that `kiln.schemas.exposition` declares."""
    declared = FAMILIES[name]
    family_type = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
    metric = family_type(name, declared.says, labels=declared.labels)
    for labels, value in values:
        metric.add_metric(labels, value)
    return metric
