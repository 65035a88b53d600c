"""nvmlDeviceGetFieldValues: one function for very many values."""

from __future__ import annotations

from typing import Any

import pynvml

from dra_driver.simulator import topology
from dra_driver.simulator.library.core import Core
from dra_driver.simulator.library.refs import Return, number, target
from dra_driver.simulator.state import Gpu, Model, State

_SPEED_BY_LINK = {
    **{84 + link: link for link in range(6)},
    **{132 + link: 6 + link for link in range(6)},
}
_SPEED_COMMON = 90
_LINK_COUNT = 91
_NVSWITCH_LINKS = 147
_LINK_SPEED, _LINK_STATE, _LINK_VERSION = 164, 165, 166
_C2C_LINKS = 170
_RESETLESS_MIG = 184
_RESET_STATUS, _DRAIN_AND_RESET_STATUS = 226, 227
_RECOVERY_ACTION = 230
_RECOVERY_ACTION_SINCE = 570
_PENDING_ROWS, _FAILED_ROWS, _CORRECTABLE_ROWS, _UNCORRECTABLE_ROWS = 144, 145, 142, 143
_ECC_TOTALS = {3: "ecc_corrected", 4: "ecc_uncorrected", 5: "ecc_corrected", 6: "ecc_uncorrected"}
_LAST_FIELD = 512


class Fields(Core):
    """Each value has its own return code."""

    def nvmlDeviceGetFieldValues(self, handle: Any, count: Any, out: Any) -> None:  # noqa: N802
        state, gpu, parsed = self.device(handle)
        values = target(out)
        for index in range(number(count)):
            entry = values[index]
            try:
                if parsed.is_mig:
                    raise Return(pynvml.NVML_ERROR_NOT_SUPPORTED)
                answer = self._field(state, gpu, int(entry.fieldId), int(entry.scopeId))
            except Return as refusal:
                entry.nvmlReturn = refusal.code
                continue
            entry.nvmlReturn = pynvml.NVML_SUCCESS
            wide = entry.fieldId in _ECC_TOTALS
            entry.valueType = (
                pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG if wide else pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
            )
            entry.value.ullVal = answer

    def _field(self, state: State, gpu: Gpu, field: int, scope: int) -> int:
        model = state.model_of(gpu)
        if field in _SPEED_BY_LINK:
            return self._link_value(gpu, model, _SPEED_BY_LINK[field], _LINK_SPEED)
        if field in (_LINK_SPEED, _LINK_STATE, _LINK_VERSION):
            return self._link_value(gpu, model, scope, field)
        if field in (_SPEED_COMMON, _LINK_COUNT, _NVSWITCH_LINKS):
            return self._all_links(gpu, model, field)
        if field == _C2C_LINKS and model.c2c_links:
            return model.c2c_links
        if field == _RESETLESS_MIG and model.mig:
            return int(model.resetless_mig)
        if field in (_RECOVERY_ACTION, _RESET_STATUS, _DRAIN_AND_RESET_STATUS):
            return self._recovery(state, gpu, field)
        if field in _ECC_TOTALS and model.ecc:
            return int(getattr(gpu, _ECC_TOTALS[field]))
        if (
            field in (_CORRECTABLE_ROWS, _UNCORRECTABLE_ROWS, _PENDING_ROWS, _FAILED_ROWS)
            and model.row_remapper
        ):
            return gpu.remapped_rows[field - _CORRECTABLE_ROWS]
        raise Return(
            pynvml.NVML_ERROR_INVALID_ARGUMENT if field >= _LAST_FIELD else pynvml.NVML_ERROR_NOT_SUPPORTED
        )

    def _recovery(self, state: State, gpu: Gpu, field: int) -> int:
        if int(state.driver_version.partition(".")[0]) < _RECOVERY_ACTION_SINCE:
            raise Return(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if field == _RESET_STATUS:
            return int(gpu.recovery_action == pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)
        if field == _DRAIN_AND_RESET_STATUS:
            return int(gpu.recovery_action == pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET)
        return gpu.recovery_action

    def _link_value(self, gpu: Gpu, model: Model, link: int, field: int) -> int:
        if not model.nvlinks:
            raise Return(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if link >= model.nvlinks:
            raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        active = any(index == link for index, _, _ in topology.active_links(gpu))
        if field == _LINK_STATE:
            return int(active)
        if field == _LINK_VERSION:
            return model.nvlink_version if active else 0
        return model.nvlink_mbps if active else 0

    def _all_links(self, gpu: Gpu, model: Model, field: int) -> int:
        if not model.nvlinks:
            raise Return(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if field == _LINK_COUNT:
            return model.nvlinks
        if field == _NVSWITCH_LINKS:
            return sum(kind == topology.REMOTE_SWITCH for _, kind, _ in topology.active_links(gpu))
        return model.nvlink_mbps if topology.active_links(gpu) else 0
