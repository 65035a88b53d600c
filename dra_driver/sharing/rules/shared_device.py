"""A device that several claims may hold at the same time, in the form of resource.k8s.io/v1.

Of a capacity that a claim does not request, the scheduler counts its policy's default, or all if it has no policy. So
every capacity of a shared device has a policy. The defaults of the capacity that the rule divides, of MPS clients and
of memory are above 0; of memory because in quotas a share without memory would cost nothing.

Limits are rounded so that shares that fit on a device never add up to more than it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from dra_driver.model.claim import DeviceResult
from dra_driver.model.dataclass import dataclass
from dra_driver.model.inventory import DynamicMigDevice, OfferedDevice, StaticMigDevice, VfioDevice, WholeGpu
from dra_driver.model.schema import JsonObject
from dra_driver.model.sharing import SharingRule
from dra_driver.model.units import format_bytes, format_decimal, parse_quantity
from dra_driver.sharing.rules.client_limits import BoundedRule

MEMORY = "memory"
SHARES = "shares"
MULTIPROCESSORS = "multiprocessors"
MPS_CLIENTS = "mpsClients"
SHAREABLE = "shareable"
"""The attribute by which classes select shared devices, for schedulers whose CEL lacks
`device.allowMultipleAllocations`."""
_MIB = 1 << 20


def shared_capacity(amounts: Mapping[str, int], device: OfferedDevice, bound: BoundedRule) -> JsonObject:
    """Return capacities with policies. `amounts` are the device's, memory in bytes. If MPS enforces the rule, the
    scheduler counts a client for each claim; in mode shares, it counts the shares instead.
    """
    rule = bound.rule
    capacity: JsonObject = {}
    for name, amount in amounts.items():
        if name == MEMORY:
            capacity[name] = _memory(amount, rule)
        elif name == MULTIPROCESSORS:
            capacity[name] = _multiprocessors(amount)
        else:
            capacity[name] = _optional(amount, 1)
    total = multiprocessors_of(device)
    if rule.multiprocessors and total is not None:
        capacity[MULTIPROCESSORS] = _multiprocessors(total)
    if rule.shares is not None:
        capacity[SHARES] = _counted(rule.shares, 1, default=1)
    elif rule.enforce == "mps":
        capacity[MPS_CLIENTS] = _counted(bound.max_clients, 1, default=1)
    return capacity


def multiprocessors_of(device: OfferedDevice) -> int | None:
    match device:
        case WholeGpu(_, gpu):
            return gpu.multiprocessors
        case StaticMigDevice() | DynamicMigDevice():
            return device.profile.multiprocessors or None
        case VfioDevice():
            return None


def memory_mib_of(device: OfferedDevice) -> int | None:
    match device:
        case WholeGpu(_, gpu):
            return None if gpu.memory_bytes is None else gpu.memory_bytes // _MIB
        case StaticMigDevice() | DynamicMigDevice():
            return device.profile.memory_mib
        case VfioDevice():
            return None


def multiprocessor_step(total: int) -> int:
    """Return at least one percent of `total`, such as 2 of 132, because MPS limits are whole percentages."""
    return -(-total // 100)


def default_memory(total: int, rule: SharingRule) -> int:
    """Return how many of `total` bytes the scheduler counts for a share without a memory request: 0 if it would be
    less than 1 MiB.
    """
    if rule.mode == "memory":
        return total // _MIB * _MIB
    if rule.shares is not None:
        return total // rule.shares // _MIB * _MIB
    return _MIB if total >= 2 * _MIB else 0


def _memory(amount: int, rule: SharingRule) -> JsonObject:
    total, default = amount // _MIB * _MIB, default_memory(amount, rule)
    return _counted(total, _MIB, default=default) if default else _optional(total, _MIB)


def _multiprocessors(total: int) -> JsonObject:
    return _optional(total, multiprocessor_step(total))


def _optional(total: int, step: int) -> JsonObject:
    """Return a capacity that only claims that request it consume."""
    if total < step or total == 0:
        return _only(0, total, step)
    high = total // step * step
    policy = {"default": "0", "validRange": {"min": "0", "max": _text(high, step), "step": _text(step, step)}}
    return {"value": _text(total, step), "requestPolicy": policy}


def _counted(total: int, step: int, *, default: int) -> JsonObject:
    """Every claim consumes at least one step, and all of it if it has less than two steps."""
    if total < 2 * step:
        return _only(total, total, step)
    span = {"min": _text(step, step), "max": _text(total, step), "step": _text(step, step)}
    return {
        "value": _text(total, step),
        "requestPolicy": {"default": _text(default, step), "validRange": span},
    }


def _only(amount: int, total: int, step: int) -> JsonObject:
    """Return the form of a single valid amount, which a range cannot express."""
    text = _text(amount, step)
    return {"value": _text(total, step), "requestPolicy": {"default": text, "validValues": [text]}}


def _text(value: int, step: int) -> str:
    return format_bytes(value) if step == _MIB else format_decimal(value)


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """None means unlimited."""

    memory_mib: int | None = None
    active_thread_percentage: int | None = None


def limits_of(result: DeviceResult, device: OfferedDevice, rule: SharingRule) -> ShareLimits:
    """Return the tighter of two limits: what the claim requested, and in mode shares its fraction of the device. The
    default memory that the scheduler counts sets a limit only in mode memory.

    Raises: InvalidConfigError if an amount is not a quantity.
    """
    memory = _memory_limits(result, device, rule)
    threads = _thread_limits(result, device, rule)
    return ShareLimits(min(memory, default=None), min(threads, default=None))


def _memory_limits(result: DeviceResult, device: OfferedDevice, rule: SharingRule) -> list[int]:
    limits = []
    asked = _consumed(result, MEMORY)
    part = _part(result, rule)
    total = memory_mib_of(device)
    is_default = rule.mode != "memory" and asked in (_MIB, default_memory((total or 0) * _MIB, rule))
    if asked > 0 and not is_default:
        limits.append(max(1, asked // _MIB))
    if part and total:
        limits.append(max(1, int(total * part)))
    return limits


def _thread_limits(result: DeviceResult, device: OfferedDevice, rule: SharingRule) -> list[int]:
    limits = []
    asked = _consumed(result, MULTIPROCESSORS)
    total = multiprocessors_of(device)
    if asked > 0 and total:
        limits.append(_percentage(asked / total))
    part = _part(result, rule)
    if part:
        # MPS rounds a percentage up to whole multiprocessors, so the percentage must correspond to a whole number.
        limits.append(_percentage(Fraction(int(total * part), total) if total else part))
    return limits


def _part(result: DeviceResult, rule: SharingRule) -> Fraction:
    """Return at most 1: the claim may have been allocated when the device had more shares than now."""
    return min(Fraction(1), _consumed(result, SHARES) / rule.shares) if rule.shares else Fraction(0)


def _percentage(part: Fraction) -> int:
    return min(100, max(1, int(100 * part)))


def _consumed(result: DeviceResult, name: str) -> Fraction:
    """In the allocation, the name of a capacity may include the driver's domain."""
    consumed = result.consumed_capacity
    text = consumed.get(name, consumed.get(f"{result.driver}/{name}"))
    return Fraction(0) if text is None else parse_quantity(text)
