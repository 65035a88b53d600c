"""A node at one moment, combined from NVML, the plugin's files and the MPS host.

The health of the GPUs is what the plugin saved, because only the plugin receives NVML's events, and what NVML shows
now. Without a plugin, the health is unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime

from dra_driver.cli.rules.node_state import NodeState, SavedHealth
from dra_driver.cli.rules.prepared_claims import ClaimDevice, PreparedClaim
from dra_driver.health.rules.polling import FABRIC, Finding, compared, findings_now
from dra_driver.health.rules.state import HANGS_NOW, LOST_NOW
from dra_driver.model.dataclass import asdict, dataclass, field, replace
from dra_driver.model.gpu import GpuLoad, GpuProcess, ProcessOrigin
from dra_driver.model.health import (
    HealthState,
    HealthTarget,
    PolledHealth,
    Reason,
    Severity,
    targets_of_instance,
)
from dra_driver.model.ids import gpu_device_names
from dra_driver.model.inventory import Inventory
from dra_driver.model.mps import MpsDaemonStatus
from dra_driver.model.problems import NodeProblem
from dra_driver.model.remedies import NOT_STARTED
from dra_driver.reporting.rules.claim_usage import unclaimed

InstanceIds = Mapping[str, tuple[str, int, int]]
_NO_STATE = NodeState()


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """What NVML reports now, by UUID.

    `lost` are GPUs that stopped answering between two calls, `hung` GPUs whose calls do not return. `hidden` are GPUs
    bound to the NVIDIA driver that NVML does not list: UUIDs (None if unknown) by PCI bus ID.
    """

    inventory: Inventory = field(default_factory=Inventory)
    loads: Mapping[str, GpuLoad] = field(default_factory=dict)
    polled: Mapping[str, PolledHealth] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    hidden: Mapping[str, str | None] = field(default_factory=dict)
    processes: Mapping[str, Sequence[GpuProcess]] = field(default_factory=dict)
    origins: Mapping[int, ProcessOrigin] = field(default_factory=dict)
    hung: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """`mode` is the MIG mode, if any; `load` is None if NVML reports nothing.

    A GPU with an unknown UUID has its PCI bus ID as the name and "" as the UUID. `health` is the worst severity of
    the GPU and its instances, `unknown`, or `vfio` for a GPU that a virtual machine has or may get.
    """

    name: str
    uuid: str
    product: str | None = None
    mode: str | None = None
    load: GpuLoad | None = None
    health: str = "unknown"
    index: int | None = None
    pci_bus_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding(ClaimDevice):
    """`trouble` is the device's severity, None if it seems healthy."""

    claim: str
    uid: str
    phase: str = "prepared"
    since_s: float | None = None
    boot: str = "this"
    trouble: str | None = None
    pods: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class SeenReason:
    """Why a device is unhealthy. `since_s` is None if only this check found it.

    `saved_s` is set if the plugin is not running, so that the reason may be over: for how many seconds the saved
    health has not changed.
    """

    subject: str
    severity: str
    reason: str
    since_s: float | None
    text: str
    devices: tuple[str, ...] = ()
    saved_s: float | None = None


@dataclass(frozen=True, slots=True)
class SeenDaemon:
    """`clients` is None before the first probe."""

    device: str
    state: str
    since_s: float
    clients: int | None = None
    pid: int | None = None
    problem: str | None = None
    directory: str = ""


@dataclass(frozen=True, slots=True)
class SeenProcess:
    """`gpu_instance_id` is only set in MIG mode.

    `pod` is `NAMESPACE/NAME`, or `pod UID` for a pod with unknown claims; None for a process of the host.
    `is_unclaimed`: it belongs to no prepared claim and no container.
    """

    gpu: str
    pid: int
    name: str
    memory_bytes: int | None = None
    gpu_instance_id: int | None = None
    pod: str | None = None
    is_unclaimed: bool = False
    utilisation_percent: int | None = None


