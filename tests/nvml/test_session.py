import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml
import pytest

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
from tests.fakes.machines import SimulatedNode
from tests.fakes.waiting import eventually


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


def test_driver_that_is_not_loaded_is_one_sentence(machine: Callable[[str], SimulatedNode]) -> None:
    node = machine("t4-4")
    node.machine.unload_driver()
    with pytest.raises(NvmlUnavailableError) as caught:
        node.session.reopen()
    assert str(caught.value) == (
        "initialise NVML: the NVIDIA kernel driver is not loaded; load it (modprobe nvidia)"
    )
    assert not node.session.is_open
    node.machine.load_driver()
    node.session.reopen()
    assert pynvml.nvmlDeviceGetCount() == 4


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


# --- operations -------------------------------------------------------------------------------------


@contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[None]:
    """`work` is done meanwhile, and without an error by the end."""
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
        thread.join(10)
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
        assert self.gate.wait(10)
        return self.node.session._loader()


@pytest.fixture
def bench(machine: Callable[[str], SimulatedNode]) -> Iterator[Bench]:
    made = Bench(machine("t4-4"))
    yield made
    made.session.close()


def test_operation_is_not_cut_off_and_the_next_one_waits(bench: Bench) -> None:
    session = bench.session
    second_waits, first_ends = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        with session.operation(lambda: 0.0):
            begun.set()
            assert second_waits.wait(10)
            with session.operation(lambda: 0.0):
                order.append(f"first sees {pynvml.nvmlDeviceGetCount()}")
            assert first_ends.wait(10)
            order.append("first ends")

    def patience() -> float:
        second_waits.set()
        first_ends.set()
        return 10

    def second() -> None:
        with session.operation(patience), session.kept_open() as opening:
            order.append(f"second in opening {opening}")

    begun = threading.Event()
    with in_thread(first):
        assert begun.wait(10)
        with in_thread(session.reopen):
            eventually(lambda: session._is_changing)
            with in_thread(second):
                pass
    assert order == ["first sees 4", "first ends", "second in opening 2"]


def test_reopening_gives_way_to_a_long_operation_but_not_to_a_hung_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logs: list
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    session = bench.session

    def begin_and_end() -> None:
        with session.operation(lambda: 0.0):
            assert pynvml.nvmlDeviceGetCount() == 4

    with session.operation(lambda: 0.0):
        bench.now += 59
        with pytest.raises(NvmlInUseError, match="a change of a GPU is under way"):
            session.reopen()
        assert (session.is_open, pynvml.nvmlDeviceGetCount()) == (True, 4)
        with in_thread(begin_and_end):
            pass
        bench.now += 2
        session.reopen()
        with session.kept_open() as opening:
            assert opening == 2
    assert [(line["event"], line["seconds"]) for line in logs] == [("nvml_operation_hangs", 61)]


def test_operation_waits_no_longer_than_its_patience(bench: Bench) -> None:
    session = bench.session
    bench.gate.clear()
    bench.opening.clear()
    with in_thread(session.reopen):
        assert bench.opening.wait(10)
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


def test_operation_tells_why_nvml_could_not_be_initialised(bench: Bench) -> None:
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


def test_end_of_the_process_cuts_off_no_operation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logs: list
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    with bench.session.operation(lambda: 0.0):
        bench.session.close()
        assert (bench.session.is_open, pynvml.nvmlDeviceGetCount()) == (False, 4)
    assert [line["event"] for line in logs] == ["nvml_left_open"]


