import pynvml
import pytest

from dra_driver import errors
from dra_driver.errors import DeviceLostError, RetryableError
from dra_driver.model.remedies import reset
from dra_driver.nvml.calls import nvml_errors, supported, translated
from tests.fakes.tables import data_of

CODES = sorted(
    {
        value
        for name, value in vars(pynvml).items()
        if name.startswith("NVML_ERROR_") and isinstance(value, int)
    }
)
EXPECTED: dict[int, type[Exception]] = {
    getattr(pynvml, f"NVML_ERROR_{code}"): getattr(errors, name)
    for code, name in data_of(__file__)["classes"].items()
}


@pytest.mark.parametrize("code", CODES)
def test_code_has_its_class_and_a_text_of_one_line(code: int) -> None:
    error = translated(pynvml.NVMLError(code), "read GPU 0")
    assert type(error) is EXPECTED.get(code, RetryableError)
    assert str(error).startswith("cannot read GPU 0: ")
    assert "\n" not in str(error)


def test_code_that_the_binding_does_not_know_is_retried() -> None:
    assert type(translated(pynvml.NVMLError(4711), "x")) is RetryableError


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (pynvml.NVML_ERROR_NO_PERMISSION, "NVML refused access; run as root with access to /dev/nvidiactl"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, f"the GPU has to be reset; {reset()}"),
    ],
)
def test_remedy_is_reported_where_there_is_one(code: int, text: str) -> None:
    assert str(translated(pynvml.NVMLError(code), "initialise NVML")) == f"cannot initialise NVML: {text}"


def test_original_error_is_the_cause() -> None:
    original = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(DeviceLostError) as caught, nvml_errors("x"):
        raise original
    assert caught.value.__cause__ is original


@pytest.mark.parametrize(
    "error", [pynvml.NVMLError(3), pynvml.NVMLError(13), pynvml.NVMLLibraryMismatchError("old")]
)
def test_missing_feature_is_none(error: Exception) -> None:
    def call() -> int:
        raise error

    assert supported(call) is None
