"""Reader and validation of the data quality checks: YAML suites check columns and rows, SQL files check whole tables.

A check in SQL is a file `TABLE.NAME.sql` or `TABLE.NAME.SUBJECT.sql`. It has comments, some of them settings
(`-- level: error`), and a SELECT in DuckDB's SQL that returns a row for each fault. Errors name the file and the line.

`python -m kiln.pipelines.quality.suites docs/quality.md` writes the lists in that page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Final, Literal, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from kiln.conf.process.errors import SettingsError
from kiln.conf.settings.durations import parse_duration
from kiln.conf.settings.keys import suggest_key
from kiln.schemas.delta.tables import TABLES

Kind = Literal["column", "number", "switch", "text", "list"]
"""Type of an argument of an expectation. `column` is the name of a column of the suite's table."""


@dataclass(frozen=True)
class Expectation:
    """An expectation that suites may use: one of Great Expectations' own, or one of Kiln's.

    A test compares the arguments with the classes of Great Expectations, which this module does not import, because
    that takes seconds.
    """

    name: str
    arguments: Mapping[str, Kind]
    """type of each argument by name"""
    required: frozenset[str] = field(default_factory=frozenset)
    """names of the arguments that a suite must give"""
    description: str = ""
    rows: bool = True
    """true if Great Expectations checks the new rows; false if DuckDB does"""
    is_stock: bool = True
    """true if the expectation is Great Expectations' own"""

    @property
    def by_value(self) -> bool:
        """True if the expectation is about single values of one column, so that checking distinct values is enough."""
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
    _define_own(
        "expect_column_values_to_be_cids",
        "Each value of the column is a CID in its usual form.",
        _MAP,
        "column",
        rows=True,
    ),
    _define_own(
        "expect_column_values_to_be_stream_ids",
        "Each value of the column is a StreamID in its usual form.",
        _MAP,
        "column",
        rows=True,
    ),
    _define_own(
        "expect_column_values_to_be_peer_ids",
        "Each value of the column is a peer id or a DHT node id, or is empty, as in rows from files without peer ids.",
        _MAP,
        "column",
        rows=True,
    ),
    _define_own(
        "expect_column_pair_cid_to_be_of_block",
        "`column_A` is the CID of the block in `column_B`: the hash in the CID matches the bytes of the block.",
        _PAIR,
        "column_A",
        "column_B",
        rows=True,
    ),
    _define_own(
        "expect_rows_to_hold",
        "The condition `rule`, in DuckDB's SQL over the columns of the table, is true or null for every row.",
        {"rule": "text"},
        "rule",
    ),
    _define_own("expect_table_to_have_its_columns", "The table has the columns and types of docs/TABLES.md.", {}),
)

EXPECTATIONS: Final[Mapping[str, Expectation]] = {expectation.name: expectation for expectation in (*_STOCK, *_KILN)}
"""Expectations by name."""


FOLDER: Final = Path(__file__).resolve().parents[2] / "conf" / "quality"
"""Folder with Kiln's own suites."""

Level = Literal["warn", "error"]
LEVELS: Final = ("warn", "error")
_SUITE_KEYS: Final = ("table", "owner", "expectations")
_EXPECTATION_KEYS: Final = ("expect", "level", "owner", "hint")

_HEADER: Final = ("grain", "level", "owner", "hint", "expires", "after", "history", "show")
"""Names of the settings in the comments of a check in SQL."""

_TABLES: Final = tuple(name for name in TABLES if name != "quality_results")


