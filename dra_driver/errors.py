"""The exceptions of the plugin.

Each adapter (NVML, API server, file system, gRPC) maps the errors of its library to these in one place, and chains
the original, except for the API server's, which may contain credentials. Each message is one line that names the
action, the object and the remedy.
"""

from __future__ import annotations


class DraDriverError(Exception):
    """`has_no_effect`: the action failed before it reached the tool, daemon or device, so nothing must be undone."""

    has_no_effect = False


class RetryableError(DraDriverError):
    """The same call may succeed later."""


class ApiUnavailableError(RetryableError):
    """The API server cannot be reached, did not answer in time, or answered with HTTP 408, 429 or 5xx.

    `is_brief`: a retry within the same call may succeed.
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
    """NVML cannot be loaded or initialised."""


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
    """NVML cannot be closed or initialised, because a call is in progress or hangs."""


class DeviceLostError(RetryableError):
    """A GPU fell off the bus or does not answer."""


class DeviceBusyError(RetryableError):
    """A process or claim uses the GPU, GPU instance or compute instance that must be changed."""


class NvmlTransientError(RetryableError):
    """The NVIDIA driver cannot perform the action now: it scrubs memory, is busy, or timed out."""


class NvmlUnknownOutcomeError(NvmlTransientError):
    """NVML did not report whether the action took effect, or the action could not be undone."""


class PermanentError(DraDriverError):
    """A person must change something first: claim, configuration, node."""


class ClaimsInTheWayError(PermanentError):
    """Claims use GPUs that should be released."""


class ClaimRefusedError(PermanentError):
    """This claim cannot be prepared."""


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
    """The GPU or the NVIDIA driver does not have the feature. For callers, this is a normal result."""


class StateError(PermanentError):
    """One of the plugin's files, locks or directories cannot be read or written."""


class FatalError(DraDriverError):
    """The process cannot continue, and stops with this as its cause."""
