"""Options and settings of all tests."""

from __future__ import annotations

import gc
import logging
import multiprocessing.util
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import debian_programs
import pytest
import structlog
from hypothesis import settings
from localcluster import ClusterError, binaries

from dra_driver.base import threads
from tests.fakes.tables import IsGenerated, IsGolden, generated

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Simulated machines of all tests, also in processes that they start, are as unkind as real ones.
os.environ |= debian_programs.hostile()


def _not_in_a_test(part: binaries.Part, *_: object) -> None:
    """A build takes minutes, and each test would try again what failed."""
    raise ClusterError(f"{part.name} is not built; run: python3 hack/cluster/cluster.py fetch")


binaries._provide_part = _not_in_a_test

# Imports and collection create many objects and discard none; `pytest_collection_finish` enables it again.
gc.disable()

_MEMORY, _ENOUGH = Path("/dev/shm"), 1 << 30
_FETCHED = debian_programs.nvidia_programs()
_BRANCH = "NVIDIA's branch"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what the code makes now into golden files and tables of the manual; no other tests run",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps only the tests that write golden files when these are rewritten."""
    if config.getoption("--update-golden"):
        items[:] = [item for item in items if "update_golden" in getattr(item, "fixturenames", ())]


def pytest_collection_finish() -> None:
    """Thousands of collected tests live until the end, so the garbage collector need not examine them."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_xdist_auto_num_workers() -> int:
    """Six more than processors: most of the time tests wait for what a daemon, a disk or a kubelet does."""
    return len(os.sched_getaffinity(0)) + 6


def pytest_configure(config: pytest.Config) -> None:
    """Let programs of simulated machines find a python3 that starts at once: that of a version manager is a shell
    script, and takes several times as long. Workers inherit it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    programs = Path(tempfile.mkdtemp(prefix="python3-"))
    (programs / "python3").symlink_to(Path(sys.executable).resolve())
    os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    config.add_cleanup(lambda: shutil.rmtree(programs, ignore_errors=True))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests used NVIDIA's own programs; skipped tests say why others did not."""
    ran: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            ran.update(value for name, value in report.user_properties if name == _BRANCH)
    if ran:
        tests = ", ".join(f"{branch} {count}" for branch, count in sorted(ran.items()))
        terminalreporter.write_line(f"NVIDIA's own programs: {len(ran)} branches, tests with each: {tests}")


def _branch_of(suite: str) -> str:
    return _FETCHED[suite].branch if suite in _FETCHED else suite


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs NVIDIA's own programs from one place, so that all of it is one line of the summary."""
    wanted = {"nvidia", "newest_nvidia"} & set(getattr(item, "fixturenames", ()))
    if not wanted:
        return
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("NVIDIA's own programs are tried without the kernel driver that is loaded here")
    if not _FETCHED or ("nvidia" in wanted and item.callspec.params["nvidia"] not in _FETCHED):
        pytest.skip(
            "NVIDIA's own programs are not there (Debian only); python3 hack/debian_programs.py says why"
        )


@pytest.fixture(params=debian_programs.SUITES, ids=_branch_of)
def nvidia(request: pytest.FixtureRequest) -> debian_programs.Programs:
    """NVIDIA's own programs and libraries as a driver root, of each branch that Debian has, and no kernel driver."""
    return _counted(request, _FETCHED[request.param])


@pytest.fixture
def newest_nvidia(request: pytest.FixtureRequest) -> debian_programs.Programs:
    """The same of the newest branch only, for tests to which the branch does not matter."""
    return _counted(request, max(_FETCHED.values(), key=lambda one: int(one.branch[1:])))


def _counted(request: pytest.FixtureRequest, programs: debian_programs.Programs) -> debian_programs.Programs:
    request.node.user_properties.append((_BRANCH, programs.branch))
    return programs


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Restores the log setup, which is global: otherwise a command called in a test affects the events of
    later tests.
    """
    root = logging.getLogger()
    handlers, level, logs = list(root.handlers), root.level, structlog.get_config()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**logs)


@pytest.fixture
def threads_that_start(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Limits how many threads with this name prefix can start from now on, as at a limit of processes."""
    start, guard = threading.Thread.start, threading.Lock()

    def limit(name: str, count: int) -> None:
        left = [None] * count

        def started(thread: threading.Thread) -> None:
            if thread.name.startswith(name):
                with guard:
                    if not left:
                        raise RuntimeError("can't start new thread")
                    left.pop()
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", started)
        monkeypatch.setattr(threads, "_spare", [])
        monkeypatch.setattr(threads, "_MAX_SPARE", 0)

    return limit


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def _memory_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in memory if there is room: on a disk, these tests spend most of their time creating files.

    Not for tests of MPS, whose daemons have their own /dev/shm.
    """
    if not os.access(_MEMORY, os.W_OK | os.X_OK) or shutil.disk_usage(_MEMORY).free < _ENOUGH:
        yield tmp_path_factory.mktemp("memory")
        return
    made = Path(tempfile.mkdtemp(prefix="gpu-dra-", dir=_MEMORY))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _temporary_directories(_memory_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands that run in this process have their temporary directories in memory, too."""
    # These stay on the disk, and last longer.
    tmp_path_factory.getbasetemp()
    multiprocessing.util.get_temp_dir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(_memory_root))
        yield


@pytest.fixture(scope="session")
def make_memory_path(_memory_root: Path) -> Callable[[], Path]:
    """Create directories that last as long as the session."""
    return lambda: Path(tempfile.mkdtemp(dir=_memory_root))


@pytest.fixture
def memory_path(make_memory_path: Callable[[], Path]) -> Iterator[Path]:
    """A fresh directory for one test."""
    made = make_memory_path()
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """In memory as well: `tests.fakes.powerloss` simulates power loss, not this machine's disk."""
    return memory_path


@pytest.fixture
def disk_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh directory on the disk, for MPS daemons, which have a /dev/shm of their own."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture
def is_golden(update_golden: bool) -> IsGolden:
    """Compares a text with a golden file, or rewrites that."""

    def compare(golden: Path, text: str) -> None:
        if update_golden:
            golden.parent.mkdir(exist_ok=True)
            golden.write_text(text)
        assert golden.exists(), f"{golden.name} is missing: run `make golden`, and read the diff"
        assert text == golden.read_text(), f"{golden.name} differs: run `make golden`, and read the diff"

    return compare


@pytest.fixture
def is_generated(is_golden: IsGolden) -> IsGenerated:
    """Compares the part of a page between `<!-- name -->` and `<!-- end of name -->`, or rewrites that."""

    def compare(page: Path, name: str, made: str) -> None:
        before, _, after = generated(page, name)
        is_golden(page, before + made + after)

    return compare
