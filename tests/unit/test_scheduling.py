"""tests/conftest.py: which process of pytest-xdist runs which modules, and what runs in none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from xdist.workermanage import WorkerController

from conftest import SPARKS, ModuleScheduling, pytest_collection_modifyitems
from kit import loopback

SESSIONS = [f"tests/spark/test_{name}.py" for name in ("commits", "read_rows")]
KILNS = [f"tests/kafka/test_{name}.py" for name in ("captures", "bad_inputs", "two_kilns", "breaker_live")]
OTHERS = [f"tests/network/test_{name}.py" for name in ("bounds", "conduct", "node", "discovery")]


class Process:
    """A worker that runs nothing by itself. `waiting`: indices of the tests that it was given."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.shutting_down = False
        self.gateway = SimpleNamespace(id="a process")

    def send_runtest_some(self, indices: list[int]) -> None:
        self.waiting += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_at_most_two_processes_have_spark_and_one_has_all_sessions() -> None:
    collection = [f"{module}::test_{n}" for module in (*OTHERS, *KILNS, *SESSIONS) for n in range(4)]
    options = SimpleNamespace(loadscopereorder=True)
    config = SimpleNamespace(getvalue=lambda name: ["popen"] * 3, option=options)
    scheduling = ModuleScheduling(cast(pytest.Config, config))
    processes = [Process() for _ in range(3)]
    nodes = [cast(WorkerController, process) for process in processes]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, collection)
    scheduling.schedule()
    ran: dict[str, set[int]] = {}
    turns = 0
    while any(process.waiting for process in processes):
        modules = [{collection[at].partition("::")[0] for at in process.waiting} for process in processes]
        with_spark = sum(bool(each & {*SESSIONS, *KILNS}) for each in modules)
        if not turns:
            assert with_spark == SPARKS, "Spark comes first"
        assert with_spark <= SPARKS
        number = turns % len(processes)
        turns += 1
        if processes[number].waiting:
            at = processes[number].waiting.pop(0)
            ran.setdefault(collection[at].partition("::")[0], set()).add(number)
            scheduling.mark_test_complete(nodes[number], at)
    assert ran.keys() == {*OTHERS, *KILNS, *SESSIONS}
    assert all(len(numbers) == 1 for numbers in ran.values())
    assert ran[SESSIONS[0]] == ran[SESSIONS[1]]


@pytest.mark.parametrize("may", [True, False])
def test_what_runs_without_a_network_runs_nowhere_else(may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "available", lambda: may)
    bridge, peers, demo = (f"{module}::test_that" for module in loopback.TESTS.values())
    runner = "tests/network/test_loopback_only.py::test_tests_need_no_other_network"
    names = [bridge, peers, f"{peers}_npm", demo, f"{runner}[bep50]", f"{runner}[libtorrent]"]
    items = [cast(pytest.Item, SimpleNamespace(nodeid=each, name=each.rpartition(":")[2])) for each in names]
    gone: list[pytest.Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    pytest_collection_modifyitems(cast(pytest.Config, SimpleNamespace(hook=hook)), items)
    assert [item.nodeid for item in gone] == ([bridge, peers] if may else [])
    assert [item.nodeid for item in items] == [each for each in names if each not in (bridge, peers) or not may]
