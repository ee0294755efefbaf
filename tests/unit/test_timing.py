"""No outcome of a test depends on the speed of the machine: what still compares a time with a constant is listed here.

A cost is a number of steps or a ratio within one process (`kit.cpu_time`), an order is asserted by events, and a
time-out is a guard against a hang, of a minute or more. `TEST_SPEED=5 make test` runs with a CPU clock on which
the machine is five times as fast, and 0.2 five times as slow. `TEST_STALLS=7 make test` stops threads at random calls
(`kit.stalls`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parents[1]
HANG_GUARD: Final = 60  # s

CLOCKS: Final = frozenset(
    {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time", "time", "time_ns"}
    | {"current_time"}
)
GUARDS: Final = {"awaited": 1, "fail_after": 0, "until": 1, "until_heard": 2, "wait": 0, "wait_until": 2, "join": 0}
"""calls that wait, and the position of their time-out; each may name it `timeout`, `seconds` or `patience` instead"""

COMPARED: Final = {
    # A loop that lasts for a while or until a deadline; what it finds decides, not when.
    "chaos/__main__.py: all": "make chaos ends after the seconds that it was given",
    "chaos/faults.py: _most_open": "descriptors are sampled for a while",
    "chaos/faults.py: places_gone": "hang guard",
    "fuzz/__main__.py: __call__": "make fuzz writes its progress each second",
    "fuzz/__main__.py: fuzz_here": "make fuzz ends after the seconds that it was given",
    "hostile/kubos.py: _is_done": "make hostile waits until nothing has come for a while",
    "hostile/kubos.py: _publish": "make hostile ends after the seconds that it was given",
    "hostile/whole.py: whole": "make hostile measures for as long after an attack as before",
    "hostile/soak.py: _publish_from": "make hostile ends after the seconds that it was given",
    "kafka/test_broker.py: read": "hang guard",
    "kafka/test_live_run.py: kiln": "a run that is ready is stopped after its length",
    "kafka/test_transition_live.py: receipts": "hang guard",
    "kit/awaiting.py: awaited": "the hang guard itself",
    "kit/torrent_nodes.py: _alert": "hang guard",
    # Two moments in their order, however far apart.
    "chaos/whole_kiln.py: status": "a status of a bridge that has ended is not taken for one of the next",
    "kafka/test_bridges.py: take_over": "batches after a kill, by the moment of the kill",
    "kafka/test_broker.py: test_records_of_7_mib_get_the_brokers_stamp": "the broker's stamp is between two moments",
    "kafka/test_upgrade.py: run_bridge": "a status after the start",
    "kafka/test_upgrade.py: upgraded": "the machine's clock is not behind a kept log",
    "store/test_location.py: test_files_and_folders_are_told_apart_and_nothing_deeper_is_told": "a minute, either way",
    "kit/steady_sender.py: _say": "a schedule of messages",
    # A pace that Kiln keeps: not faster than so much per second, and as much slower as the machine likes.
    "network/test_bitswap_node.py: test_a_peer_that_pulls_much_gets_the_budget_of_bytes_and_an_honest_one_its_blocks_"
    "meanwhile": "bytes/s",
    "network/test_bounds.py: test_a_peer_over_its_budget_is_read_slowly_and_nothing_of_it_is_lost": "bytes/s",
    "network/test_bounds.py: test_to_a_peer_over_its_budget_is_sent_slowly_and_what_is_not_sent_is_counted": "bytes/s",
    "network/test_conduct.py: test_a_peer_that_prunes_us_is_left_alone_for_the_time_it_says": "back-off after PRUNE",
    "network/test_demo_network.py: test_the_rate_is_kept_and_shared": "messages/s",
    "kafka/test_bridges.py: test_a_rejoin_whose_result_is_lost_costs_no_core_and_comes_again": "polls/s",
}
"""comparisons of a time with a constant, as `file: function`, and why each is none of a machine's speed"""

SHORT: Final = {
    "hostile/attack.py": "a stranger gives up, and tries again",
    "kafka/test_spool_broker.py": "pace of the frames",
    "network/test_node_foreign.py": "pace of a knock that is repeated",
    "unit/bridge/test_session_thread.py": "a thread that is well reports no error meanwhile",
    "unit/bridge/test_kubo_client.py": "pace of the drops of a slow server",
    "unit/bridge/test_spool.py": "any amount of progress is right",
    "unit/conf/test_stop_signal.py": "a wait that ends without a signal",
    "unit/kit/test_awaiting.py": "the hang guard itself",
}
"""files with waits of less than a minute that guard nothing, and their reasons"""


@cache
def texts() -> dict[str, str]:
    return {str(path.relative_to(TESTS)): path.read_text() for path in sorted(TESTS.rglob("*.py"))}


def reads_clock(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time" | "trio"), attr=name)):
            return name in CLOCKS
    return False


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield functions that are in no other function: a closure uses the times of the function around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from functions(node)


def compares_time(function: ast.AST) -> bool:
    nodes = list(ast.walk(function))
    times = {
        name.id
        for node in nodes
        if isinstance(node, ast.Assign) and any(map(reads_clock, ast.walk(node.value)))
        for target in node.targets
        for name in (target.elts if isinstance(target, ast.Tuple) else (target,))
        if isinstance(name, ast.Name)
    }
    return any(
        reads_clock(part) or (isinstance(part, ast.Name) and part.id in times)
        for node in nodes
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops)
        for part in ast.walk(node)
    )


def short_guards(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in GUARDS:
                named = [word.value for word in node.keywords if word.arg in ("timeout", "seconds", "patience")]
                for given in named or node.args[GUARDS[name] : GUARDS[name] + 1]:
                    number = given.value if isinstance(given, ast.Constant) else None
                    if isinstance(number, int | float) and 0 < number < HANG_GUARD:
                        yield ast.unparse(node)


def test_what_compares_a_time_with_a_constant_is_listed() -> None:
    found = {
        f"{path}: {function.name}"
        for path, text in texts().items()
        if any(f"time.{name}()" in text or f"trio.{name}()" in text for name in CLOCKS)
        for function in functions(ast.parse(text))
        if compares_time(function)
    }
    assert found == COMPARED.keys()


def test_a_guard_against_a_hang_lasts_a_minute_or_more() -> None:
    waits = re.compile("|".join(rf"\b{name}\(" for name in GUARDS))
    found = {path: list(short_guards(ast.parse(text))) for path, text in texts().items() if waits.search(text)}
    assert {path: calls for path, calls in found.items() if calls and path not in SHORT} == {}
    assert [path for path in SHORT if not found.get(path)] == []


def test_a_comparison_of_times_is_found() -> None:
    tree = ast.parse("def f():\n    began = time.monotonic()\n    def g():\n        assert time.time() - began < 5\n")
    assert [compares_time(function) for function in functions(tree)] == [True]
    assert list(short_guards(ast.parse("gate.wait(5)\nwait_until(f, 'x')\nevent.wait(timeout=60)"))) == ["gate.wait(5)"]
