"""The dashboards as Grafana's JSON: `python -m kiln.deploy.packaging.grafana.files deploy/packaging/grafana/json`
writes a file for each.

The library is that of Grafana's makers: with it mypy holds the JSON to Grafana's own schema. A test holds the files
equal to this code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

from kiln.deploy.packaging.grafana.dashboards import DASHBOARDS, Panel, PanelRow

_SOURCE: Final = DataSourceRef("prometheus", "${source}")
_WIDTH: Final = 24  # of a dashboard, in Grafana's columns
_FIGURES = 6  # side by side at most
_PLOT_HEIGHT, _FIGURE_HEIGHT = 8, 4


def build_dashboard(name: str) -> str:
    """Build the JSON of a dashboard."""
    built = (
        dashboard.Dashboard(f"Kiln: {name}")
        .uid(f"kiln-{name}")
        .tags(["kiln"])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("utc")
        .link(
            dashboard.DashboardLink("Kiln")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["kiln"])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("instance")
            .label("Kiln")
            .datasource(_SOURCE)
            .query('label_values(up{job="kiln"}, instance)')
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    for row in DASHBOARDS[name]:
        built.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            built.with_panel(_build_panel(panel, _WIDTH // count_columns(row)))
    return json.dumps(built.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def count_columns(row: PanelRow) -> int:
    """Count the columns of a row of panels."""
    if all(panel.figure for panel in row.panels):
        return min(_FIGURES, len(row.panels))
    # four fill a row, and none of five or six stands alone
    return min(4 if len(row.panels) == 4 else 3, len(row.panels))


def _build_panel(panel: Panel, span: int) -> stat.Panel | timeseries.Panel:
    built: stat.Panel | timeseries.Panel
    if panel.figure:
        built = stat.Panel().height(_FIGURE_HEIGHT)
        if panel.bad_from is not None:
            steps = [Threshold(None, "green"), Threshold(panel.bad_from, "red")]
            built.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    else:
        built = timeseries.Panel().height(_PLOT_HEIGHT).min(0)
        if panel.stacked:
            built.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(30)
    built.title(panel.title).description(panel.says).unit(panel.unit).datasource(_SOURCE).span(span)
    for number, line in enumerate(panel.lines):
        name = chr(ord("A") + number)
        built.with_target(prometheus.Dataquery().expr(line.expression).legend_format(line.legend).ref_id(name))
    return built


def main(folder: Path) -> None:
    """Write the files of all dashboards."""
    for name in DASHBOARDS:
        (folder / f"{name}.json").write_text(build_dashboard(name), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
