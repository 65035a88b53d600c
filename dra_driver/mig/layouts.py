"""Applies the node's MIG layout, GPU by GPU. It never takes a GPU away from a claim:

    applied ──other layout──▶ waiting: tainted ──5 s later, if no claim holds the GPU──▶ changing ──▶ applied
       ▲                         │ if a claim, process or reset is in the way: report it, check again later
       └──── refused: nothing was changed ◀── the layout does not fit, or a foreign instance is in the way

The change is one operation in the GPU's lane. Under the planning lock, which also protects the planning of claims, it
checks whether a claim holds the GPU, and marks the GPU as changing until discovery has read it again. A claim that
needs a changing GPU waits.

Each check starts from the hardware and the ledger, so it continues after a crash at any point.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import ClaimRefusedError, DraDriverError, NvmlTransientError, RetryableError
from dra_driver.journal.lanes import Lanes, Operation
from dra_driver.mig.devices import MigDevices
from dra_driver.mig.layout_file import LayoutFile
from dra_driver.mig.mode import MigContext, MigMode
from dra_driver.mig.rules.layouts import (
    LayoutRefusedError,
    LayoutTarget,
    NoMigError,
    absent_indices,
    entry_for,
    layout_gpus,
    target_of,
)
from dra_driver.model.dataclass import KW_ONLY, dataclass
from dra_driver.model.gpu import Gpu
from dra_driver.model.ids import mig_slot_name
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import (
    LAYOUT_LABEL,
    LAYOUT_STATE_LABEL,
    GpuAddress,
    GpuInstance,
    GpuLayout,
    LayoutState,
    MigLayouts,
    MigProfile,
    OwnedInstance,
    PlacedProfile,
    Placement,
)
from dra_driver.model.steps import CreateMig
from dra_driver.model.units import counted

_log = structlog.get_logger(__name__)

_HANGS_S = 60.0
_PLANNING_S = 5.0
TAINTED_FIRST_S = 5.0
"""How long a GPU is tainted before a change: claims that are already allocated to it are prepared by then."""
_CHECK_EVERY_S = 30.0
_CHECK_WAITING_S = 5.0


@dataclass(eq=False)
class NodeLayouts(BackgroundWorker):
    """`rescan` returns when discovery has read the GPUs. `on_change` gets the states that changed."""

    context: MigContext
    devices: MigDevices
    mode: MigMode
    lanes: Lanes
    file: LayoutFile
    wanted: MigLayouts
    _: KW_ONLY
    labels: Callable[[], Mapping[str, str] | None]
    inventory: Callable[[], Inventory | None]
    is_on_demand: Callable[[Gpu], bool]
    rescan: Callable[[], None]
    on_change: Callable[[Sequence[GpuLayout]], None]

    def __post_init__(self) -> None:
        self._hardware = self.context.hardware
        self._ledger = self.context.ledger
        self._clock = self.context.clock
        self._states: Mapping[str, GpuLayout] = {}
        if self.wanted.is_on:
            self._states = {one.gpu_uuid: one for one in self.file.load()}
        self._tainted_at: dict[tuple[str, str], float] = {}  # by GPU and layout
        self._changing: set[str] = set()
        self._guard = threading.Lock()
        super().__init__("mig-layouts", self._turn)

    def start(self) -> None:
        if self.wanted.is_on:
            super().start()
        else:
            self.file.remove()

    def states(self) -> Mapping[str, GpuLayout]:
        """Return the states by UUID."""
        with self._guard:
            return self._states

    def refuse_changing(self, gpu_uuids: Collection[str]) -> None:
        """Raise NvmlTransientError while the plugin is changing one of these GPUs. Call it under the planning lock."""
        if changing := sorted(self._changing.intersection(gpu_uuids)):
            raise NvmlTransientError(
                f"gpu-dra-driver is applying the node's MIG layout to {' and '.join(changing)}; the kubelet retries"
            )

    def _turn(self) -> float:
        self.look()
        is_waiting = any(one.state == "waiting" for one in self.states().values())
        return _CHECK_WAITING_S if is_waiting else _CHECK_EVERY_S

    def look(self) -> None:
        """Apply the layout as far as possible now. `states` then shows what is in the way."""
        inventory = self.inventory()
        try:
            if inventory is None:
                return
            labels = self.labels()
            if labels is None:
                return
        except DraDriverError as error:
            _log.warning("mig_layout_unknown", reason=str(error))
            return
        name = labels.get(LAYOUT_LABEL) if self.wanted.from_label else None
        name = name or self.wanted.name
        self._publish({} if name is None else self._looked(inventory, labels, name))

    def _looked(self, inventory: Inventory, labels: Mapping[str, str], name: str) -> Mapping[str, GpuLayout]:
        found: dict[str, GpuLayout] = {}
        for index, gpu in layout_gpus(inventory):
            if self.is_on_demand(gpu):
                continue
            if LAYOUT_STATE_LABEL in labels:
                text = (
                    f"NVIDIA's mig-manager runs on this node (label {LAYOUT_STATE_LABEL}); remove mig-manager and "
                    "this label, then the plugin applies the layout"
                )
                state: GpuLayout | None = self._state(gpu.uuid, name, "refused", text)
            else:
                state = self._check(gpu, inventory.gpu_names[gpu.uuid], index, name)
            if state is not None:
                found[gpu.uuid] = state
        count = len(inventory.offered_gpus)
        # Without the NVIDIA driver, the node shows no GPU.
        for absent in absent_indices(name, self.wanted.named, count) if count else ():
            text = f"the node has only {counted(count, 'GPU')}; correct `devices` in the layout's entries"
            found[str(absent)] = self._state(str(absent), name, "refused", text)
        return found

    def _publish(self, found: Mapping[str, GpuLayout]) -> None:
        with self._guard:
            before, self._states = self._states, found
        self._tainted_at = {
            key: at
            for key, at in self._tainted_at.items()
            if key[0] in found and (found[key[0]].layout, found[key[0]].state) == (key[1], "waiting")
        }
        try:
            self.file.save(list(found.values()))
        except DraDriverError as error:
            _log.warning("mig_layout_not_saved", reason=str(error))
        new = [one for uuid, one in found.items() if before.get(uuid) != one]
        for one in new:
            _log.info(
                "mig_layout", gpu_uuid=one.gpu_uuid, layout=one.layout, state=one.state, reason=one.text
            )
        if new or found.keys() != before.keys():
            self.on_change(new)

    def _check(self, gpu: Gpu, gpu_name: str, index: int, name: str) -> GpuLayout | None:
        """Check, and maybe change, a GPU in its lane. Returns None if no entry fits or the state is unknown."""
        tainted_at = self._tainted_at.get((gpu.uuid, name))
        may_change = tainted_at is not None and self._clock() >= tainted_at + TAINTED_FIRST_S

        def alone(_operation: Operation) -> GpuLayout | None:
            with self.context.operation():
                return self._converged(gpu, gpu_name, index, name, may_change=may_change)

        try:
            self.lanes.refuse_unresponsive({gpu.uuid}, _HANGS_S)
            done = self.lanes.submit({gpu.uuid}, f"the check of MIG layout {name}", alone)
            try:
                state = done.result(_HANGS_S)
            finally:
                done.cancel()  # if the check did not start in time, the next check tries again
        except LayoutRefusedError as error:
            is_other = isinstance(error, NoMigError)
            return self._state(gpu.uuid, name, "unsupported" if is_other else "refused", str(error))
        except (TimeoutError, DraDriverError) as error:
            # The GPU cannot be read now, so keep its last known state.
            _log.warning(
                "mig_layout_not_read",
                gpu_uuid=gpu.uuid,
                reason=str(error) or "the check did not finish in time",
            )
            known = self._states.get(gpu.uuid)
            return known if known is not None and known.layout == name else None
        if state is not None and state.state == "waiting":
            self._tainted_at.setdefault((gpu.uuid, name), self._clock())
        return state

    def _state(self, gpu: str, name: str, state: LayoutState, text: str = "") -> GpuLayout:
        """Take the GPU's UUID, or its index if the node does not have it."""
        known = self._states.get(gpu)
        is_same = known is not None and (known.layout, known.state) == (name, state)
        return GpuLayout(gpu, name, state, text, known.since if known and is_same else int(time.time()))

    # --- one GPU, in its lane ------------------------------------------------------------------

    def _converged(
        self, gpu: Gpu, gpu_name: str, index: int, name: str, *, may_change: bool
    ) -> GpuLayout | None:
        """Change the GPU if `may_change` is True and no claim holds the GPU.

        Raises: LayoutRefusedError; DraDriverError if the GPU cannot be read.
        """
        address = GpuAddress(gpu.uuid, gpu.pci_bus_id)
        target = self._target(gpu, address, index, name)
        if target is None:
            return None
        if not self._has_layout(target, address):
            if not may_change:
                text = "the plugin will change the GPU soon; no new pods start on it"
                return self._state(gpu.uuid, name, "waiting", text)
            try:
                self._change_if_free(gpu, gpu_name, target)
            except DraDriverError as error:
                return self._state(gpu.uuid, name, "waiting", str(error))
        return self._state(gpu.uuid, name, "applied")

    def _change_if_free(self, gpu: Gpu, gpu_name: str, target: LayoutTarget) -> None:
        """Raise DraDriverError that names the obstacle, such as a claim on the GPU, if the GPU cannot be changed."""
        with self.context.users.records.planning.hold(_PLANNING_S):
            holder = self.context.users.on_gpu(gpu.uuid, gpu_name, self._ledger.boot_id or "")
            if holder is not None:
                raise RetryableError(f"{holder} uses the GPU; the plugin changes the GPU when it is free")
            self._changing.add(gpu.uuid)
        try:
            self._ledger.refuse_newer({gpu.uuid})
            for pending in self._ledger.pending({gpu.uuid}):
                if any(isinstance(step, CreateMig) for step in pending.steps):
                    raise RetryableError(pending.text)
            try:
                self._change(target, GpuAddress(gpu.uuid, gpu.pci_bus_id), gpu_name)
            finally:
                self.rescan()
        finally:
            self._changing.discard(gpu.uuid)

    def _target(self, found: Gpu, gpu: GpuAddress, index: int, name: str) -> LayoutTarget | None:
        pci_id, profiles = self._hardware.cuts(found)
        entry = entry_for(name, self.wanted.named, index, pci_id, profiles)
        if entry is None:
            return None
        existing = self._hardware.instances(*gpu)
        fixed = [] if self.wanted.destroys_foreign else self._foreign(gpu, existing)
        target = target_of(entry, profiles, existing, [instance.slot for instance in fixed])
        for instance in fixed:
            if target.slots and not self._hardware.compute_instances(*gpu, instance.gpu_instance_id):
                raise LayoutRefusedError(
                    f"GPU instance {instance.gpu_instance_id}, which another program created, has no compute "
                    "instance; create one or destroy the GPU instance with `nvidia-smi mig`"
                )
        return target

    def _foreign(self, gpu: GpuAddress, existing: Sequence[GpuInstance]) -> list[GpuInstance]:
        ours = {one.slot for one in self._ledger.details(OwnedInstance, gpu.uuid)}
        return [instance for instance in existing if instance.slot not in ours]

    def _has_layout(self, target: LayoutTarget, gpu: GpuAddress) -> bool:
        if self.mode.is_on(gpu) != target.mode:
            return False
        if target.only_mode:
            return True
        existing = self._hardware.instances(*gpu)
        wanted = {_slot(*pair) for pair in target.slots}
        return {instance.slot for instance in existing} == wanted and all(
            one.slot in wanted and one.phase == "created" and one.is_of_layout
            for one in self._ledger.details(OwnedInstance, gpu.uuid)
        )

    def _change(self, target: LayoutTarget, gpu: GpuAddress, gpu_name: str) -> None:
        wanted = {_slot(*pair) for pair in target.slots}
        if not target.only_mode:
            for one in self._ledger.details(OwnedInstance, gpu.uuid):
                if one.slot not in wanted:
                    self.devices.destroy(one)
            for instance in self._foreign(gpu, self._hardware.instances(*gpu)):
                if instance.slot not in wanted:
                    self.devices.destroy_foreign(gpu, instance)
        self.mode.ensure(gpu, target.mode)
        kept = {instance.slot for instance in self._foreign(gpu, self._hardware.instances(*gpu))}
        for row, placement in target.slots:
            if _slot(row, placement) not in kept:
                self._make(gpu, gpu_name, row.profile, placement)

    def _make(self, gpu: GpuAddress, gpu_name: str, profile: MigProfile, placement: Placement) -> None:
        step = CreateMig(
            mig_slot_name(gpu_name, profile, placement), *gpu, profile.profile_id, profile.name, placement
        )
        try:
            self.devices.create(step, for_layout=True)
        except ClaimRefusedError as error:
            raise RetryableError(str(error)) from error


def _slot(row: PlacedProfile, placement: Placement) -> tuple[int, int]:
    return (row.profile.profile_id, placement.start)
