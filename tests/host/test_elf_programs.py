"""The driver's programs as real ELF programs, for plugin and MPS host: they run beside any C library of the host, and
one that cannot be started is told as that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import libcs
import pytest

from dra_driver.concurrency.bounded_program import run_program
from dra_driver.errors import NvmlUnavailableError, RetryableError
from dra_driver.host.driver_programs import installed_programs
from dra_driver.host.driver_root import find_nvml_library
from dra_driver.host.nvidia_smi import NvidiaSmi
from dra_driver.model.driver_programs import CONTROL_PROGRAM, SMI_PROGRAM, DriverPrograms, FindPrograms
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.mps.compute_mode import ComputeMode
from dra_driver.mps.daemon_control import OUTPUT, ControlProgram
from dra_driver.mps.daemon_conversation import Timings
from dra_driver.mps.layout import MpsLayout
from dra_driver.mps.mounts import KernelMounter, MountsWherePossible
from dra_driver.mps.selinux import SelinuxLabels
from dra_driver.mps.supervisor import HostTools, Supervisor
from tests.fakes.elfdriver import (
    LAYOUTS,
    VERSION,
    ElfDriver,
    build_elf_driver,
    loaded,
    of_another_architecture,
)

GPU = "GPU-1"
SPEC = MpsDaemonSpec("gpu-1", GPU, "gpu", GPU)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ElfDriver:
    return build_elf_driver(tmp_path_factory.mktemp("elf"))


@pytest.fixture(params=["older", "newer"])
def foreign_libc(request: pytest.FixtureRequest, driver: ElfDriver) -> Path:
    """The directory with a C library that this machine's loader cannot work with."""
    found = libcs.older() if request.param == "older" else libcs.newer()
    if found is None:
        pytest.skip("the mirror has no release after this machine's")
    return found


@pytest.fixture(params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def root(driver: ElfDriver, layout: str, foreign_libc: Path, tmp_path: Path) -> Path:
    return driver.install(tmp_path, LAYOUTS[layout], foreign_libc)


@pytest.fixture
def mps(tmp_path: Path) -> Iterator[Callable[[Path], Supervisor]]:
    """Opens an MPS host for a driver root."""
    opened = []

    def open_for(root: Path) -> Supervisor:
        layout = MpsLayout(tmp_path / "mps")
        programs = installed_programs(str(root), layout.libraries, 0o755)
        labels = SelinuxLabels(enabled=False)
        mounter = MountsWherePossible(KernelMounter(layout.root, labels))
        tools = HostTools(
            ControlProgram(programs), mounter, ComputeMode(programs), lambda: None, labels
        )  # whole GPUs need no capability nodes
        supervisor = Supervisor(layout, tools, Timings(patience=0.2))
        supervisor.open()
        opened.append(supervisor)
        return supervisor

    yield open_for
    for supervisor in opened:
        supervisor.stop(SPEC.device, 20)
        supervisor.close()


# --- beside another C library --------------------------------------------------------------------


def test_a_program_dies_when_the_loader_looks_in_the_hosts_library_directory(root: Path, layout: str) -> None:
    """What our way must avoid: otherwise these roots would prove nothing."""
    libraries = root / LAYOUTS[layout].libraries
    programs = DriverPrograms(
        str(root),
        {SMI_PROGRAM: str(root / LAYOUTS[layout].programs / SMI_PROGRAM)},
        "/usr/bin:/bin",
        str(libraries),
    )
    with pytest.raises(RetryableError, match=r"cannot be started \(exit code 127\)") as caught:
        NvidiaSmi(lambda: programs).set_time_slice(GPU, 2)
    assert caught.value.has_no_effect


def test_nvidia_smi_runs_with_the_hosts_driver_and_our_c_library(root: Path, tmp_path: Path) -> None:
    find = installed_programs(str(root), tmp_path / "links")
    NvidiaSmi(find).set_time_slice(GPU, 2)

    program = find().path(SMI_PROGRAM)
    code, said = run_program([program, "-i", GPU, "-c", "0"], find().environment(), timeout_s=20, lane="test")
    assert code == 0, said
    of_host = [path for path in loaded(said) if path.startswith(f"{tmp_path}/")]
    assert [path.removeprefix(f"{root}/").rpartition("/")[2] for path in of_host] == [
        f"libnvidia-ml.so.{VERSION}"
    ]
    assert "libc.so.6" in {Path(path).name for path in loaded(said)}


def test_the_hosts_nvml_is_loaded_with_our_c_library(root: Path) -> None:
    """As the plugin does, in its own process."""
    load = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).nvmlInit_v2())"
    command = [sys.executable, "-c", load, find_nvml_library(str(root))]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "0\n"


