"""How NVML is called: the one map from its return codes to our errors, and calls that a silent GPU does not hold up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import pynvml

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

if TYPE_CHECKING:
    from dra_driver.nvml.session import NvmlSession

T = TypeVar("T")
Handle = Any
"""What NVML knows a GPU, an instance or an event set by; it is good for one session."""

_UNAVAILABLE = {
    pynvml.NVML_ERROR_UNINITIALIZED: "NVML is not initialised",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel driver is not loaded; load it (modprobe nvidia)",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found below the driver root",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the NVML library and the kernel driver have different versions; reload the driver or reboot"
    ),
}
_GONE = frozenset({pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})
# Not NVML_ERROR_UNKNOWN: it comes for single attributes too, and a GPU that tells its UUID is not lost.
_LOST = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, getattr(pynvml, "NVML_ERROR_GPU_NOT_FOUND", 28)})
_ABSENT = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        getattr(pynvml, "NVML_ERROR_ARGUMENT_VERSION_MISMATCH", 25),
    }
)
# What passes by itself within seconds. NVML gives the answers of `_UNSURE` also where the call took effect.
_PASSING = frozenset(
    {
        pynvml.NVML_ERROR_MEMORY,
        pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES,
        getattr(pynvml, "NVML_ERROR_NOT_READY", 27),
        getattr(pynvml, "NVML_ERROR_INVALID_STATE", 29),
    }
)
_UNSURE = frozenset({pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_UNKNOWN})
_REMEDIES = {
    pynvml.NVML_ERROR_NO_PERMISSION: "NVML refused access; run as root with access to /dev/nvidiactl",
    pynvml.NVML_ERROR_RESET_REQUIRED: (
        "the GPU has to be reset; stop everything that uses it and run `nvidia-smi --gpu-reset`, or reboot the node"
    ),
}
ANSWERS_WITHIN_S = 15.0
"""A GPU without persistence mode wakes up first, which takes seconds."""
NOT_ANSWERED = f"it has not answered within {ANSWERS_WITHIN_S:.0f} s"
_OTHERS_ANSWER_WITHIN_S = 1.0
"""For the GPUs after one that did not answer. A call that hangs may block all others of the process, and then eight
GPUs must not take eight times as long."""


def translated(error: pynvml.NVMLError, action: str) -> DraDriverError:
    """Our error for an NVML error; `action` says what was tried on which object."""
    code = error.value
    if code in _UNAVAILABLE:
        kind = DriverGoneError if code in _GONE else NvmlUnavailableError
        return kind(f"{action}: {_UNAVAILABLE[code]}")
    if code in _LOST:
        return DeviceLostError(f"{action}: the GPU does not answer ({error})")
    if code in _ABSENT:
        return NotSupportedError(f"{action}: {error}")
    if code == pynvml.NVML_ERROR_IN_USE:
        return DeviceBusyError(f"{action}: {error}")
    if code in _PASSING:
        return NvmlTransientError(f"{action}: {error}")
    if code in _UNSURE:
        return NvmlUnknownOutcomeError(f"{action}: {error}")
    return RetryableError(f"{action}: {_REMEDIES.get(code, error)}")


@contextmanager
def nvml_errors(action: str) -> Iterator[None]:
    """Raise our errors for everything that the binding raises inside.

    Raises: NvmlUnavailableError (DriverGoneError), DeviceLostError, DeviceBusyError, NotSupportedError,
    NvmlTransientError (NvmlUnknownOutcomeError), RetryableError.
    """
    try:
        yield
    except pynvml.NVMLError as error:
        raise translated(error, action) from error
    except getattr(pynvml, "NVMLLibraryMismatchError", ()) as error:
        raise NotSupportedError(f"{action}: {error}") from error


@contextmanager
def best_effort(failed: Callable[[Exception], object]) -> Iterator[None]:
    """`failed` hears of what fails inside.

    Raises: DeviceLostError, NvmlUnavailableError, because nothing else can be read then either.
    """
    try:
        yield
    except (DeviceLostError, NvmlUnavailableError):
        raise
    except (DraDriverError, ValueError) as error:
        failed(error)


def collected(faults: list[DiscoveryFault], subject: str) -> AbstractContextManager[None]:
    """What fails inside is a fault of the subject, and hides nothing else. Raises: as `best_effort`."""
    return best_effort(lambda error: faults.append(DiscoveryFault(subject, str(error))))


def supported(call: Callable[..., T], *args: object) -> T | None:
    """The call's result, or None where the GPU or driver does not have the feature.

    Raises: the other errors of `nvml_errors`.
    """
    try:
        with nvml_errors(getattr(call, "__name__", "NVML call")):
            return call(*args)
    except NotSupportedError:
        return None


def ask(
    call: Callable[..., T], *args: object, failed: Callable[[Exception], object] = lambda _error: None
) -> T | None:
    """What the call returns; None if it is not supported, or fails, of which `failed` hears. Raises: as
    `best_effort`."""
    with best_effort(failed):
        return supported(call, *args)
    return None


class GpuWalk:
    """Calls NVML for GPUs by their NVML index, in a thread of its own. For one caller at a time.

    A GPU whose call does not return in time is left behind with that thread, and is not called again until its call has
    returned. So there is at most one outstanding call for each GPU. The `session` is not closed under a call; None is
    one that its caller keeps open.
    """

    def __init__(self, session: NvmlSession | None = None) -> None:
        self._session = session
        self._outstanding: dict[int, Future[Any]] = {}

    def each(self, indexes: Sequence[int], read: Callable[[int], T]) -> dict[int, Future[T]]:
        """What `read` returned or raised, by index, as futures that are done. A GPU that does not answer is left out.

        >>> [index for index, answer in GpuWalk().each(range(2), lambda index: index * 10).items()]
        [0, 1]
        """
        self._outstanding = {index: call for index, call in self._outstanding.items() if not call.done()}
        left = [index for index in indexes if index not in self._outstanding]
        answers: dict[int, Future[T]] = {}
        wait_s = ANSWERS_WITHIN_S
        while left:
            calls = self._begun(left, read)
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
        """One thread reads them in this order; it ends at the first call that was cancelled before it began."""
        calls: dict[int, Future[T]] = {index: Future() for index in indexes}

        def run() -> None:
            for index, call in calls.items():
                if not call.set_running_or_notify_cancel():
                    return
                try:
                    with nullcontext() if self._session is None else self._session.kept_open():
                        call.set_result(read(index))
                except BaseException as error:  # noqa: BLE001  it is raised where the answer is looked at
                    call.set_exception(error)

        threading.Thread(target=run, name="gpu-walk", daemon=True).start()
        return calls
