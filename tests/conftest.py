"""Fixtures that all tests share, and the rule that no test may skip although what it needs is there."""

from __future__ import annotations

import gc
import os
import random
import shlex
import shutil
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from random import SystemRandom
from typing import Final, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from trio._core._run import _r as order_of_tasks
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from kiln.conf.settings.model import Kafka
from kiln.deploy.stack import jars
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.java import JavaError, find_java
from kiln.pipelines.native.library import find_engine, find_rustc
from kit import jdbc_driver, loopback, validators
from kit.foreign_peer import CACHE
from kit.stalls import stalls

# jsonschema would build a parser of each rule of RFC 3987 at its import, in 3 s, for formats that no test checks.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # as the import system marks it

# A process of pytest-xdist has a main module without a file. pyspark.sql.connect takes that for a doctest, and exits.
if not hasattr(sys.modules["__main__"], "__file__"):
    sys.modules["__main__"].__file__ = __file__

# A script that runs the tests in the background makes them ignore SIGINT, and nohup SIGHUP, and every program that they
# start, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).resolve().parents[1]
VECTORS = ROOT / "tests" / "vectors"
"""Captures and vectors, with their origin in `README.md` there."""
SHARED = ROOT.parent / "shared"
"""Files of third parties, which are not part of the repository."""

# What `make tools` fetched, after the user's own programs.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(CACHE / "bin")])

# ---------------------------------------------------------------- chance

