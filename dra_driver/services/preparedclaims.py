"""What is prepared on this node, from the files below the plugin directory alone. Nothing is changed on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dra_driver.errors import DraDriverError
from dra_driver.model.claim import Pods
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.record import ClaimRecord, HeldDevice
from dra_driver.model.usage import INTERVALS, MpsShared, TimeSliced, UnknownUsage, Usage
from dra_driver.state.cdi_directory import CdiDirectory
from dra_driver.state.readonly import read_state, set_aside_files
from dra_driver.state.stepcodec import encode_step

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """One device of a claim. `mig` are the ids of a MIG device that was made on demand, as text."""

    device: str
    kind: str
    uuid: str
    gpu_uuid: str
    admin_access: bool = False
    share_id: str | None = None
    usage: str | None = None
    mig: str | None = None


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """One record. `age_s` is None where the record does not say since when; `boot` is `this`, `earlier` or `unknown`;
    `undo` names the steps that Unprepare would take back, in its order; `pods` are those that the claim is for as far
    as the driver wrote it down, None where that is unknown."""

    namespace: str
    name: str
    uid: str
    phase: str
    prepared_at: str | None
    age_s: float | None
    boot: str
    cdi_spec: str
    devices: tuple[PreparedDevice, ...]
    undo: tuple[str, ...]
    pods: Pods = None


@dataclass(frozen=True, slots=True)
class NodeClaims:
    """All claims, oldest first, and sentences on what is not as it should be."""

    claims: tuple[PreparedClaim, ...]
    problems: tuple[str, ...] = ()


def read_prepared_claims(
    plugin_directory: Path, cdi_root: Path, driver: str, boot_id: str | None, now: datetime
) -> NodeClaims:
    """What the records say. `boot_id` None: it cannot be told whether a record is of this boot."""
    state = read_state(plugin_directory)
    problems = list(state.faults)
    specs, problem = _specs(cdi_root, driver)
    problems += [] if problem is None else [problem]
    ledger = {entry.device: entry for entry in state.owned}
    claims = [_claim(record, specs, ledger, boot_id, now) for record in state.records]
    claims.sort(key=lambda claim: (claim.prepared_at or "~", claim.namespace, claim.name))
    problems += [
        f"{file} was set aside, as it could not be read as a file of the driver; look at it, then remove it"
        for file in set_aside_files(plugin_directory, cdi_root, driver)
    ]
    known = {claim.uid for claim in claims}
    problems += [
        f"the CDI spec of claim UID {uid} has no record: {', '.join(names) or 'unreadable'}"
        for uid, names in sorted((specs or {}).items())
        if uid not in known
    ]
    problems += [
        f"claim {claim.namespace}/{claim.name} is prepared but its CDI spec is missing; its pods cannot start "
        "anew until the driver prepares it again"
        for claim in claims
        if claim.cdi_spec == "missing" and claim.phase == "prepared"
    ]
    held = {device.device for claim in claims for device in claim.devices}
    problems += [
        f"MIG device {entry.device} ({entry.phase}) is in the ledger and no claim holds it; the driver removes it"
        for entry in state.owned
        if entry.device not in held and entry.boot_id == boot_id
    ]
    return NodeClaims(tuple(claims), tuple(problems))


def _specs(cdi_root: Path, driver: str) -> tuple[Mapping[str, Sequence[str]] | None, str | None]:
    """The devices in each claim's spec by claim UID; None where the directory cannot be read, and why."""
    try:
        return CdiDirectory(cdi_root, driver).list(), None
    except (DraDriverError, OSError) as error:
        return None, str(error)


def _claim(
    record: ClaimRecord,
    specs: Mapping[str, Sequence[str]] | None,
    ledger: Mapping[str, OwnedInstance],
    boot_id: str | None,
    now: datetime,
) -> PreparedClaim:
    boot = "unknown" if boot_id is None else "this" if record.boot_id == boot_id else "earlier"
    return PreparedClaim(
        record.ref.namespace,
        record.ref.name,
        record.ref.uid,
        record.phase,
        record.prepared_at,
        _age(record.prepared_at, now),
        boot,
        "unknown" if specs is None else "present" if record.ref.uid in specs else "missing",
        tuple(_device(held, ledger.get(held.device)) for held in record.devices),
        tuple(str(encode_step(step)["kind"]) for step in reversed(record.steps)),
        record.claim.pods,
    )


def _age(since: str | None, now: datetime) -> float | None:
    try:
        return max(0.0, (now - datetime.fromisoformat(since)).total_seconds()) if since else None
    except (ValueError, TypeError):
        return None


def _device(held: HeldDevice, owned: OwnedInstance | None) -> PreparedDevice:
    mig = None
    if owned is not None:
        ids = [
            f"{label} {value}"
            for label, value in (("GI", owned.gpu_instance_id), ("CI", owned.compute_instance_id))
            if value is not None
        ]
        mig = f"{owned.profile_name} at {owned.placement.start}, {' '.join([owned.phase, *ids])}"
    return PreparedDevice(
        held.device,
        held.kind,
        held.uuid or (owned.uuid if owned is not None and owned.uuid else ""),
        held.gpu_uuid,
        held.admin_access,
        held.share_id,
        usage_text(held.usage),
        mig,
    )


def usage_text(usage: Usage) -> str | None:
    """`MPS, at most 10240 MiB and 50 % of threads`; None for a device that nobody shares."""
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
        case MpsShared(memory_limit_mib=memory, active_thread_percentage=threads):
            limits = [] if memory is None else [f"{memory} MiB"]
            limits += [] if threads is None else [f"{threads} % of threads"]
            return f"MPS, at most {' and '.join(limits)}" if limits else "MPS"
        case UnknownUsage(kind=kind):
            return f"{kind} (of a newer release)"
