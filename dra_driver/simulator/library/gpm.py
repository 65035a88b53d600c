"""GPU performance monitoring (GPM): samples of a GPU instance, and the metrics between two of them."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pynvml

from dra_driver.simulator.library.core import Core
from dra_driver.simulator.library.device import busy
from dra_driver.simulator.library.refs import address, number, put_handle, target
from dra_driver.simulator.mig import Refusal

_HOPPER = 9
_UNLIKE = 4711.0


class _Taken(NamedTuple):
    """What a sample shows: the MIG devices that there were in the GPU instance, and how busy they were."""

    devices: tuple[str, ...]
    percent: int


class Gpm(Core):
    """nvmlGpm*. Of two samples of different instances with the same ID a metric comes out that no device can have."""

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        self._numbers = itertools.count(0x6000_0000, 16)
        self.gpm_samples: dict[int, _Taken | None] = {}

    def nvmlGpmQueryDeviceSupport(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        target(out).isSupportedDevice = int(state.model_of(gpu).architecture >= _HOPPER)

    def nvmlGpmSampleAlloc(self, out: Any) -> None:  # noqa: N802
        self.state()
        made = next(self._numbers)
        self.gpm_samples[made] = None
        put_handle(out, made)

    def nvmlGpmSampleFree(self, sample: Any) -> None:  # noqa: N802
        self.state()
        self.gpm_samples.pop(self._sample(sample))

    def nvmlGpmMigSampleGet(self, handle: Any, gi: Any, sample: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        if state.model_of(gpu).architecture < _HOPPER or not gpu.mig_mode:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        instance = gpu.instance(number(gi))
        if instance is None:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        holders = [holder for holder in gpu.holders if holder.gpu_instance == instance.id]
        taken = _Taken(tuple(device.uuid for device in instance.compute), busy(holders))
        self.gpm_samples[self._sample(sample)] = taken

    def nvmlGpmMetricsGet(self, out: Any) -> None:  # noqa: N802
        self.state()
        wanted = target(out)
        if wanted.version != pynvml.NVML_GPM_METRICS_GET_VERSION:
            raise Refusal(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        first, second = (self.gpm_samples[self._sample(one)] for one in (wanted.sample1, wanted.sample2))
        if first is None or second is None:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        is_same = first.devices == second.devices
        for metric in wanted.metrics[: wanted.numMetrics]:
            metric.nvmlReturn = pynvml.NVML_SUCCESS
            metric.value = (first.percent + second.percent) / 2 if is_same else _UNLIKE

    def _sample(self, sample: Any) -> int:
        found = address(sample)
        if found not in self.gpm_samples:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found
