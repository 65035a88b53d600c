"""Drivers of PCI functions on simulated machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dra_driver.errors import InvalidConfigError
from dra_driver.simulator import Machine, SimulatedPciControl, simulate_commands

GPU = "0000:16:00.0"


def link(machine: Machine, path: str) -> str | None:
    found = machine.host_root / path
    return found.readlink().name if found.is_symlink() else None


def test_gpu_that_no_one_has_goes_to_the_nvidia_driver_when_that_is_loaded(
    make: Callable[..., Machine],
) -> None:
    machine = make("l40s-8")
    control = SimulatedPciControl(machine)
    machine.set_gpu(0, persistence=0)
    drivers = str(machine.host_root / "sys/bus/pci/drivers")
    control.write(f"{drivers}/nvidia/unbind", GPU)
    assert link(machine, f"sys/bus/pci/devices/{GPU}/driver") is None
    with pytest.raises(OSError, match="No such device"):
        control.write(f"{drivers}/nvidia/unbind", GPU)
    with pytest.raises(FileNotFoundError):
        control.write(f"{drivers}/vfio-pci/bind", GPU)
    with pytest.raises(OSError, match="No such device"):
        control.write(f"{drivers}_probe", "0000:ff:00.0")
    for path in ("/sys/bus/pci/drivers_probe", f"{drivers}/nvidia/new_id"):
        with pytest.raises(FileNotFoundError):
            control.write(path, GPU)
    machine.unload_driver()
    assert not Path(drivers, "nvidia").exists()
    machine.load_driver()
    assert link(machine, f"sys/bus/pci/devices/{GPU}/driver") == "nvidia"
    with pytest.raises(OSError, match="Device or resource busy"):
        control.write(f"{drivers}/nvidia/bind", GPU)


def test_override_ends_with_a_reboot_and_what_an_administrator_set_does_not(
    make: Callable[..., Machine],
) -> None:
    machine = make("l40s-8")
    control = SimulatedPciControl(machine)
    file = machine.host_root / "sys/bus/pci/devices" / GPU / "driver_override"
    control.write(str(file), "vfio-pci\n")
    assert file.read_text() == "vfio-pci\n"
    machine.give_to(1, "vfio-pci")
    machine.reboot()
    assert file.read_text() == "(null)\n"
    assert link(machine, f"sys/bus/pci/devices/{GPU}/driver") == "nvidia"
    assert link(machine, f"sys/bus/pci/devices/{machine.gpu(1).bus_id}/driver") == "vfio-pci"
    machine.remove_gpu(1)
    machine.add_gpu("l40s")
    assert link(machine, f"sys/bus/pci/devices/{machine.gpu(1).bus_id}/driver") == "vfio-pci"


def test_commands_speak_of_drivers_modules_and_writes(make: Callable[..., Machine]) -> None:
    machine = make("l40s-8")
    machine.give_to("1", "vfio-pci")
    with pytest.raises(
        InvalidConfigError, match="there is no driver 'nouveau' for a GPU; choose one of nvidia, vfio-pci"
    ):
        machine.give_to("1", "nouveau")
    said = simulate_commands.vfio(machine, iommu=None, iommufd=True, installed=None, loaded=None)
    assert (
        said
        == "IOMMU: on; iommufd: present; modules: vfio_pci, vfio_iommu_type1; loaded: vfio_pci, vfio_iommu_type1"
    )
    said = simulate_commands.vfio(machine, iommu=False, iommufd=None, installed="", loaded="")
    assert said == "IOMMU: off; iommufd: present; modules: none; loaded: none"
    with pytest.raises(
        InvalidConfigError, match=r"vfio_modules can be vfio_pci, nvgrace_gpu_vfio_pci, .*, not 'vfio'"
    ):
        simulate_commands.vfio(machine, iommu=None, iommufd=None, installed="vfio", loaded=None)
    for code, text in (("EBUSY", "device or resource busy"), ("hang", "hang"), ("5", "input/output error")):
        assert machine.set_fault("unbind", code=code, gpu="1") == text
    with pytest.raises(
        InvalidConfigError, match="a write to sysfs cannot fail with 'gpu-is-lost'; use EBUSY"
    ):
        machine.set_fault("unbind", code="gpu-is-lost", gpu="1")