@dataclass(frozen=True, slots=True)
class SeenProblem:
    """`subject` is empty for the whole node. `since_s` is None if the problem was just found."""

    problem: str
    subject: str
    text: str
    since_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    """Everything that `top` shows. `unwatched` is why the health of all GPUs is unknown."""

    node: str
    driver: str
    taken_at: str
    nvidia_version: str | None = None
    cuda_version: str | None = None
    problems: tuple[SeenProblem, ...] = ()
    gpus: tuple[SeenGpu, ...] = ()
    holdings: tuple[Holding, ...] = ()
    health: tuple[SeenReason, ...] = ()
    unwatched: str | None = None
    mps: tuple[SeenDaemon, ...] = ()
    processes: tuple[SeenProcess, ...] = ()
    notes: tuple[str, ...] = ()


def node_view(
    node: str,
    driver: str,
    now: datetime,
    nvml: NvmlFacts,
    claims: Sequence[PreparedClaim] = (),
    state: NodeState = _NO_STATE,
    daemons: Sequence[MpsDaemonStatus] = (),
    notes: Iterable[str] = (),
    problems: Iterable[NodeProblem] = (),
    *,
    plugin_runs: bool,
) -> NodeView:
    """Show `notes` without duplicates."""
    inventory, at = nvml.inventory, now.timestamp()
    ids = state.instance_ids(inventory)
    names, places, hidden = _names_and_places(nvml, state)
    # The NVIDIA driver learns a GPU's UUID when it starts the GPU.
    unstarted = {uuid for uuid in hidden if nvml.hidden[places[uuid]] is None}
    # GPUs in `unread` have never answered, but NVML lists them, so they are not lost. NVML does not tell which of the
    # other GPUs its calls hang for.
    missing = frozenset(hidden - inventory.unread - unstarted)
    facts = replace(nvml, hung=missing) if inventory.hanging else replace(nvml, lost=nvml.lost | missing)
    unwatched = _unwatched(state.health, plugin_runs=plugin_runs)
    reasons = [*_reasons(facts, state.health, names, ids, at, is_watched=unwatched is None)]
    reasons += [_not_started(uuid, names[uuid]) for uuid in sorted(unstarted)]
    cuda = inventory.versions.cuda
    return NodeView(
        node=node,
        driver=driver,
        taken_at=f"{now:%Y-%m-%d %H:%M:%S} UTC",
        nvidia_version=inventory.versions.driver,
        cuda_version=None if cuda is None else f"{cuda[0]}.{cuda[1]}",
        problems=tuple(_problem(shown, at) for shown in problems),
        gpus=_in_place(_gpus(nvml, names, places, reasons, state.health.known if unwatched is None else ())),
        holdings=tuple(holding for claim in claims for holding in _holdings(claim, reasons, ids)),
        health=tuple(shown for _, _, _, shown in reasons),
        unwatched=unwatched,
        mps=tuple(
            SeenDaemon(
                device, one.state, max(0.0, at - one.since), one.clients, one.pid, one.problem, one.directory
            )
            for one in daemons
            for device in one.spec.devices
        ),
        processes=tuple(_processes(nvml, claims, state, names, ids)),
        notes=tuple(dict.fromkeys(notes)),
    )


def searched(view: NodeView, text: str) -> NodeView:
    """Return only the GPUs, claims and pods whose names contain the text, and their details."""
    wanted = text.lower()
    if not wanted:
        return view

    def hit(*names: object) -> bool:
        return wanted in " ".join(map(str, names)).lower()

    holdings = [
        one for one in view.holdings if hit(one.claim, one.uid, one.device, one.uuid, *one.pods or ())
    ]
    pods = {f"{one.claim.partition('/')[0]}/{pod}" for one in holdings for pod in one.pods or ()}
    processes = [one for one in view.processes if one.pod in pods or hit(one.pod, one.pid, one.name, one.gpu)]
    used = {one.device for one in holdings} | {one.gpu for one in processes}
    gpus = [
        gpu
        for gpu in view.gpus
        if hit(gpu.name, gpu.uuid, gpu.product, gpu.pci_bus_id, gpu.health)
        or any(device.startswith(gpu.name) for device in used)
    ]
    named = {gpu.name for gpu in gpus}
    return replace(
        view,
        gpus=tuple(gpus),
        holdings=tuple(holdings),
        processes=tuple(processes),
        health=tuple(one for one in view.health if one.subject.partition(" ")[0] in named),
        mps=tuple(one for one in view.mps if one.device in used | named),
    )


