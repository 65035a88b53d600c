"""Cards for virtual machines on a real kernel with an IOMMU, in one boot of `make e2e-vm`. Each test leaves all GPUs
with the NVIDIA driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.vm.conftest import AUDIO, GPUS, LIMIT_S, PCI, POD_UID, SLOW, Vm, driver_of, eventually, programs

A, B, C, D = GPUS


def group_of(bus_id: str) -> str:
    return (PCI / "devices" / bus_id / "iommu_group").resolve().name


@contextmanager
def used_by_a_machine(bus_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """Meanwhile a program has the card as a virtual machine has it."""
    command = [sys.executable, str(Path(__file__).with_name("vfio_user.py")), group_of(bus_id), bus_id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"holds\n"
        try:
            yield user
        finally:
            user.kill()


def unbinds() -> list[int]:
    """The processes that unbind a GPU from the NVIDIA driver."""
    return [
        pid for pid, command in programs().items() if "drivers/nvidia/unbind" in command and " -c " in command
    ]


def test_card_goes_to_a_machine_and_back_when_the_machine_has_ended(vm: Vm) -> None:
    assert (driver_of(A), driver_of(AUDIO)) == ("nvidia", "snd_hda_intel")
    ref = vm.claim("first", A)
    assert vm.call("prepare", ref) is None
    assert (driver_of(A), driver_of(AUDIO), driver_of(B)) == ("vfio-pci", "vfio-pci", "nvidia")
    with used_by_a_machine(A):
        vm.release(ref)
        assert driver_of(A) == "vfio-pci"
    eventually(
        "the return of the card", lambda: (driver_of(A), driver_of(AUDIO)) == ("nvidia", "snd_hda_intel")
    )


def test_card_whose_group_has_a_network_card_is_not_for_machines(vm: Vm) -> None:
    assert [bus_id for bus_id in GPUS if vm.devices(bus_id) == ["gpu", "vfio"]] == [A, B, D]
    assert vm.devices(C) == ["gpu"]


def test_daemon_that_is_killed_while_the_kernel_hangs_leaves_a_successor_all_other_gpus(vm: Vm) -> None:
    """A program opens the GPU between the plugin's look and the unbind: the kernel waits for it. The daemon is killed
    meanwhile."""
    hanging, other, whole = vm.claim("hanging", B), vm.claim("other", D), vm.claim("whole", A, vm=False)
    SLOW.write_text("4000")
    with ThreadPoolExecutor() as threads:
        call = threads.submit(vm.call, "prepare", hanging)
        [writer] = eventually("the unbind", unbinds)
        user = os.open("/dev/nvidia1", os.O_RDWR)
        SLOW.write_text("0")
        vm.kill()
        assert call.exception(LIMIT_S) is not None or call.result() is not None
    assert unbinds() == [writer]
    for flags in ((), ("--pod-uid", POD_UID)):
        vm.start(*flags)
        assert [vm.call("prepare", ref) for ref in (whole, other)] == [None, None]
        assert (driver_of(D), driver_of(A)) == ("vfio-pci", "nvidia")
        assert [vm.call("unprepare", ref) for ref in (whole, other)] == [None, None]
        eventually("the return of the card", lambda: driver_of(D) == "nvidia")
        vm.kill()
    vm.start()
    assert unbinds() == [writer]
    os.close(user)
    eventually("the end of the write", lambda: not unbinds())
    assert vm.call("prepare", hanging) is None
    assert driver_of(B) == "vfio-pci"
    for ref in (hanging, other, whole):
        vm.release(ref)
    eventually("the return of the card", lambda: driver_of(B) == "nvidia")
