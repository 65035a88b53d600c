"""NVIDIA's own programs for plugin and MPS host, with any C library of the host, and the errors if they
cannot be started. No NVIDIA driver is loaded: their message about this shows that they run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import debian_programs
import pytest
from debian_programs import Programs

from dra_driver.base.bounded_program import run_program
from dra_driver.errors import NvmlUnavailableError, RetryableError
from dra_driver.host.driver_programs import InstalledPrograms, NvidiaSmi
from dra_driver.host.driver_root import find_nvml_library
from dra_driver.model.driver_files import CONTROL_PROGRAM, SMI_PROGRAM, DriverPrograms, FindPrograms
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.mps_host.daemon import HostTools
from dra_driver.mps_host.daemon_compute_mode import ComputeMode
from dra_driver.mps_host.daemon_control import OUTPUT, DaemonControl, Timings
from dra_driver.mps_host.daemon_mounts import MountsWherePossible, SelinuxLabels
from dra_driver.mps_host.host_files import MpsLayout
from tests.fakes import elfdriver
from tests.fakes.elfdriver import LAYOUTS, LIBRARIES, loaded
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.mps_host.conftest import Served

GPU = "GPU-1"
SPEC = MpsDaemonSpec("gpu-1", GPU, "gpu", GPU, multi_user=False)
NO_DRIVER = "couldn't communicate with the NVIDIA driver"


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """MPS daemons have a /dev/shm of their own."""
    return disk_path


@pytest.fixture(params=["older", "newer"])
def foreign_libc(request: pytest.FixtureRequest) -> Path:
    """The directory with a C library that this machine's loader cannot work with."""
    older = elfdriver.older_libc()
    found = older if request.param == "older" else debian_programs.newer_libc()
    if found is None:
        pytest.skip("the mirror has no release after this machine's")
    return found


@pytest.fixture(params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def root(newest_nvidia: Programs, layout: str, foreign_libc: Path, tmp_path: Path) -> Path:
    return elfdriver.install(newest_nvidia, tmp_path, LAYOUTS[layout], foreign_libc)


@pytest.fixture
def container(newest_nvidia: Programs, tmp_path: Path) -> Path:
    """The driver root of a driver container."""
    return elfdriver.install(newest_nvidia, tmp_path, LAYOUTS["a driver container"], elfdriver.older_libc())


@pytest.fixture
def mps(tmp_path: Path) -> Iterator[Callable[[Path], Served]]:
    """Open an MPS host for a driver root."""
    opened = []

    def open_for(root: Path) -> Served:
        layout = MpsLayout(tmp_path / "mps")
        programs = InstalledPrograms(str(root), layout.libraries, 0o755)
        labels = SelinuxLabels(enabled=False)
        tools = HostTools(
            layout,
            programs,
            MountsWherePossible(layout.root, labels),
            ComputeMode(programs),
            lambda: None,  # whole GPUs need no capability nodes
            labels,
            Timings(patience=0.2),
        )
        supervisor = Served(tools)
        supervisor.open()
        opened.append(supervisor)
        return supervisor

    yield open_for
    for supervisor in opened:
        supervisor.stop(SPEC.device, PATIENCE_S)
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
    with pytest.raises(RetryableError, match=r"did not start \(exit code 127\)") as caught:
        NvidiaSmi(lambda: programs).set_time_slice(GPU, 2)
    assert caught.value.has_no_effect


def test_nvidia_smi_runs_with_the_hosts_driver_and_our_c_library(
    newest_nvidia: Programs, root: Path, tmp_path: Path
) -> None:
    find = InstalledPrograms(str(root), tmp_path / "links")
    with pytest.raises(NvmlUnavailableError, match=NO_DRIVER):
        NvidiaSmi(find).set_time_slice(GPU, 2)

    environment = {**find().environment(), "LD_DEBUG": "files"}
    _, said = run_program([find().path(SMI_PROGRAM)], environment, timeout_s=20, slot="test")
    real = [os.path.realpath(path) for path in loaded(said)]
    of_host = [path for path in real if path.startswith(f"{tmp_path}/")]
    assert [Path(path).name for path in of_host] == [newest_nvidia.library("libnvidia-ml").name], said
    assert "libc.so.6" in {Path(path).name for path in loaded(said)}


def test_the_hosts_nvml_is_loaded_with_our_c_library(root: Path) -> None:
    """As the plugin does, in its own process; 9 is that no driver is loaded."""
    load = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).nvmlInit_v2())"
    command = [sys.executable, "-c", load, find_nvml_library(str(root))]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
        == "9\n"
    )


