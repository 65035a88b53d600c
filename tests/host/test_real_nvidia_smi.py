"""Output and exit codes of NVIDIA's own nvidia-smi for exactly our arguments: without an NVIDIA driver, and
with a test NVML with one GPU. All branches behave alike unless a test says otherwise.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from debian_programs import Programs
from gpucheck import NOT_IN_EACH_RELEASE, POWER, ask_smi, facts

from dra_driver.base.bounded_program import run_program
from dra_driver.errors import NotSupportedError, NvmlUnavailableError, RetryableError
from dra_driver.host.driver_programs import InstalledPrograms, NvidiaSmi
from dra_driver.model.driver_files import SMI_PROGRAM, FindPrograms
from dra_driver.mps_host.daemon_compute_mode import ComputeMode
from tests.fakes.samples import h100
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S

UUID = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running."
)
DEFAULT, PROHIBITED, EXCLUSIVE_PROCESS = 0, 2, 3

OneGpu = Callable[..., FindPrograms]


@pytest.fixture
def root(nvidia: Programs, tmp_path: Path) -> Path:
    """A driver root with nothing but NVIDIA's nvidia-smi."""
    programs = tmp_path / "root/usr/bin"
    programs.mkdir(parents=True)
    shutil.copy(nvidia.root / "usr/lib/nvidia/current/nvidia-smi", programs)
    return tmp_path / "root"


@pytest.fixture
def one_gpu(nvidia: Programs, root: Path, tmp_path: Path) -> OneGpu:
    """Provide a test NVML; its answers are macros of one_gpu_nvml.c."""
    if shutil.which("cc") is None:
        pytest.fail("a C compiler is missing; run: python3 hack/debian_programs.py")

    def make(*answers: str) -> FindPrograms:
        library = root / nvidia.library("libnvidia-ml").relative_to(nvidia.root)
        library.parent.mkdir(parents=True)
        library.with_name(f"libcuda.so.{nvidia.version}").touch()
        source = Path(__file__).parents[1] / "fakes/one_gpu_nvml.c"
        macros = [f'UUID="{UUID}"', f'STATE="{tmp_path}/mode"', *answers]
        command = ["cc", "-w", "-shared", "-fPIC", *(f"-D{macro}" for macro in macros), "-o", library, source]
        subprocess.run(command, check=True, timeout=PATIENCE_S)
        return InstalledPrograms(str(root), tmp_path / "links")

    return make


def said(find: FindPrograms, *arguments: str) -> tuple[int, str]:
    programs = find()
    command = [programs.path(SMI_PROGRAM), *arguments]
    return run_program(command, programs.environment(), timeout_s=20, slot="test")


# --- no driver -----------------------------------------------------------------------------------


def test_a_driver_that_is_not_loaded_is_reported_as_that(nvidia: Programs, tmp_path: Path) -> None:
    find = InstalledPrograms(str(nvidia.root), tmp_path / "links")
    with pytest.raises(NvmlUnavailableError) as caught:
        NvidiaSmi(find).set_time_slice(UUID, 2)
    assert (
        str(caught.value)
        == f"cannot set the time slice of GPU {UUID}: nvidia-smi failed with exit code 9: {NO_DRIVER}"
    )
    assert ComputeMode(find).get(UUID) is None
    with pytest.raises(RetryableError, match="to EXCLUSIVE_PROCESS: NVIDIA-SMI has failed"):
        ComputeMode(find).set(UUID, EXCLUSIVE_PROCESS)


def test_a_library_that_is_missing_is_not_a_missing_driver(root: Path, tmp_path: Path) -> None:
    find = InstalledPrograms(str(root), tmp_path / "links")
    with pytest.raises(
        RetryableError, match=r"did not start \(exit code 12\): NVIDIA-SMI couldn't find"
    ) as caught:
        NvidiaSmi(find).set_time_slice(UUID, 2)
    assert (caught.value.has_no_effect, isinstance(caught.value, NvmlUnavailableError)) == (True, False)
    with pytest.raises(RetryableError, match="exit code 12"):
        ComputeMode(find).get(UUID)


# --- one GPU -------------------------------------------------------------------------------------


def test_each_compute_mode_that_is_set_is_read_back(one_gpu: OneGpu) -> None:
    find = one_gpu()
    mode = ComputeMode(find)
    assert mode.get(UUID) == DEFAULT
    for wanted in (EXCLUSIVE_PROCESS, EXCLUSIVE_PROCESS, PROHIBITED, DEFAULT):
        mode.set(UUID, wanted)
        assert mode.get(UUID) == wanted
    assert said(find, "-i", UUID, "-c", "EXCLUSIVE_PROCESS") == (
        0,
        "Set compute mode to EXCLUSIVE_PROCESS for GPU 00000000:01:00.0.\nAll done.\n",
    )


def test_a_gpu_without_a_compute_mode_is_reported(one_gpu: OneGpu) -> None:
    find = one_gpu("GET_MODE=3")
    assert said(find, "-i", UUID, "--query-gpu=compute_mode", "--format=csv,noheader") == (0, "[N/A]\n")
    with pytest.raises(NotSupportedError, match=r"^cannot read the compute mode of .*N/A"):
        ComputeMode(find).get(UUID)


