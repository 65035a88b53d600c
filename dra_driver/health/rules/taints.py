"""Taints of a device, from the health of its GPU and of its MIG instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from dra_driver.health.rules.polling import (
    FABRIC,
    NVLINK,
    NVLINK_ERRORS,
    PCIE_GENERATION,
    PCIE_WIDTH,
    SLOWDOWN,
    fabric_findings,
)
from dra_driver.journal.rules.cleanups import Withholding
from dra_driver.mig.rules.counters import has_counters
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.health import (
    LOST,
    UNMONITORED,
    UNRESPONSIVE,
    HealthState,
    HealthStates,
    HealthTarget,
    Reason,
    Severity,
    targets_of_instance,
    targets_of_mig,
)
from dra_driver.model.inventory import DynamicMigDevice, OfferedDevice, StaticMigDevice, VfioDevice, WholeGpu
from dra_driver.model.mig import MIG_LAYOUT, GpuLayout, OwnedInstance
from dra_driver.model.record import ClaimRecord
from dra_driver.model.schema import JsonObject
from dra_driver.model.sharing import SharingPolicy
from dra_driver.slices.rules.build import NEWEST_TAINTS, TaintLimits

Effect = Literal["None", "NoSchedule", "NoExecute"]

_EFFECTS: tuple[Effect, ...] = ("NoExecute", "NoSchedule", "None")
_KEEP_AWAY = frozenset({"NoExecute", "NoSchedule"})
PREFIX = "gpu.nvidia.com/"
CLEANUP = "cleanup"
_OF_NVLINK = frozenset({FABRIC, NVLINK, NVLINK_ERRORS})


@dataclass(frozen=True, slots=True)
class TaintPolicy:
    """The effect of each taint, by its key without the prefix. The default is NoSchedule.

    Informational reasons have the effect None, except for a configured `unmonitored`. API servers before Kubernetes
    1.35 refuse the whole slice if it has a taint with the effect None.
    """

    effects: Mapping[str, Effect] = field(default_factory=dict)
    limits: TaintLimits = NEWEST_TAINTS


DEFAULT_POLICY = TaintPolicy()


class MadeInstance(NamedTuple):
    gpu_instance_id: int
    compute_instance_id: int
    uuid: str | None


def device_reasons(
    device: OfferedDevice, states: HealthStates, instances: Mapping[str, MadeInstance]
) -> tuple[Reason, ...]:
    """Return the reasons of a device's GPU and of its instance, worst first.

    MIG devices have no NVLink, so links and fabric do not affect them. An earlier instance with the same IDs is
    ignored.
    """
    uuid = _uuid_of(device, instances)
    found = [
        reason
        for target in device_targets(device, instances)
        if target in states and _is_about(states[target], uuid)
        for reason in states[target].reasons
        if isinstance(device, WholeGpu | VfioDevice) or reason.key not in _OF_NVLINK
    ]
    return tuple(sorted(found, key=_rank))


def instances_by_device(ledger: Iterable[OwnedInstance]) -> Mapping[str, MadeInstance]:
    return {
        owned.device: MadeInstance(owned.gpu_instance_id, owned.compute_instance_id, owned.uuid)
        for owned in ledger
        if owned.gpu_instance_id is not None and owned.compute_instance_id is not None
    }


def device_targets(device: OfferedDevice, instances: Mapping[str, MadeInstance]) -> tuple[HealthTarget, ...]:
    match device:
        case StaticMigDevice(_, _, mig):
            return targets_of_mig(mig)
        case DynamicMigDevice(name, gpu) if name in instances:
            made = instances[name]
            return targets_of_instance(gpu.uuid, made.gpu_instance_id, made.compute_instance_id)
        case VfioDevice(card=card) if card.is_bound:
            return ()  # NVML does not list the card
        case WholeGpu(gpu=gpu) | DynamicMigDevice(gpu=gpu) | VfioDevice(gpu=gpu):
            return (HealthTarget(gpu.uuid),)


def device_taints(
    device: OfferedDevice,
    states: HealthStates,
    instances: Mapping[str, MadeInstance],
    policy: TaintPolicy = DEFAULT_POLICY,
    pending: Withholding | None = None,
    layout: GpuLayout | None = None,
) -> tuple[JsonObject, ...]:
    """Return the taints in wire format, one per key, sorted by key: the worst reason, then the oldest.

    A fabric that was not ready when discovery read the GPU remains a reason until discovery reads it again, whatever
    polls report, because the published device lacks its fabric attributes until then.
    """
    reasons = [*device_reasons(device, states, instances), *_unready_fabric(device)]
    if pending is not None:
        reasons.append(_reason_of(pending))
    if layout is not None and layout.state == "waiting":
        since = layout.since
        reasons.append(Reason(MIG_LAYOUT, "change", Severity.UNHEALTHY, since, since, layout.text))
    return taints_of(reasons, policy)


def _unready_fabric(device: OfferedDevice) -> Iterable[Reason]:
    fabric = device.gpu.unready_fabric
    if fabric is None or fabric.state == "unknown" or not isinstance(device, WholeGpu | VfioDevice):
        return ()
    return [
        Reason(key, value, severity, fabric.since, fabric.since, text, "poll")
        for key, value, severity, text in fabric_findings(fabric.state, fabric.text)
    ]


def _reason_of(pending: Withholding) -> Reason:
    return Reason(CLEANUP, pending.kinds[0], Severity.UNHEALTHY, pending.since, pending.since, pending.text)


def taints_of(reasons: Iterable[Reason], policy: TaintPolicy) -> tuple[JsonObject, ...]:
    ranked = sorted(reasons, key=_rank)
    is_lost = any(reason.key == LOST and reason.severity == Severity.LOST for reason in ranked)
    chosen: dict[str, tuple[Reason, Effect]] = {}
    for reason in ranked:
        if is_lost and reason.key == UNMONITORED:
            continue
        effect = _effect(reason.key, reason.severity, policy)
        if effect is not None:
            chosen.setdefault(reason.key, (reason, effect))
    worst = sorted(chosen.values(), key=lambda pair: (_EFFECTS.index(pair[1]), _rank(pair[0])))
    worst = worst[: policy.limits.most]
    return tuple(_taint(*pair) for pair in sorted(worst, key=lambda pair: pair[0].key))


def is_withdrawn(
    device: OfferedDevice, taints: Iterable[JsonObject], *, is_held: bool, is_shared: bool
) -> bool:
    """Whether a device is removed from the slices on a cluster where taints have no effect.

    A device that a claim holds stays for readers of the slices. If it is shared, it stays only with counters: without
    them, other claims would get a share. With them, the scheduler would ignore the counters of a removed device, and
    allocate its part of the GPU again.
    """
    if all(taint["effect"] not in _KEEP_AWAY for taint in taints):
        return False
    is_counted = has_counters(device.gpu) and not isinstance(device, StaticMigDevice)
    return not is_held or (is_shared and not is_counted)


def withdrawals(
    taints: Callable[[OfferedDevice], Iterable[JsonObject]],
    records: Iterable[ClaimRecord],
    sharing: SharingPolicy,
) -> Callable[[OfferedDevice], bool]:
    held = {held.device for record in records for held in record.devices if not held.admin_access}

    def withdrawn(device: OfferedDevice) -> bool:
        is_shared = sharing.rule_for(device) is not None
        return is_withdrawn(device, taints(device), is_held=device.name in held, is_shared=is_shared)

    return withdrawn


def rfc3339(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _uuid_of(device: OfferedDevice, instances: Mapping[str, MadeInstance]) -> str | None:
    if isinstance(device, DynamicMigDevice):
        made = instances.get(device.name)
        return None if made is None else made.uuid
    return device.uuid


def _is_about(state: HealthState, uuid: str | None) -> bool:
    """Whether a state with the device's IDs belongs to the device. IDs of instances are reused; UUIDs are not."""
    if not state.target.is_instance or state.identity is None or uuid is None:
        return True
    return uuid in state.identity.split(",")