def test_the_mps_daemon_and_its_server_run_with_the_hosts_driver_and_our_c_library(
    root: Path, tmp_path: Path, mps: Callable[[Path], Served]
) -> None:
    """A server that has loaded libcuda reports that there is no GPU."""
    supervisor = mps(root)
    assert supervisor.ensure(SPEC, PATIENCE_S).state == "ready"
    layout = MpsLayout(tmp_path / "mps")
    programs = InstalledPrograms(str(root), layout.libraries, 0o755)
    control = DaemonControl(programs, SPEC, layout.directories(SPEC.device))
    control.query(f"start_server -uid {os.geteuid()}", timeout_s=20)
    output = Path(layout.directories(SPEC.device).log, OUTPUT)
    eventually(lambda: "exited with status 1" in output.read_text())
    assert "no CUDA-capable device is detected" in output.read_text()
    supervisor.stop(SPEC.device, PATIENCE_S)
    assert supervisor.status() == ()


@pytest.mark.parametrize("late", ["libnvidia-ml", "lib"])
def test_nvidia_smi_finds_libraries_that_come_after_it(
    newest_nvidia: Programs, container: Path, tmp_path: Path, late: str
) -> None:
    """A package manager unpacks one package after the other, and a claim may come in between."""
    smi = NvidiaSmi(InstalledPrograms(str(container), tmp_path / "links"))
    libraries = container / LAYOUTS["a driver container"].libraries
    apart = tmp_path / "apart"
    apart.mkdir()
    for file in [*libraries.glob(f"{late}*.so.{newest_nvidia.version}"), *libraries.glob(f"{late}*.so.1")]:
        file.rename(apart / file.name)
    for _ in range(2):
        with pytest.raises(RetryableError, match="exit code 12"):
            smi.set_time_slice(GPU, 2)
    for file in apart.iterdir():
        file.rename(libraries / file.name)
    with pytest.raises(NvmlUnavailableError, match=NO_DRIVER):
        smi.set_time_slice(GPU, 2)