@dataclass(frozen=True)
class SuiteCheck:
    """A data quality check: an expectation with its arguments, for a table."""

    table: str
    expectation: str
    arguments: Mapping[str, object]
    level: Level
    owner: str
    hint: str
    location: str
    """place of the definition, as FILE:LINE; FILE for a check in SQL"""
    sql: str = ""
    """a SELECT of faults from the tables and from `new_TABLE`, the new rows of each; empty for a check in YAML"""
    grain: str = ""
    """meaning of a row that `sql` returns, such as "a batch without a receipt\""""
    expires: tuple[str, ...] = ()
    """tables from which `lake.retention` may have removed a row that the check would report as missing"""
    after: timedelta = timedelta()
    """minimum age of the commits that the check covers, because rows that belong to them may arrive that much later"""
    history: timedelta = timedelta(days=1)
    """maximum age of the rows with which `kiln run` first compares new rows"""
    show: str = ""
    """SQL that shows a fault. Names of columns in braces stand for their values in the fault"""

    @property
    def kind(self) -> Expectation:
        """Definition of the expectation that a check in YAML uses."""
        return EXPECTATIONS[self.expectation]

    @property
    def id(self) -> str:
        """Identity of the check as 12 hex digits: a hash of table, expectation, arguments and SQL."""
        identity = json.dumps([self.table, self.expectation, self.arguments, self.sql], sort_keys=True, default=str)
        return blake2b(identity.encode(), digest_size=6).hexdigest()

    @property
    def tables(self) -> frozenset[str]:
        """Names of the tables that the check reads."""
        return frozenset({self.table, *find_tables(self.sql)})

    @property
    def new_tables(self) -> frozenset[str]:
        """Names of the tables whose new rows the check reads."""
        return frozenset(name for name in TABLES if re.search(rf"\bnew_{name}\b", self.sql))

    @property
    def name(self) -> str:
        """Name of the check: the expectation and what it is about, such as `expect_column_values_to_be_cids(tip)`."""
        values = [
            self.arguments[name]
            for name in ("subject", "column", "column_A", "column_B", "rule")
            if name in self.arguments
        ]
        return f"{self.expectation}({', '.join(map(str, values))})" if values else self.expectation


def find_tables(sql: str) -> frozenset[str]:
    """Find the names of the tables that a check in SQL reads. `new_TABLE` means TABLE; `windows` means `updates`."""
    words = set(re.findall(r"\w+", sql))
    return frozenset(
        name for name in TABLES if words & {name, f"new_{name}"} or (name == "updates" and "windows" in words)
    )


def read_all_suites(user_paths: Iterable[str]) -> list[SuiteCheck]:
    """Read Kiln's own checks and those in the user's files and folders. Errors are those of `read_suites`."""
    return read_suites([FOLDER, *map(Path, user_paths)])


def read_suites(paths: Iterable[Path]) -> list[SuiteCheck]:
    """Read the checks in files, or in the `*.yaml` and `*.sql` files of folders.

    Raises:
        SettingsError: A check is invalid. The error names all invalid checks.
    """
    checks: list[SuiteCheck] = []
    faults: list[str] = []
    seen: dict[str, str] = {}
    for file in _list_files(paths, faults):
        for check in _read_sql(file) if file.suffix == ".sql" else _read_suite(file):
            if isinstance(check, str):
                faults.append(check)
            elif check.id in seen:
                faults.append(f"{check.location}: {check.name} is also in {seen[check.id]}: remove one of them")
            else:
                seen[check.id] = check.location
                checks.append(check)
    if faults:
        raise SettingsError(faults)
    return checks


