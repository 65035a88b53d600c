import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pynvml
import pytest

from dra_driver.base.file_lock import UseMark
from dra_driver.errors import (
    DriverGoneError,
    NvmlInUseError,
    NvmlLibraryError,
    NvmlPausedError,
    NvmlUnavailableError,
    RetryableError,
)
from dra_driver.nvml import session as module
from dra_driver.nvml.session import NvmlSession, load_library
from tests.fakes.hanging_nvml import HangingNvml
from tests.fakes.machines import SimulatedNode
from tests.fakes.waiting import PATIENCE_S, eventually


def test_library_is_loaded_once_and_again_after_reopen(machine: Callable[[str], SimulatedNode]) -> None:
    node = machine("t4-4")
    loads: list[object] = []
    loader = node.session._loader
    session = NvmlSession(lambda: loads.append(1) or loader())
    session.reopen()
    assert (session.is_open, len(loads)) == (True, 1)
    session.reopen()
    assert (session.is_open, len(loads)) == (True, 2)
    session.close()
    session.close()
    assert not session.is_open


def test_close_does_not_mind_a_driver_that_is_gone(machine: Callable[[str], SimulatedNode]) -> None:
    node = machine("t4-4")
    node.session.reopen()
    node.machine.unload_driver()
    node.session.close()
    assert not node.session.is_open


def test_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    path = tmp_path / "libnvidia-ml.so.1"
    path.write_bytes(b"no library")
    with pytest.raises(NvmlLibraryError, match=f"cannot load the NVML library {path}: "):
        load_library(str(path))
    path.unlink()
    with pytest.raises(NvmlUnavailableError) as gone:
        load_library(str(path))
    assert not isinstance(gone.value, NvmlLibraryError)


def test_error_of_the_loader_leaves_the_session_closed() -> None:
    def missing() -> object:
        raise NvmlUnavailableError("libnvidia-ml.so.1 was not found")

    session = NvmlSession(missing)
    with pytest.raises(NvmlUnavailableError, match="was not found"):
        session.reopen()
    assert not session.is_open


def test_device_files_that_stay_open_keep_the_mark(
    machine: Callable[[str], SimulatedNode],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    logs: list[dict[str, object]],
) -> None:
    monkeypatch.setattr(module, "_DEVICE_FILES", str(tmp_path / "nvidia"))
    mark = UseMark(tmp_path / "nvml.lock")
    session = NvmlSession(machine("t4-4").session._loader, mark=mark)
    with (tmp_path / "nvidia0").open("w"):
        session.reopen()
        session.release("NVML is detached")
        assert (logs[-1]["event"], logs[-1]["files"]) == (
            "nvml_device_files_open",
            [str(tmp_path / "nvidia0")],
        )
        assert UseMark(tmp_path / "nvml.lock").is_held()
    session.reopen()
    session.release("NVML is detached")
    assert not UseMark(tmp_path / "nvml.lock").is_held()


# --- operations -------------------------------------------------------------------------------------


@contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[None]:
    """Do `work` in a thread during the block, and asserts that it succeeds."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE_S)
    assert (thread.is_alive(), errors) == (False, [])


class Bench:
    """An open session whose next opening waits at a gate."""

    def __init__(self, node: SimulatedNode) -> None:
        self.now = 100.0
        self.gate, self.opening = threading.Event(), threading.Event()
        self.gate.set()
        self.node = node
        self.session = NvmlSession(self._load, lambda: self.now)
        self.session.reopen()

    def _load(self) -> object:
        self.opening.set()
        assert self.gate.wait(PATIENCE_S)
        return self.node.session._loader()


@pytest.fixture
def bench(machine: Callable[[str], SimulatedNode]) -> Iterator[Bench]:
    made = Bench(machine("t4-4"))
    yield made
    made.session.close()


@contextmanager
def under_way(use: Callable[[], AbstractContextManager[object]]) -> Iterator[threading.Event]:
    """An operation or call in another thread that runs until the event is set, at the latest at the end."""
    begun, ends = threading.Event(), threading.Event()

    def work() -> None:
        with use():
            begun.set()
            assert ends.wait(PATIENCE_S)
            assert pynvml.nvmlDeviceGetCount() == 4

    with in_thread(work):
        try:
            assert begun.wait(PATIENCE_S)
            yield ends
        finally:
            ends.set()


def of_a_moment(session: NvmlSession) -> AbstractContextManager[None]:
    """An operation that waits for nothing."""
    return session.operation(lambda: 0.0)


def test_operation_is_not_cut_off_by_a_new_session_and_others_begin_in_between(bench: Bench) -> None:
    session = bench.session
    with under_way(lambda: of_a_moment(session)) as ends, in_thread(session.reopen):
        eventually(lambda: session._waiting)
        for _ in range(3):
            with of_a_moment(session), session.kept_open() as opening:
                assert (opening, pynvml.nvmlDeviceGetCount()) == (1, 4)
        ends.set()
    with session.operation(lambda: 10), session.kept_open() as opening:
        assert opening == 2


@pytest.mark.parametrize(
    ("kind", "lasts_s", "text"),
    [
        ("operation", 60, "a change to a GPU has been in progress for more than 60 s"),
        ("look", 10, "an NVML call has been in progress for more than 10 s"),
    ],
)
def test_nvml_is_never_shut_down_under_a_call_and_a_hang_is_refused_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str, lasts_s: float, text: str
) -> None:
    session = bench.session
    changes: list[Callable[[], None]] = [
        session.reopen,
        lambda: session.release("detached"),
        lambda: paused(99.0),
    ]

    def paused(patience_s: float) -> None:
        with session.closed(lambda: patience_s):
            pytest.fail("it was closed under a call")

    with under_way(session.kept_open if kind == "look" else lambda: of_a_moment(session)):
        bench.now += lasts_s - 1
        monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
        for change in (*changes[:2], lambda: paused(0.0)):
            with pytest.raises(NvmlInUseError, match="is in progress; gpu-dra-driver retries soon"):
                change()
        monkeypatch.setattr(module, "_PATIENCE_S", 99.0)
        bench.now += 1
        for change in changes:
            with pytest.raises(NvmlInUseError, match=text):
                change()
        with of_a_moment(session), session.kept_open() as opening:
            assert opening == 1
        assert session.pauses == 0
    session.reopen()
    with session.closed(lambda: 0.0):
        assert clients(bench) == []


def test_looks_give_way_to_who_waits_but_not_while_an_operation_is_running(bench: Bench) -> None:
    session, closed = bench.session, threading.Event()

    def pause() -> None:
        with session.closed(lambda: 10):
            closed.set()

    def is_refused() -> bool:
        try:
            with session.kept_open():
                return False
        except NvmlPausedError:
            return True

    with (
        under_way(session.kept_open) as call_ends,
        under_way(lambda: of_a_moment(session)) as ends,
        in_thread(pause),
    ):
        eventually(lambda: session._waiting)
        assert not is_refused()
        ends.set()
        eventually(is_refused)
        with of_a_moment(session), session.kept_open():
            assert not closed.is_set()
        call_ends.set()
    assert closed.is_set()


def test_operation_waits_no_longer_than_its_patience(bench: Bench) -> None:
    session = bench.session
    bench.gate.clear()
    bench.opening.clear()
    with in_thread(session.reopen):
        assert bench.opening.wait(PATIENCE_S)
        with (
            pytest.raises(NvmlUnavailableError, match="NVML is being initialised") as caught,
            session.operation(lambda: 0.0),
        ):
            pass
        assert not isinstance(caught.value, DriverGoneError)

        def none_left() -> float:
            raise RetryableError("no time is left")

        with pytest.raises(RetryableError, match="no time is left"), session.operation(none_left):
            pass
        bench.gate.set()


def test_operation_reports_why_nvml_could_not_be_initialised(bench: Bench) -> None:
    session = bench.session
    bench.node.machine.unload_driver()
    with pytest.raises(DriverGoneError):
        session.reopen()
    for _ in range(2):
        with pytest.raises(DriverGoneError, match="is not loaded"), session.operation(lambda: 0.0):
            pass
    bench.node.machine.load_driver()
    session.reopen()
    with session.operation(lambda: 0.0):
        assert pynvml.nvmlDeviceGetCount() == 4
    session.close()
    with pytest.raises(NvmlUnavailableError, match="NVML is not initialised"), session.operation(lambda: 10):
        pass


@pytest.mark.parametrize("kind", ["a change to a GPU", "an NVML call"])
def test_process_that_ends_leaves_nvml_open_while_a_call_is_running(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logs: list, kind: str
) -> None:
    """The shutdown would cut off a change, and might hang as the call does."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    with of_a_moment(bench.session) if "change" in kind else bench.session.kept_open():
        bench.session.close()
        assert (bench.session.is_open, pynvml.nvmlDeviceGetCount()) == (False, 4)
    [line] = logs
    assert (line["event"], line["reason"]) == (
        "nvml_not_shut_down",
        f"cannot shut NVML down: {kind} is in progress",
    )


