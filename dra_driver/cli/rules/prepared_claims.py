"""The prepared claims of a node."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime

from dra_driver.cli.rules.node_state import NodeState
from dra_driver.journal.rules.cleanups import PendingCleanup
from dra_driver.model.claim import HeldDevice, Pods
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.mps import INTERVALS, LostMps, MpsShared, SharingMode, TimeSliced
from dra_driver.model.problems import FailingClaim
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import Limit
from dra_driver.power.rules.limits import limits_on


@dataclass(frozen=True, slots=True)
class ClaimDevice:
    """`mig` describes a MIG device on demand: profile, placement, IDs. `limits` are texts such as `500 W`."""

    device: str
    kind: str
    uuid: str
    gpu_uuid: str
    admin_access: bool = False
    share_id: str | None = None
    usage: str | None = None
    mig: str | None = None
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """`boot` is `this`, `earlier` or `unknown`, `cdi_spec` `present`, `missing` or `unknown`. `undo` names the steps
    that Unprepare undoes, first to last. `pods` is None if unknown.
    """

    namespace: str
    name: str
    uid: str
    phase: str
    prepared_at: str | None
    age_s: float | None
    boot: str
    cdi_spec: str
    devices: tuple[ClaimDevice, ...]
    undo: tuple[str, ...]
    pods: Pods = None
    maintenance: str | None = None


@dataclass(frozen=True, slots=True)
class ClaimCleanup:
    """`since` is in seconds since 1970."""

    namespace: str
    name: str
    uid: str
    kinds: tuple[str, ...]
    since: int
    text: str


@dataclass(frozen=True, slots=True)
class NodeClaims:
    """`running` is a busy GPU, by the UID of a claim that is being prepared."""

    claims: tuple[PreparedClaim, ...]
    problems: tuple[str, ...] = ()
    cleanups: tuple[ClaimCleanup, ...] = ()
    failing: tuple[FailingClaim, ...] = ()
    running: Mapping[str, str] = field(default_factory=dict)


Specs = Mapping[str, Sequence[str]] | None
"""Devices by claim UID; None if the directory could not be read."""


def prepared_claims(state: NodeState, specs: Specs, now: datetime) -> tuple[PreparedClaim, ...]:
    ledger = {entry.device: entry for entry in state.owned}
    maintenances = {one.claim: one.text for one in state.maintenances}
    claims = (
        PreparedClaim(
            record.ref.namespace,
            record.ref.name,
            record.ref.uid,
            record.phase,
            record.prepared_at,
            _age_s(record.prepared_at, now),
            _boot(record, state.boot_id),
            "unknown" if specs is None else "present" if record.ref.uid in specs else "missing",
            tuple(
                _device(held, ledger.get(held.device), limits_on(record.steps, held.gpu_uuid))
                for held in record.devices
            ),
            tuple(step.tag for step in reversed(record.steps)),
            record.claim.pods,
            maintenances.get(record.ref),
        )
        for record in state.records
    )
    return tuple(sorted(claims, key=lambda claim: (claim.prepared_at or "~", claim.namespace, claim.name)))


def shown(cleanup: PendingCleanup) -> ClaimCleanup:
    ref = cleanup.record.ref
    return ClaimCleanup(ref.namespace, ref.name, ref.uid, cleanup.kinds, cleanup.since, cleanup.text)


def contradictions(state: NodeState, specs: Specs, claims: Sequence[PreparedClaim]) -> Iterator[str]:
    known = {claim.uid for claim in claims}
    for uid, names in sorted((specs or {}).items()):
        if uid not in known:
            yield f"claim UID {uid} has a CDI spec but no record: {', '.join(names) or 'unreadable'}"
    for claim in claims:
        if claim.cdi_spec == "missing" and claim.phase == "prepared":
            yield (
                f"claim {claim.namespace}/{claim.name} is prepared but its CDI spec is missing; its containers cannot "
                "restart until gpu-dra-driver prepares it again"
            )
    held = {device.device for claim in claims for device in claim.devices}
    for entry in state.owned:
        is_wanted = entry.device in held or entry.is_of_layout
        if not is_wanted and entry.boot_id == state.boot_id:
            yield (
                f"MIG device {entry.device} ({entry.phase}) is in the ledger but not used by a claim; "
                "gpu-dra-driver will destroy it"
            )


def _boot(record: ClaimRecord, boot_id: str | None) -> str:
    if boot_id is None:
        return "unknown"
    return "this" if record.boot_id == boot_id else "earlier"


def _age_s(since: str | None, now: datetime) -> float | None:
    try:
        return max(0.0, (now - datetime.fromisoformat(since)).total_seconds()) if since else None
    except (ValueError, TypeError):
        return None


def _device(held: HeldDevice, owned: OwnedInstance | None, limits: Collection[Limit]) -> ClaimDevice:
    mig = None
    if owned is not None:
        ids = [
            f"{label} {value}"
            for label, value in (("GI", owned.gpu_instance_id), ("CI", owned.compute_instance_id))
            if value is not None
        ]
        mig = f"{owned.profile_name} at {owned.placement.start}, {' '.join([owned.phase, *ids])}"
    return ClaimDevice(
        held.device,
        held.kind,
        held.uuid or (owned.uuid if owned is not None and owned.uuid else ""),
        held.gpu_uuid,
        held.admin_access,
        held.share_id,
        usage_text(held.usage),
        mig,
        tuple(sorted(limit.text for limit in limits)),
    )


def usage_text(usage: SharingMode) -> str | None:
    """Return a text such as `MPS, at most 10240 MiB and 50 % of threads`; None for a device that is not shared."""
    match usage:
        case None:
            return None
        case TimeSliced(interval=None):
            return "time-slicing"
        case TimeSliced(interval=interval):
            known = interval is not None and 0 <= interval < len(INTERVALS)
            return (
                f"time-slicing, {INTERVALS[interval].lower() if known and interval is not None else interval}"
            )
        case LostMps():
            return "MPS"
        case MpsShared(memory_limit_mib=memory, active_thread_percentage=threads):
            limits = [] if memory is None else [f"{memory} MiB"]
            limits += [] if threads is None else [f"{threads} % of threads"]
            return f"MPS, at most {' and '.join(limits)}" if limits else "MPS"


def age_text(seconds: float) -> str:
    """Return an age such as `45s`, `12m`, `2h05m` or `3d4h`."""
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m" if minutes else f"{whole}s"
