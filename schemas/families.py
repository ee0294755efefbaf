"""A family of `kiln.schemas.exposition` with its values, as prometheus_client writes families."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kiln.schemas.exposition import FAMILIES

Values = Iterable[tuple[tuple[str, ...], float]]
"""Label values, in the family's order, and the value."""


def family(name: str, values: Values) -> Metric:
    """A counter or gauge that `kiln.schemas.exposition` declares. KeyError: there is no such family."""
    declared = FAMILIES[name]
    of_kind = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
    made = of_kind(name, declared.says, labels=declared.labels)
    for labels, value in values:
        made.add_metric(labels, value)
    return made
