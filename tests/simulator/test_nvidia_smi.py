"""The nvidia-smi script, run as the host and as a container run it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import debian_programs
import pytest

from dra_driver import simulator
from dra_driver.simulator import create_machine

SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)] or ["sh"]


def run(script, *arguments, shell="sh", dev=None, check=True):
    command = [shell, "sh"] if shell == "busybox" else [shell]
    environment = {} if dev is None else {"SIMULATOR_DEV": str(dev)}
    done = subprocess.run(
        [*command, str(script), *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def container(tmp_path):
    """A container's /dev with the given nodes, and the script alone in another directory."""

    def start(machine, *nodes):
        dev = tmp_path / "container-dev"
        for node in ("nvidiactl", *nodes):
            path = dev / node
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        script = tmp_path / "elsewhere"
        shutil.copy(machine.host_root / "usr/bin/nvidia-smi", script)
        return script, dev

    return start


def smi(machine) -> Path:
    return machine.host_root / "usr/bin/nvidia-smi"


@pytest.mark.parametrize("shell", SHELLS)
def test_the_host_sees_everything(shell, make):
    machine = make("a30-mig-static")
    lines = run(smi(machine), "-L", shell=shell).stdout.splitlines()
    first, second = machine.gpu(0), machine.gpu(1)
    uuids = [ci.uuid for gpu in (first, second) for _, ci in gpu.mig_devices]
    assert lines == [
        f"GPU 0: NVIDIA A30 (UUID: {first.uuid})",
        f"  MIG 1g.6gb      Device  0: (UUID: {uuids[0]})",
        f"  MIG 1g.6gb      Device  1: (UUID: {uuids[1]})",
        f"  MIG 2g.12gb     Device  2: (UUID: {uuids[2]})",
        f"GPU 1: NVIDIA A30 (UUID: {second.uuid})",
        f"  MIG 4g.24gb     Device  0: (UUID: {uuids[3]})",
        f"GPU 2: NVIDIA A30 (UUID: {machine.gpu(2).uuid})",
        f"GPU 3: NVIDIA A30 (UUID: {machine.gpu(3).uuid})",
    ]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_container_sees_its_nodes_only(shell, make, container):
    machine = make("h100-mig-static")
    script, dev = container(
        machine, "nvidia6", "nvidia0", "nvidia-caps/nvidia-cap12", "nvidia-caps/nvidia-cap13"
    )
    out = run(script, "-L", shell=shell, dev=dev).stdout.splitlines()
    assert out == [
        f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {machine.gpu(0).uuid})",
        f"  MIG 3g.40gb     Device  0: (UUID: {machine.gpu(0).mig_devices[0][1].uuid})",
        f"GPU 1: NVIDIA H100 80GB HBM3 (UUID: {machine.gpu(6).uuid})",
    ]
    query = run(script, "--query-gpu=index,uuid,count", "--format=csv,noheader", shell=shell, dev=dev).stdout
    assert query.splitlines() == [f"0, {machine.gpu(0).uuid}, 2", f"1, {machine.gpu(6).uuid}, 2"]


def test_containers_without_nodes(make, container):
    machine = make("t4-4")
    script, dev = container(machine)
    done = run(script, "-L", dev=dev, check=False)
    assert (done.returncode, done.stdout) == (6, "No devices were found\n")
    (dev / "nvidiactl").unlink()
    assert run(script, "-L", dev=dev, check=False).stdout == "Failed to initialize NVML: Unknown Error\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_query(shell, make):
    machine = make("dgx-h100")
    fields = "index, name,memory.total,mig.mode.current,compute_mode,pci.bus_id,driver_version,compute_cap"
    out = run(
        smi(machine), f"--query-gpu={fields}", "--format=csv", "-i", "1", shell=shell
    ).stdout.splitlines()
    assert (
        out[0]
        == "index, name, memory.total [MiB], mig.mode.current, compute_mode, pci.bus_id, driver_version, compute_cap"
    )
    assert (
        out[1] == "1, NVIDIA H100 80GB HBM3, 81559 MiB, Disabled, Default, 00000000:43:00.0, 580.95.05, 9.0"
    )
    assert len(out) == 2
    plain = run(smi(machine), "--query-gpu=memory.total", "--format=csv,noheader,nounits", shell=shell).stdout
    assert plain.split() == ["81559"] * 8
    assert run(smi(machine), "--query-gpu=shoe_size", "--format=csv,noheader", check=False).returncode == 2


