"""Programs that exit, that do not, and that not even SIGKILL stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from dra_driver.base import bounded_program
from dra_driver.errors import RetryableError
from dra_driver.model.driver_files import DriverPrograms
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.mps_host import daemon_compute_mode as computemode
from dra_driver.mps_host import daemon_control as control
from dra_driver.mps_host.daemon_compute_mode import ComputeMode
from dra_driver.mps_host.daemon_control import DaemonControl
from dra_driver.mps_host.host_files import MpsLayout
from tests.fakes.waiting import PATIENCE_S, eventually


def run(script, timeout_s=5.0, slot="test", **more):
    arguments = ["/bin/sh", "-c", script]
    return bounded_program.run_program(arguments, dict(os.environ), timeout_s=timeout_s, slot=slot, **more)


@pytest.fixture
def unkillable(monkeypatch):
    """SIGKILL has no effect for now, as on a process that waits in the kernel."""
    children = []

    def ignored(child):
        children.append(child)

    monkeypatch.setattr(bounded_program, "_AFTER_KILL_S", 0.05)
    monkeypatch.setattr(bounded_program, "_kill", ignored)
    yield children
    monkeypatch.undo()
    for child in children:
        child.kill()
        child.wait(PATIENCE_S)


def test_exit_code_and_all_output():
    assert run("cat; echo err >&2; exit 3", text="in\n") == (3, "in\nerr\n")


def test_a_program_that_does_not_end_is_killed():
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not finish within 0\.1 s"):
        run("exec sleep 600", 0.1)
    assert time.monotonic() - began < PATIENCE_S
    assert run("exit 0") == (0, "")


def test_a_grandchild_that_keeps_the_output_open_does_not_count():
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        run("sleep 600 & exec sleep 600", 0.1)
    assert time.monotonic() - began < PATIENCE_S


def test_unkillable_program_is_left_behind(unkillable):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="did not finish"):
        run("exec sleep 600", 0.1)
    with pytest.raises(TimeoutError, match=f"process {unkillable[0].pid} of an earlier attempt still hangs"):
        run("exit 0")
    assert run("exit 0", slot="another") == (0, "")
    assert time.monotonic() - began < PATIENCE_S
    os.kill(unkillable[0].pid, signal.SIGKILL)
    unkillable[0].wait(PATIENCE_S)
    assert run("exit 0") == (0, ""), "nothing hangs any more"


def test_unkillable_program_is_left_behind_when_no_thread_starts(unkillable, threads_that_start):
    threads_that_start("", 0)
    with pytest.raises(TimeoutError, match="did not finish"):
        run("exec sleep 600", 0.1)
    os.kill(unkillable[0].pid, signal.SIGKILL)
    unkillable[0].wait(PATIENCE_S)
    assert run("exit 0") == (0, "")


def test_a_gpu_that_hangs_delays_no_other(unkillable, tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    paths = {"nvidia-smi": str(program), "nvidia-cuda-mps-control": str(program)}
    programs = DriverPrograms("/", paths, os.environ["PATH"])
    monkeypatch.setattr(computemode, "_TIMEOUT_S", 0.1)
    began = time.monotonic()
    mode = ComputeMode(lambda: programs)
    for gpu, text in (("GPU-1", "did not finish"), ("GPU-1", "still hangs"), ("GPU-2", "did not finish")):
        with pytest.raises(RetryableError, match=f"of {gpu}: .*{text}"):
            mode.get(gpu)
    spec, directories = MpsDaemonSpec("gpu-1", "", "gpu", ""), MpsLayout(tmp_path).directories("gpu-1")
    with pytest.raises(
        RetryableError, match=r"'quit' to the MPS daemon: .*does not answer: it did not finish"
    ):
        DaemonControl(lambda: programs, spec, directories).query_once("quit", timeout_s=0.1)
    assert time.monotonic() - began < PATIENCE_S
    assert control.CONTROL_PROGRAM in str(sorted(bounded_program._stuck))


NVIDIA_SMI = """#!/bin/sh
case "$*" in
*EXCLUSIVE_PROCESS*) echo $$ >{0}/begun; read line <{0}/goes-on; echo Exclusive_Process >{0}/mode ;;
*) cat {0}/mode ;;
esac
"""
SETS_MODE = """
import sys
from pathlib import Path
from dra_driver.model.driver_files import DriverPrograms
from dra_driver.mps_host.daemon_compute_mode import EXCLUSIVE_PROCESS, ComputeMode
programs = DriverPrograms("/", {"nvidia-smi": sys.argv[1] + "/nvidia-smi"}, sys.argv[2])
ComputeMode(lambda: programs, locks=Path(sys.argv[1], "host.modes")).set("GPU-1", EXCLUSIVE_PROCESS)
"""


def test_compute_mode_is_not_read_before_the_nvidia_smi_of_a_killed_host_has_set_it(tmp_path, monkeypatch):
    """Otherwise the next MPS host would read the default mode, and later leave the GPU exclusive."""
    program, path = tmp_path / "nvidia-smi", os.environ["PATH"]
    program.write_text(NVIDIA_SMI.format(tmp_path))
    program.chmod(0o755)
    (tmp_path / "mode").write_text("Default\n")
    os.mkfifo(tmp_path / "goes-on")
    with subprocess.Popen([sys.executable, "-c", SETS_MODE, str(tmp_path), path]) as host:
        eventually((tmp_path / "begun").exists)
        host.kill()
        host.wait()
    programs = DriverPrograms("/", {"nvidia-smi": str(program)}, path)
    mode = ComputeMode(lambda: programs, locks=tmp_path / "host.modes")
    monkeypatch.setattr(computemode, "_OTHER_S", 0.0)
    with pytest.raises(RetryableError, match="of GPU-1: an earlier nvidia-smi is still running"):
        mode.get("GPU-1")
    assert mode.get("GPU-2") == computemode.DEFAULT
    monkeypatch.setattr(computemode, "_OTHER_S", 20.0)
    (tmp_path / "goes-on").write_text("\n")
    assert mode.get("GPU-1") == computemode.EXCLUSIVE_PROCESS
