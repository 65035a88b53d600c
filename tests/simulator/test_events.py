"""Events, also those raised by another process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pynvml
import pytest

XID = pynvml.nvmlEventTypeXidCriticalError


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


def test_no_replay_of_what_was_before_registration(nvml, handles, refused):
    machine = nvml("dgx-h100")
    machine.raise_xid(0, 48)
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(handles()[0], XID, events)
    machine.raise_xid(1, 48)
    assert refused(pynvml.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_TIMEOUT


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


def test_unsupported_types_are_refused(nvml, handles, refused):
    nvml("t4-4")
    events = pynvml.nvmlEventSetCreate()
    mask = pynvml.nvmlEventTypeGpuRecoveryAction
    call = pynvml.nvmlDeviceRegisterEvents
    assert refused(call, handles()[0], mask, events) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert not pynvml.nvmlDeviceGetSupportedEventTypes(handles()[0]) & mask
