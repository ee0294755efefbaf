"""docs/METRICS.md: closed, against what the bridge's code counts and what its status can hold."""

from __future__ import annotations

import ast
import re
import types
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from kiln.bridge.fetcher import attempts, pending
from kiln.bridge.ipfs import blocks
from kiln.conf.process.bridge_status import BridgeStatus
from kiln.schemas.dht import krpc
from kiln.schemas.metrics import insert_tables
from kiln.schemas.wire import genesis, topic_table

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/METRICS.md").read_text(encoding="utf-8")
ROW = re.compile(r"\| `([^`]+)` \| (?:counter|gauge) \| [A-Za-z]+ \| [A-Z`].*\. \|")


def described() -> Iterator[str]:
    """The paths in the status whose numbers docs/METRICS.md describes, each with its kind, unit and sentence."""
    for section in PAGE.partition("\n## status.json\n")[2].split("\n### ")[1:]:
        path = re.search(r"^Path: `(.*)…`", section, re.MULTILINE)
        for line in section.splitlines():
            if line.startswith("| `"):
                row = ROW.fullmatch(line)
                assert row is not None, line
                yield f"{path[1] if path is not None else ''}{row[1]}"


PATHS = list(described())


def is_described(path: str) -> bool:
    return path in PATHS or f"{path.rpartition('.')[0]}.*" in PATHS


COUNTERS = "counters."
# which names count what, and where the counts stand in the status
PLACES = {
    "bridge/gossipsub": {"counters": COUNTERS, "_counters": COUNTERS},
    "bridge/libp2p": {"counters": COUNTERS, "_counters": COUNTERS},
    "bridge/fetcher": {"counts": "fetcher.counts."},
    "bridge/ipfs/bitswap": {"counters": COUNTERS},
    "bridge/bep50": {"dropped": "bep50.dropped.", "unsent": "bep50.unsent.", "_counts": "bep50."},
}
FETCH_REASONS = (
    *(*attempts.REASONS, *genesis.REASONS),
    *(blocks.TOO_LARGE, blocks.WRONG_HASH, blocks.WRONG_CID, blocks.CID_MALFORMED),
    *("cid_hash_unsupported", blocks.CODEC_UNSUPPORTED),
)
REFUSALS = {value.code for value in vars(krpc).values() if isinstance(value, krpc.KrpcRefusal)}
# a name that is made while the bridge runs comes out of a closed set
MADE = {
    "hashes.reason": topic_table.REASONS,
    "topic.reason": tuple(reason.replace(" ", "_") for reason in topic_table.INDEX_REASONS),
    "record.without": genesis.WITHOUT,
    "outcome": (),  # `_finish`, whose callers are looked at
    "failed.reason": FETCH_REASONS,
    "message.reason": krpc.REASONS,
    "f'refused_{error.refusal.code}'": tuple(f"refused_{code}" for code in sorted(REFUSALS)),
    "type(error).__name__": ("OSError",),
}


def counted(path: Path, places: dict[str, str]) -> Iterator[str]:
    """The paths in the status of what a file counts: `counters[NAME] += …` or `= …`, `counters.update(NAME=…)`,
    `_finish(…, NAME)`."""
    module = import_module(".".join(("kiln", *path.relative_to(ROOT).with_suffix("").parts)))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AugAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            for target in targets:
                if isinstance(target, ast.Subscript) and (name := last_name(target.value)) in places:
                    for counter in names(target.slice, module):
                        yield places[name] + counter
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
            if (name := last_name(node.func.value)) in places:
                for keyword in node.keywords:
                    yield f"{places[name]}{keyword.arg}"
        elif isinstance(node, ast.Call) and last_name(node.func) == "_finish" and "counts" in places:
            for counter in names(node.args[1], module):
                yield places["counts"] + counter


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def names(key: ast.expr, module: types.ModuleType) -> tuple[str, ...]:
    if isinstance(key, ast.Constant):
        return (str(key.value),)
    if isinstance(key, ast.IfExp):
        return (*names(key.body, module), *names(key.orelse, module))
    if isinstance(key, ast.Name) and isinstance(value := getattr(module, key.id, None), str):
        return (value,)
    text = ast.unparse(key).removesuffix(".replace(' ', '_')")
    assert text in MADE, f"{module.__name__} counts {text}: say in this test out of which closed set that name comes"
    return MADE[text]


FILES = [(path, places) for folder, places in PLACES.items() for path in sorted((ROOT / folder).glob("*.py"))]
COUNTED = {name for path, places in FILES for name in counted(path, places)}


def numbers(kind: object, path: str = "") -> Iterator[str]:
    """The paths of all numbers in a status struct; those of a dictionary end in `*`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (int, float):
        yield path
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        for field in msgspec.structs.fields(kind):
            yield from numbers(hints[field.name], f"{path}.{field.name}" if path else field.name)
    elif origin is dict:
        yield from numbers(arguments[1], f"{path}.*")
    elif origin is tuple:
        yield from numbers(arguments[0], f"{path}[]")
    elif origin in (types.UnionType, typing.Union):
        for each in arguments:
            yield from numbers(each, path)


NOT_METRICS = {"at", "pid"}
"""when, and which process"""


def test_every_counter_of_the_code_is_described() -> None:
    assert len(COUNTED) > 120
    assert {name for name in COUNTED if not is_described(name)} == set()


def test_every_number_of_the_status_is_described() -> None:
    found = set(numbers(BridgeStatus)) - NOT_METRICS
    dictionaries = {path for path in found if path.endswith(".*")}
    assert {path for path in found - dictionaries if not is_described(path)} == set()
    for path in dictionaries:
        assert any(name.startswith(path.removesuffix("*")) for name in PATHS), path


def test_nothing_is_described_twice_or_not_counted() -> None:
    counted = {*numbers(BridgeStatus), *COUNTED, "bep50.unsent.*"}
    assert set(PATHS) - counted == set()
    assert len(PATHS) == len(set(PATHS))


def test_a_counter_without_a_sentence_would_be_noticed() -> None:
    assert not is_described("counters.made_up")
    assert is_described("mesh./ceramic/mainnet")
    assert is_described("bep50.unsent.PermissionError")
    with pytest.raises(AssertionError, match="closed set"):
        names(ast.parse("some.thing", mode="eval").body, pending)


def test_the_tables_of_families_are_made_from_the_code() -> None:
    assert insert_tables(PAGE) == PAGE, "regenerate it: make pages"
