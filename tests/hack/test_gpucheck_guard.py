"""Nothing that the tool does can change a GPU."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pynvml
import pytest
from gpucheck.compare import READS, ask_smi
from gpucheck.machine import NO_PERMISSION, ReadOnlyLibrary

from tests.fakes.tables import tabled
from tests.hack.support import looking_at

_CHANGES = re.compile(
    r"Set(?!s|tings|\Z)|Create|Destroy|Clear|Reset|Remove|Modify|Register|Freeze|Force|Update|Write|Activate|Alloc|Free|Discover"
)


class _Everything:
    """A library that has every function, and each succeeds."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: 0


def symbols() -> set[str]:
    """Every C function that the binding knows."""
    return set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', inspect.getsource(pynvml)))


def test_a_function_that_changes_something_is_refused_when_it_is_called() -> None:
    guard = ReadOnlyLibrary(_Everything())
    codes = {name: getattr(guard, name)() for name in symbols()}
    others = {
        name
        for name, code in codes.items()
        if code == 0 and not re.match(r"nvml[A-Z][a-z]+\w*(Get|Is)[A-Z]", name)
    }
    assert others == {"nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString"}
    assert {name for name, code in codes.items() if code == 0 and _CHANGES.search(name)} == set()
    assert set(codes.values()) == {0, NO_PERMISSION}
    assert guard.refused == {name for name, code in codes.items() if code == NO_PERMISSION}


def test_setters_change_nothing_when_called_through_the_binding(tmp_path: Path) -> None:
    with looking_at("h100-mig-static", tmp_path) as view:
        state = tmp_path / "machine/machine.json"
        before = state.read_bytes()
        handle = pynvml.nvmlDeviceGetHandleByIndex(2)
        with pytest.raises(pynvml.NVMLError_NoPermission):
            pynvml.nvmlDeviceSetMigMode(handle, 1)
        first = pynvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(pynvml.NVMLError_NoPermission):
            pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(first, 1))
        with pytest.raises(pynvml.NVMLError_NoPermission):
            pynvml.nvmlDeviceCreateGpuInstance(first, 19)
        assert state.read_bytes() == before
        assert "nvmlDeviceSetMigMode" in view.nvml.refused


@tabled("arguments")
def test_nvidia_smi_is_never_run_when_it_could_change_something(arguments: list[str]) -> None:
    with pytest.raises(AssertionError, match="is not known to change nothing"):
        ask_smi("/bin/false", tuple(arguments))


def test_nvidia_smi_is_asked_for_lists_alone() -> None:
    assert set(READS) == {("-L",), ("-q", "-x"), ("topo", "-m")}
