"""The law of imports, held by the code; the checker itself, on small made-up trees; the size and names of files.

docs/design/overview.md states the law. The test reads the table there, so the table and the test cannot disagree.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kit.import_law import LawError, breaches, circle, foreign_imports, imported_files, read_law

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("schemas", "conf", "bridge", "pipelines", "deploy", "bench")


def python_files(*folders: str) -> dict[str, str]:
    paths = (path for folder in folders for path in sorted((ROOT / folder).glob("**/*.py")))
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in paths
        if "node_modules" not in path.parts
    }


CODE = python_files(*ROOMS) | {"kiln/__init__.py": (ROOT / "kiln/__init__.py").read_text(encoding="utf-8")}
LAW = read_law((ROOT / "docs/design/overview.md").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- Kiln's own code


def test_the_code_keeps_the_law_of_imports() -> None:
    assert breaches(CODE, LAW) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(CODE) == []


def test_every_room_of_the_law_is_there() -> None:
    assert [room for room in (*LAW.rooms, *LAW.free) if not (ROOT / room).exists()] == []


def test_the_law_keeps_the_two_sides_apart_and_the_settings_at_the_entry_points() -> None:
    """Sentences beside the table, which the table must not contradict."""
    assert LAW.rooms["schemas"] == set()
    for room, allowed in LAW.rooms.items():
        side = room.split("/")[0]
        apart = {"bridge": "pipelines", "pipelines": "bridge"}.get(side, "nothing")
        assert not any(each.startswith(apart) for each in allowed), room
    entry_points = {room for room, allowed in LAW.rooms.items() if "conf/settings" in allowed}
    assert entry_points <= {
        "bridge/app",
        "pipelines/app",
        "pipelines/quality",
        *(room for room in LAW.rooms if room.startswith("deploy/")),
        "tests",
        "bench",
    }


def test_no_room_imports_a_room_below_its_own_row() -> None:
    order = list(LAW.rooms)
    product = [room for room in order if room not in ("tests", "bench")]
    assert [
        (room, other) for room in product for other in LAW.rooms[room] if order.index(other) > order.index(room)
    ] == []


@pytest.mark.parametrize("folder", ["schemas", "conf", "bridge", "pipelines/decode"])
def test_no_spark_outside_its_rooms(folder: str) -> None:
    files = python_files(folder)
    assert files
    found = {path for path, text in files.items() if foreign_imports(path, text) & {"pyspark", "delta", "py4j"}}
    assert found == set()


def test_no_file_is_too_long_to_read() -> None:
    files = {path: text.count("\n") for path, text in python_files(*ROOMS, "tests").items()}
    long = {path for path, lines in files.items() if lines > 900 and not path.endswith("_pb2.py")}
    assert long == set()


SAYS_NOTHING = (
    *("desk", "held", "tied", "again", "alone", "asking"),
    *("util", "utils", "helper", "helpers", "manager", "common", "misc"),
)


def test_a_module_is_named_after_what_it_holds() -> None:
    names = {part.removesuffix(".py") for path in python_files(*ROOMS, "tests") for part in path.split("/")}
    assert {name for name in names if re.sub("^test_", "", name) in SAYS_NOTHING} == set()


# ---------------------------------------------------------------- the checker

DOCUMENT = """
**The law of imports.** A room may import itself and the rooms in its row.
Every room but `schemas` may import `conf/process`; the table leaves it out. Words.

| room | holds | may import |
| --- | --- | --- |
| `schemas` | shapes | none |
| `bridge/kafka` | producers | `schemas` |
| `bridge/gossipsub` | the router | `schemas`, `bridge/kafka` |
| `bridge/app` | the entry point | `schemas`, all of `bridge` |
| `pipelines/app/launch.py` | a start | `schemas` |
| `pipelines/app/submit.py` | another | what `pipelines/app/launch.py` may, and `pipelines/app/launch.py` |
| `deploy` | the command | everything but `tests`, `bench` |
| `tests`, `bench` | tests | everything |