def test_the_mps_daemon_and_its_server_run_with_the_hosts_driver_and_our_c_library(
    root: Path, tmp_path: Path, mps: Callable[[Path], Supervisor]
) -> None:
    supervisor = mps(root)
    assert supervisor.ensure(SPEC, 20).state == "ready"
    said = (tmp_path / "mps/gpu-1/log" / OUTPUT).read_text()
    of_host = [path for path in loaded(said) if path.startswith(f"{tmp_path}/")]
    assert [Path(path).name for path in of_host] == [f"libcuda.so.{VERSION}"] * 2, said
    supervisor.stop(SPEC.device, 20)
    assert supervisor.status() == ()


@pytest.mark.parametrize("late", ["libnvidia-ml", "lib"])
def test_nvidia_smi_finds_libraries_that_come_after_it(driver: ElfDriver, tmp_path: Path, late: str) -> None:
    """A package manager unpacks one package after the other, and a claim may come in between."""
    root = driver.install(tmp_path, LAYOUTS["a driver container"], driver.libc)
    smi = NvidiaSmi(installed_programs(str(root), tmp_path / "links"))
    libraries = root / LAYOUTS["a driver container"].libraries
    apart = tmp_path / "apart"
    apart.mkdir()
    for file in [*libraries.glob(f"{late}*.so.{VERSION}"), *libraries.glob(f"{late}*.so.1")]:
        file.rename(apart / file.name)
    for _ in range(2):
        with pytest.raises(RetryableError, match="exit code 12"):
            smi.set_time_slice(GPU, 2)
    for file in apart.iterdir():
        file.rename(libraries / file.name)
    smi.set_time_slice(GPU, 2)