# A change must not be refused for what it did not do: in the gate, a property test draws the same examples every time.
# `make fuzz` draws new examples, and keeps those that fail. Slowness is no fault, as JVMs may run beside the tests.
settings.register_profile(
    "gate",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile(
    "fuzz",
    derandomize=False,
    database=DirectoryBasedExampleDatabase(ROOT / ".fuzz"),
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("gate")


def _profile() -> str:
    return settings.get_current_profile_name()


def pytest_sessionstart() -> None:
    # No test loses power, and a core would stand still while files are synced.
    pytest.MonkeyPatch().setattr(os, "fsync", lambda file: None)
    if _profile() == "gate":
        # Hypothesis draws constants of all modules that are loaded. The examples of a test would change with a change
        # of any module, and a test alone would have other examples than the same test in a run of all tests.
        none = Constants()
        pytest.MonkeyPatch().setattr(providers, "_get_local_constants", lambda: none)


SPARKS: Final = 2
"""processes that may run Spark at the same time: with more, Python workers may wait too long for a core to start on"""


class ModuleScheduling(LoadScopeScheduling):
    """Runs the tests of a module in one process, and those of all modules with a session in one too, as they share its
    JVM. Modules with Spark come first, in at most `SPARKS` processes at the same time."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return _SESSION if _opens_session(module) else module

    def _assign_work_unit(self, node: WorkerController) -> None:
        others = (work for other, work in self.assigned_work.items() if other is not node)
        busy = sum(
            any(_starts_spark(scope) and self._pending_of({scope: unit}) for scope, unit in work.items())
            for work in others
        )
        # The longest module, then those of the whole, which are few and long, come before those of packages: no process
        # is left alone with a long one at the end.
        units = sorted(
            self.workqueue,
            key=lambda scope: (not _starts_spark(scope), scope != _SESSION, scope != _LONGEST, scope.count("/")),
        )
        allowed = units if busy < SPARKS else [scope for scope in units if not _starts_spark(scope)] or units
        self.workqueue.move_to_end(allowed[0], last=False)
        super()._assign_work_unit(node)


_SESSION: Final = "modules that share a session"
_LONGEST: Final = "tests/faults/test_chaos.py"


@cache
def _opens_session(module: str) -> bool:
    return "kit.local_spark" in (ROOT / module).read_text()


@cache
def _starts_spark(scope: str) -> bool:
    return scope == _SESSION or "pytest.mark.spark" in (ROOT / scope).read_text()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ModuleScheduling:
    return ModuleScheduling(config, log)


def _is_slow_folder(path: Path) -> bool:
    return path.relative_to(ROOT / "tests").parts[0] not in ("unit", "fuzz")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore modules of which `-m` selects no test: otherwise each process would import all of them."""
    if collection_path.suffix != ".py":
        return None
    slow, text = _is_slow_folder(collection_path), collection_path.read_text()
    match config.option.markexpr:
        case "slow":
            return None if slow or "mark.slow" in text else True
        case "not slow":
            return None if not slow or "mark.main_path" in text else True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, and exclude all that is loaded by then from later collections, each of which
    would walk through thousands of tests and the modules that they import."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries complain at the end about what is never collected


def pytest_itemcollected(item: pytest.Item) -> None:
    if _is_slow_folder(item.path) and item.get_closest_marker("main_path") is None:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _profile() == "fuzz":
        random.shuffle(items)  # the time may be up before the last
    selected = {item.nodeid for item in items}
    again = [item for item in items if _runs_without_network(item, selected)]
    if again and loopback.available():
        config.hook.pytest_deselected(items=again)
        items[:] = [item for item in items if item not in again]


def _runs_without_network(item: pytest.Item, selected: set[str]) -> bool:
    """Report if a selected test of tests/network/test_loopback_only.py runs this test too."""
    runner = "tests/network/test_loopback_only.py::test_tests_need_no_other_network"
    module = item.nodeid.partition("::")[0]
    return loopback.INSTALLED not in item.name and any(
        module == tests and f"{runner}[{name}]" in selected for name, tests in loopback.TESTS.items()
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    seed = os.environ.get("TEST_STALLS")
    with stalls(f"{seed} {item.nodeid}") if seed else nullcontext():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    random.seed(item.nodeid)
    order_of_tasks.seed(item.nodeid)  # trio runs tasks that are ready in any order


# ---------------------------------------------------------------- skips


def _has_java() -> bool:
    try:
        find_java()
    except JavaError:
        return False
    return True


def _has_native_core() -> bool:
    return find_engine().is_native


def _has_program(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name) is not None


def _has_api_server() -> bool:
    from kit import api_server  # imports this module

    return api_server.built() and validators.HELM.exists()


class Requirement(NamedTuple):
    """A part that tests need and a machine may lack."""

    name: str
    is_present: Callable[[], bool]
    remedy: str


# A skip is expected when its reason has one of these words in it and the part is truly absent.
REQUIREMENTS: Final = {
    "`shared`": Requirement(
        "a folder `shared` next to the checkout", SHARED.is_dir, "it has files of third parties, see CONTRIBUTING.md"
    ),
    "Java": Requirement("Java", _has_java, "run `make setup`"),
    "native core": Requirement("the native core", _has_native_core, "run `make native`"),
    "rustc": Requirement("rustc", lambda: find_rustc() is not None, "run `make native`"),
    "cargo": Requirement("cargo", _has_program("cargo"), "install Rust"),
    "namespace": Requirement("a namespace", loopback.available, "run as root, or allow user namespaces"),
    "go toolchain": Requirement("go", _has_program("go"), "install Go"),
    "`ipfs` program": Requirement("Kubo", _has_program("ipfs"), "put `ipfs` on the PATH, or set KILN_TEST_KUBO"),
    "`chromium` browser": Requirement("chromium", _has_program("chromium"), "run `make tools`"),
    "`prometheus` program": Requirement("prometheus", _has_program("prometheus"), "run `make tools`"),
    "promtool": Requirement("promtool", _has_program("promtool"), "run `make tools`"),
    "manifests: helm": Requirement("helm", validators.HELM.exists, "run `make tools`"),
    "manifests: kubeconform": Requirement("kubeconform", validators.SCHEMAS.is_dir, "run `make tools`"),
    "manifests: compose-go": Requirement("compose-go", validators.COMPOSE.exists, "run `make tools`"),
    "JDBC driver": Requirement("DuckDB's JDBC driver", jdbc_driver.is_fetched, "run `make tools`"),
    "API server": Requirement("an API server", _has_api_server, "run `make tools ARGS=api-server`"),
    **{
        name: Requirement(name, partial(os.environ.__contains__, name), f"set {name}, see CONTRIBUTING.md")
        for name in ("KILN_TEST_SPARK_TLS", "KILN_TEST_CLUSTER")
    },
}


def _find_absent(reason: str) -> Requirement | None:
    """Find the absent part that is the reason for a skip."""
    named = (part for word, part in REQUIREMENTS.items() if word.lower() in reason.lower())
    return next((part for part in named if not part.is_present()), None)


def summarize_skips(reasons: Iterable[str]) -> list[str]:
    """Count skips by cause: a line for each cause, with its remedy."""
    causes = Counter[str]()
    for reason in reasons:
        part = _find_absent(reason)
        causes[f"without {part.name}: {part.remedy}" if part else reason] += 1
    return [f"{count:4} skipped: {cause}" for cause, count in causes.most_common()]


def _read_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


_unexpected: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-unexpected-skips",
        action="store_true",
        help="fail when a test skips although what it needs is there",
    )


def pytest_configure(config: pytest.Config) -> None:
    # kafka-python reads its own files so, a hundred times
    config.addinivalue_line("filterwarnings", "ignore:(read|open)_text is deprecated:DeprecationWarning")


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    # an xfail is reported as skipped, too
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = _read_reason(report)
        if _find_absent(reason) is None:
            _unexpected.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--no-unexpected-skips") and _unexpected and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _profile() == "fuzz":
        for report in terminalreporter.getreports("failed"):
            # Hypothesis begins with the examples in .fuzz
            command = ["pytest", "--hypothesis-profile=fuzz", report.nodeid]
            seed = f"PYTHONHASHSEED={os.environ['PYTHONHASHSEED']} " if "PYTHONHASHSEED" in os.environ else ""
            terminalreporter.line(f"reproduce: {seed}.venv/bin/python -m {shlex.join(command)}")
    if skipped := terminalreporter.getreports("skipped"):
        terminalreporter.section("skipped, by cause")
        for line in summarize_skips(map(_read_reason, skipped)):
            terminalreporter.line(line)
    if config.getoption("--no-unexpected-skips") and _unexpected:
        terminalreporter.section("skipped although what they need is there: this run fails", red=True)
        for line in _unexpected:
            terminalreporter.line(line)


# ---------------------------------------------------------------- places


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the checkout, with files of third parties; skips where there is none."""
    if not SHARED.is_dir():
        pytest.skip("no folder `shared` beside the checkout")
    return SHARED


# ---------------------------------------------------------------- the broker


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on, by TCP or UDP. Linux seldom gives a connection one of these ports, so
    they stay free while other tests dial. The default ports of Kiln are not among them."""
    first_dialled_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    last = min(max(first_dialled_from, 20_000), Kafka().embedded_port)
    found: list[int] = []
    while len(found) < count:
        port = SystemRandom().randrange(10_000, last)
        if port not in found and _is_free(port):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        try:
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.fixture
def free_port() -> int:
    """A port that nothing listens on."""
    return free_ports(1)[0]


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that another program listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture(scope="session")
def broker_classpath() -> list[Path]:
    """Jars of the embedded broker; skips without Java, fails where `make setup` has not fetched them."""
    try:
        find_java()
    except JavaError as error:
        pytest.skip(f"no Java: {error}")
    try:
        return jars.list_jars("broker")
    except jars.JarsError as error:
        pytest.fail(str(error))


@pytest.fixture
def new_broker(broker_classpath: list[Path]) -> Iterator[Callable[..., EmbeddedBroker]]:
    """`new_broker(state, **options)`: a broker not yet started, on free ports; ended with the test."""
    made: list[EmbeddedBroker] = []

    def make(state: Path) -> EmbeddedBroker:
        port, controller_port = free_ports(2)
        made.append(EmbeddedBroker(state, port, controller_port, broker_classpath, heap="256m"))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture(scope="session")
def broker(broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """One running broker for the whole run: `broker.address`. Take `prefix` for topics of the test's own."""
    port, controller_port = free_ports(2)
    with EmbeddedBroker(tmp_path_factory.mktemp("broker"), port, controller_port, broker_classpath) as running:
        yield running


@pytest.fixture
def prefix() -> str:
    """Put before topic names, so that tests on one broker do not meet."""
    return f"t{random.getrandbits(48):012x}."
