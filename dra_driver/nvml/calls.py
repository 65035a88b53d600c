"""Calls NVML: translates its return codes to our errors, and continues if a GPU does not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import pynvml

from dra_driver.base.threads import start_thread
from dra_driver.errors import (
    DeviceBusyError,
    DeviceLostError,
    DraDriverError,
    DriverGoneError,
    NotSupportedError,
    NvmlTransientError,
    NvmlUnavailableError,
    NvmlUnknownOutcomeError,
    RetryableError,
)
from dra_driver.model.inventory import DiscoveryFault
from dra_driver.model.remedies import reset

if TYPE_CHECKING:
    from dra_driver.nvml.session import NvmlSession

T = TypeVar("T")
Handle = Any
"""NVML's handle of a GPU, an instance or an event set; valid for one session."""

_KINDS: Mapping[int, type[DraDriverError]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: NvmlUnavailableError,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: NvmlUnavailableError,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: DriverGoneError,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: DriverGoneError,
    pynvml.NVML_ERROR_GPU_IS_LOST: DeviceLostError,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: DeviceLostError,
    pynvml.NVML_ERROR_NOT_SUPPORTED: NotSupportedError,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: NotSupportedError,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: NotSupportedError,
    pynvml.NVML_ERROR_IN_USE: DeviceBusyError,
    # Errors that pass within seconds.
    pynvml.NVML_ERROR_MEMORY: NvmlTransientError,
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: NvmlTransientError,
    pynvml.NVML_ERROR_NOT_READY: NvmlTransientError,
    pynvml.NVML_ERROR_INVALID_STATE: NvmlTransientError,
    # The call may still have had its effect. NVML_ERROR_UNKNOWN also occurs for single attributes, and a GPU that
    # reports its UUID is not lost.
    pynvml.NVML_ERROR_TIMEOUT: NvmlUnknownOutcomeError,
    pynvml.NVML_ERROR_UNKNOWN: NvmlUnknownOutcomeError,
}
_TEXTS = {
    pynvml.NVML_ERROR_UNINITIALIZED: "NVML is not initialised",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel driver is not loaded; load it (modprobe nvidia)",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found below the driver root",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the NVML library and the kernel driver have different versions; reload the NVIDIA driver or reboot the node"
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: "NVML refused access; run as root with access to /dev/nvidiactl",
    pynvml.NVML_ERROR_RESET_REQUIRED: f"the GPU has to be reset; {reset()}",
}
ANSWERS_WITHIN_S = 15.0
"""A GPU without persistence mode is initialised first, which takes seconds."""
NOT_ANSWERED = "it did not answer in time"
_ALL_ANSWER_WITHIN_S = 0.5
_OTHERS_ANSWER_WITHIN_S = 1.0
"""The limit after one GPU has not answered: a hanging call may block all other calls of the process."""


_ERRORS = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
"""The second one means that the library is too old for a call."""


def translated(error: Exception, action: str) -> DraDriverError:
    if not isinstance(error, pynvml.NVMLError):
        return NotSupportedError(f"cannot {action}: {error}")
    kind = _KINDS.get(error.value, RetryableError)
    is_lost = kind is DeviceLostError
    text = f"the GPU does not answer ({error})" if is_lost else _TEXTS.get(error.value, error)
    return kind(f"cannot {action}: {text}")


@contextmanager
def nvml_errors(action: str) -> Iterator[None]:
    """Convert all errors of the binding to ours.

    Raises: NvmlUnavailableError (DriverGoneError), DeviceLostError, DeviceBusyError, NotSupportedError,
    NvmlTransientError (NvmlUnknownOutcomeError), RetryableError.
    """
    try:
        yield
    except _ERRORS as error:
        raise translated(error, action) from error


@contextmanager
def best_effort(failed: Callable[[Exception], object]) -> Iterator[None]:
    """Suppress errors and pass them to `failed`, except DeviceLostError and NvmlUnavailableError: nothing else can be
    read then.
    """
    try:
        yield
    except (DeviceLostError, NvmlUnavailableError):
        raise
    except (DraDriverError, ValueError) as error:
        failed(error)


def collected(faults: list[DiscoveryFault], subject: str) -> AbstractContextManager[None]:
    return best_effort(lambda error: faults.append(DiscoveryFault(subject, str(error))))


def supported(call: Callable[..., T], *args: object) -> T | None:
    """Return None if the GPU or driver lacks the feature. Raises: the errors of `nvml_errors`."""
    # Without `nvml_errors`, whose generator would cost as much as a short call.
    try:
        return call(*args)
    except NotSupportedError:
        return None
    except _ERRORS as error:
        raised = translated(error, getattr(call, "__name__", "NVML call"))
        if isinstance(raised, NotSupportedError):
            return None
        raise raised from error


def query(
    call: Callable[..., T], *args: object, failed: Callable[[Exception], object] = lambda _error: None
) -> T | None:
    """Return None if the call is not supported or fails. Raises: the errors of `best_effort`."""
    with best_effort(failed):
        return supported(call, *args)
    return None


class GpuWalk:
    """Calls NVML for GPUs by their NVML index in a separate thread. Only one caller may use it at a time.

    If a call does not return in time, the thread is abandoned, and the GPU is not called again until then. Without a
    `session`, the caller keeps NVML open.
    """

    def __init__(self, session: NvmlSession | None = None) -> None:
        self._session = session
        self._outstanding: dict[int, Future[Any]] = {}

    def each(self, indexes: Sequence[int], read: Callable[[int], T]) -> dict[int, Future[T]]:
        """Return the results of `read`, by index, as completed futures. GPUs that do not answer are omitted.

        >>> [index for index, answer in GpuWalk().each(range(2), lambda index: index * 10).items()]
        [0, 1]
        """
        self._outstanding = {index: call for index, call in self._outstanding.items() if not call.done()}
        left = [index for index in indexes if index not in self._outstanding]
        answers: dict[int, Future[T]] = {}
        wait_s = ANSWERS_WITHIN_S
        while left:
            calls = self._begun(left, read)
            wait([calls[left[-1]]], _ALL_ANSWER_WITHIN_S)
            for index in left:
                try:
                    calls[index].exception(wait_s)
                except FutureTimeout:
                    self._outstanding[index] = calls[index]
                    wait_s = _OTHERS_ANSWER_WITHIN_S
                    left = left[left.index(index) + 1 :]
                    for later in left:
                        calls[later].cancel()
                    break
                answers[index] = calls[index]
            else:
                break
        return answers

    def _begun(self, indexes: Sequence[int], read: Callable[[int], T]) -> dict[int, Future[T]]:
        calls: dict[int, Future[T]] = {index: Future() for index in indexes}

        def run() -> None:
            for index, call in calls.items():
                if not call.set_running_or_notify_cancel():
                    return
                try:
                    with nullcontext() if self._session is None else self._session.kept_open():
                        call.set_result(read(index))
                except BaseException as error:  # noqa: BLE001  raised when the result is read
                    call.set_exception(error)

        start_thread("gpu-walk", run)
        return calls
