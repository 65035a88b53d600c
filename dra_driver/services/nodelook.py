"""One look at a node for people: NVML, the driver's records and kept health, the MPS host.

Nothing is changed, on the GPUs or in the driver's directories, and nothing that hangs is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from dra_driver.core.health import LOST
from dra_driver.core.migholders import KnownState, gpu_maps
from dra_driver.core.signals import FABRIC, level_reasons
from dra_driver.core.taints import instances_by_device
from dra_driver.core.topview import Holding, NodeView, SeenDaemon, SeenGpu, SeenInstance, SeenReason
from dra_driver.errors import DeviceLostError, DraDriverError, NvmlUnavailableError, StateError
from dra_driver.model.gpu import Gpu
from dra_driver.model.health import HealthState, Reason, Severity, Signals, Subject, subjects_of_instance
from dra_driver.model.ids import gpu_device_names, mig_device_name
from dra_driver.model.inventory import Inventory
from dra_driver.model.load import GpuLoad
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.mps import MpsDaemonStatus
from dra_driver.model.record import ClaimRecord
from dra_driver.mps.client import MpsClient
from dra_driver.mps.layout import mps_layout
from dra_driver.nvml.health import find_gpu, read_health
from dra_driver.nvml.load import read_load
from dra_driver.nvml.partitions import PartitionReader
from dra_driver.services.patience import Patient
from dra_driver.services.preparedclaims import PreparedClaim, read_prepared_claims
from dra_driver.state.files import read_plain
from dra_driver.state.healthstore import KeptHealth, decode
from dra_driver.state.readonly import read_state

HEALTH_FILE = "health.json"
_MPS_WAIT_S = 1.0
_NO_ANSWER = "the GPU does not answer NVML"


class Nvml(Protocol):
    """The NVML session. All calls raise NvmlUnavailableError while there is no driver."""

    def reopen(self) -> None:
        """Initialise anew."""

    def close(self) -> None:
        """Shut down."""

    def pulse(self) -> tuple[Hashable, ...]:
        """An entry a GPU, None for one that does not answer."""

    def read_inventory(self) -> Inventory:
        """All GPUs that answer; `partitioning` on those to be cut on demand."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where to look. `on_demand` tells the GPUs whose MIG devices are made on demand."""

    node: str
    driver: str
    plugin_directory: Path
    cdi_root: Path
    boot_id: str | None
    on_demand: Callable[[Gpu], bool]


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """What NVML tells now. `lost` are UUIDs of GPUs that stopped answering between two calls."""

    inventory: Inventory = field(default_factory=Inventory)
    loads: Mapping[str, GpuLoad] = field(default_factory=dict)
    signals: Mapping[str, Signals] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Told:
    """A reason by its name, and how it is shown."""

    subject: Subject
    name: tuple[str, str]
    severity: Severity
    seen: SeenReason


Findings = Mapping[str, Mapping[tuple[str, str], tuple[Severity, str]]]
"""Severity and text of each finding by its name, by key."""