def test_end_of_the_process_does_not_shut_nvml_down_while_a_call_hangs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logs: list
) -> None:
    """The shutdown might hang as well."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    with bench.session.kept_open():
        bench.session.close()
        assert (bench.session.is_open, pynvml.nvmlDeviceGetCount()) == (False, 4)
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("nvml_left_open", "a call of NVML is still under way")
    ]


# --- closed for a moment ----------------------------------------------------------------------------


def clients(bench: Bench) -> list[str]:
    return bench.node.machine.everybody()


def test_who_comes_second_joins_and_the_last_one_opens_nvml(bench: Bench) -> None:
    session, first_ends = bench.session, threading.Event()

    def first() -> None:
        with session.closed(lambda: 10):
            assert first_ends.wait(10)

    with in_thread(first):
        eventually(lambda: not clients(bench))
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
        assert waits.wait(10)
        assert seen == []
    later.join(10)
    assert seen == [4]


def test_operation_that_has_begun_is_waited_for_and_not_cut_off(bench: Bench) -> None:
    session, ends = bench.session, threading.Event()
    begun = threading.Event()

    def operation() -> None:
        with session.operation(lambda: 0.0):
            begun.set()
            assert ends.wait(10)
            assert pynvml.nvmlDeviceGetCount() == 4

    with in_thread(operation):
        assert begun.wait(10)
        with (
            pytest.raises(NvmlInUseError, match="a change of a GPU is under way"),
            session.closed(lambda: 0.0),
        ):
            pytest.fail("it was closed under an operation")
        assert (session.is_open, session.openings) == (True, 1)

        def patience() -> float:
            ends.set()
            return 10

        with session.closed(patience):
            assert clients(bench) == []
    with session.operation(lambda: 0.0), pytest.raises(RuntimeError), session.closed(lambda: 0.0):
        pass
    assert session.is_open


def test_error_of_the_patience_leaves_nvml_as_it_was(bench: Bench) -> None:
    def none_left() -> float:
        raise RetryableError("no time is left")

    with pytest.raises(RetryableError, match="no time is left"), bench.session.closed(none_left):
        pass
    with bench.session.operation(lambda: 0.0):
        assert (pynvml.nvmlDeviceGetCount(), bench.session.openings) == (4, 1)


def test_nobody_opens_nvml_meanwhile(bench: Bench) -> None:
    session = bench.session
    with session.closed(lambda: 0.0):
        with pytest.raises(NvmlInUseError, match="closed for a moment"):
            session.reopen()
        assert clients(bench) == []
        with pytest.raises(NvmlPausedError), session.operation(lambda: 0.0):
            pass
    assert (session.is_open, len(clients(bench))) == (True, 1)


def test_look_that_ends_just_before_a_pause_does_not_make_operations_fail(bench: Bench) -> None:
    """The last one out of the pause is about to open NVML, and waits for the look."""
    session, closed, over = bench.session, threading.Event(), threading.Event()

    def pause() -> None:
        with session.closed(lambda: 10):
            closed.set()
            over.wait(10)

    with in_thread(pause):
        assert closed.wait(10)
        with session._changing(), session._lock:
            over.set()
            eventually(lambda: not session._pausing)
        with session.operation(lambda: 10):
            assert session.is_open


def test_nvml_that_was_closed_before_stays_closed(bench: Bench) -> None:
    bench.session.let_go("the node is detached")
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
    assert (fresh.is_open, fresh._is_changing) == (False, True)


def test_end_of_the_process_ends_a_pause_for_good(bench: Bench) -> None:
    with bench.session.closed(lambda: 0.0):
        bench.session.close()
    assert (bench.session.is_open, clients(bench)) == (False, [])


def test_nvml_that_cannot_be_opened_after_a_pause_is_told_and_opened_later(bench: Bench, logs: list) -> None:
    with bench.session.closed(lambda: 0.0):
        bench.node.machine.unload_driver()
    assert [line["event"] for line in logs] == ["nvml_not_opened_again"]
    with pytest.raises(DriverGoneError), bench.session.operation(lambda: 0.0):
        pass
    bench.node.machine.load_driver()
    bench.session.reopen()
    assert pynvml.nvmlDeviceGetCount() == 4


def test_pause_of_another_process_keeps_operations_waiting(bench: Bench) -> None:
    def theirs() -> object:
        raise NvmlPausedError

    session = bench.session
    with session.closed(lambda: 0.0):
        session._loader = theirs
    session._loader = bench._load
    with pytest.raises(NvmlUnavailableError, match="is being initialised"), session.operation(lambda: 0.0):
        pass
    with session.closed(lambda: 0.0):
        pass
    with session.operation(lambda: 0.0):
        assert pynvml.nvmlDeviceGetCount() == 4