def _list_files(paths: Iterable[Path], faults: list[str]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted((*path.glob("*.yaml"), *path.glob("*.sql")))
        elif path.is_file():
            yield path
        else:
            faults.append(f"{path}: there is no such file or folder. Correct quality.suites")


def _read_sql(file: Path) -> Iterator[SuiteCheck | str]:
    """Read the check in an SQL file. Yield it or, if it is invalid, descriptions of its faults."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        yield f"{file}: cannot be read: {error}"
        return
    table, _, name = file.stem.partition(".")
    name, _, subject = name.partition(".")
    lines = [line[2:].strip() for line in text.splitlines() if line.startswith("--")]
    header = dict(line.split(": ", 1) for line in lines if line.split(":")[0] in _HEADER and ": " in line)
    sql = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--")).strip().rstrip(";")
    faults = [f"the comment `-- {key}: …` is missing" for key in ("grain", "level", "hint") if not header.get(key)]
    if table not in _TABLES:
        faults.append(f"table {table}: there is no such table{suggest_key(table, _TABLES)}")
    if not name:
        faults.append("the file's name must be TABLE.NAME.sql or TABLE.NAME.SUBJECT.sql")
    if header.get("level", "error") not in LEVELS:
        faults.append(f"level {header['level']}: expected warn or error")
    expires = tuple(table.strip() for table in header.get("expires", "").split(",") if table.strip())
    faults += [
        f"expires {table}: there is no such table{suggest_key(table, _TABLES)}"
        for table in expires
        if table not in _TABLES
    ]
    lengths = dict[str, timedelta]()
    for key in ("after", "history"):
        try:
            lengths |= {key: parse_duration(header[key])} if key in header else {}
        except ValueError as error:
            faults.append(f"{key} {header[key]}: expected {error}")
    faults += _find_sql_faults(sql)
    yield from (f"{file}: {fault}" for fault in faults)
    if not faults:
        yield SuiteCheck(
            table,
            name,
            {"subject": subject} if subject else {},
            cast(Level, header["level"]),
            header.get("owner", ""),
            header["hint"],
            str(file),
            sql,
            header["grain"],
            expires,
            show=header.get("show", ""),
            **lengths,
        )


def _find_sql_faults(sql: str) -> Iterator[str]:
    """Parse the SQL of a check without running it. Yield a description if it is invalid."""
    import duckdb

    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        yield str(error).splitlines()[0]
        return
    if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
        yield "expected exactly one SELECT"


def _read_suite(file: Path) -> Iterator[SuiteCheck | str]:
    """Read a YAML suite. Yield its checks and, for invalid parts, descriptions of the faults with their lines."""
    try:
        suite = YAML().load(file.read_bytes().decode("utf-8-sig"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        yield f"{file}:{mark.line + 1 if mark else 1}: {error.problem or error.context}"
        return
    except OSError as error:
        yield f"{file}: cannot be read: {error.strerror}"
        return
    except RecursionError:
        yield f"{file}: the YAML is nested too deeply"
        return
    except (ValueError, YAMLError) as error:  # not UTF-8, or characters or numbers that YAML does not allow
        yield f"{file}: not YAML: {error}"
        return
    if not isinstance(suite, CommentedMap):
        yield f"{file}:1: expected a mapping with table and expectations"
        return
    suite_faults = [*_find_unknown_keys(file, suite, _SUITE_KEYS, "key of a suite")]
    table = suite.get("table")
    if table not in _TABLES:
        suite_faults.append(
            f"{file}:{_get_line(suite, 'table')}: table {table}: there is no such table"
            f"{suggest_key(str(table), _TABLES)}"
        )
    expectations = suite.get("expectations")
    if not isinstance(expectations, CommentedSeq) or not expectations:
        suite_faults.append(f"{file}:{_get_line(suite, 'expectations')}: expectations: expected a list of expectations")
    if suite_faults:
        yield from suite_faults
        return
    for number, item in enumerate(expectations):
        line = expectations.lc.item(number)[0] + 1
        if not isinstance(item, CommentedMap):
            yield f"{file}:{line}: expected a mapping with expect, level and hint"
            continue
        faults = list(_find_faults(file, line, str(table), suite, item))
        yield from faults
        if not faults:
            arguments = {str(key): _to_plain(value) for key, value in item.items() if key not in _EXPECTATION_KEYS}
            yield SuiteCheck(
                str(table),
                str(item["expect"]),
                arguments,
                cast(Level, item["level"]),
                str(item.get("owner", suite.get("owner", ""))),
                str(item["hint"]),
                f"{file}:{line}",
            )


def _find_faults(file: Path, line: int, table: str, suite: CommentedMap, item: CommentedMap) -> Iterator[str]:
    name = item.get("expect")
    kind = EXPECTATIONS.get(str(name))
    if kind is None:
        location = f"{file}:{_get_line(item, 'expect', line)}"
        yield f"{location}: {name}: no such expectation{suggest_key(str(name), EXPECTATIONS)}"
        return
    if item.get("level") not in LEVELS:
        yield f"{file}:{_get_line(item, 'level', line)}: level {item.get('level')}: expected warn or error"
    for required in ("hint",) if "owner" in suite or "owner" in item else ("hint", "owner"):
        if not isinstance(item.get(required), str):
            yield f"{file}:{_get_line(item, required, line)}: {name}: {required} is missing"
    yield from _find_unknown_keys(file, item, (*_EXPECTATION_KEYS, *kind.arguments), f"argument of {name}")
    for required in sorted(kind.required - item.keys()):
        yield f"{file}:{line}: {name}: {required} is missing"
    for argument, value in item.items():
        if argument in kind.arguments:
            location = f"{file}:{_get_line(item, argument, line)}: {argument}"
            for fault in _find_value_faults(kind.arguments[argument], _to_plain(value), table):
                yield f"{location}: {fault}"


def _find_value_faults(kind: Kind, value: object, table: str) -> Iterator[str]:
    columns = [column.name for column in TABLES[table].columns]
    match kind:
        case "column" if value not in columns:
            yield f"{value}: table {table} has no such column{suggest_key(str(value), columns)}"
        case "number" if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{value}: expected a number"
        case "switch" if not isinstance(value, bool):
            yield f"{value}: expected true or false"
        case "text" if not isinstance(value, str):
            yield f"{value}: expected text"
        case "list" if not isinstance(value, list):
            yield f"{value}: expected a list"
        case _:
            pass


def _find_unknown_keys(file: Path, mapping: CommentedMap, known: Sequence[str], description: str) -> Iterator[str]:
    for key in mapping:
        if key not in known:
            yield f"{file}:{_get_line(mapping, key)}: {key}: no such {description}{suggest_key(str(key), known)}"


def _get_line(mapping: CommentedMap, key: object, otherwise: int = 1) -> int:
    return int(mapping.lc.key(key)[0]) + 1 if key in mapping else otherwise


def _to_plain(value: object) -> object:
    """Convert a value from ruamel's classes, so that the id of a check does not depend on the style of the YAML."""
    if isinstance(value, CommentedSeq):
        return [_to_plain(item) for item in value]
    if isinstance(value, bool | int | float | str) or value is None:
        for plain in (bool, int, float, str):
            if isinstance(value, plain):
                return plain(value)
        return None
    return str(value)


_BEGIN: Final = "<!-- Made by `python -m kiln.pipelines.quality.suites docs/quality.md`: do not edit it here. -->"
_END: Final = "<!-- End of what is made. -->"


def render_lists() -> str:
    """Render the lists of expectations and checks as Markdown, for docs/quality.md."""
    lines = ["### Kiln's own expectations", "", "| expectation | arguments | description |", "| --- | --- | --- |"]
    for expectation in EXPECTATIONS.values():
        if not expectation.is_stock:
            arguments = ", ".join(
                f"`{name}`" if name in expectation.required else f"[`{name}`]" for name in expectation.arguments
            )
            lines.append(f"| `{expectation.name}` | {arguments or 'none'} | {_escape_cell(expectation.description)} |")
    stock = ", ".join(f"`{expectation.name}`" for expectation in EXPECTATIONS.values() if expectation.is_stock)
    lines += [
        "",
        "A suite may also use these expectations of Great Expectations, with their own arguments:",
    ]
    lines += ["", f"{stock}.", "", "### The checks", ""]
    lines += ["Their level is `error`, except where *warn* follows. Each file has the hints.", ""]
    lines += ["| table | owner | SQL over whole tables | expectations of the suite |", "| --- | --- | --- | --- |"]
    for table, group in groupby(
        sorted(read_suites([FOLDER]), key=lambda check: check.table), key=lambda check: check.table
    ):
        checks = list(group)
        tables = [_render_check(check) for check in checks if check.sql]
        columns = [_render_check(check) for check in checks if not check.sql]
        suite = f"[{table}.yaml](../conf/quality/{table}.yaml): {', '.join(columns)}"
        lines.append(f"| `{table}` | {checks[0].owner} | {', '.join(tables) or '–'} | {suite} |")
    return "\n".join([*lines, ""])


def _render_check(check: SuiteCheck) -> str:
    name = f"`{_escape_cell(check.name)}`"
    link = f"[{name}](../conf/quality/{Path(check.location).name})" if check.sql else name
    return link if check.level == "error" else f"{link} *warn*"


def insert_lists(page: str) -> str:
    """Replace the lists of expectations and checks in the text of docs/quality.md.

    Raises:
        ValueError: The page has no markers for the lists.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"docs/quality.md lacks the markers around its lists. Add two lines: {_BEGIN} and {_END}")
    return f"{before}{_BEGIN}\n\n{render_lists()}\n{_END}{after}"


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(insert_lists(target.read_text(encoding="utf-8")), encoding="utf-8")
