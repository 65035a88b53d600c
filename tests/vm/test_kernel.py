"""Cards for virtual machines on a real kernel with an IOMMU, in one boot of `make e2e-vm`. Each test leaves
all GPUs bound to the NVIDIA driver. The group of the third GPU has a network card, so that GPU is not for
virtual machines.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from dra_driver.model.claim import ClaimRef
from tests.vm.conftest import (
    AUDIO,
    GPUS,
    LIMIT_S,
    PCI,
    POD_UID,
    SLOW,
    Vm,
    driver_of,
    eventually,
    order,
    programs,
)

A, B, C, D = GPUS


@pytest.fixture(autouse=True)
def as_before(vm: Vm) -> Iterator[None]:
    """After the test each function has its driver again, and each GPU is published for all that it is for."""
    yield
    drivers = {**dict.fromkeys(GPUS, "nvidia"), AUDIO: "snd_hda_intel"}
    types = {A: ["gpu", "vfio"], B: ["gpu", "vfio"], C: ["gpu"], D: ["gpu", "vfio"]}
    eventually("all drivers", lambda: {bus_id: driver_of(bus_id) for bus_id in drivers} == drivers)
    eventually("all devices", lambda: {bus_id: vm.devices(bus_id) for bus_id in GPUS} == types)


def group_of(bus_id: str) -> str:
    return (PCI / "devices" / bus_id / "iommu_group").resolve().name


@contextmanager
def used_by_a_machine(bus_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """During the block a program uses the card like a virtual machine."""
    command = [sys.executable, str(Path(__file__).with_name("vfio_user.py")), group_of(bus_id), bus_id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"holds\n"
        try:
            yield user
        finally:
            user.kill()


def writes(file: str) -> list[int]:
    """The processes that write to such a file of sysfs now."""
    return [pid for pid, command in programs().items() if f"{PCI}/{file}" in command and " -c " in command]


def unbinds() -> list[int]:
    """The processes that unbind a GPU from the NVIDIA driver."""
    return writes("drivers/nvidia/unbind")


def test_card_stays_with_its_driver_while_a_module_cannot_be_loaded(vm: Vm) -> None:
    broken, ref = Path("/etc/modprobe.d/broken.conf"), vm.claim("modules", A)
    missing = ["vfio_pci", "vfio_iommu_type1"]
    for module in missing.copy():
        broken.write_text("".join(f"install {name} /bin/false\n" for name in missing))
        missing.remove(module)
        assert f"load the kernel module {module} for" in (vm.call("prepare", ref) or "")
        assert driver_of(A) == "nvidia"
    broken.unlink()
    assert vm.call("prepare", ref) is None
    assert driver_of(A) == "vfio-pci"
    vm.release(ref)


def test_card_goes_to_a_machine_and_back_when_the_machine_has_ended(vm: Vm) -> None:
    assert (driver_of(A), driver_of(AUDIO)) == ("nvidia", "snd_hda_intel")
    ref, override = vm.claim("first", A), PCI / "devices" / AUDIO / "driver_override"
    override.write_text("snd_hda_intel\n")
    assert vm.call("prepare", ref) is None
    assert (driver_of(A), driver_of(AUDIO), driver_of(B)) == ("vfio-pci", "vfio-pci", "nvidia")
    with used_by_a_machine(A):
        vm.release(ref)
        assert driver_of(A) == "vfio-pci"
    eventually("the override of before", lambda: override.read_text() == "snd_hda_intel\n")
    override.write_text("\n")


def test_daemon_that_is_killed_while_the_kernel_hangs_leaves_a_successor_all_other_gpus(vm: Vm) -> None:
    """A program opens the GPU between the plugin's check and the unbind, so the kernel waits for it. The
    daemon is killed during that.
    """
    hanging, other, whole = vm.claim("hanging", B), vm.claim("other", D), vm.claim("whole", A, vm=False)
    SLOW.write_text("4000")
    with ThreadPoolExecutor() as threads:
        call = threads.submit(vm.call, "prepare", hanging)
        [writer] = eventually("the unbind", unbinds)
        user = os.open("/dev/nvidia1", os.O_RDWR)
        SLOW.write_text("0")
        vm.kill()
        call.exception(LIMIT_S)
    assert unbinds() == [writer]
    for flags in ((), ("--pod-uid", POD_UID)):
        vm.start(*flags)
        assert [vm.call("prepare", ref) for ref in (whole, other)] == [None, None]
        assert (driver_of(D), driver_of(A)) == ("vfio-pci", "nvidia")
        assert [vm.call("unprepare", ref) for ref in (whole, other)] == [None, None]
        eventually("the return of the card", lambda: driver_of(D) == "nvidia")
        vm.kill()
    vm.start()
    eventually(
        "a refusal",
        lambda: "does not respond: the wait for another process" in (vm.call("prepare", hanging) or ""),
    )
    assert unbinds() == [writer]
    os.close(user)
    eventually("the end of the write", lambda: not unbinds())
    assert vm.call("prepare", hanging) is None
    assert driver_of(B) == "vfio-pci"
    for ref in (hanging, other, whole):
        vm.release(ref)


@pytest.mark.parametrize(
    ("what", "file", "number"),
    [
        ("prepare", "drivers/nvidia/unbind", signal.SIGTERM),
        ("prepare", "drivers/nvidia/unbind", signal.SIGKILL),
        ("unprepare", "drivers/nvidia/bind", signal.SIGKILL),
    ],
)
def test_claim_continues_after_its_daemon_has_ended_in_the_middle(
    vm: Vm, what: str, file: str, number: int
) -> None:
    ref = vm.claim("middle", A)
    if what == "unprepare":
        assert vm.call("prepare", ref) is None
    SLOW.write_text("3000")
    with ThreadPoolExecutor() as threads:
        call = threads.submit(vm.call, what, ref)
        eventually(f"a write to {file}", lambda: writes(file))
        vm.kill(number)
        SLOW.write_text("0")
        call.exception(LIMIT_S)
    vm.start()
    if what == "prepare":
        assert vm.call("prepare", ref) is None
        assert (driver_of(A), driver_of(AUDIO)) == ("vfio-pci", "vfio-pci")
    vm.release(ref)


def test_card_that_is_pulled_out_under_a_machine_ends_with_it_and_comes_back(vm: Vm) -> None:
    ref = vm.claim("pulled", D)
    assert vm.call("prepare", ref) is None
    with used_by_a_machine(D):
        order("device_del gpu3")
        eventually("the removal to wait for the machine", lambda: driver_of(D) is None)
        assert "and the kernel waits for" in (vm.call("prepare", ref) or "")
        vm.release(ref)
    eventually("the removal", lambda: not (PCI / "devices" / D).exists())
    eventually("slices without the card", lambda: vm.devices(D) == [])
    order("device_add edu,id=gpu3,bus=port4")


def test_power_is_cut_while_claims_come_and_go(vm: Vm) -> None:
    """The last test of the first boot, which does not return."""
    refs = [vm.claim("cut-a", A), vm.claim("cut-b", B), vm.claim("cut-c", C, vm=False), vm.claim("cut-d", D)]
    vm.save_claims()
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def churn(ref: ClaimRef) -> None:
        while True:
            ended.put(vm.call("prepare", ref))
            ended.put(vm.call("unprepare", ref))

    for ref in refs:
        threading.Thread(target=churn, args=(ref,), daemon=True).start()
    for _ in range(random.randint(8, 16)):
        ended.get(timeout=LIMIT_S)
    Path("/dev/ttyS1").write_text("\nvm: power cut\n")
    order("quit")
    threading.Event().wait()