def _rank(reason: Reason) -> tuple[int, int, str, int, str]:
    return (-reason.severity, reason.since, reason.key, len(reason.value), reason.value)


def keeps_claims_away(key: str, severity: Severity, policy: TaintPolicy) -> bool:
    """Whether no new claim gets a device with this reason: its taint keeps pods away, or Prepare refuses it."""
    is_refused = severity == Severity.LOST or key == UNRESPONSIVE
    return is_refused or _effect(key, severity, policy) in _KEEP_AWAY


def _effect(key: str, severity: Severity, policy: TaintPolicy) -> Effect | None:
    if key in (SLOWDOWN, PCIE_GENERATION, PCIE_WIDTH, NVLINK_ERRORS):
        return None  # comes and goes with load and temperature
    configured = policy.effects.get(key)
    if key == UNMONITORED and configured is not None:
        effect = configured
    elif severity <= Severity.INFORMATION:
        effect = "None"
    else:
        effect = configured or "NoSchedule"
    return None if effect == "None" and not policy.limits.informational else effect


def _taint(reason: Reason, effect: Effect) -> JsonObject:
    value = {"value": reason.value} if reason.value else {}
    return {"key": PREFIX + reason.key, **value, "effect": effect, "timeAdded": rfc3339(reason.since)}