class NodeLook:
    """Looks at one node, as often as wanted. NVML stays open in between; `close` shuts it down."""

    def __init__(
        self, place: Place, nvml: Nvml, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._place = place
        self._nvml = nvml
        self._clock = clock
        self._is_open = False
        self._partitions = PartitionReader()
        self._facts = Patient("NVML", self._read_nvml)
        layout = mps_layout(place.plugin_directory)
        self._mps_socket = layout.socket
        client = MpsClient(layout, connect_s=0.0)
        self._daemons = Patient("the MPS host", lambda: client.status(_MPS_WAIT_S))

    def close(self) -> None:
        """Shut NVML down, unless it hangs."""
        if not self._facts.is_asking:
            self._nvml.close()

    def view(self, wait_s: float) -> NodeView:
        """All that can be had. NVML is waited for no longer than `wait_s` seconds."""
        place, now = self._place, self._clock()
        self._facts.ask()
        may_ask, mps_problem = self._may_ask_mps_host()
        if may_ask:
            self._daemons.ask()
        claims = read_prepared_claims(
            place.plugin_directory, place.cdi_root, place.driver, place.boot_id, now
        )
        state = read_state(place.plugin_directory)
        kept, notes = _read_health(place.plugin_directory / HEALTH_FILE, place.boot_id)
        found, nvml_problem = self._facts.answer(wait_s)
        facts = found or NvmlFacts()
        daemons: Sequence[MpsDaemonStatus] | None = None
        if may_ask:
            daemons, mps_problem = self._daemons.answer(_MPS_WAIT_S)
        states = () if kept is None else kept.states
        names = _names(facts.inventory, state.records, states)
        told = list(_reasons(states, facts, names, int(now.timestamp())))
        ids = _instance_ids(facts.inventory, state.owned)
        known = KnownState(state.records, state.owned, place.boot_id, is_known=not state.faults)
        inventory = facts.inventory
        problems = [nvml_problem, mps_problem, *notes, *claims.problems]
        cuda = inventory.versions.cuda
        return NodeView(
            node=place.node,
            driver=place.driver,
            taken_at=f"{now:%Y-%m-%d %H:%M:%S} UTC",
            nvidia_version=inventory.versions.driver,
            cuda_version=None if cuda is None else f"{cuda[0]}.{cuda[1]}",
            gpus=tuple(_gpus(facts, names, told)),
            domains=_domains(inventory, names),
            holdings=tuple(holding for claim in claims.claims for holding in _holdings(claim, told, ids)),
            instances=tuple(_instances(inventory, known, place.on_demand)),
            health=tuple(entry.seen for entry in told),
            mps=tuple(_daemon(status, now.timestamp()) for status in daemons or ()),
            notes=tuple(
                dict.fromkeys(
                    [
                        *filter(None, problems),
                        *(f"{fault.subject}: {fault.text}" for fault in inventory.faults),
                    ]
                )
            ),
        )

    def _may_ask_mps_host(self) -> tuple[bool, str | None]:
        """Whether there is somebody to ask, and why not where there is."""
        with suppress(OSError):
            if self._mps_socket.exists():
                may = os.access(self._mps_socket, os.W_OK)
                return may, None if may else "MPS daemons are not shown: only root may ask the MPS host"
        return False, None

    def _read_nvml(self) -> NvmlFacts:
        """Raises: DraDriverError if NVML does not answer; then it is opened anew the next time."""
        if not self._is_open:
            self._nvml.reopen()
        # Set only by success: after a failure, or for a GPU that came back, only a new session helps.
        self._is_open = False
        inventory = self._nvml.read_inventory()
        inventory = replace(inventory, gpus=tuple(self._cut(gpu, inventory) for gpu in inventory.gpus))
        loads: dict[str, GpuLoad] = {}
        signals: dict[str, Signals] = {}
        lost: set[str] = set()
        for gpu in inventory.gpus:
            try:
                loads[gpu.uuid] = read_load(gpu.uuid)
                signals[gpu.uuid] = read_health(gpu.uuid)
            except DeviceLostError:
                lost.add(gpu.uuid)
            except NvmlUnavailableError:
                raise
            except DraDriverError:
                continue
        self._is_open = None not in self._nvml.pulse()
        return NvmlFacts(inventory, loads, signals, frozenset(lost))

    def _cut(self, gpu: Gpu, inventory: Inventory) -> Gpu:
        """With the GPU instances of a GPU in MIG mode, also where they are none of the driver's business.

        Not by the inventory itself, which would count such a GPU into an NVLink domain.
        """
        if not gpu.mig_enabled or gpu.partitioning is not None:
            return gpu
        try:
            table, _ = self._partitions.read(find_gpu(gpu.uuid), gpu, inventory.versions.driver)
        except NvmlUnavailableError:
            raise
        except DraDriverError:
            return gpu
        return replace(gpu, partitioning=table)


def _read_health(path: Path, boot_id: str | None) -> tuple[KeptHealth | None, list[str]]:
    """What the driver wrote down, and what is wrong with that. The file is left as it is."""
    try:
        kept = decode(read_plain(path))
    except FileNotFoundError:
        return None, []
    except OSError as error:
        return None, [f"cannot read the kept health {path}: {error.strerror or error}"]
    except StateError as error:
        return None, [f"the kept health {path} cannot be read: {error}"]
    if boot_id is None or kept.boot_id == boot_id:
        return kept, []
    lasting = tuple(state for state in kept.states if not state.subject.is_instance)
    note = "the kept health is from before the last boot; the driver has not watched the GPUs since"
    return replace(kept, states=lasting), [note]


def _names(
    inventory: Inventory, records: Iterable[ClaimRecord], states: Iterable[HealthState]
) -> Mapping[str, str]:
    """Device names by UUID: GPUs that NVML shows in PCI order, then those that only files know."""
    shown = [gpu.uuid for gpu in inventory.gpus]
    known = {state.subject.gpu_uuid for state in states}
    known |= {uuid for record in records for uuid in record.gpu_uuids if uuid}
    return gpu_device_names(dict.fromkeys([*shown, *sorted(known - set(shown))]))


def _reasons(
    states: Iterable[HealthState], facts: NvmlFacts, names: Mapping[str, str], now: int
) -> Iterator[_Told]:
    """By device, the worst first: what the driver wrote down, and what only NVML says now."""
    kept: dict[str, list[HealthState]] = {}
    for state in states:
        kept.setdefault(state.subject.gpu_uuid, []).append(state)
    for uuid, name in names.items():
        found = _found(uuid, facts)
        told = [
            _written(state.subject, name, reason, found, now)
            for state in kept.get(uuid, ())
            for reason in state.reasons
        ]
        known = {(entry.subject, entry.name) for entry in told}
        told += [
            _Told(Subject(uuid), finding, severity, _seen(name, finding, severity, None, text))
            for findings in found.values()
            for finding, (severity, text) in findings.items()
            if (Subject(uuid), finding) not in known
        ]
        yield from sorted(told, key=lambda entry: (entry.subject.order, -entry.severity, entry.name))


def _written(subject: Subject, name: str, reason: Reason, found: Findings, now: int) -> _Told:
    is_gone = reason.key in found and reason.name not in found[reason.key]
    text = reason.text + ("; NVML does not show it any more" if is_gone else "")
    parts = [name]
    if subject.gpu_instance_id is not None:
        parts.append(f"GI {subject.gpu_instance_id}")
    if subject.compute_instance_id is not None:
        parts.append(f"CI {subject.compute_instance_id}")
    age_s = float(max(0, now - reason.since))
    seen = _seen(" ".join(parts), reason.name, reason.severity, age_s, text)
    return _Told(subject, reason.name, reason.severity, seen)


def _seen(
    subject: str, name: tuple[str, str], severity: Severity, age_s: float | None, text: str
) -> SeenReason:
    return SeenReason(subject, severity.name.lower(), " ".join(filter(None, name)), age_s, text)


def _found(uuid: str, facts: NvmlFacts) -> Findings:
    """What shows in a look at a GPU; a key that was not looked at is missing."""
    if uuid in facts.lost:
        return {LOST: {(LOST, ""): (Severity.LOST, _NO_ANSWER)}}
    if uuid not in facts.signals:
        return {}
    levels = level_reasons(facts.signals[uuid])
    return {LOST: {}} | {
        key: {(name, value): (severity, text) for name, value, severity, text in findings}
        for key, findings in levels.items()
    }


def _gpus(facts: NvmlFacts, names: Mapping[str, str], told: Sequence[_Told]) -> Iterator[SeenGpu]:
    shown = {gpu.uuid: gpu for gpu in facts.inventory.gpus}
    for uuid, name in names.items():
        severity = max(
            (entry.severity for entry in told if entry.subject.gpu_uuid == uuid), default=Severity.OK
        )
        is_known = uuid in facts.signals or severity >= Severity.DEGRADED
        health = severity.name.lower() if is_known else "unknown"
        if (gpu := shown.get(uuid)) is None:
            yield SeenGpu(name, uuid, health=health)
        else:
            mode = None if not gpu.mig_capable else "on" if gpu.mig_enabled else "off"
            yield SeenGpu(name, uuid, gpu.product_name, mode, facts.loads.get(uuid), health)


def _domains(inventory: Inventory, names: Mapping[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    members: dict[str, list[str]] = {}
    for gpu in inventory.gpus:
        if gpu.uuid in inventory.nvlink_domains:
            members.setdefault(inventory.nvlink_domains[gpu.uuid], []).append(names[gpu.uuid])
    return tuple((domain, tuple(found)) for domain, found in members.items())


def _holdings(
    claim: PreparedClaim, told: Sequence[_Told], instances: Mapping[str, tuple[int, int]]
) -> Iterator[Holding]:
    for device in claim.devices:
        subjects: tuple[Subject, ...] = (Subject(device.gpu_uuid),)
        if device.device in instances:
            subjects = subjects_of_instance(device.gpu_uuid, *instances[device.device])
        # MIG devices have no NVLink.
        hits = [entry for entry in told if not (device.kind == "mig" and entry.name[0] == FABRIC)]
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


def _instance_ids(inventory: Inventory, owned: Iterable[OwnedInstance]) -> Mapping[str, tuple[int, int]]:
    """GPU and compute instance ID by the device name of each MIG device."""
    names = gpu_device_names(gpu.uuid for gpu in inventory.gpus)
    there = {
        mig_device_name(names[gpu.uuid], mig): (mig.gpu_instance_id, mig.compute_instance_id)
        for gpu in inventory.gpus
        for mig in gpu.mig_devices
    }
    made = {
        name: (entry.gpu_instance_id, entry.compute_instance_id)
        for name, entry in instances_by_device(owned).items()
    }
    return {**made, **there}


def _instances(
    inventory: Inventory, known: KnownState, on_demand: Callable[[Gpu], bool]
) -> Iterator[SeenInstance]:
    for drawn in gpu_maps(inventory, known, on_demand):
        for instance in sorted(drawn.instances, key=lambda entry: entry.placement):
            yield SeenInstance(
                gpu=drawn.name,
                profile=instance.profile,
                start=instance.placement.start,
                size=instance.placement.size,
                gpu_instance_id=instance.gpu_instance_id,
                compute_instance_ids=instance.compute_instance_ids,
                holder=instance.owner,
            )


def _daemon(status: MpsDaemonStatus, now: float) -> SeenDaemon:
    since_s = max(0.0, now - status.since)
    return SeenDaemon(status.device, status.state, since_s, status.clients, status.pid, status.problem)
