"""What nvidia-smi says and what it means: no such feature, no GPU or driver, try again."""

from __future__ import annotations

import ctypes
import shutil
import sys
import time
from pathlib import Path

import pytest

from dra_driver.concurrency import bounded_program
from dra_driver.concurrency.bounded_program import run_program
from dra_driver.errors import NotSupportedError, NvmlUnavailableError, RetryableError
from dra_driver.host.driver_programs import InstalledPrograms
from dra_driver.host.nvidia_smi import NvidiaSmi
from dra_driver.model.driver_programs import DriverPrograms
from dra_driver.simulator import create_machine
from tests.fakes.tables import tabled
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


# --- under a C library that is not the host's ----------------------------------------------------


def mapped(name):
    """The file of a shared library that this very process runs with."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(path for line in lines if (path := line.split()[-1]).rpartition("/")[2].startswith(name))


@pytest.fixture
def host_of_another_libc(tmp_path):
    """A driver root as hosts have it: NVIDIA's libraries in one directory with a C library that is not ours, and
    nvidia-smi as a real program of the linker and loader."""
    ctypes.CDLL("libm.so.6")
    root, other = tmp_path / "root", mapped("libm")
    libraries = root / "usr/lib64"
    libraries.mkdir(parents=True)
    (root / "usr/bin").mkdir()
    for name in ("libnvidia-ml", "libcuda"):
        shutil.copy(other, libraries / f"{name}.so.580.65.06")
        (libraries / f"{name}.so.1").symlink_to(f"{name}.so.580.65.06")
    # Has none of the symbols of the C library that the program was linked against.
    shutil.copy(other, libraries / "libc.so.6")
    shutil.copy("/bin/echo", root / "usr/bin/nvidia-smi")
    return root


def test_nvidia_smi_starts_beside_a_c_library_of_the_host_that_does_not_fit(host_of_another_libc, tmp_path):
    program = host_of_another_libc / "usr/bin/nvidia-smi"
    with pytest.raises(RetryableError, match="cannot be started") as caught:
        at(program, f"{host_of_another_libc}/usr/lib64").set_time_slice("GPU-1", 2)
    assert not isinstance(caught.value, NvmlUnavailableError), (
        "though the loader says that something is not found"
    )

    find = InstalledPrograms(str(host_of_another_libc), tmp_path / "links")
    NvidiaSmi(find).set_time_slice("GPU-1", 2)
    code, said = run_program([str(program), "-L"], find().environment(), timeout_s=20.0, lane="test")
    assert (code, said) == (0, "-L\n")


def test_nvidia_smi_finds_the_hosts_library_of_nvml(host_of_another_libc, tmp_path):
    """As it does, by dlopen and without a path."""
    load = "import ctypes; ctypes.CDLL('libnvidia-ml.so.1'); print(open('/proc/self/maps').read())"
    environment = InstalledPrograms(str(host_of_another_libc), tmp_path / "links")().environment()
    code, said = run_program([sys.executable, "-c", load], environment, timeout_s=20.0, lane="test")
    assert code == 0, said
    assert f"{host_of_another_libc}/usr/lib64/libnvidia-ml.so.580.65.06" in said
    assert f"{host_of_another_libc}/usr/lib64/libc.so.6" not in said


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


@pytest.mark.parametrize("code", [126, 127])
def test_one_that_cannot_be_started_is_told_as_that(smi, tmp_path, code):
    """The loader's words have "not found" in them, which does not mean that the GPU is absent."""
    said = "/lib/libc.so.6: version GLIBC_2.38 not found"
    with pytest.raises(
        RetryableError, match=rf"{tmp_path}/nvidia-smi cannot be started \(exit code {code}\): .*GLIBC_2"
    ) as caught:
        smi(f'echo "{said}" >&2; exit {code}').set_time_slice("GPU-1", 2)
    assert not isinstance(caught.value, NvmlUnavailableError)


@tabled("code", "text")
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
        at(None).set_time_slice("GPU-1", 2)
    with pytest.raises(RetryableError, match="/nonexistent cannot be started: No such file"):
        at("/nonexistent").set_time_slice("GPU-1", 2)


def test_another_gpu_that_is_lost_does_not_matter(smi):
    smi("echo 'GPU is lost' >&2; exit 0").set_time_slice("GPU-1", 2)


def test_on_a_machine_that_lost_a_gpu_and_then_its_driver(tmp_path):
    machine = create_machine("dgx-h100", tmp_path, device_nodes="described")
    one = NvidiaSmi(InstalledPrograms(str(machine.host_root), tmp_path / "links"))
    machine.lose_gpu(3)
    one.set_time_slice(machine.gpu(2).uuid, 1)
    with pytest.raises(NvmlUnavailableError, match="GPU is lost"):
        one.set_time_slice(machine.gpu(3).uuid, 1)
    machine.unload_driver()
    with pytest.raises(NvmlUnavailableError, match="couldn't communicate"):
        one.set_time_slice(machine.gpu(2).uuid, 1)


def test_one_that_hangs_in_the_kernel_is_left_behind(smi, monkeypatch):
    children = []

    def ignored(child):
        children.append(child)

    monkeypatch.setattr(bounded_program, "_AFTER_KILL_S", 0.05)
    monkeypatch.setattr(bounded_program, "_kill", ignored)
    began = time.monotonic()
    with pytest.raises(RetryableError, match="does not answer: it did not end within"):
        smi("exec sleep 60").set_time_slice("GPU-1", 2, 0.1)
    assert time.monotonic() - began < 20
    children[0].kill()
    assert children[0].wait(20) == -9
