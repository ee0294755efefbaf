"""tests/conftest.py: which process of pytest-xdist runs which modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from xdist.workermanage import WorkerController

from conftest import SPARKS, ModuleScheduling

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