def _names_and_places(
    facts: NvmlFacts, state: NodeState
) -> tuple[Mapping[str, str], Mapping[str, str], Set[str]]:
    """Return device names and PCI bus IDs by UUID, and the UUIDs of hidden GPUs. A PCI bus ID replaces an unknown
    UUID.
    """
    inventory = facts.inventory
    shown = {gpu.uuid: gpu.pci_bus_id for gpu in inventory.gpus}
    states = state.health.states
    kept = {one.target.gpu_uuid: one.pci_bus_id for one in states if not one.target.is_instance}
    known = {place: uuid for uuid, place in kept.items() if uuid not in shown}
    hidden = {uuid or known.get(place) or place: place for place, uuid in facts.hidden.items()}
    others = {one.target.gpu_uuid for one in states} | state.health.known | inventory.unread
    others |= {uuid for record in state.records for uuid in record.gpu_uuids if uuid}
    others |= {uuid for uuid, place in hidden.items() if uuid != place}
    names = gpu_device_names(dict.fromkeys([*shown, *sorted(others - set(shown))]))
    unnamed = {place: place for uuid, place in hidden.items() if uuid == place}
    places = {uuid: place for uuid, place in {**kept, **hidden, **shown}.items() if place is not None}
    return {**names, **(inventory.kept_names or {}), **inventory.gpu_names, **unnamed}, places, hidden.keys()


_Found = tuple[HealthTarget, tuple[str, str], Severity, SeenReason]


def _unwatched(saved: SavedHealth, *, plugin_runs: bool) -> str | None:
    if not plugin_runs:
        return "gpu-dra-driver is not running on this node"
    return "gpu-dra-driver has not saved it in this boot" if saved.saved_at is None else None


def _reasons(
    facts: NvmlFacts,
    saved: SavedHealth,
    names: Mapping[str, str],
    ids: InstanceIds,
    now: float,
    *,
    is_watched: bool,
) -> Iterator[_Found]:
    saved_s = None if is_watched or saved.saved_at is None else max(0.0, now - saved.saved_at)
    states = {state.target: state for state in saved.states}
    for uuid, name in names.items():
        target = HealthTarget(uuid)
        found = [
            _saved(state, reason, name, ids, int(now), saved_s)
            for state in states.values()
            if state.target.gpu_uuid == uuid
            for reason in state.reasons
        ]
        known = {reason for of, reason, *_ in found if of == target}
        found += [
            (target, (key, value), severity, _shown(name, severity, (key, value), None, text))
            for key, value, severity, text in _findings(facts, uuid, states.get(target))
            if (key, value) not in known
        ]
        yield from sorted(found, key=lambda one: (one[0].order, -one[2], one[1]))


def _findings(facts: NvmlFacts, uuid: str, state: HealthState | None) -> Sequence[Finding]:
    if uuid in facts.lost:
        return [LOST_NOW]
    if uuid in facts.hung:
        return [HANGS_NOW]
    if uuid not in facts.polled:
        return []
    others = (polled.nvlinks for other, polled in facts.polled.items() if other != uuid)
    return findings_now(compared(facts.polled[uuid], others), None if state is None else state.nvlinks)


def _not_started(uuid: str, gpu: str) -> _Found:
    name, severity = (NOT_STARTED, ""), Severity.UNHEALTHY
    shown = _shown(gpu, severity, name, None, "the NVIDIA driver could not start the GPU")
    return HealthTarget(uuid), name, severity, shown


def _saved(
    state: HealthState, reason: Reason, gpu: str, ids: InstanceIds, now: int, saved_s: float | None
) -> _Found:
    target = state.target
    uuid, gi, ci = target.gpu_uuid, target.gpu_instance_id, target.compute_instance_id
    devices = (
        name
        for name, (on, *instance) in sorted(ids.items())
        if target.is_instance and on == uuid and instance[0] == gi and ci in (None, instance[1])
    )
    subject = " ".join([gpu, *([] if gi is None else [f"GI {gi}"]), *([] if ci is None else [f"CI {ci}"])])
    since_s = float(max(0, now - reason.since))
    shown = _shown(subject, reason.severity, reason.name, since_s, reason.text)
    return target, reason.name, reason.severity, replace(shown, devices=tuple(devices), saved_s=saved_s)