@pytest.mark.parametrize("shell", SHELLS)
def test_reset_is_refused_while_something_keeps_the_gpu_open_and_seen_by_the_next(shell, make, container):
    machine = make("dgx-h100")
    machine.set_recovery_action(2, 1)
    one = ("-i", machine.gpu(2).uuid)

    def refused(*ids: str) -> str:
        done = run(smi(machine), "--gpu-reset", *ids, shell=shell, check=False)
        assert done.returncode == 255
        return done.stdout

    assert refused(*one).splitlines()[1:4] == [
        "The following GPUs could not be reset:", "  GPU 00000000:52:00.0: In use by another client", "",
    ]  # fmt: skip
    session = machine.open_session("dcgm")
    assert run(smi(machine), "-pm", "0", *one, shell=shell).stdout == (
        "Disabled persistence mode for GPU 00000000:52:00.0.\nAll done.\n"
    )
    assert "1 device is currently being used" in refused(*one)  # by DCGM
    assert "8 devices are currently being used" in refused()
    machine.close_session(session)
    machine.hold_gpu(2, 4711, "python3")
    assert "1 device is currently being used" in refused(*one)
    machine.release_gpu(2)
    (smi(machine).parents[2] / "var/lib/nvidia-simulator/sessions/left.1.1.killed").touch()
    assert run(smi(machine), "--gpu-reset", *one, shell=shell).stdout == (
        "GPU 00000000:52:00.0 was successfully reset.\nAll done.\n"
    )
    machine.close_session(machine.open_session("dcgm"))
    assert [(gpu.recovery_action, gpu.resets, gpu.persistence) for gpu in machine.current().present[1:4]] == [
        (0, 0, 1), (0, 1, 0), (0, 0, 1)
    ]  # fmt: skip
    script, dev = container(machine, "nvidia2")
    done = run(script, "--gpu-reset", *one, shell=shell, dev=dev, check=False)
    assert (done.returncode, "only on the host" in done.stdout) == (4, True)


@pytest.mark.parametrize("shell", SHELLS)
def test_persistence_mode(shell, make):
    machine = make("t4-4")
    query = ("--query-gpu=persistence_mode", "--format=csv,noheader")
    run(smi(machine), "-pm", "0", "-i", "1", shell=shell)
    assert run(smi(machine), *query, shell=shell).stdout.split() == [
        "Enabled",
        "Disabled",
        "Enabled",
        "Enabled",
    ]
    assert "already Disabled" in run(smi(machine), "--persistence-mode=0", "-i", "1", shell=shell).stdout
    machine.set_gpu(1, persistence=1)  # through NVML
    assert run(smi(machine), *query, shell=shell).stdout.split() == ["Enabled"] * 4
    assert run(smi(machine), "-pm", "2", shell=shell, check=False).returncode == 2


def test_texts_of_reset_and_persistence_mode_are_nvidias(nvidia):
    program = nvidia.root.joinpath("usr/lib/nvidia/current/nvidia-smi").read_bytes()
    script = Path(simulator.__file__).with_name("scripts").joinpath("nvidia-smi.sh").read_text()
    for text in (
        "The following GPUs could not be reset:",
        "In use by another client",
        "currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, graphics "
        "application such as an X server, or a monitoring application such as another instance of nvidia-smi). Please "
        "first kill all processes using ",
        " and all compute applications running in the system.",
        " was successfully reset.",
        " persistence mode for GPU ",
        "Persistence mode is already %s for GPU %s.",
        "Invalid persistence mode: ",
    ):
        assert text.encode() in program
        assert text in script


