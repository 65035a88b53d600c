"""The exceptions of the plugin.

    DraDriverError
    ├── RetryableError        the same call may succeed later: API server down, device being torn down
    │   ├── ApiUnavailableError   the API server did not answer, or cannot answer now
    │   ├── NvmlUnavailableError  the NVIDIA driver or its NVML library is missing or not ready
    │   │   ├── DriverGoneError       the kernel driver is not loaded, or its library is missing
    │   │   ├── NvmlLibraryError      the NVML library exists but cannot be loaded
    │   │   └── NvmlDetachedError     NVML is closed on purpose (NvmlPausedError: for a moment)
    │   ├── NvmlInUseError        NVML cannot be closed or initialised while a call is in progress
    │   ├── DeviceLostError       a GPU no longer answers
    │   ├── DeviceBusyError       a process or claim uses a device that must be changed
    │   └── NvmlTransientError    the NVIDIA driver cannot perform the action now, but may later
    │       └── NvmlUnknownOutcomeError   the action may have taken effect
    ├── PermanentError        a person must change something first: claim, configuration, node
    │   ├── ClaimsInTheWayError   claims use GPUs that should be released
    │   ├── ClaimRefusedError     this claim cannot be prepared
    │   ├── InvalidConfigError    opaque parameters, a flag or the configuration file are wrong
    │   ├── ApiRejectedError      the API server refused the request (status code in `.status`)
    │   ├── NotSupportedError     this GPU or driver does not have the feature; a normal result for callers
    │   └── StateError            one of the plugin's files or directories cannot be read or written
    └── FatalError            the process cannot continue; it stops with this as its cause

Each adapter (NVML, API server, file system, gRPC) maps the errors of its library to these in one place, and
chains the original, except for the API server's, which may contain credentials. Each message is one line that names
the action, the object and the remedy.
"""

from __future__ import annotations


class DraDriverError(Exception):
    """Base of all errors that the plugin raises on purpose.

    `has_no_effect` means that the action failed before it reached the tool, daemon or device, so nothing must
    be undone.
    """

    has_no_effect = False


class RetryableError(DraDriverError):
    """The same call may succeed later, without anyone changing anything."""


class ApiUnavailableError(RetryableError):
    """The API server cannot be reached, did not answer in time, or answered with HTTP 408, 429 or 5xx.

    `is_brief` means that a retry within the same call may succeed: the server is busy, starting, failing, or
    being replaced.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        is_brief: bool = False,
        timed_out: bool = False,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_brief = is_brief
        self.timed_out = timed_out


class NvmlUnavailableError(RetryableError):
    """NVML cannot be loaded or initialised: the driver is not installed, not loaded, or being replaced."""


class DriverGoneError(NvmlUnavailableError):
    """The NVIDIA driver is not loaded or its library is missing, so no GPU instance can exist."""


class NvmlLibraryError(NvmlUnavailableError):
    """The NVML library exists but cannot be loaded: wrong architecture, or a damaged installation."""


class NvmlDetachedError(NvmlUnavailableError):
    """NVML is closed on purpose for a while."""


class NvmlPausedError(NvmlDetachedError):
    """NVML is closed for a moment so that a GPU can be changed."""

    def __init__(self, message: str = "NVML is closed for a moment, so that a GPU can be changed") -> None:
        super().__init__(message)


class NvmlInUseError(RetryableError):
    """NVML cannot be closed or initialised yet, because a call is in progress or hangs."""


class DeviceLostError(RetryableError):
    """A GPU fell off the bus or does not answer."""


class DeviceBusyError(RetryableError):
    """A process or claim uses the GPU, GPU instance or compute instance, so it cannot be changed now."""


class NvmlTransientError(RetryableError):
    """The NVIDIA driver cannot perform the action now: it scrubs memory, is busy, or timed out."""


class NvmlUnknownOutcomeError(NvmlTransientError):
    """NVML did not report whether the action took effect, or the action could not be undone."""


class PermanentError(DraDriverError):
    """The call cannot succeed until a person changes something."""


class ClaimsInTheWayError(PermanentError):
    """GPUs cannot be released because claims use them."""


class ClaimRefusedError(PermanentError):
    """The claim cannot be prepared."""


class InvalidConfigError(PermanentError):
    """Opaque parameters, a flag or the configuration file are wrong; `faults` lists every fault."""

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
    """The GPU or the installed driver does not have the feature. For callers, this is a normal result."""


class StateError(PermanentError):
    """One of the plugin's records, locks or directories cannot be read or written."""


class FatalError(DraDriverError):
    """The process cannot continue, and stops with this as its cause."""