def _shown(
    subject: str, severity: Severity, name: tuple[str, str], since_s: float | None, text: str
) -> SeenReason:
    return SeenReason(subject, severity.name.lower(), " ".join(filter(None, name)), since_s, text)


def _gpus(
    facts: NvmlFacts,
    names: Mapping[str, str],
    places: Mapping[str, str],
    reasons: Sequence[_Found],
    known: Collection[str],
) -> Iterator[SeenGpu]:
    shown = {gpu.uuid: gpu for gpu in facts.inventory.gpus}
    for uuid, name in names.items():
        current = (
            how for target, _, how, shown in reasons if target.gpu_uuid == uuid and shown.saved_s is None
        )
        severity, place = max(current, default=Severity.OK), places.get(uuid)
        is_known = uuid in known or severity >= Severity.DEGRADED
        health = severity.name.lower() if is_known else "unknown"
        card, gpu = facts.inventory.under_vfio.get(uuid), shown.get(uuid)
        if card is not None:
            yield SeenGpu(name, uuid, card.product_name, health="vfio", pci_bus_id=card.bus_id)
        elif gpu is None:
            yield SeenGpu(name, "" if uuid == place else uuid, health=health, pci_bus_id=place)
        else:
            mode = None if not gpu.mig_capable else "on" if gpu.mig_enabled else "off"
            load = facts.loads.get(uuid)
            yield SeenGpu(name, uuid, gpu.product_name, mode, load, health, gpu.index, gpu.pci_bus_id)


def _in_place(gpus: Iterable[SeenGpu]) -> tuple[SeenGpu, ...]:
    """Return the GPUs in PCI order, which is NVML's. A lost GPU gets the index that NVML leaves free."""
    ordered = sorted(gpus, key=lambda gpu: gpu.pci_bus_id or "~")
    used, free = {gpu.index for gpu in ordered}, 0
    for at, gpu in enumerate(ordered):
        if gpu.index is None and gpu.health == "lost" and free not in used:
            ordered[at] = replace(gpu, index=free)
        index = ordered[at].index
        free = free if index is None else index + 1
    return tuple(ordered)


def _processes(
    facts: NvmlFacts,
    claims: Iterable[PreparedClaim],
    state: NodeState,
    names: Mapping[str, str],
    ids: InstanceIds,
) -> Iterator[SeenProcess]:
    pods = {pod.uid: f"{claim.namespace}/{pod.name}" for claim in claims for pod in claim.pods or ()}
    claimed = {
        (held.gpu_uuid, ids[held.device][1] if held.device in ids else None)
        for record in state.records
        for held in record.devices
    }
    for uuid, processes in facts.processes.items():
        stray = unclaimed(uuid, processes, claimed, facts.origins)
        for process in processes:
            uid = facts.origins[process.pid].pod_uid
            pod = None if uid is None else pods.get(uid, f"pod {uid}")
            program, blank, rest = process.name.partition(" ")
            yield SeenProcess(
                names[uuid],
                process.pid,
                f"{program.rpartition('/')[2]}{blank}{rest}",
                process.memory_bytes,
                process.gpu_instance_id,
                pod,
                process in stray,
                process.utilisation_percent,
            )


def _holdings(claim: PreparedClaim, reasons: Sequence[_Found], ids: InstanceIds) -> Iterator[Holding]:
    for device in claim.devices:
        targets: tuple[HealthTarget, ...] = (HealthTarget(device.gpu_uuid),)
        if device.device in ids:
            targets = targets_of_instance(*ids[device.device])
        # MIG devices have no NVLink.
        severity = max(
            (
                how
                for target, name, how, _ in reasons
                if target in targets and not (device.kind == "mig" and name[0] == FABRIC)
            ),
            default=Severity.OK,
        )
        yield Holding(
            **asdict(device),
            claim=f"{claim.namespace}/{claim.name}",
            uid=claim.uid,
            phase=claim.phase,
            since_s=claim.age_s,
            boot=claim.boot,
            trouble=severity.name.lower() if severity >= Severity.DEGRADED else None,
            pods=None if claim.pods is None else tuple(pod.name for pod in claim.pods),
        )


def _problem(problem: NodeProblem, now: float) -> SeenProblem:
    lasted_s = max(0.0, now - problem.since)
    return SeenProblem(problem.code, problem.subject, problem.text, lasted_s if lasted_s >= 1 else None)
