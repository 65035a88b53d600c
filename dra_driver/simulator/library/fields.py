"""nvmlDeviceGetFieldValues: one function for very many values, of which this plugin reads a few."""

from __future__ import annotations

from typing import Any

import pynvml

from dra_driver.simulator.library.core import Core
from dra_driver.simulator.library.refs import number, target
from dra_driver.simulator.mig import Refusal
from dra_driver.simulator.state import Gpu, State

_RESETLESS_MIG = 184
_RECOVERY_ACTION = 230
_RECOVERY_ACTION_SINCE = 570
_LAST_FIELD = 512
_BLACKWELL = 10
_NVLINK_ERRORS = {38: "crc", 45: "crc data", 52: "replay", 59: "recovery"}
"""The totals of all links, which GPUs have had until Blackwell; since then they count for each link."""
_LINK_RECOVERIES = 215


class Fields(Core):
    """Each value has its own return code."""

    def nvmlDeviceGetFieldValues(self, handle: Any, count: Any, out: Any) -> None:  # noqa: N802
        state, gpu, parsed = self.device(handle)
        values = target(out)
        for index in range(number(count)):
            entry = values[index]
            try:
                if parsed.is_mig:
                    raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
                answer = self._field(state, gpu, int(entry.fieldId), int(entry.scopeId))
            except Refusal as refusal:
                entry.nvmlReturn = refusal.code
                continue
            entry.nvmlReturn = pynvml.NVML_SUCCESS
            entry.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
            entry.value.ullVal = answer

    def _field(self, state: State, gpu: Gpu, field: int, scope: int) -> int:
        model = state.model_of(gpu)
        if field == _RESETLESS_MIG and model.mig:
            return int(model.resetless_mig)
        if field == _RECOVERY_ACTION:
            if int(state.driver_version.partition(".")[0]) < _RECOVERY_ACTION_SINCE:
                raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return gpu.recovery_action
        if model.nvlinks and model.architecture < _BLACKWELL and field in _NVLINK_ERRORS:
            return gpu.nvlink_errors.get(_NVLINK_ERRORS[field], 0)
        if scope < model.nvlinks and model.architecture >= _BLACKWELL and field == _LINK_RECOVERIES:
            # All of them were of the first link.
            return gpu.nvlink_errors.get("recovery", 0) if scope == 0 else 0
        raise Refusal(
            pynvml.NVML_ERROR_INVALID_ARGUMENT if field >= _LAST_FIELD else pynvml.NVML_ERROR_NOT_SUPPORTED
        )
