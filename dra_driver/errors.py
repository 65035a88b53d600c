"""The errors of the plugin, one tree.

    DraDriverError
    ├── RetryableError        the same call may succeed later: API server down, device being torn down
    │   ├── ApiUnavailableError   the API server did not answer, or answered that it cannot answer now
    │   ├── NvmlUnavailableError  the NVIDIA driver or its NVML library is absent or not ready
    │   │   ├── DriverGoneError       the kernel driver is not loaded, or its library is not there
    │   │   └── NvmlDetachedError     NVML is kept closed on purpose (NvmlPausedError: for a moment only)
    │   ├── NvmlInUseError        NVML cannot be closed or initialised again while a call of it is under way
    │   ├── DeviceLostError       a GPU does not answer any more
    │   ├── DeviceBusyError       a process uses a device that would have to be changed
    │   └── NvmlTransientError    the NVIDIA driver cannot do it now; that passes by itself
    │       └── NvmlUnknownOutcomeError   it may have done it all the same
    ├── PermanentError        a person must change something first: claim, configuration, node
    │   ├── ClaimRefusedError     this claim cannot be prepared as it stands
    │   ├── InvalidConfigError    opaque parameters, a flag or the configuration file
    │   ├── ApiRejectedError      the API server understood and refused (status code in `.status`)
    │   ├── NotSupportedError     this GPU or driver does not have the feature; callers treat that as data
    │   └── StateError            a record or directory of ours cannot be read or written
    └── FatalError            the process cannot go on; it stops with this as its cause

Every edge (NVML, API server, file system, gRPC) maps foreign errors to these in one place and chains the original. Each
text is one line and names the action, the object and the remedy.
"""

from __future__ import annotations


class DraDriverError(Exception):
    """Base of all errors that this plugin raises on purpose.

    `has_no_effect` says that the action failed before it reached the tool, daemon or device: nothing is to be undone.
    """

    has_no_effect = False


class RetryableError(DraDriverError):
    """The same call may succeed later, though nobody changes anything."""


class ApiUnavailableError(RetryableError):
    """The API server did not answer in time, refused the connection, or asked to come back later.

    `is_brief` says that a retry within the same call may succeed: the server is busy, starts, fails, or another one
    takes over.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None, is_brief: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_brief = is_brief


class NvmlUnavailableError(RetryableError):
    """NVML cannot be loaded or initialised: driver not installed, not loaded, or being replaced."""


class DriverGoneError(NvmlUnavailableError):
    """The NVIDIA driver is not loaded or its library is not there: no GPU instance is left that could be used."""


class NvmlLibraryError(NvmlUnavailableError):
    """The NVML library is there, but this process cannot load it: another architecture, or a damaged installation."""


class NvmlDetachedError(NvmlUnavailableError):
    """NVML is kept closed on purpose for a while."""


class NvmlPausedError(NvmlDetachedError):
    """NVML is kept closed for a moment, so that a GPU can be changed."""

    def __init__(self, message: str = "NVML is closed for a moment, so that a GPU can be changed") -> None:
        super().__init__(message)


class NvmlInUseError(RetryableError):
    """NVML cannot be closed or initialised again yet, because a call of it is under way, or hangs."""


class DeviceLostError(RetryableError):
    """A GPU fell off the bus or does not answer."""


class DeviceBusyError(RetryableError):
    """A GPU, GPU instance or compute instance is in use by a process, so it cannot be changed now."""


class NvmlTransientError(RetryableError):
    """The NVIDIA driver answered that it cannot do it now: memory is being scrubbed, it is busy, it timed out."""


class NvmlUnknownOutcomeError(NvmlTransientError):
    """NVML does not tell whether it did what was asked, or what it did could not be undone."""


class PermanentError(DraDriverError):
    """The call does not succeed until a person changes something."""


class ClaimsInTheWayError(PermanentError):
    """GPUs cannot be let go of, because claims use them."""


class ClaimRefusedError(PermanentError):
    """A claim cannot be prepared as it stands."""


class InvalidConfigError(PermanentError):
    """Opaque parameters, a flag or the configuration file are wrong; `faults` lists every one."""

    def __init__(self, message: str, *, faults: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class ApiRejectedError(PermanentError):
    """The API server understood the request and refused it."""

    def __init__(self, message: str, *, status: int, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class NotSupportedError(PermanentError):
    """The GPU or the installed driver does not offer this; callers treat it as data."""


class StateError(PermanentError):
    """A record, lock or directory of ours cannot be read or written."""


class FatalError(DraDriverError):
    """The process cannot go on and stops with this as its cause."""
