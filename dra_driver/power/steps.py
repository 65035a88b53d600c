"""The steps that limit power and clocks. Their methods raise as in `GpuLimits`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dra_driver.journal.ledger import Ledger
from dra_driver.journal.setting_steps import SettingSteps
from dra_driver.model.dataclass import replace
from dra_driver.model.steps import LockClocks, SetPowerLimit
from dra_driver.nvml.limits import GpuLimits
from dra_driver.power.rules.limits import watts

_WATT_MW = 1000


class PowerLimitSteps(SettingSteps[SetPowerLimit]):
    """Also sets the node's limit on GPUs without a claim."""

    def __init__(
        self, limits: GpuLimits, ledger: Ledger, default_w: int | None, gpus: Callable[[], Iterable[str]]
    ) -> None:
        """`default_w` None leaves GPUs without a claim as they are. `gpus` as in `SettingSteps`."""
        super().__init__(
            SetPowerLimit,
            ledger,
            otherwise="remove power from the claim's parameters",
            at_rest=SetPowerLimit("", default_w or 0),
            has_rest_value=default_w is not None,
            gpus=gpus,
        )
        self._limits = limits

    def read(self, step: SetPowerLimit) -> int:
        """Return milliwatts."""
        return self._limits.power_mw(step.gpu_uuid)

    def write(self, step: SetPowerLimit, value: int) -> None:
        self._limits.set_power(step.gpu_uuid, value)

    def accepted(self, step: SetPowerLimit) -> SetPowerLimit:
        """Return the step with the nearest limit that the GPU accepts."""
        least, most = self._limits.power_range_w(step.gpu_uuid)
        return replace(step, limit_w=min(most, max(least, step.limit_w)))

    def is_same(self, found: int, value: int) -> bool:
        """Whether the limits differ by less than a watt, because a GPU may round them."""
        return abs(found - value) < _WATT_MW

    def text(self, value: int) -> str:
        return watts(value)


class ClockSteps(SettingSteps[LockClocks]):
    """NVML does not report which clocks are locked."""

    def __init__(self, limits: GpuLimits, ledger: Ledger) -> None:
        super().__init__(LockClocks, ledger, otherwise="remove clocks from the claim's parameters")
        self._limits = limits

    def read(self, step: LockClocks) -> None:
        """Return None."""

    def write(self, step: LockClocks, value: tuple[int, int] | None) -> None:
        if value is None:
            self._limits.unlock_clock(step.gpu_uuid, step.domain)
        else:
            self._limits.lock_clock(step.gpu_uuid, step.domain, *value)

    def text(self, value: tuple[int, int]) -> str:
        least, most = value
        return f"{least} to {most} MHz"