@pytest.mark.parametrize("shell", SHELLS)
def test_timeslice(shell, make, container):
    machine = make("dgx-h100")
    uuid = machine.gpu(2).uuid
    assert (
        "Long" in run(smi(machine), "compute-policy", "-i", uuid, "--set-timeslice", "3", shell=shell).stdout
    )
    assert [machine.timeslice(index) for index in range(4)] == [0, 0, 3, 0]
    assert "Timeslice: Long" in run(smi(machine), "compute-policy", "-i", "2", "-l", shell=shell).stdout
    assert run(smi(machine), "compute-policy", "--set-timeslice=7", check=False).returncode == 2
    run(smi(machine), "compute-policy", "-i", uuid, "--set-timeslice=0", shell=shell)
    assert machine.timeslice(2) == 0
    machine.set_mig_mode(2, True)
    machine.reboot()
    assert machine.timeslice(2) == 0


def test_the_script_finds_its_machine_when_the_directory_is_mounted_elsewhere(make, tmp_path):
    machine = make("t4-4")
    moved = tmp_path / "mounted"
    settings = "var/lib/nvidia-simulator"
    shutil.copytree(machine.host_root / settings, moved / "root" / settings)
    (moved / "root/usr/bin").mkdir(parents=True)
    shutil.copytree(
        machine.host_root / "dev", moved / "root/dev", copy_function=lambda _, to: Path(to).touch()
    )
    shutil.copy(smi(machine), moved / "root/usr/bin/nvidia-smi")
    run(moved / "root/usr/bin/nvidia-smi", "compute-policy", "-i", "0", "--set-timeslice", "1")
    assert (moved / "root" / settings / "timeslice" / machine.gpu(0).uuid).read_text() == "1\n"
    assert machine.timeslice(0) == 0


@pytest.mark.parametrize("shell", SHELLS)
def test_compute_mode(shell, make):
    machine = make("h100-mig-empty")
    uuid = machine.gpu(1).uuid
    out = run(smi(machine), "-i", uuid, "-c", "EXCLUSIVE_PROCESS", shell=shell).stdout
    assert out == "Set compute mode to EXCLUSIVE_PROCESS for GPU 00000000:64:00.0.\nAll done.\n"
    assert machine.compute_mode(uuid) == 3
    assert (
        "Exclusive_Process" in run(smi(machine), "--query-gpu=compute_mode", "--format=csv,noheader").stdout
    )
    run(smi(machine), "-i", uuid, "-c", "0", shell=shell)
    assert machine.compute_mode(uuid) == 0
    warned = run(smi(machine), "-i", "0", "-c", "3")
    assert warned.stdout.splitlines()[:2] == [
        "Setting compute mode to EXCLUSIVE_PROCESS is not supported on a MIG-enabled device.",
        "Treating as warning and moving on.",
    ]
    assert machine.compute_mode(machine.gpu(0).uuid) == 0


def test_containers_cannot_change_policies(make, container):
    machine = make("t4-4")
    script, dev = container(machine, "nvidia0")
    done = run(script, "compute-policy", "-i", "0", "--set-timeslice", "1", dev=dev, check=False)
    assert done.returncode == 4
    assert "Insufficient Permissions" in done.stdout


