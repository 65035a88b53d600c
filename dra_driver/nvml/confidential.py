"""Confidential computing, which NVML tells of all GPUs of the machine at once."""

from __future__ import annotations

import pynvml

from dra_driver.model.inventory import ConfidentialMode
from dra_driver.nvml.failures import supported

_SETTINGS_ABSENT = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_FunctionNotFound,
    pynvml.NVMLError_ArgumentVersionMismatch,
)


def confidential_mode() -> ConfidentialMode:
    """How the GPUs are set. Raises: NVMLError; ValueError if NVML gives a mode that is not known."""
    feature, has_tools, several_gpus = _settings()
    if several_gpus == pynvml.NVML_CC_SYSTEM_MULTIGPU_PROTECTED_PCIE:
        return "ppcie"  # the feature itself is off then
    if feature == pynvml.NVML_CC_SYSTEM_FEATURE_DISABLED:
        return "off"
    if feature != pynvml.NVML_CC_SYSTEM_FEATURE_ENABLED:
        raise ValueError(f"NVML gives the mode as {feature}, which is not known")
    return "devtools" if has_tools else "on"


def accepts_work() -> bool | None:
    """Whether programs can use the GPUs: always without confidential computing, else once somebody has set the ready
    state. None where NVML does not support the queries. Raises: the errors of `nvml_errors`; ValueError if NVML gives a
    mode that is not known."""
    mode = supported(confidential_mode)
    # Without confidential computing the ready state means nothing, and libraries answer anything.
    if mode is None or mode == "off":
        return None if mode is None else True
    ready = supported(pynvml.nvmlSystemGetConfComputeGpusReadyState)
    return None if ready is None else ready == pynvml.NVML_CC_ACCEPTING_CLIENT_REQUESTS_TRUE


def _settings() -> tuple[int, bool, int]:
    """The feature, whether tools for developers are allowed, and the mode of several GPUs. Drivers before R550 and GPUs
    before Hopper do not tell the last."""
    settings = pynvml.c_nvmlSystemConfComputeSettings_v1_t()
    try:
        pynvml._nvmlCheckReturn(pynvml.nvmlSystemGetConfComputeSettings(pynvml.byref(settings)))
    except _SETTINGS_ABSENT:
        state = pynvml.nvmlSystemGetConfComputeState()
        return int(state.ccFeature), bool(state.devToolsMode), pynvml.NVML_CC_SYSTEM_MULTIGPU_NONE
    return int(settings.ccFeature), bool(settings.devToolsMode), int(settings.multiGpuMode)
