"""The simulated NVML and its machine: wrong calls, faults, events, many processes, files of machines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import forked_commands
import pynvml
import pytest

from dra_driver.errors import InvalidConfigError
from dra_driver.simulator import create_machine, open_machine
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S


def test_faults(nvml, handles, refused):
    machine = nvml("dgx-h100")
    machine.set_fault("nvmlDeviceGetUUID", code="gpu-is-lost", count=2)
    gpus = handles()
    assert [refused(pynvml.nvmlDeviceGetUUID, gpu) for gpu in gpus[:2]] == [15, 15]
    assert pynvml.nvmlDeviceGetUUID(gpus[0])
    machine.set_fault("nvmlDeviceGet*", code="NVML_ERROR_UNKNOWN", gpu=1)
    assert pynvml.nvmlDeviceGetName(gpus[0])
    assert refused(pynvml.nvmlDeviceGetName, gpus[1]) == 999
    assert refused(pynvml.nvmlDeviceGetHandleByIndex, 1) == 999
    assert refused(pynvml.nvmlDeviceGetHandleByPciBusId, "0000:43:00.0") == 999
    machine.clear_faults()
    machine.set_fault("nvmlInit*", code=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert refused(pynvml.nvmlInit) == 9
    machine.clear_faults()
    machine.set_fault("nvmlDeviceGetName", delay_s=0.05, count=1)
    started = time.monotonic()
    pynvml.nvmlDeviceGetName(gpus[0])
    assert time.monotonic() - started >= 0.05
    assert machine.current().faults == []


def test_wrong_faults_and_selectors(make):
    machine = make("t4-4")
    with pytest.raises(InvalidConfigError, match="needs an error code, a delay, or both"):
        machine.set_fault("nvmlInit")
    with pytest.raises(InvalidConfigError, match="no NVML error 'broken'"):
        machine.set_fault("nvmlInit", code="broken")
    for more in ({"code": "EBUSY"}, {"code": "no-effect", "count": 1}, {"delay_s": 1.0}):
        with pytest.raises(InvalidConfigError, match="a fault of nvidia-smi can only be no-effect"):
            machine.set_fault("nvidia-smi", **more)
    for selector in (4, "GPU-none", "0000:ff:00.0"):
        with pytest.raises(InvalidConfigError, match="has no GPU"):
            machine.lose_gpu(selector)


def test_a_machine_of_ones_own(make, tmp_path, nvml, handles):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "driver: {version: 575.57.08, cuda: '12.9'}\n"
        "models: {h100-sxm: {name: NVIDIA H100 96GB, memory: 97871}, odd: {name: Odd GPU, arch: 99, compute: [11, 0],"
        " sm: 1, cores: 128, pci_id: 0x123410DE}}\n"
        "gpus:\n"
        "  - {bus: '0000:01:00.0', model: h100-sxm, uuid: GPU-11111111-2222-3333-4444-555555555555, "
        "minor: 5, mig: [7g.80gb@0]}\n"
        "  - {bus: '0000:02:00.0', model: odd}\n"
    )
    machine = nvml(str(file))
    assert machine.name == "mine"
    first, second = handles()
    assert pynvml.nvmlDeviceGetUUID(first) == "GPU-11111111-2222-3333-4444-555555555555"
    assert (pynvml.nvmlDeviceGetName(first), pynvml.nvmlDeviceGetMinorNumber(first)) == (
        "NVIDIA H100 96GB",
        5,
    )
    assert pynvml.nvmlDeviceGetArchitecture(second) == 99
    assert pynvml.nvmlSystemGetCudaDriverVersion() == 12090


@tabled("text", "message")
def test_bad_machine_files(text, message, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(InvalidConfigError, match=message):
        create_machine(str(file), tmp_path / "machine")


def test_a_gone_directory_is_an_nvml_error(nvml, refused, handles):
    machine = nvml("t4-4")
    gpu = handles()[0]
    (machine.directory / "machine.json").unlink()
    assert refused(pynvml.nvmlDeviceGetName, gpu) == pynvml.NVML_ERROR_UNKNOWN


def test_many_changes_at_once(make):
    machine = make("dgx-h100")
    script = (
        "import sys; from pathlib import Path; from dra_driver.simulator import open_machine\n"
        "machine = open_machine(Path(sys.argv[1]))\n"
        "for _ in range(10): machine.raise_xid(0, 43)\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", script, str(machine.directory)]) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: machine.raise_xid(1, number), range(20)))
    assert [child.wait(PATIENCE_S) for child in children] == [0, 0]
    events = machine.current().events
    assert [event.seq for event in events] == list(range(1, 41))
    assert machine.current().version == 41


def test_a_refused_change_leaves_no_trace(make):
    machine = make("dgx-h100")
    before = (machine.directory / "machine.json").read_bytes()
    machine_state = machine.current()
    with pytest.raises(InvalidConfigError, match="cannot create"):
        machine.create_mig(0, "1g.10gb", 0)
    assert (machine.directory / "machine.json").read_bytes() == before
    assert machine.current() is machine_state
    assert sorted(path.name for path in machine.directory.iterdir()) == sorted(
        ["machine.json", "machine.lock", "rendered", "rendered.paths", "root"]
    )


def test_an_open_session_of_another_program_refuses_what_the_driver_refuses(nvml, handles, refused):
    """MIG mode through NVML, and reset, unload and MIG mode through the commands; the session of a killed
    program ends.
    """
    machine = nvml("dgx-h100")
    command = [sys.executable, "-m", "dra_driver.cli.main", "simulate"]
    where = ["--simulator-dir", str(machine.directory)]
    assert machine.clients() == [], "our own session does not count"
    agent = subprocess.Popen([*command, "client", "dcgm", *where], stdout=subprocess.PIPE, text=True)
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "dcgm has NVML open on dgx-h100\n"
        assert machine.clients() == [f"dcgm (process {agent.pid})"]
        assert pynvml.nvmlDeviceSetMigMode(handles()[0], 1) == pynvml.NVML_ERROR_IN_USE
        assert pynvml.nvmlDeviceGetMigMode(handles()[0]) == [0, 0]
        for words in (["reset", "0"], ["unload-driver"], ["mig", "enable", "0"]):
            done = forked_commands.run(["simulate", *words, *where], env=os.environ)
            assert done.returncode == 1
            assert f"dcgm (process {agent.pid})" in done.stderr
    finally:
        agent.kill()
        agent.communicate()
    assert machine.clients() == []
    assert pynvml.nvmlDeviceSetMigMode(handles()[0], 1) == pynvml.NVML_SUCCESS


def test_a_reset_ends_the_registration_of_events(nvml, handles, refused):
    machine = nvml("dgx-h100")
    events = pynvml.nvmlEventSetCreate()
    for gpu in handles()[:2]:
        pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, events)
    machine.set_mig_mode(0, True)
    machine.reset_gpu(1)
    machine.raise_xid(0, 79)
    machine.raise_xid(1, 79)
    assert refused(pynvml.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_TIMEOUT
    pynvml.nvmlDeviceRegisterEvents(handles()[0], pynvml.nvmlEventTypeXidCriticalError, events)
    machine.raise_xid(0, 48)
    assert pynvml.nvmlEventSetWait_v2(events, 0).eventData == 48


def test_a_hostile_machine_makes_no_capability_nodes_and_has_virtual_functions(memory_path, monkeypatch):
    """The profile of the project's own tests; what users create is kind."""
    kind = create_machine("dgx-h100", memory_path / "kind")
    monkeypatch.setenv("SIMULATE_HOSTILE", "true")
    hostile = create_machine("dgx-h100", memory_path / "hostile")
    for machine, nodes, functions in ((kind, 2, 0), (hostile, 0, 2)):
        machine.set_mig_mode(0, True)
        machine.create_mig(0, "1g.10gb", 0)
        made = [
            path
            for path in machine.host_root.glob("dev/nvidia-caps/nvidia-cap*")
            if path.name[-1] not in "12"
        ]
        described = open_machine(machine.directory).current().system["cap_nodes"]
        assert described is (nodes == 2)
        assert len(list(machine.host_root.glob("sys/bus/pci/devices/*/physfn"))) == functions
        assert len(made) in (nodes, 0), "described nodes are no files"