def test_the_script_follows_the_machine(make):
    machine = make("dgx-h100")
    machine.set_mig_mode(0, True)
    _, _, uuid = machine.create_mig(0, "2g.20gb", 2)
    assert f"  MIG 2g.20gb     Device  0: (UUID: {uuid})" in run(smi(machine), "-L").stdout
    machine.lose_gpu(7)
    done = run(smi(machine), "-L", check=False)
    assert done.returncode == 15
    assert "GPU is lost" in done.stderr
    assert machine.gpu(7).uuid not in done.stdout
    machine.unload_driver()
    done = run(smi(machine), check=False)
    assert done.returncode == 9
    assert "couldn't communicate with the NVIDIA driver" in done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_table_help_and_version(shell, make):
    machine = make("dgx-h100")
    table = run(smi(machine), shell=shell).stdout.splitlines()
    assert len({len(line) for line in table}) == 1
    assert len(table) == 14
    assert "compute-policy" in run(smi(machine), "-h", shell=shell).stdout
    assert "CUDA Version        : 13.0" in run(smi(machine), "--version", shell=shell).stdout
    for argument in ("topo", "mig", "--frobnicate"):
        assert run(smi(machine), argument, shell=shell, check=False).returncode == 2


@pytest.mark.parametrize("shell", SHELLS)
def test_time_slices_are_not_supported_in_mig_mode_on_virtual_gpus_and_on_old_parts(shell, make):
    machine = make("dgx-h100")
    machine.set_mig_mode(0, True)
    with machine._change() as state:
        state.by_uuid[machine.gpu(1).uuid].virtualization = 2
        old = state.by_uuid[machine.gpu(2).uuid]
        state.models["old"] = replace(state.model_of(old), compute=(6, 1))
        old.model = "old"
    for index in range(4):
        done = run(
            smi(machine), "compute-policy", "-i", str(index), "--set-timeslice", "2", shell=shell, check=False
        )
        assert ("Not Supported" in done.stdout, machine.timeslice(index)) == (
            (True, 0) if index < 3 else (False, 2)
        )


@pytest.fixture
def elf_files() -> Path:
    found = debian_programs.elf_directory()
    if found is None or os.uname().machine != "x86_64":
        pytest.skip(
            "needs a C compiler and the C library of the release before: python3 hack/debian_programs.py"
        )
    return found


def test_a_hostile_machine_has_elf_programs_that_need_libraries_of_the_driver(
    make, monkeypatch, elf_files, tmp_path, memory_path
):
    """The profile of the project's own tests; what users create runs in any container."""
    kind = make("a30-4")
    monkeypatch.setenv("SIMULATE_HOSTILE", "true")
    monkeypatch.setenv("SIMULATE_ELF", str(elf_files))
    hostile = create_machine("a30-4", memory_path / "hostile")
    foreign = create_machine("gb200-nvl72-tray", memory_path / "foreign")

    def started(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    alone = started(smi(hostile), "-L")
    assert (alone.returncode, alone.stdout.partition(" library")[0]) == (
        12,
        "NVIDIA-SMI couldn't find libnvidia-ml.so",
    )
    libraries = hostile.host_root / "usr/lib/x86_64-linux-gnu"
    next_to_its_libc = started(smi(hostile), "-L", LD_LIBRARY_PATH=str(libraries))
    assert next_to_its_libc.returncode != 0
    assert "libc.so.6" in next_to_its_libc.stderr

    links = tmp_path / "links"
    links.mkdir()
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        (links / name).symlink_to(libraries / name)
    on_host = started(smi(hostile), "-L", LD_LIBRARY_PATH=str(links))
    assert on_host.stdout == run(smi(kind), "-L").stdout
    alone_in_a_container = tmp_path / "nvidia-smi"
    shutil.copy(smi(hostile), alone_in_a_container)
    dev = str(tmp_path / "no-nodes")
    there = started(alone_in_a_container, "-L", LD_LIBRARY_PATH=str(links), SIMULATOR_DEV=dev)
    assert "GPU 0" not in there.stdout
    control = hostile.host_root / "usr/bin/nvidia-cuda-mps-control"
    requested = started(control, LD_LIBRARY_PATH=str(links), PATH=os.environ["PATH"])
    assert requested.stdout == "Cannot find MPS control daemon process\n"
    assert smi(foreign).read_bytes().startswith(b"#!/bin/sh")
