"""Persistence mode of the simulated GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dra_driver.errors import DeviceLostError, NotSupportedError, NvmlUnavailableError
from dra_driver.nvml.persistence import PersistenceModes
from tests.fakes.machines import SimulatedNode


def test_mode_is_read_set_and_gone_with_the_driver_of_the_gpu(
    machine: Callable[[str], SimulatedNode],
) -> None:
    node = machine("l40s-8")
    modes = PersistenceModes(lambda: node.session.operation(lambda: 0.0))
    first, second = (node.machine.gpu(number) for number in (1, 2))
    node.session.reopen()
    assert modes.get(first.uuid, first.bus_id) is True
    modes.set(first.uuid, first.bus_id, on=False)
    modes.set(first.uuid, first.bus_id, on=False)
    assert (modes.get(first.uuid, None), modes.get(second.uuid, second.bus_id)) == (False, True)
    node.machine.give_to(1, "vfio-pci")
    node.session.reopen()
    with pytest.raises(DeviceLostError, match="NVML shows no such GPU"):
        modes.get(first.uuid, first.bus_id)
    node.machine.give_to(1, "nvidia")
    node.session.reopen()
    assert modes.get(first.uuid, first.bus_id) is False, "nobody switched it on again"
    node.session.close()
    with pytest.raises(NvmlUnavailableError):
        modes.get(first.uuid, first.bus_id)


def test_gpu_without_the_mode_has_none(machine: Callable[[str], SimulatedNode]) -> None:
    node = machine("l40s-8")
    modes = PersistenceModes(lambda: node.session.operation(lambda: 0.0))
    gpu = node.machine.gpu(0)
    node.session.reopen()
    for name in ("nvmlDeviceGetPersistenceMode", "nvmlDeviceSetPersistenceMode"):
        node.machine.set_fault(name, code="not-supported")
    assert modes.get(gpu.uuid, gpu.bus_id) is None
    with pytest.raises(NotSupportedError, match=r"switch persistence mode of GPU .* off"):
        modes.set(gpu.uuid, gpu.bus_id, on=False)
