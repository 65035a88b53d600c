"""The limits of one share of a device: what the scheduler counted, as MPS can hold a process to it.

Rounded so that shares which fit on a device never add up to more than it has. Whether anybody enforces
them is the rule's `enforce`, which is not looked at here.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dra_driver.model.claim import DeviceResult
from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.sharing import SharingRule
from dra_driver.model.units import parse_quantity
from dra_driver.sharing.rules.shared_device import (
    MEMORY,
    MULTIPROCESSORS,
    SHARES,
    default_memory,
    memory_mib_of,
    multiprocessors_of,
)

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """What the processes of a share may use of the device; None is no limit."""

    memory_mib: int | None = None
    active_thread_percentage: int | None = None


def limits_of(result: DeviceResult, device: OfferedDevice, rule: SharingRule) -> ShareLimits:
    """The limits of an allocated share.

    Memory and multiprocessors that the claim asked for, and in mode shares its part of both; of two
    limits the tighter one. What was not asked for, or is unknown of the device, is no limit. Memory that the
    scheduler counts for a claim that asks for none is none either, except in mode memory.

    Raises: InvalidConfigError if the allocation has an amount that is not a quantity.
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
        # MPS rounds a percentage up to whole multiprocessors, so it must be that of a whole number of them.
        limits.append(_percentage(Fraction(int(total * part), total) if total else part))
    return limits


def _part(result: DeviceResult, rule: SharingRule) -> Fraction:
    """The part of the whole device that the shares of this allocation are.

    Never more than the whole: a claim may have been allocated when the device had more shares than now.
    """
    return min(Fraction(1), _consumed(result, SHARES) / rule.shares) if rule.shares else Fraction(0)


def _percentage(part: Fraction) -> int:
    return min(100, max(1, int(100 * part)))


def _consumed(result: DeviceResult, name: str) -> Fraction:
    """An amount of the allocation; its name may be written with the domain of gpu-dra-driver."""
    consumed = result.consumed_capacity
    text = consumed.get(name, consumed.get(f"{result.driver}/{name}"))
    return Fraction(0) if text is None else parse_quantity(text)
