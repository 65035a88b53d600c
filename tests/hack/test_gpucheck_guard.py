"""Nothing that the tool does can change a GPU."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pynvml
import pytest
from gpucheck.guard import ALLOWED, NO_PERMISSION, ReadOnlyLibrary
from gpucheck.smi import NvidiaSmi, is_read_only

from dra_driver.simulator import create_machine, nvml_library
from tests.hack.support import looking_at

_CHANGES = re.compile(
    r"Set(?!s|tings)|Create|Destroy|Clear|Reset|Remove|Modify|Register|Freeze|Force|Update|Write|Activate|Alloc|Free|Discover"
)


def symbols() -> set[str]:
    """Every C function that the binding knows."""
    return set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', inspect.getsource(pynvml)))


def test_only_getters_are_allowed() -> None:
    others = {name for name in ALLOWED if not re.match(r"nvml\w*(Get|Is)[A-Z]", name)}
    assert others == {"nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString"}
    assert {name for name in ALLOWED if _CHANGES.search(name)} == set()
    assert symbols() >= ALLOWED


def test_what_is_not_allowed_answers_no_permission_when_called(tmp_path: Path) -> None:
    machine = create_machine("h100-mig-static", tmp_path, device_nodes="described")
    guard = ReadOnlyLibrary(nvml_library(machine))
    refused = symbols() - ALLOWED
    assert {getattr(guard, name)() for name in refused} == {NO_PERMISSION}
    assert guard.refused == refused
    assert all(value is not machine for value in vars(guard).values())
    with pytest.raises(AttributeError):
        _ = guard._library


def test_setters_change_nothing_when_called_through_the_binding(tmp_path: Path) -> None:
    with looking_at("h100-mig-static", tmp_path) as view:
        state = tmp_path / "machine/machine.json"
        before = state.read_bytes()
        handle = pynvml.nvmlDeviceGetHandleByIndex(2)
        with pytest.raises(pynvml.NVMLError_NoPermission):
            pynvml.nvmlDeviceSetMigMode(handle, 1)
        with pytest.raises(pynvml.NVMLError_NoPermission):
            pynvml.nvmlDeviceSetComputeMode(handle, 3)
        with pytest.raises(pynvml.NVMLError_NoPermission):
            pynvml.nvmlDeviceSetPersistenceMode(handle, 0)
        first = pynvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(pynvml.NVMLError_NoPermission):
            pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(first, 1))
        with pytest.raises(pynvml.NVMLError_NoPermission):
            pynvml.nvmlDeviceCreateGpuInstance(first, 19)
        assert state.read_bytes() == before
        assert "nvmlDeviceSetMigMode" in view.nvml.refused


@pytest.mark.parametrize(
    "arguments",
    [
        ["-L"],
        ["-q", "-x"],
        ["topo", "-m"],
        ["nvlink", "-s"],
        ["mig", "-lgi"],
        ["--query-gpu=uuid,pci.bus_id", "--format=csv,noheader,nounits"],
    ],
)
def test_nvidia_smi_may_list(arguments: list[str]) -> None:
    assert is_read_only(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-c", "3"],
        ["-i", "0", "-mig", "1"],
        ["-r"],
        ["mig", "-cgi", "19"],
        ["mig", "-dci"],
        ["-q", "-x", "-r"],
        ["compute-policy", "--set-timeslice=1"],
        ["--query-gpu=uuid", "-mig", "1"],
        ["--query-gpu=uuid;reboot", "--format=csv,noheader,nounits"],
        ["--query-gpu=uuid\n", "--format=csv,noheader,nounits"],
    ],
)
def test_nvidia_smi_is_never_run_when_it_could_change_something(arguments: list[str]) -> None:
    assert not is_read_only(arguments)
    with pytest.raises(ValueError, match="is not known to change nothing"):
        NvidiaSmi("/bin/false")._run(*arguments)