def test_nvidia_smi_finds_the_libraries_of_the_next_version(driver: ElfDriver, tmp_path: Path) -> None:
    root = driver.install(tmp_path, LAYOUTS["a driver container"], driver.libc)
    smi = NvidiaSmi(installed_programs(str(root), tmp_path / "links"))
    for _ in range(2):
        smi.set_time_slice(GPU, 2)
    for file in root.rglob(f"lib*.so.{VERSION}"):
        link = file.with_name(f"{file.name.partition('.')[0]}.so.1")
        file.rename(file.with_name(file.name.replace(VERSION, "590.44.01")))
        link.unlink()
        link.symlink_to(link.name.replace(".so.1", ".so.590.44.01"))
    smi.set_time_slice(GPU, 2)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_programs_run_as_on_their_own_system_when_the_driver_root_is_ours(
    driver: ElfDriver, foreign_libc: Path, tmp_path: Path
) -> None:
    """The root is `/`: program, loader and C library are of one system, and no environment comes between them."""
    root = driver.install(tmp_path, LAYOUTS["the root of a Debian host"], foreign_libc)
    loader = next(foreign_libc.glob("ld-linux*"))
    for directory in ("lib", "lib64"):  # where programs name it on aarch64 and on x86_64
        (root / directory).mkdir()
        shutil.copy(loader, root / directory)
    (root / "dev").mkdir()
    (root / "dev/null").touch()
    command = [sys.executable, "-c", _IN_ROOT, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert loaded(done.stdout), done.stdout
    assert not (root / "links").exists()


_IN_ROOT = """
import os, sys
from pathlib import Path
from dra_driver.concurrency.bounded_program import run_program
from dra_driver.host.driver_programs import installed_programs
from dra_driver.host.nvidia_smi import NvidiaSmi

os.chroot(sys.argv[1])
find = installed_programs("/", Path("/links"))
NvidiaSmi(find).set_time_slice("GPU-1", 2)
programs = find()
for name, words in (("nvidia-smi", ["-i", "GPU-1", "-c", "0"]), ("nvidia-cuda-mps-control", [])):
    code, said = run_program([programs.path(name), *words], programs.environment(), timeout_s=20, lane=name, text="")
    assert code == 0, said
    print(said)
"""


# --- programs that cannot be started -------------------------------------------------------------


def _absent_library(driver: ElfDriver, program: Path) -> None:
    driver.program(program, *driver.missing("libabsent.so.1"))


def _unknown_version(driver: ElfDriver, program: Path) -> None:
    driver.program(program, *driver.missing("librt.so.1", "GLIBC_9.99"))


def _unknown_loader(driver: ElfDriver, program: Path) -> None:
    driver.program(program, "-Wl,--dynamic-linker=/absent/ld.so")


def _other_architecture(driver: ElfDriver, program: Path) -> None:
    of_another_architecture(program)


def _not_executable(driver: ElfDriver, program: Path) -> None:
    program.chmod(0o644)


def _nvml_of_a_newer_libc(driver: ElfDriver, program: Path) -> None:
    _library_of_a_newer_libc(driver, program, "libnvidia-ml")


def _libcuda_of_a_newer_libc(driver: ElfDriver, program: Path) -> None:
    _library_of_a_newer_libc(driver, program, "libcuda")


def _library_of_a_newer_libc(driver: ElfDriver, program: Path, name: str) -> None:
    library = next(program.parents[2].rglob(f"{name}.so.{VERSION}"))
    driver.library(library, *driver.missing("librt.so.1", "GLIBC_9.99"))


def _no_nvml(driver: ElfDriver, program: Path) -> None:
    for library in program.parents[2].rglob("libnvidia-ml.so.*"):
        library.unlink()


BROKEN = [
    pytest.param(_absent_library, "exit code 127.*libabsent.so.1: cannot open", id="needs-an-absent-library"),
    pytest.param(_unknown_version, "exit code 1.*GLIBC_9.99' not found", id="needs-a-newer-libc"),
    pytest.param(_unknown_loader, "the loader that it names is not there", id="needs-an-absent-loader"),
    pytest.param(
        _other_architecture, "it is no program for this machine's architecture", id="of-another-architecture"
    ),
    pytest.param(_not_executable, "Permission denied", id="not-executable"),
]
BROKEN_LIBRARY = [
    pytest.param(_nvml_of_a_newer_libc, "exit code 12.*GLIBC_9.99' not found", id="nvml-needs-a-newer-libc"),
    pytest.param(_no_nvml, "exit code 12.*libnvidia-ml.so.1: cannot open", id="no-nvml"),
]


@pytest.fixture
def broken(
    driver: ElfDriver, tmp_path: Path
) -> Callable[[str, Callable[[ElfDriver, Path], None]], FindPrograms]:
    """Finds the programs of a driver root, one of which was broken."""

    def make(name: str, harm: Callable[[ElfDriver, Path], None]) -> FindPrograms:
        root = driver.install(tmp_path, LAYOUTS["a driver container"], driver.libc)
        harm(driver, root / "usr/bin" / name)
        return installed_programs(str(root), tmp_path / "links")

    return make


@pytest.mark.parametrize(("harm", "cause"), BROKEN + BROKEN_LIBRARY)
def test_a_time_slice_that_nobody_could_set_is_told_with_its_cause(broken, harm, cause: str) -> None:
    with pytest.raises(RetryableError, match=f"nvidia-smi cannot be started.*{cause}") as caught:
        NvidiaSmi(broken(SMI_PROGRAM, harm)).set_time_slice(GPU, 2)
    assert not isinstance(caught.value, NvmlUnavailableError), "the GPU may be there"
    assert caught.value.has_no_effect


@pytest.mark.parametrize(("harm", "cause"), BROKEN + BROKEN_LIBRARY)
def test_a_compute_mode_that_nobody_could_read_is_not_taken_for_none(broken, harm, cause: str) -> None:
    mode = ComputeMode(broken(SMI_PROGRAM, harm))
    with pytest.raises(RetryableError, match=f"nvidia-smi cannot be started.*{cause}"):
        mode.get(GPU)
    with pytest.raises(RetryableError, match=f"nvidia-smi cannot be started.*{cause}"):
        mode.set(GPU, 3)


@pytest.mark.parametrize(("harm", "cause"), BROKEN)
def test_an_mps_daemon_that_cannot_be_asked_is_told_with_its_cause(
    broken, harm, cause: str, tmp_path: Path
) -> None:
    control = ControlProgram(broken(CONTROL_PROGRAM, harm))
    directories = MpsLayout(tmp_path / "mps").directories(SPEC.device)
    with pytest.raises(RetryableError, match=f"nvidia-cuda-mps-control cannot be started.*{cause}"):
        control.ask(directories, "get_server_list", timeout_s=20)


BROKEN_DAEMON = [
    *BROKEN,
    pytest.param(_libcuda_of_a_newer_libc, "GLIBC_9.99' not found", id="libcuda-needs-a-newer-libc"),
]


@pytest.mark.parametrize(("harm", "cause"), BROKEN_DAEMON)
def test_an_mps_daemon_that_cannot_be_started_is_told_with_its_cause(
    driver: ElfDriver, tmp_path: Path, mps: Callable[[Path], Supervisor], harm, cause: str
) -> None:
    root = driver.install(tmp_path, LAYOUTS["a driver container"], driver.libc)
    harm(driver, root / "usr/bin" / CONTROL_PROGRAM)
    supervisor = mps(root)
    words_of_loader = cause.rpartition(".*")[2]  # its daemon is no child whose exit code counts
    with pytest.raises(RetryableError, match=words_of_loader):
        supervisor.ensure(SPEC, 20)
    assert supervisor.status() == ()
