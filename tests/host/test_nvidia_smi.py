"""What nvidia-smi says and what it means: no such feature, no GPU or driver, try again."""

from __future__ import annotations

import subprocess
import threading
import time

import pytest

from dra_driver.errors import NotSupportedError, NvmlUnavailableError, RetryableError
from dra_driver.host import nvidia_smi
from dra_driver.host.nvidia_smi import NvidiaSmi
from dra_driver.simulator import create_machine


@pytest.fixture
def smi(tmp_path):
    def make(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return NvidiaSmi(lambda: (str(program), str(tmp_path / "libnvidia-ml.so.1")))

    return make


def test_the_time_slice_is_set_with_the_drivers_library(smi, tmp_path):
    smi(f'echo "$LD_LIBRARY_PATH $*" > {tmp_path}/said').set_time_slice("GPU-1", 2)
    said = (tmp_path / "said").read_text()
    assert said == f"{tmp_path} compute-policy -i GPU-1 --set-timeslice 2\n"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (6, "No devices were found"),
        (9, "NVIDIA-SMI has failed"),
        (15, "whatever"),
        (15, "not supported while it is lost"),
        (1, "GPU is lost.  Reboot the system to recover this GPU"),
        (255, "Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error"),
        (1, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
        (1, "GPU GPU-1 was not found"),
    ],
)
@pytest.mark.parametrize("stream", [1, 2])
def test_no_gpu_or_no_driver(smi, code, text, stream):
    with pytest.raises(NvmlUnavailableError, match="set the time slice of GPU GPU-1: "):
        smi(f'echo "{text}" >&{stream}; exit {code}').set_time_slice("GPU-1", 2)


def test_other_refusals(smi):
    with pytest.raises(NotSupportedError, match="does not support it"):
        smi("echo 'Timeslice is Not Supported'; exit 3").set_time_slice("GPU-1", 2)
    with pytest.raises(RetryableError, match="failed with exit code 4: Insufficient Permissions") as caught:
        smi("echo 'Insufficient Permissions'; exit 4").set_time_slice("GPU-1", 2)
    assert not isinstance(caught.value, NvmlUnavailableError)
    with pytest.raises(NvmlUnavailableError, match="install the NVIDIA driver"):
        NvidiaSmi(lambda: None).set_time_slice("GPU-1", 2)
    with pytest.raises(RetryableError, match="cannot run /nonexistent"):
        NvidiaSmi(lambda: ("/nonexistent", "/lib")).set_time_slice("GPU-1", 2)


def test_another_gpu_that_is_lost_does_not_matter(smi):
    smi("echo 'GPU is lost' >&2; exit 0").set_time_slice("GPU-1", 2)


def test_on_a_machine_that_lost_a_gpu_and_then_its_driver(tmp_path):
    machine = create_machine("dgx-h100", tmp_path, device_nodes="described")
    root = machine.host_root
    one = NvidiaSmi(lambda: (str(root / "usr/bin/nvidia-smi"), str(root / "usr/lib64/libnvidia-ml.so.1")))
    machine.lose_gpu(3)
    one.set_time_slice(machine.gpu(2).uuid, 1)
    with pytest.raises(NvmlUnavailableError, match="GPU is lost"):
        one.set_time_slice(machine.gpu(3).uuid, 1)
    machine.unload_driver()
    with pytest.raises(NvmlUnavailableError, match="couldn't communicate"):
        one.set_time_slice(machine.gpu(2).uuid, 1)


def test_one_that_hangs_in_the_kernel_is_left_behind(smi, monkeypatch):
    children, kill = [], subprocess.Popen.kill

    def ignored(child):
        children.append(child)

    monkeypatch.setattr(nvidia_smi, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(nvidia_smi, "_AFTER_KILL_S", 0.05)
    monkeypatch.setattr(subprocess.Popen, "kill", ignored)
    began = time.monotonic()
    with pytest.raises(RetryableError, match="did not answer within"):
        smi("exec sleep 60").set_time_slice("GPU-1", 2)
    assert time.monotonic() - began < 20
    kill(children[0])
    while any(thread.name == "nvidia-smi-reaper" for thread in threading.enumerate()):
        assert time.monotonic() - began < 40
        time.sleep(0.01)
    assert children[0].returncode == -9