def test_nvidia_smi_finds_the_libraries_of_the_next_version(
    newest_nvidia: Programs, container: Path, tmp_path: Path
) -> None:
    smi = NvidiaSmi(InstalledPrograms(str(container), tmp_path / "links"))
    for _ in range(2):
        with pytest.raises(NvmlUnavailableError, match=NO_DRIVER):
            smi.set_time_slice(GPU, 2)
    for name in LIBRARIES:
        [file] = container.rglob(f"{name}.so.{newest_nvidia.version}")
        link = file.with_name(f"{name}.so.1")
        file.rename(file.with_name(f"{name}.so.999.44.01"))
        link.unlink()
        link.symlink_to(f"{name}.so.999.44.01")
    with pytest.raises(NvmlUnavailableError, match=NO_DRIVER):
        smi.set_time_slice(GPU, 2)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_programs_run_as_on_their_own_system_when_the_driver_root_is_ours(
    newest_nvidia: Programs, foreign_libc: Path, tmp_path: Path
) -> None:
    """The root is `/`: program, loader and C library are of one system, and no environment comes between them."""
    root = elfdriver.install(newest_nvidia, tmp_path, LAYOUTS["the root of a Debian host"], foreign_libc)
    loader = next(foreign_libc.glob("ld-linux*"))
    for directory in ("lib", "lib64"):  # where programs name it on aarch64 and on x86_64
        (root / directory).mkdir()
        shutil.copy(loader, root / directory)
    (root / "dev").mkdir()
    (root / "dev/null").touch()
    command = [sys.executable, "-c", _IN_ROOT, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["None", "Cannot find MPS control daemon process"]
    assert not (root / "links").exists()


_IN_ROOT = """
import os, sys
from pathlib import Path
from dra_driver.base.bounded_program import run_program
from dra_driver.errors import NvmlUnavailableError
from dra_driver.host.driver_programs import InstalledPrograms
from dra_driver.host.driver_programs import NvidiaSmi
from dra_driver.mps_host.daemon_compute_mode import ComputeMode

os.chroot(sys.argv[1])
find = InstalledPrograms("/", Path("/links"))
try:
    NvidiaSmi(find).set_time_slice("GPU-1", 2)
    sys.exit("no driver is loaded")
except NvmlUnavailableError:
    print(ComputeMode(find).get("GPU-1"))
programs = find()
program = programs.path("nvidia-cuda-mps-control")
print(run_program([program], programs.environment(), timeout_s=20, slot="test", text="get_server_list")[1].strip())
"""


# --- programs that cannot be started -------------------------------------------------------------


def _not_executable(program: Path) -> None:
    program.chmod(0o644)


def _nvml_of_a_newer_libc(program: Path) -> None:
    [library] = program.parents[2].rglob("libnvidia-ml.so.*.*")
    elfdriver.of_a_newer_libc(library)


def _no_nvml(program: Path) -> None:
    for library in program.parents[2].rglob("libnvidia-ml.so.*"):
        library.unlink()


BROKEN = [
    pytest.param(
        elfdriver.of_an_absent_library,
        r"exit code 127.*libno\.so\.1: cannot open",
        id="needs-an-absent-library",
    ),
    pytest.param(
        elfdriver.of_a_newer_libc, r"exit code 1.*GLIBC_9[0-9.]*' not found", id="needs-a-newer-libc"
    ),
    pytest.param(
        elfdriver.of_an_absent_loader, "the loader that it names is missing", id="needs-an-absent-loader"
    ),
    pytest.param(
        elfdriver.of_another_architecture,
        "it is not built for this machine's architecture",
        id="of-another-architecture",
    ),
    pytest.param(_not_executable, "Permission denied", id="not-executable"),
]
BROKEN_LIBRARY = [
    pytest.param(_nvml_of_a_newer_libc, "exit code 12.*couldn't find", id="nvml-needs-a-newer-libc"),
    pytest.param(_no_nvml, "exit code 12.*couldn't find", id="no-nvml"),
]

Harm = Callable[[Path], None]


@pytest.fixture
def broken(container: Path, tmp_path: Path) -> Callable[[str, Harm], FindPrograms]:
    """Find the programs of a driver root, one of which was broken."""

    def make(name: str, harm: Harm) -> FindPrograms:
        harm(container / "usr/bin" / name)
        return InstalledPrograms(str(container), tmp_path / "links")

    return make


@pytest.mark.parametrize(("harm", "cause"), BROKEN + BROKEN_LIBRARY)
def test_a_time_slice_that_cannot_be_set_is_reported_with_its_cause(broken, harm: Harm, cause: str) -> None:
    with pytest.raises(RetryableError, match=f"nvidia-smi did not start.*{cause}") as caught:
        NvidiaSmi(broken(SMI_PROGRAM, harm)).set_time_slice(GPU, 2)
    assert not isinstance(caught.value, NvmlUnavailableError), "the GPU may be there"
    assert caught.value.has_no_effect


@pytest.mark.parametrize(("harm", "cause"), BROKEN)
def test_an_mps_daemon_that_cannot_be_queried_is_reported_with_its_cause(
    broken, harm: Harm, cause: str, tmp_path: Path
) -> None:
    directories = MpsLayout(tmp_path / "mps").directories(SPEC.device)
    control = DaemonControl(broken(CONTROL_PROGRAM, harm), SPEC, directories)
    with pytest.raises(RetryableError, match=f"nvidia-cuda-mps-control did not start.*{cause}"):
        control.query_once("get_server_list", timeout_s=20)


@pytest.mark.parametrize(("harm", "cause"), BROKEN)
def test_an_mps_daemon_that_cannot_be_started_is_reported_with_its_cause(
    container: Path, mps: Callable[[Path], Served], harm: Harm, cause: str
) -> None:
    harm(container / "usr/bin" / CONTROL_PROGRAM)
    supervisor = mps(container)
    words_of_loader = cause.rpartition(".*")[2]  # its daemon is not a child, so there is no exit code
    with pytest.raises(RetryableError, match=words_of_loader):
        supervisor.ensure(SPEC, PATIENCE_S)
    supervisor.stop(SPEC.device, PATIENCE_S)
    assert supervisor.status() == ()
