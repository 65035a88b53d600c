"""What nvidia-smi says and what it means: no such feature, no GPU or driver, try again."""

from __future__ import annotations

import time

import pytest

from dra_driver.base import bounded_program
from dra_driver.errors import NotSupportedError, NvmlUnavailableError, RetryableError
from dra_driver.host.driver_programs import InstalledPrograms, NvidiaSmi
from dra_driver.model.driver_files import DriverPrograms
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S
from tests.host.trees import VERSION, put_libraries, put_program


def at(program, library_path=None):
    paths = {} if program is None else {"nvidia-smi": str(program)}
    return NvidiaSmi(lambda: DriverPrograms("/driver-root", paths, "/usr/bin:/bin", library_path))


@pytest.fixture
def smi(tmp_path):
    def make(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return at(program, str(tmp_path / "links"))

    return make


def test_the_time_slice_is_set_with_the_drivers_libraries(smi, tmp_path):
    smi(f'echo "$LD_LIBRARY_PATH $*" > {tmp_path}/said').set_time_slice("GPU-1", 2)
    said = (tmp_path / "said").read_text()
    assert said == f"{tmp_path}/links compute-policy -i GPU-1 --set-timeslice 2\n"


def test_links_follow_the_libraries_of_another_root(tmp_path, monkeypatch):
    root, links = tmp_path / "driver", tmp_path / "links"
    put_program(root, "/usr/bin/nvidia-smi", ":")
    put_libraries(root, "/usr/lib64")
    monkeypatch.setenv("PATH", "/usr/bin")
    find = InstalledPrograms(str(root), links)
    assert find().environment() == {"PATH": f"{root}/usr/bin:/usr/bin", "LD_LIBRARY_PATH": str(links)}
    assert str((links / "libcuda.so.1").readlink()) == f"{root}/usr/lib64/libcuda.so.{VERSION}"
    for library in (root / "usr/lib64").iterdir():
        library.unlink()
    find()
    assert list(links.iterdir()) == []
    assert InstalledPrograms("/", tmp_path / "none")().library_path is None
    assert not (tmp_path / "none").exists()


@tabled("code", "text")
@pytest.mark.parametrize("stream", [1, 2])
def test_no_gpu_or_no_driver(smi, code, text, stream):
    with pytest.raises(NvmlUnavailableError, match="cannot set the time slice of GPU GPU-1: "):
        smi(f'echo "{text}" >&{stream}; exit {code}').set_time_slice("GPU-1", 2)


def test_other_refusals(smi):
    with pytest.raises(NotSupportedError, match="does not support it"):
        smi("echo 'Timeslice is Not Supported'; exit 3").set_time_slice("GPU-1", 2)
    with pytest.raises(RetryableError, match="failed with exit code 4: Insufficient Permissions") as caught:
        smi("echo 'Insufficient Permissions'; exit 4").set_time_slice("GPU-1", 2)
    assert not isinstance(caught.value, NvmlUnavailableError)
    with pytest.raises(NvmlUnavailableError, match="install the NVIDIA driver"):
        at(None).set_time_slice("GPU-1", 2)
    with pytest.raises(RetryableError, match="/nonexistent did not start: No such file"):
        at("/nonexistent").set_time_slice("GPU-1", 2)


def test_another_gpu_that_is_lost_does_not_matter(smi):
    smi("echo 'GPU is lost' >&2; exit 0").set_time_slice("GPU-1", 2)


def test_program_that_hangs_in_the_kernel_is_left_behind(smi, monkeypatch):
    children = []

    def ignored(child):
        children.append(child)

    monkeypatch.setattr(bounded_program, "_AFTER_KILL_S", 0.05)
    monkeypatch.setattr(bounded_program, "_kill", ignored)
    began = time.monotonic()
    with pytest.raises(RetryableError, match="does not answer: it did not finish within"):
        smi("exec sleep 600").set_time_slice("GPU-1", 2, 0.1)
    assert time.monotonic() - began < PATIENCE_S
    children[0].kill()
    assert children[0].wait(PATIENCE_S) == -9
