"""Decides which limits of power and clocks a claim sets on its GPUs, or why it is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from dra_driver.api.config import NO_CLOCKS, ClockRange, GpuConfig, PowerConfig
from dra_driver.api.resolve import ResolvedConfig
from dra_driver.errors import ClaimRefusedError
from dra_driver.model.claim import DeviceResult
from dra_driver.model.dataclass import dataclass
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.steps import ClockDomain, Limit, LockClocks, SetPowerLimit, Step


@dataclass(frozen=True, slots=True)
class PowerPolicy:
    """In watts; None means no setting.

    `default_w` is the limit of each GPU without a claim. A claim cannot set more than `max_w` on a GPU. `budget_w` is
    the sum of the limits of all GPUs that can be in use at the same time.
    """

    default_w: int | None = None
    max_w: int | None = None
    budget_w: int | None = None

    def counted_w(self, gpu: Gpu) -> int | None:
        """Return what a GPU uses of the node's budget: its limit without a claim."""
        if self.default_w is None or gpu.power_limits_w is None:
            return None if gpu.power_limits_w is None else gpu.power_limit_default_w
        least, most = gpu.power_limits_w
        return min(most, max(least, self.default_w))

    def most_w(self, gpu: Gpu) -> int | None:
        """Return the highest limit that a claim can set on a GPU; with a budget, at most what is counted for the
        GPU.
        """
        limits = [self.max_w, gpu.power_limits_w and gpu.power_limits_w[1]]
        if self.budget_w is not None:
            limits.append(self.counted_w(gpu))
        return min((limit for limit in limits if limit is not None), default=None)


NO_POWER_POLICY: Final = PowerPolicy()


def watts(milliwatts: int) -> str:
    """Return for example `115.5 W` for 115500."""
    return f"{milliwatts / 1000:g} W"


def limits_of(
    devices: Sequence[tuple[DeviceResult, OfferedDevice]],
    parameters: Sequence[ResolvedConfig],
    policy: PowerPolicy,
) -> list[Limit]:
    """Return the steps that limit the devices, sorted. Raises: ClaimRefusedError."""
    found: dict[str, tuple[str, list[Limit]]] = {}
    for (result, offered), resolved in zip(devices, parameters, strict=True):
        if result.admin_access:
            _refuse_admin_access(result, resolved)
            continue
        limits = _of_device(result, offered, resolved, policy)
        request, others = found.setdefault(offered.gpu.uuid, (result.request, limits))
        if others != limits:
            raise ClaimRefusedError(
                f"requests {request} and {result.request} share device {offered.name}: {DIFFERENT}"
            )
    return [limit for _, (_, limits) in sorted(found.items()) for limit in limits]


DIFFERENT: Final = "all claims on a GPU need the same limits of power and clocks"


def limits_on(steps: Iterable[Step], gpu_uuid: str) -> frozenset[Limit]:
    return frozenset(step for step in steps if isinstance(step, Limit) and step.gpu_uuid == gpu_uuid)


def _refuse_admin_access(result: DeviceResult, resolved: ResolvedConfig) -> None:
    config = resolved.config
    if isinstance(config, GpuConfig) and (config.power or config.clocks != NO_CLOCKS):
        raise ClaimRefusedError(
            f"request {result.request}: power and clocks ({resolved.entry}) would change a device that other claims "
            "may use, which adminAccess does not allow; remove them or adminAccess"
        )


def _of_device(
    result: DeviceResult, offered: OfferedDevice, resolved: ResolvedConfig, policy: PowerPolicy
) -> list[Limit]:
    config, found = resolved.config, list[Limit]()
    if not isinstance(config, GpuConfig):
        return found
    if config.power is not None:
        found.append(_power(result, offered, config.power, policy))
    if (graphics := config.clocks.graphics) is not None:
        found.append(_clock(result, offered, "graphics", graphics, offered.gpu.graphics_clocks_mhz))
    if (memory := config.clocks.memory) is not None:
        found.append(_clock(result, offered, "memory", memory, offered.gpu.memory_clocks_mhz))
    return found


def _power(
    result: DeviceResult, offered: OfferedDevice, wanted: PowerConfig, policy: PowerPolicy
) -> SetPowerLimit:
    gpu = offered.gpu
    default, most = gpu.power_limit_default_w, policy.most_w(gpu)
    if gpu.power_limits_w is None or default is None or most is None:
        raise _no_limits(result, offered, "power limit", "power")
    asked = [] if wanted.limit_w is None else [("limitWatts", wanted.limit_w)]
    if wanted.percent is not None:
        asked.append(("percent", default * wanted.percent // 100))
    least, of_gpu = gpu.power_limits_w
    lowered = "" if most == of_gpu else f" (the GPU {of_gpu} W, but the node's configuration less)"
    for name, limit in asked:
        if not least <= limit <= most:
            raise ClaimRefusedError(
                f"request {result.request}: power.{name}: device {offered.name} accepts {least} to {most} W{lowered}, "
                f"but the claim asks for {limit} W; change power.{name}"
            )
    return SetPowerLimit(gpu.uuid, min(limit for _, limit in asked))


def _clock(
    result: DeviceResult,
    offered: OfferedDevice,
    domain: ClockDomain,
    wanted: ClockRange,
    bounds: tuple[int, int] | None,
) -> LockClocks:
    if bounds is None:
        raise _no_limits(result, offered, f"{domain} clock", f"clocks.{domain}MHz")
    least, most = wanted.least_mhz or bounds[0], wanted.most_mhz or bounds[1]
    if not bounds[0] <= least <= most <= bounds[1]:
        raise ClaimRefusedError(
            f"request {result.request}: clocks.{domain}MHz: device {offered.name} accepts a range within "
            f"{bounds[0]} to {bounds[1]} MHz, but the claim asks for {least} to {most} MHz; change clocks.{domain}MHz"
        )
    return LockClocks(offered.gpu.uuid, domain, least, most)


def _no_limits(result: DeviceResult, offered: OfferedDevice, what: str, field: str) -> ClaimRefusedError:
    return ClaimRefusedError(
        f"request {result.request}: the {what} of device {offered.name} cannot be set, because NVML reports no limits "
        f"for it; remove {field} from the parameters, or select another product"
    )
