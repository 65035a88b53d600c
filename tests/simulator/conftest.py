"""Simulated machines under the real binding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml
import pytest

from dra_driver.simulator import HOSTILE, Machine, SimulatedLibrary, create_machine


@pytest.fixture(autouse=True, scope="module")
def _kind() -> Iterator[None]:
    """The variant for users, because these tests check the simulator itself. Not for the session, which other
    tests share.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv(HOSTILE)
        yield


def load(machine: Machine) -> None:
    """Put a fresh library of the machine under the binding."""
    pynvml.nvmlLib = SimulatedLibrary(machine)
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.fixture
def make(memory_path: Path) -> Callable[..., Machine]:
    def create(name: str, **options: object) -> Machine:
        return create_machine(name, memory_path / Path(name).stem, **options)

    return create


@pytest.fixture(scope="session")
def shared(make_memory_path: Callable[[], Path]) -> Callable[[str], Machine]:
    """Machines that are created once and only read."""
    known: dict[str, Machine] = {}

    def one(name: str) -> Machine:
        if name not in known:
            known[name] = create_machine(name, make_memory_path())
        return known[name]

    return one


@contextmanager
def started(made: Callable[..., Machine]) -> Iterator[Callable[..., Machine]]:
    before = pynvml.nvmlLib

    def start(name: str, **options: object) -> Machine:
        machine = made(name, **options)
        load(machine)
        pynvml.nvmlInit()
        return machine

    yield start
    pynvml.nvmlLib = before
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.fixture
def look(shared: Callable[[str], Machine]) -> Iterator[Callable[[str], Machine]]:
    """Initialise NVML on a machine that the test only reads."""
    with started(shared) as start:
        yield start


@pytest.fixture
def nvml(make: Callable[..., Machine]) -> Iterator[Callable[..., Machine]]:
    """Create a machine and initialises NVML on it."""
    with started(make) as start:
        yield start


@pytest.fixture
def reload() -> Callable[[Machine], None]:
    """What a restart of the process does: a new library, a new session."""

    def again(machine: Machine) -> None:
        load(machine)
        pynvml.nvmlInit()

    return again


@pytest.fixture
def handles() -> Callable[[], list[object]]:
    def all_handles() -> list[object]:
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    return all_handles


@pytest.fixture
def refused() -> Callable[..., int]:
    """The NVML return code of a call that must fail."""

    def code(call: Callable[..., object], *arguments: object) -> int:
        with pytest.raises(pynvml.NVMLError) as caught:
            call(*arguments)
        return caught.value.value

    return code
