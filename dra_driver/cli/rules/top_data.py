"""What `top` shows of a node, from NVML, the files of gpu-dra-driver and the MPS host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from dra_driver.cli.rules.mig_holders import gpu_maps
from dra_driver.cli.rules.node_state import NodeState
from dra_driver.cli.rules.node_view import (
    Holding,
    NodeView,
    SeenDaemon,
    SeenGpu,
    SeenProblem,
    SeenProcess,
    SeenReason,
)
from dra_driver.cli.rules.prepared_claims import PreparedClaim
from dra_driver.health.rules.nvlinks import compared
from dra_driver.health.rules.polling import FABRIC
from dra_driver.health.rules.state import observe
from dra_driver.model.gpu import Gpu, GpuLoad, GpuProcess
from dra_driver.model.health import (
    HealthState,
    HealthTarget,
    PolledHealth,
    PollResult,
    Severity,
    Unreachable,
    targets_of_instance,
)
from dra_driver.model.ids import gpu_device_names
from dra_driver.model.inventory import Inventory
from dra_driver.model.mps import MpsDaemonStatus
from dra_driver.model.problems import ShownProblem
from dra_driver.reporting.rules.usage import Origin, Place, unclaimed


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """What NVML reports now, by UUID. `lost` are the GPUs that stopped answering between two calls. `hidden` are those
    that the NVIDIA driver is bound to and NVML does not show: their UUIDs, None where unknown, by PCI bus ID. `pods`
    are the UIDs of the pods that processes belong to, and `origins` says where processes run, by process ID."""

    inventory: Inventory = field(default_factory=Inventory)
    loads: Mapping[str, GpuLoad] = field(default_factory=dict)
    polled: Mapping[str, PolledHealth] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    hidden: Mapping[str, str | None] = field(default_factory=dict)
    processes: Mapping[str, Sequence[GpuProcess]] = field(default_factory=dict)
    pods: Mapping[int, str] = field(default_factory=dict)
    origins: Mapping[int, Origin] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _ShownReason:
    """Why a device is not well: its name, and how it is shown."""

    subject: HealthTarget
    name: tuple[str, str]
    severity: Severity
    shown: SeenReason


def node_view(
    node: str,
    driver: str,
    now: datetime,
    nvml: NvmlFacts,
    claims: Sequence[PreparedClaim],
    state: NodeState,
    daemons: Sequence[MpsDaemonStatus],
    notes: Iterable[str],
    on_demand: Callable[[Gpu], bool],
    problems: Iterable[ShownProblem] = (),
) -> NodeView:
    """The view. `notes` are sentences, each shown once; `on_demand` says of a GPU whether its MIG devices are made on
    demand. `problems` are those of the node."""
    inventory = nvml.inventory
    ids = state.instance_ids(inventory)
    names, places, reasons = _named_reasons(nvml, state, ids, now)
    cuda = inventory.versions.cuda
    return NodeView(
        node=node,
        driver=driver,
        taken_at=f"{now:%Y-%m-%d %H:%M:%S} UTC",
        nvidia_version=inventory.versions.driver,
        cuda_version=None if cuda is None else f"{cuda[0]}.{cuda[1]}",
        problems=tuple(_problem(shown, now.timestamp()) for shown in problems),
        gpus=tuple(_gpus(nvml, names, places, reasons)),
        domains=_domains(inventory, names),
        holdings=tuple(holding for claim in claims for holding in _holdings(claim, reasons, ids)),
        instances=tuple(
            instance
            for drawn in gpu_maps(inventory, state, on_demand)
            for instance in sorted(drawn.instances, key=lambda one: (one.start, one.size))
        ),
        health=tuple(reason.shown for reason in reasons),
        mps=tuple(
            _daemon(device, status, now.timestamp()) for status in daemons for device in status.spec.devices
        ),
        processes=tuple(_processes(nvml, claims, names, _places_of_claims(state, ids))),
        notes=tuple(dict.fromkeys(notes)),
    )


def _named_reasons(
    facts: NvmlFacts, state: NodeState, ids: Mapping[str, tuple[str, int, int]], now: datetime
) -> tuple[Mapping[str, str], Mapping[str, str], Sequence[_ShownReason]]:
    """Device names and PCI bus IDs by UUID, and all reasons. A GPU whose UUID is not known goes by its PCI bus ID."""
    inventory = facts.inventory
    shown = {gpu.uuid: gpu.pci_bus_id for gpu in inventory.gpus}
    places = {
        entry.target.gpu_uuid: entry.pci_bus_id for entry in state.health if not entry.target.is_instance
    }
    known = {place: uuid for uuid, place in places.items() if uuid not in shown}
    hidden = {uuid or known.get(place) or place: place for place, uuid in facts.hidden.items()}
    places = {**places, **hidden, **shown}
    names = _names(inventory, state, hidden)
    # NVML lists a GPU that answers nothing from the start, so it is not lost.
    facts = replace(facts, lost=facts.lost | (hidden.keys() - inventory.unread))
    reasons = _reasons(state.health, facts, names, _mig_devices(ids), int(now.timestamp()))
    return names, {uuid: place for uuid, place in places.items() if place is not None}, list(reasons)


def _names(inventory: Inventory, state: NodeState, hidden: Mapping[str, str]) -> Mapping[str, str]:
    """Device names by UUID: GPUs that NVML shows in PCI order, then those that only files know, or that NVML lists
    without saying what they are."""
    shown = [gpu.uuid for gpu in inventory.gpus]
    known = {entry.target.gpu_uuid for entry in state.health}
    known |= {uuid for record in state.records for uuid in record.gpu_uuids if uuid}
    known |= {uuid for uuid, place in hidden.items() if uuid != place} | inventory.unread
    unnamed = {place: place for uuid, place in hidden.items() if uuid == place}
    names = gpu_device_names(dict.fromkeys([*shown, *sorted(known - set(shown))]))
    return {**names, **(inventory.kept_names or {}), **inventory.gpu_names, **unnamed}


def _mig_devices(instances: Mapping[str, tuple[str, int, int]]) -> Mapping[HealthTarget, tuple[str, ...]]:
    """The names of the MIG devices in each GPU instance and in each compute instance."""
    found: dict[HealthTarget, tuple[str, ...]] = {}
    for name, (uuid, gi, ci) in sorted(instances.items()):
        for target in (HealthTarget(uuid, gi), HealthTarget(uuid, gi, ci)):
            found[target] = (*found.get(target, ()), name)
    return found


def _reasons(
    states: Iterable[HealthState],
    facts: NvmlFacts,
    names: Mapping[str, str],
    devices: Mapping[HealthTarget, tuple[str, ...]],
    now: int,
) -> Iterator[_ShownReason]:
    """By device, the worst first: what gpu-dra-driver wrote down, then what only NVML says now."""
    kept = {HealthTarget(uuid): HealthState(HealthTarget(uuid)) for uuid in names}
    kept |= {state.target: state for state in states}
    for uuid, name in names.items():
        mine = (state for target, state in kept.items() if target.gpu_uuid == uuid)
        shown = [entry for state in mine for entry in _of_target(state, name, devices, facts, now)]
        yield from sorted(shown, key=lambda entry: (entry.subject.order, -entry.severity, entry.name))


def _of_target(
    state: HealthState,
    gpu: str,
    devices: Mapping[HealthTarget, tuple[str, ...]],
    facts: NvmlFacts,
    now: int,
) -> Iterator[_ShownReason]:
    subject = state.target
    parts = [gpu]
    if subject.gpu_instance_id is not None:
        parts.append(f"GI {subject.gpu_instance_id}")
    if subject.compute_instance_id is not None:
        parts.append(f"CI {subject.compute_instance_id}")
    # What a running plugin would find now; where none runs, nobody has taken back what is over.
    after = state
    if subject.gpu_uuid in facts.lost:
        after = observe(state, Unreachable(), now)
    elif subject.gpu_uuid in facts.polled:
        others = (polled.nvlinks for uuid, polled in facts.polled.items() if uuid != subject.gpu_uuid)
        polled = compared(facts.polled[subject.gpu_uuid], others)
        after = observe(state, PollResult(polled), now)
    known = {reason.name for reason in state.reasons}
    active = {reason.name for reason in after.reasons}
    new = [reason for reason in after.reasons if reason.name not in known]
    for reason in (*state.reasons, *new):
        is_over = reason.name not in active
        shown = SeenReason(
            subject=" ".join(parts),
            severity=reason.severity.name.lower(),
            reason=" ".join(filter(None, reason.name)),
            since_s=float(max(0, now - reason.since)) if reason.name in known else None,
            text=reason.text + ("; NVML does not show it any more" if is_over else ""),
            devices=devices.get(subject, ()),
            is_over=is_over,
        )
        yield _ShownReason(subject, reason.name, reason.severity, shown)


def _gpus(
    facts: NvmlFacts, names: Mapping[str, str], places: Mapping[str, str], reasons: Sequence[_ShownReason]
) -> Iterator[SeenGpu]:
    shown = {gpu.uuid: gpu for gpu in facts.inventory.gpus}
    for uuid, name in names.items():
        severity = max(
            (entry.severity for entry in reasons if entry.subject.gpu_uuid == uuid), default=Severity.OK
        )
        polled = facts.polled.get(uuid)
        is_known = (polled is not None and polled.answered) or severity >= Severity.DEGRADED
        health = severity.name.lower() if is_known else "unknown"
        card = facts.inventory.under_vfio.get(uuid)
        if card is not None:
            yield SeenGpu(name, uuid, card.product_name, health="vfio", pci_bus_id=card.bus_id)
        elif (gpu := shown.get(uuid)) is None:
            place = places.get(uuid)
            yield SeenGpu(name, "" if uuid == place else uuid, health=health, pci_bus_id=place)
        else:
            mode = None if not gpu.mig_capable else "on" if gpu.mig_enabled else "off"
            load = facts.loads.get(uuid)
            yield SeenGpu(name, uuid, gpu.product_name, mode, load, health, gpu.index, gpu.pci_bus_id)


def _places_of_claims(state: NodeState, instances: Mapping[str, tuple[str, int, int]]) -> Collection[Place]:
    """Where processes of claims may be."""
    return {
        (held.gpu_uuid, instances[held.device][1] if held.device in instances else None)
        for record in state.records
        for held in record.devices
    }


def _processes(
    facts: NvmlFacts,
    claims: Iterable[PreparedClaim],
    names: Mapping[str, str],
    claimed: Collection[Place],
) -> Iterator[SeenProcess]:
    known = {pod.uid: f"{claim.namespace}/{pod.name}" for claim in claims for pod in claim.pods or ()}
    for uuid, processes in facts.processes.items():
        nobodys = unclaimed(uuid, processes, claimed, lambda pid: facts.origins.get(pid, "unknown"))
        for process in processes:
            pod = facts.pods.get(process.pid)
            program, blank, rest = process.name.partition(" ")
            yield SeenProcess(
                names[uuid],
                process.pid,
                f"{program.rpartition('/')[2]}{blank}{rest}",
                process.memory_bytes,
                process.gpu_instance_id,
                None if pod is None else known.get(pod, f"pod {pod}"),
                process in nobodys,
            )


def _domains(inventory: Inventory, names: Mapping[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    members: dict[str, list[str]] = {}
    for gpu in inventory.gpus:
        if gpu.uuid in inventory.nvlink_domains:
            members.setdefault(inventory.nvlink_domains[gpu.uuid], []).append(names[gpu.uuid])
    return tuple((domain, tuple(found)) for domain, found in members.items())


def _holdings(
    claim: PreparedClaim, reasons: Sequence[_ShownReason], instances: Mapping[str, tuple[str, int, int]]
) -> Iterator[Holding]:
    for device in claim.devices:
        subjects: tuple[HealthTarget, ...] = (HealthTarget(device.gpu_uuid),)
        if device.device in instances:
            subjects = targets_of_instance(*instances[device.device])
        # MIG devices have no NVLink.
        hits = [entry for entry in reasons if not (device.kind == "mig" and entry.name[0] == FABRIC)]
        severity = max((entry.severity for entry in hits if entry.subject in subjects), default=Severity.OK)
        yield Holding(
            claim=f"{claim.namespace}/{claim.name}",
            uid=claim.uid,
            phase=claim.phase,
            since_s=claim.age_s,
            device=device.device,
            kind=device.kind,
            uuid=device.uuid,
            usage=device.usage,
            share_id=device.share_id,
            admin_access=device.admin_access,
            mig=device.mig,
            boot=claim.boot,
            trouble=severity.name.lower() if severity >= Severity.DEGRADED else None,
            pods=None if claim.pods is None else tuple(pod.name for pod in claim.pods),
        )


def _problem(shown: ShownProblem, now: float) -> SeenProblem:
    problem, lasted_s = shown.problem, max(0.0, now - shown.since)
    return SeenProblem(problem.code, problem.subject, problem.text, lasted_s if lasted_s >= 1 else None)


def _daemon(device: str, status: MpsDaemonStatus, now: float) -> SeenDaemon:
    since_s = max(0.0, now - status.since)
    return SeenDaemon(
        device, status.state, since_s, status.clients, status.pid, status.problem, status.directory
    )