@tabled("code", "text")
def test_a_compute_mode_that_nvml_refuses_to_set_is_reported_with_nvmls_words(
    one_gpu: OneGpu, code: int, text: str
) -> None:
    with pytest.raises(
        RetryableError, match=f"to EXCLUSIVE_PROCESS: Unable to set the compute mode .*: {text}"
    ):
        ComputeMode(one_gpu(f"SET_MODE={code}")).set(UUID, EXCLUSIVE_PROCESS)


@pytest.mark.parametrize("answer", ["SET_MODE=3", "GET_MODE=3"])
def test_a_compute_mode_that_the_gpu_does_not_have_is_not_taken_for_set(one_gpu: OneGpu, answer: str) -> None:
    """nvidia-smi treats it as a warning, continues, and exits with 0."""
    find = one_gpu(answer)
    code, text = said(find, "-i", UUID, "-c", "EXCLUSIVE_PROCESS")
    assert (code, "Treating as warning and moving on." in text) == (0, True)
    with pytest.raises(NotSupportedError, match=r"(?i)not supported"):
        ComputeMode(find).set(UUID, EXCLUSIVE_PROCESS)


@pytest.mark.parametrize(("code", "text"), [(4, "Insufficient Permissions"), (999, "Unknown Error")])
def test_a_compute_mode_that_cannot_be_read_is_not_taken_for_none(
    one_gpu: OneGpu, code: int, text: str
) -> None:
    """nvidia-smi prints the error instead of the value, and exits with 0."""
    find = one_gpu(f"GET_MODE={code}")
    assert said(find, "-i", UUID, "--query-gpu=compute_mode", "--format=csv,noheader") == (0, f"[{text}]\n")
    with pytest.raises(RetryableError, match=text):
        ComputeMode(find).get(UUID)


def test_the_levels_of_time_slices_are_nvidias(one_gpu: OneGpu) -> None:
    """The setting itself is inside NVML, so nvidia-smi says what it tried, and that it failed."""
    smi = NvidiaSmi(one_gpu())
    for level, name in enumerate(("Default", "Short", "Medium", "Long")):
        with pytest.raises(
            RetryableError,
            match=f"exit code 255: Failed to set timeslice policy with value {name} for GPU 0 :",
        ) as caught:
            smi.set_time_slice(UUID, level)
        assert not isinstance(caught.value, NvmlUnavailableError)


def test_a_gpu_that_is_not_there_is_reported_as_absent(one_gpu: OneGpu) -> None:
    find = one_gpu()
    other = UUID.replace("4", "5")
    assert said(find, "-i", other, "-c", "DEFAULT") == (6, "No devices were found\n")
    with pytest.raises(NvmlUnavailableError, match="No devices were found"):
        NvidiaSmi(find).set_time_slice(other, 2)
    assert ComputeMode(find).get(other) is None
    with pytest.raises(RetryableError, match="No devices were found"):
        ComputeMode(find).set(other, EXCLUSIVE_PROCESS)


def test_a_gpu_that_fell_off_the_bus_is_reported_as_absent(one_gpu: OneGpu) -> None:
    """The real program prints uninitialised memory instead of the GPU's address."""
    find = one_gpu("FIND=15")
    with pytest.raises(NvmlUnavailableError, match=r"GPU is lost\. +Reboot the system to recover this GPU"):
        NvidiaSmi(find).set_time_slice(UUID, 2)
    assert ComputeMode(find).get(UUID) is None
    with pytest.raises(RetryableError, match="GPU is lost"):
        ComputeMode(find).set(UUID, EXCLUSIVE_PROCESS)


@tabled("answers", "text")
def test_an_nvml_that_does_not_work_is_not_a_missing_setting(
    one_gpu: OneGpu, answers: str, text: str
) -> None:
    """R470 exits with 255 on a mismatch, the others with 18."""
    find = one_gpu(answers)
    for attempt in (
        lambda: NvidiaSmi(find).set_time_slice(UUID, 2),
        lambda: ComputeMode(find).get(UUID),
        lambda: ComputeMode(find).set(UUID, DEFAULT),
    ):
        with pytest.raises(RetryableError, match=text) as caught:
            attempt()
        assert not isinstance(caught.value, NvmlUnavailableError)


def test_gpu_check_finds_the_list_and_the_elements_that_each_branch_has(one_gpu: OneGpu) -> None:
    """The XML itself needs a more complete NVML than the test's; the program contains the names of its
    elements.
    """
    programs = one_gpu()()
    program = programs.path(SMI_PROGRAM)
    assert f"(UUID: {UUID})" in ask_smi(program, ("-L",), programs.library_path)
    elements = {part for path in facts(h100(0)) for part in path.split("/")}
    content = Path(program).read_bytes()
    assert {element for element in elements if element.encode() not in content} <= {
        *NOT_IN_EACH_RELEASE,
        POWER,
    }
