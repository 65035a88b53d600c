from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from dra_driver.errors import NvmlUnavailableError
from dra_driver.nvml.session import NvmlSession, load_library
from tests.fakes.machines import SimulatedNode


def test_library_is_loaded_once_and_again_after_reopen(machine: Callable[[str], SimulatedNode]) -> None:
    node = machine("t4-4")
    loads: list[object] = []
    loader = node.session._loader
    session = NvmlSession(lambda: loads.append(1) or loader())
    session.open()
    session.open()
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
        node.session.open()
    assert str(caught.value) == (
        "initialise NVML: the NVIDIA kernel driver is not loaded; load it (modprobe nvidia)"
    )
    assert not node.session.is_open
    node.machine.load_driver()
    node.session.open()
    assert pynvml.nvmlDeviceGetCount() == 4


def test_other_driver_version_needs_a_new_session(machine: Callable[[str], SimulatedNode]) -> None:
    node = machine("t4-4")
    node.session.open()
    node.machine.load_driver("590.1.2")
    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlSystemGetDriverVersion()
    node.session.reopen()
    assert pynvml.nvmlSystemGetDriverVersion() == "590.1.2"


def test_close_does_not_mind_a_driver_that_is_gone(machine: Callable[[str], SimulatedNode]) -> None:
    node = machine("t4-4")
    node.session.open()
    node.machine.unload_driver()
    node.session.close()
    assert not node.session.is_open


def test_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    path = tmp_path / "libnvidia-ml.so.1"
    path.write_bytes(b"no library")
    with pytest.raises(NvmlUnavailableError, match=f"cannot load the NVML library {path}: "):
        load_library(str(path))


def test_error_of_the_loader_leaves_the_session_closed() -> None:
    def missing() -> object:
        raise NvmlUnavailableError("libnvidia-ml.so.1 was not found")

    session = NvmlSession(missing)
    with pytest.raises(NvmlUnavailableError, match="was not found"):
        session.reopen()
    assert not session.is_open