# --- closed for a moment ----------------------------------------------------------------------------


def clients(bench: Bench) -> list[str]:
    return bench.node.machine.clients(with_own=True)


def test_second_pause_joins_the_first_and_the_last_one_opens_nvml(bench: Bench) -> None:
    session, first_ends = bench.session, threading.Event()

    def first() -> None:
        with session.closed(lambda: 10):
            assert first_ends.wait(PATIENCE_S)

    with in_thread(first):
        eventually(lambda: not clients(bench) and session._change is None)
        with session.closed(lambda: 0.0):
            first_ends.set()
            eventually(lambda: session._pausing == 1)
            assert (session.is_open, clients(bench), session.openings) == (False, [], 1)
    assert (session.is_open, len(clients(bench)), session.openings, session.pauses) == (True, 1, 2, 2)
    assert pynvml.nvmlDeviceGetCount() == 4


def test_operation_waits_for_the_end_and_a_look_is_refused(bench: Bench) -> None:
    session, waits = bench.session, threading.Event()
    seen: list[int] = []

    def patience() -> float:
        waits.set()
        return 10

    def operation() -> None:
        with session.operation(patience):
            seen.append(pynvml.nvmlDeviceGetCount())

    with session.closed(lambda: 0.0):
        with pytest.raises(NvmlPausedError, match="closed for a moment"), session.kept_open():
            pass
        with pytest.raises(NvmlPausedError), session.operation(lambda: 0.0):
            pass
        later = threading.Thread(target=operation)
        later.start()
        assert waits.wait(PATIENCE_S)
        assert seen == []
    later.join(PATIENCE_S)
    assert seen == [4]


def test_operation_that_has_begun_is_waited_for_and_others_begin_in_between(bench: Bench) -> None:
    session = bench.session
    with under_way(lambda: of_a_moment(session)) as ends:
        with (
            pytest.raises(NvmlInUseError, match="a change to a GPU is in progress"),
            session.closed(lambda: 0.0),
        ):
            pytest.fail("it was closed under an operation")
        assert (session.is_open, session.openings, session.pauses) == (True, 1, 0)

        def end() -> None:
            eventually(lambda: session._waiting)
            with of_a_moment(session):
                ends.set()

        with in_thread(end), session.closed(lambda: 10):
            assert clients(bench) == []
    with of_a_moment(session), pytest.raises(RuntimeError), session.closed(lambda: 0.0):
        pass
    assert session.is_open


