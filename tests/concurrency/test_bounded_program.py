"""Programs that end, that do not, and that not even a KILL ends."""

from __future__ import annotations

import os
import signal
import time

import pytest

from dra_driver.concurrency import bounded_program
from dra_driver.errors import RetryableError
from dra_driver.model.driver_programs import DriverPrograms
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.mps import daemon_compute_mode as computemode
from dra_driver.mps import daemon_control as control
from dra_driver.mps.daemon_compute_mode import ComputeMode
from dra_driver.mps.daemon_control import DaemonControl
from dra_driver.mps.host_files import MpsLayout


def run(script, timeout_s=5.0, lane="test", **more):
    arguments = ["/bin/sh", "-c", script]
    return bounded_program.run_program(arguments, dict(os.environ), timeout_s=timeout_s, lane=lane, **more)


@pytest.fixture
def unkillable(monkeypatch):
    """KILL has no effect for now, as on a process that waits in the kernel."""
    children = []

    def ignored(child):
        children.append(child)

    monkeypatch.setattr(bounded_program, "_AFTER_KILL_S", 0.05)
    monkeypatch.setattr(bounded_program, "_kill", ignored)
    yield children
    monkeypatch.undo()
    for child in children:
        child.kill()
        child.wait(20)


def test_exit_code_and_all_output():
    assert run("cat; echo err >&2; exit 3", text="in\n") == (3, "in\nerr\n")


def test_a_program_that_does_not_end_is_killed():
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not end within 0\.1 s"):
        run("exec sleep 60", 0.1)
    assert time.monotonic() - began < 15
    assert run("exit 0") == (0, "")


def test_a_grandchild_that_keeps_the_output_open_does_not_count():
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        run("sleep 20 & exec sleep 60", 0.1)
    assert time.monotonic() - began < 15


def test_what_even_kill_does_not_end_is_left_behind(unkillable):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="did not end"):
        run("exec sleep 60", 0.1)
    with pytest.raises(TimeoutError, match=f"process {unkillable[0].pid} of an earlier try still hangs"):
        run("exit 0")
    assert run("exit 0", lane="another") == (0, "")
    assert time.monotonic() - began < 15
    os.kill(unkillable[0].pid, signal.SIGKILL)
    unkillable[0].wait(20)
    assert run("exit 0") == (0, ""), "nothing hangs any more"


def test_what_even_kill_does_not_end_is_left_behind_when_no_thread_starts(unkillable, threads_that_start):
    threads_that_start("", 0)
    with pytest.raises(TimeoutError, match="did not end"):
        run("exec sleep 60", 0.1)
    os.kill(unkillable[0].pid, signal.SIGKILL)
    unkillable[0].wait(20)
    assert run("exit 0") == (0, "")


def test_a_gpu_that_hangs_holds_nobody_up(unkillable, tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    paths = {"nvidia-smi": str(program), "nvidia-cuda-mps-control": str(program)}
    programs = DriverPrograms("/", paths, os.environ["PATH"])
    monkeypatch.setattr(computemode, "_TIMEOUT_S", 0.1)
    began = time.monotonic()
    mode = ComputeMode(lambda: programs)
    for gpu, text in (("GPU-1", "did not end"), ("GPU-1", "still hangs"), ("GPU-2", "did not end")):
        with pytest.raises(RetryableError, match=f"of {gpu}: .*{text}"):
            mode.get(gpu)
    spec, directories = MpsDaemonSpec("gpu-1", "", "gpu", ""), MpsLayout(tmp_path).directories("gpu-1")
    with pytest.raises(RetryableError, match=r"'quit': .*does not answer: it did not end"):
        DaemonControl(lambda: programs, spec, directories).ask_once("quit", timeout_s=0.1)
    assert time.monotonic() - began < 15
    assert control.CONTROL_PROGRAM in str(sorted(bounded_program._stuck))