| another | table |
"""
GOOD = {
    "schemas/__init__.py": "",
    "schemas/kafka/topics.py": "import json",
    "conf/process/errors.py": "",
    "conf/process/state_folder.py": "from kiln.conf.process.errors import KilnError",
    "bridge/__init__.py": "",
    "bridge/kafka/producers.py": (
        "from kiln.schemas.kafka.topics import TOPICS\nfrom kiln.conf.process.errors import KilnError"
    ),
    "bridge/gossipsub/router.py": "from kiln.bridge.kafka import producers\nfrom . import wire",
    "bridge/gossipsub/wire.py": "import struct",
    "bridge/app/main.py": "def main():\n    from kiln.bridge.gossipsub.router import Router",
    "pipelines/app/launch.py": 'import kiln.schemas.kafka.topics\nimport_module(f"kiln.schemas.{name}")',
    "pipelines/app/submit.py": "import kiln.pipelines.app.launch",
    "deploy/cli.py": "from kiln.bridge.app.main import main\nfrom kiln.pipelines.app.submit import main",
}


def test_the_law_is_read_from_the_document() -> None:
    law = read_law(DOCUMENT)
    assert law.free == {"conf/process"}
    assert law.rooms["schemas"] == set()
    assert law.rooms["bridge/app"] == {"schemas", "bridge/kafka", "bridge/gossipsub"}
    assert law.rooms["pipelines/app/submit.py"] == {"schemas", "pipelines/app/launch.py"}
    assert law.rooms["deploy"] == set(law.rooms) - {"deploy", "tests", "bench"}
    assert law.rooms["bench"] == set(law.rooms) - {"bench"}


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ("all of `bridge`", "all of the `bridge`"),
        ("| `schemas`, `bridge/kafka` |", "| `schemas`, `bridge/kafak` |"),
        ("| none |", "| no other room |"),
        ("everything but `tests`, `bench`", "nearly everything"),
        ("what `pipelines/app/launch.py` may", "what `pipelines/lunch.py` may"),
        ("Every room but `schemas` may import", "All may import"),
        ("| room |", "| place |"),
    ],
)
def test_words_that_the_checker_does_not_understand_are_refused(words: str, others: str) -> None:
    assert words in DOCUMENT
    with pytest.raises(LawError):
        read_law(DOCUMENT.replace(words, others))


def test_a_lawful_tree_is_lawful() -> None:
    assert breaches(GOOD, read_law(DOCUMENT)) == []
    assert circle(GOOD) == []
    assert imported_files(GOOD)["bridge/gossipsub/router.py"] == {
        "bridge/kafka/producers.py": "kiln.bridge.kafka.producers",
        "bridge/gossipsub/wire.py": "kiln.bridge.gossipsub.wire",
    }


@pytest.mark.parametrize(
    ("path", "text", "says"),
    [
        (
            "pipelines/app/launch.py",
            "import kiln.bridge.gossipsub.router",
            "may not import kiln.bridge.gossipsub.router",
        ),
        (
            "pipelines/app/launch.py",
            "from kiln.bridge.gossipsub import router",
            "may not import kiln.bridge.gossipsub.router",
        ),
        (
            "pipelines/app/launch.py",
            "def f():\n    from kiln.bridge.gossipsub.router import Router",
            "may not import kiln.bridge",
        ),
        (
            "pipelines/app/launch.py",
            "if TYPE_CHECKING:\n    from kiln.bridge.gossipsub.router import R",
            "may not import kiln.bridge",
        ),
        (
            "pipelines/app/launch.py",
            'import_module("kiln.bridge.gossipsub.router")',
            "may not import kiln.bridge.gossipsub.router",
        ),
        (
            "pipelines/app/launch.py",
            "from kiln.pipelines.app.submit import main",
            "may not import kiln.pipelines.app.submit.main",
        ),
        ("bridge/gossipsub/wire.py", "from ..app import main", "may not import kiln.bridge.app.main"),
        ("bridge/kafka/producers.py", "import kiln.bridge", "may not import kiln.bridge"),
        ("conf/process/errors.py", "import kiln.schemas.kafka.topics", "may not import kiln.schemas.kafka.topics"),
        (
            "schemas/kafka/topics.py",
            "from kiln.bridge.kafka.producers import connect",
            "may not import kiln.bridge.kafka.producers",
        ),
        ("bridge/other/new.py", "import json", "stands in no room"),
        ("bridge/__init__.py", "import kiln.schemas.kafka.topics", "stands in no room"),
    ],
)
def test_a_breach_is_named(path: str, text: str, says: str) -> None:
    (said,) = breaches(GOOD | {path: text}, read_law(DOCUMENT))
    assert said.startswith(f"{path} {says}")


def test_a_name_that_is_computed_as_a_whole_is_refused() -> None:
    with pytest.raises(LawError, match=r"pipelines/app/launch.py:2: nobody can read"):
        breaches({"pipelines/app/launch.py": "\nimport_module(name)"}, read_law(DOCUMENT))


@pytest.mark.parametrize(
    "text",
    ["import a.two", "from a import two", "def f():\n    import a.two", "if TYPE_CHECKING:\n    from a.two import T"],
)
def test_a_circle_is_found_wherever_its_imports_stand(text: str) -> None:
    assert circle({"a/one.py": text, "a/two.py": "from a.three import x", "a/three.py": "from . import one"})[:-1]
    assert circle({"a/one.py": text, "a/two.py": "from a.three import x", "a/three.py": "import json"}) == []


def test_a_circle_is_told_in_order() -> None:
    found = circle({"a.py": "import b", "b.py": "import c", "c.py": "import a", "d.py": "import a"})
    assert found[0] == found[-1]
    assert "".join(path[0] for path in found) in ("abca", "bcab", "cabc")


def test_a_package_that_imports_its_importer_is_a_circle() -> None:
    package = {"p/__init__.py": "from p.inner import x", "p/inner.py": "import json"}
    assert circle({**package, "a.py": "from p.inner import x"}) == []
    assert set(circle({**package, "p/inner.py": "import a", "a.py": "import p.other", "p/other.py": ""})) == {
        "a.py",
        "p/__init__.py",
        "p/inner.py",
    }