def test_shutdown_that_hangs_is_left_behind_and_reported_until_it_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logs: list
) -> None:
    monkeypatch.setattr(module, "_SHUTDOWN_S", 0.2)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    session, nvml = bench.session, HangingNvml(bench.session)
    try:
        with nvml.hanging("nvmlShutdown"):
            with (
                pytest.raises(NvmlInUseError, match="its shutdown has not finished"),
                session.closed(lambda: 0.0),
            ):
                pytest.fail("it is not closed")
            [line] = logs
            assert (line["event"], line["reason"].partition(" taken")[0]) == (
                "nvml_hangs",
                "NVML is being shut down, which has",
            )
            with pytest.raises(NvmlUnavailableError, match="being shut down"), of_a_moment(session):
                pass
            with pytest.raises(NvmlInUseError, match="the shutdown of NVML"), session.closed(lambda: 0.0):
                pass
            bench.now += 60
            assert session.change_lasts_s() == 60
            with (
                pytest.raises(NvmlUnavailableError, match="being shut down, which has taken 60 s so far"),
                session.operation(lambda: pytest.fail("nobody waits for it")),
            ):
                pass
            with pytest.raises(
                NvmlInUseError, match="the shutdown of NVML has been in progress for more than 60 s"
            ):
                session.reopen()
        eventually(lambda: session.is_open)
        with of_a_moment(session):
            assert (pynvml.nvmlDeviceGetCount(), session.openings) == (4, 2)
    finally:
        nvml.leave()


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlShutdown"])
def test_pause_and_process_end_though_nvml_hangs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, function: str, logs: list
) -> None:
    monkeypatch.setattr(module, "_OPENING_S", 0.2)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    session, nvml = bench.session, HangingNvml(bench.session)
    try:
        with nvml.hanging(function):
            if function == "nvmlInitWithFlags":
                with session.closed(lambda: 0.0):
                    pass
                assert [line["event"] for line in logs] == ["nvml_hangs"]
            session.close()
            assert logs[-1]["event"] == "nvml_not_shut_down"
        eventually(lambda: session._change is None)
    finally:
        nvml.leave()
    session.close()


def test_error_of_the_patience_leaves_nvml_as_it_was(bench: Bench) -> None:
    def none_left() -> float:
        raise RetryableError("no time is left")

    with pytest.raises(RetryableError, match="no time is left"), bench.session.closed(none_left):
        pass
    with bench.session.operation(lambda: 0.0):
        assert (pynvml.nvmlDeviceGetCount(), bench.session.openings) == (4, 1)


def test_no_one_opens_nvml_in_between(bench: Bench) -> None:
    session = bench.session
    with session.closed(lambda: 0.0):
        with pytest.raises(NvmlInUseError, match="closed for a moment"):
            session.reopen()
        assert clients(bench) == []
        with pytest.raises(NvmlPausedError), session.operation(lambda: 0.0):
            pass
    assert (session.is_open, len(clients(bench))) == (True, 1)


def test_look_that_ends_just_before_a_pause_does_not_make_operations_fail(bench: Bench) -> None:
    """The last user of the pause is about to open NVML, and waits for the call."""
    session, closed, over = bench.session, threading.Event(), threading.Event()

    def pause() -> None:
        with session.closed(lambda: 10):
            closed.set()
            over.wait(PATIENCE_S)

    with in_thread(pause):
        assert closed.wait(PATIENCE_S)
        with pytest.raises(NvmlInUseError, match="closed for a moment"):
            session.reopen()
        over.set()
        with session.operation(lambda: 10):
            assert session.is_open


def test_nvml_that_was_closed_before_stays_closed(bench: Bench) -> None:
    bench.session.release("the node is detached")
    with bench.session.closed(lambda: 0.0):
        pass
    assert not bench.session.is_open
    with (
        pytest.raises(NvmlUnavailableError, match="the node is detached"),
        bench.session.operation(lambda: 0.0),
    ):
        pass


def test_first_opening_is_waited_for_over_a_pause_before_it(bench: Bench) -> None:
    fresh = NvmlSession(bench.node.session._loader)
    with fresh.closed(lambda: 0.0):
        pass
    assert (fresh.is_open, fresh._is_expected()) == (False, True)


def test_end_of_the_process_ends_a_pause_for_good(bench: Bench) -> None:
    with bench.session.closed(lambda: 0.0):
        bench.session.close()
    assert (bench.session.is_open, clients(bench)) == (False, [])


def test_nvml_that_cannot_be_opened_after_a_pause_is_reported_and_opened_later(
    bench: Bench, logs: list
) -> None:
    with bench.session.closed(lambda: 0.0):
        bench.node.machine.unload_driver()
    assert [line["event"] for line in logs] == ["nvml_reopen_failed"]
    with pytest.raises(DriverGoneError), bench.session.operation(lambda: 0.0):
        pass
    bench.node.machine.load_driver()
    bench.session.reopen()
    assert pynvml.nvmlDeviceGetCount() == 4
