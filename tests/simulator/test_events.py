"""Events, also those raised by another process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pynvml
import pytest

XID = pynvml.nvmlEventTypeXidCriticalError
ANY = 0xFFFFFFFF


@pytest.fixture
def watched(nvml, handles):
    """A machine, and an event set that watches all its GPUs."""

    def start(name):
        machine = nvml(name)
        events = pynvml.nvmlEventSetCreate()
        for gpu in handles():
            pynvml.nvmlDeviceRegisterEvents(gpu, XID & pynvml.nvmlDeviceGetSupportedEventTypes(gpu), events)
        return machine, events

    return start


def test_nothing_happens(watched, refused):
    _, events = watched("dgx-h100")
    started = time.monotonic()
    assert refused(pynvml.nvmlEventSetWait_v2, events, 60) == pynvml.NVML_ERROR_TIMEOUT
    assert time.monotonic() - started >= 0.055
    assert refused(pynvml.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_TIMEOUT
    pynvml.nvmlEventSetFree(events)
    assert refused(pynvml.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_events_come_in_order_and_once(watched, refused):
    machine, events = watched("dgx-h100")
    machine.raise_xid(1, 48)
    machine.raise_xid(0, 31, gpu_instance=3, compute_instance=0)
    first, second = (pynvml.nvmlEventSetWait_v2(events, 1000) for _ in range(2))
    assert (pynvml.nvmlDeviceGetIndex(first.device), first.eventType, first.eventData) == (1, XID, 48)
    assert (first.gpuInstanceId, first.computeInstanceId) == (ANY, ANY)
    assert (second.eventData, second.gpuInstanceId, second.computeInstanceId) == (31, 3, 0)
    assert refused(pynvml.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_TIMEOUT


def test_no_replay_of_what_was_before_registration(nvml, handles, refused):
    machine = nvml("dgx-h100")
    machine.raise_xid(0, 48)
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(handles()[0], XID, events)
    machine.raise_xid(1, 48)
    assert refused(pynvml.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_TIMEOUT


def test_unsupported_types_are_refused(nvml, handles, refused):
    nvml("t4-4")
    events = pynvml.nvmlEventSetCreate()
    mask = pynvml.nvmlEventTypeGpuRecoveryAction
    call = pynvml.nvmlDeviceRegisterEvents
    assert refused(call, handles()[0], mask, events) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert not pynvml.nvmlDeviceGetSupportedEventTypes(handles()[0]) & mask


def test_a_waiting_thread_hears_another_process(watched):
    machine, events = watched("dgx-h100")
    heard = []
    waiter = threading.Thread(target=lambda: heard.append(pynvml.nvmlEventSetWait_v2(events, 10_000)))
    waiter.start()
    script = (
        "import sys; from pathlib import Path; from dra_driver.simulator import open_machine; "
        "open_machine(Path(sys.argv[1])).raise_xid(5, 74)"
    )
    subprocess.run([sys.executable, "-c", script, str(machine.directory)], check=True)
    waiter.join(5)
    assert [(pynvml.nvmlDeviceGetIndex(event.device), event.eventData) for event in heard] == [(5, 74)]


def test_a_lost_gpu(watched, handles, refused):
    machine, events = watched("dgx-h100")
    machine.lose_gpu(2)
    event = pynvml.nvmlEventSetWait_v2(events, 1000)
    assert event.eventData == 79
    assert refused(pynvml.nvmlEventSetWait_v2, events, 1000) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert refused(pynvml.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_TIMEOUT


def test_recovery_action(watched, handles):
    machine, events = watched("dgx-h100")
    machine.set_recovery_action(3, pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET)
    assert pynvml.nvmlEventSetWait_v2(events, 1000).eventData == 154
    fields = pynvml.nvmlDeviceGetFieldValues(
        handles()[3],
        [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED, 5000],
    )
    assert [field.value.uiVal for field in fields[:2]] == [4, 1]
    assert fields[2].nvmlReturn == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_unloading_the_driver_ends_the_wait(watched, refused):
    machine, events = watched("dgx-h100")
    timer = threading.Timer(0.05, machine.unload_driver)
    timer.start()
    assert refused(pynvml.nvmlEventSetWait_v2, events, 5000) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    timer.join()
