"""Results of data quality checks as HTML (Data Docs), one page for each table, rendered by Great Expectations.

Great Expectations' own pages load styles and scripts from eleven servers. These pages load nothing: each contains
Kiln's style, and a content security policy by which browsers load nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Final

from great_expectations.core import ExpectationSuiteValidationResult, ExpectationValidationResult
from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
from great_expectations.render.renderer.page_renderer import ValidationResultsPageRenderer
from great_expectations.render.view.view import DefaultJinjaPageView

from kiln.pipelines.quality.results import CheckResult
from kiln.schemas.printable import printable

_BY_DUCKDB: Final[tuple[str, dict[str, object]]] = ("unexpected_rows_expectation", {"unexpected_rows_query": "{batch}"})
"""Type and arguments of the expectation that the pages show for each check that DuckDB ran."""
_STYLE: Final = Path(__file__).with_suffix(".css")
_POLICY: Final = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
_FETCHES: Final = re.compile(r"<script\b.*?</script>|<link\b[^>]*>|<img\b[^>]*>", re.DOTALL | re.IGNORECASE)


def write_docs(results: Sequence[CheckResult], folder: Path) -> Path:
    """Write a page for each table, and `index.html`, into a folder. Return the path of `index.html`."""
    folder.mkdir(parents=True, exist_ok=True)
    links: list[str] = []
    for table, of_table in groupby(
        sorted(results, key=lambda result: result.check.table), key=lambda result: result.check.table
    ):
        table_results = list(of_table)
        failed = sum(not result.success for result in table_results)
        document = ValidationResultsPageRenderer().render(_build_suite_result(table, table_results))
        html = DefaultJinjaPageView().render(document)  # type: ignore[no-untyped-call]  # the library has no types here
        (folder / f"{table}.html").write_text(_make_self_contained(html), encoding="utf-8")
        total = len(table_results)
        summary = f"{failed} of {total} expectations are not met" if failed else f"all {total} expectations are met"
        links.append(f'<li><a href="{escape(table)}.html">{escape(table)}</a>: {summary}</li>')
    index = folder / "index.html"
    index.write_text(
        _make_self_contained(
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Kiln: data quality</title></head>'
            f"<body><h1>Data quality</h1><ul>{''.join(links)}</ul></body></html>"
        ),
        encoding="utf-8",
    )
    return index


def _make_self_contained(html: str) -> str:
    """Remove everything that a page would load or run, and insert Kiln's style."""
    style = f"{_POLICY}<style>{_STYLE.read_text(encoding='utf-8')}</style></head>"
    return _FETCHES.sub("", html).replace("</head>", style, 1)


def _build_suite_result(table: str, results: Sequence[CheckResult]) -> ExpectationSuiteValidationResult:
    met = sum(result.success for result in results)
    return ExpectationSuiteValidationResult(
        success=met == len(results),
        results=[_build_result(result) for result in results],
        suite_name=table,
        statistics={
            "evaluated_expectations": len(results),
            "successful_expectations": met,
            "unsuccessful_expectations": len(results) - met,
            "success_percent": 100 * met / len(results),
        },
        meta={"active_batch_definition": {"data_asset_name": table}},
    )


def _build_result(result: CheckResult) -> ExpectationValidationResult:
    check = result.check
    is_own = not check.sql and check.kind.rows
    kind, arguments = (check.expectation, dict(check.arguments)) if is_own else _BY_DUCKDB
    # The page inserts the text as HTML.
    faults = "" if result.success else escape(printable("; ".join(dict.fromkeys(result.words))))
    return ExpectationValidationResult(
        success=result.success,
        expectation_config=ExpectationConfiguration(
            type=kind,
            kwargs=arguments,
            description=f"{check.level}: {check.name}" + (f": {faults}. {result.hint}" if faults else ""),
        ),
        result={"observed_value": escape(printable(result.observed))},
        exception_info={"raised_exception": False, "exception_message": None, "exception_traceback": None},
    )