def test_call_with_wrong_arguments_is_refused_as_by_the_library(look, handles, refused):
    look("l40s-8")
    gpu = handles()[0]
    assert refused(pynvml.nvmlDeviceGetHandleByIndex, 8) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert refused(pynvml.nvmlDeviceGetHandleByUUID, "GPU-none") == pynvml.NVML_ERROR_NOT_FOUND
    assert refused(pynvml.nvmlDeviceGetHandleByPciBusId, "0000:99:00.0") == pynvml.NVML_ERROR_NOT_FOUND
    assert refused(pynvml.nvmlDeviceGetUUID, pynvml.c_nvmlDevice_t()) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert refused(pynvml.nvmlDeviceGetMigMode, gpu) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert refused(pynvml.nvmlDeviceGetMemoryInfo, gpu, 1) == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    assert refused(pynvml.nvmlDeviceGetAttributes, gpu) == pynvml.NVML_ERROR_NOT_SUPPORTED
    events, mask = pynvml.nvmlEventSetCreate(), pynvml.nvmlEventTypeGpuRecoveryAction
    assert refused(pynvml.nvmlDeviceRegisterEvents, gpu, mask << 1, events) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0


def test_session_counts_its_initialisations(look, refused):
    look("t4-4")
    pynvml.nvmlShutdown()
    assert refused(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    assert refused(pynvml.nvmlShutdown) == pynvml.NVML_ERROR_UNINITIALIZED
    pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
    assert pynvml.nvmlDeviceGetCount() == 4


def test_wait_for_events_sees_another_process(nvml, handles):
    machine, events, received = nvml("dgx-h100"), pynvml.nvmlEventSetCreate(), []
    pynvml.nvmlDeviceRegisterEvents(handles()[5], pynvml.nvmlEventTypeXidCriticalError, events)
    waiter = threading.Thread(target=lambda: received.append(pynvml.nvmlEventSetWait_v2(events, 10_000)))
    waiter.start()
    script = (
        "import sys; from pathlib import Path; from dra_driver.simulator import open_machine; "
        "open_machine(Path(sys.argv[1])).raise_xid(5, 74)"
    )
    subprocess.run([sys.executable, "-c", script, str(machine.directory)], check=True)
    waiter.join(PATIENCE_S)
    assert [(pynvml.nvmlDeviceGetIndex(event.device), event.eventData) for event in received] == [(5, 74)]
