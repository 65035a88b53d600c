from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from dra_driver.errors import InvalidConfigError, StateError
from dra_driver.model.ids import gpu_device_names
from dra_driver.simulator import catalogue, mig, pci
from dra_driver.simulator.faults import error_text, fault_text, make_fault
from dra_driver.simulator.hostroot import HostRoot
from dra_driver.simulator.machine_files import (
    COMPUTE_MODE,
    PERSISTENCE,
    RESET,
    TIMESLICE,
    Policies,
    Session,
    Sessions,
    Store,
)
from dra_driver.simulator.machine_state import (
    NVIDIA,
    Fault,
    Function,
    Gpu,
    Holder,
    Model,
    State,
    sysfs_bus_id,
)

Selector = int | str
T = TypeVar("T")
XID_OFF_THE_BUS = 79
XID_RECOVERY_ACTION = 154


class Machine:
    """A simulated machine, whose state is stored in a directory. Several processes may use it at the same time.

    GPUs are selected by device name, index (in bus order, like NVML), UUID or PCI bus ID.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._store = Store(directory)
        self._host = HostRoot(directory)
        # The directory that represents the host's `/`.
        self.host_root = self._host.root
        self._policies = Policies(self.host_root)
        self._sessions = Sessions(self._policies.directory / "sessions")
        self.current: Callable[[], State] = self._store.current
        self.wait_changed = self._store.wait_changed

    # --- what it is ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.current().machine

    @property
    def driver_version(self) -> str:
        return self.current().driver_version

    @property
    def driver_loaded(self) -> bool:
        return self.current().driver_loaded

    @property
    def boot_id(self) -> str:
        return self.current().boot_id

    def gpu(self, selector: Selector) -> Gpu:
        return self._find(self.current(), selector)

    def called(self, selector: Selector) -> str:
        """Return `GPU 1 (gpu-cbe0e302)`."""
        state = self.current()
        gpu = self._find(state, selector)
        name = gpu_device_names(one.uuid for one in state.present)[gpu.uuid]
        return f"GPU {state.present.index(gpu)} ({name})"

    def _find(self, state: State, selector: Selector) -> Gpu:
        text = str(selector)
        present = state.present
        if text.isdigit() and int(text) < len(present):
            return present[int(text)]
        names = gpu_device_names(gpu.uuid for gpu in present)
        for gpu in present:
            if text in (gpu.uuid, names[gpu.uuid]) or (":" in text and sysfs_bus_id(text) == gpu.bus_id):
                return gpu
        known = ", ".join(f"{index} is {names[gpu.uuid]}" for index, gpu in enumerate(present)) or "none"
        raise InvalidConfigError(
            f"machine {state.machine} has no GPU {text!r}; use a device name, an index, a UUID or a PCI bus ID "
            f"(by index: {known})"
        )

    # --- who has it open -----------------------------------------------------------------------

    def open_session(self, name: str) -> Session:
        with self._store.locked():
            self._apply_nvidia_smi()
            return self._sessions.open(name)

    def close_session(self, session: Session) -> None:
        """After the last session, let the NVIDIA driver release GPUs without persistence mode and forget their
        settings.
        """
        with self._store.locked():
            session.end()
            self._apply_nvidia_smi()
            if self._sessions.names(with_own=True):
                return
            for gpu in self.current().present:
                if not gpu.persistence and not gpu.holders:
                    self._policies.forget(gpu.uuid)
                    if gpu.power_limit_mw or gpu.locked_mhz:
                        self.set_gpu(gpu.uuid, power_limit_mw=None, locked_mhz={})

    def _apply_nvidia_smi(self) -> None:
        for gpu in self.current().present:
            mode = self._policies.take(PERSISTENCE, gpu.uuid)
            if mode:
                self.set_gpu(gpu.uuid, persistence=int(mode == 1))
            if self._policies.take(RESET, gpu.uuid):
                self.reset_gpu(gpu.uuid)

    def clients(self, *, with_own: bool = False) -> list[str]:
        """Return the open sessions of other processes, such as `dcgm (process 4711)`."""
        with self._store.locked():
            return self._sessions.names(with_own=with_own)

    # --- changing it ---------------------------------------------------------------------------

    def keep_elf_files(self, source: Path) -> None:
        self._host.elf.keep(source)

    def setup(self, state: State) -> None:
        """Write a new machine, or keep an existing machine of the same name."""
        with self._store.locked():
            if self._store.exists():
                known = self._store.current()
                if known.machine != state.machine:
                    raise StateError(
                        f"the simulator directory {self.directory} holds the machine {known.machine}, not "
                        f"{state.machine}; choose another directory or remove this one"
                    )
                self.heal()
                return
            self._host.render(None, state)
            self._policies.prepare()
            self._store.write(state)

    def heal(self) -> None:
        """Write the host root again if a process died while changing it."""
        if self._host.is_current(self.current()):
            return
        with self._store.locked():
            self._host.render(None, self.current())

    def _change(self) -> AbstractContextManager[State]:
        return self._store.change(self._host.render)

    def change_gpu(self, gpu_uuid: str, change: Callable[[Gpu, Model], T]) -> T:
        """Change one GPU under the lock. If `change` raises, the machine does not change."""
        with self._change() as state:
            gpu = state.by_uuid[gpu_uuid]
            return change(gpu, state.model_of(gpu))

    # --- GPUs come, go and fail ----------------------------------------------------------------

    def lose_gpu(self, selector: Selector) -> None:
        with self._change() as state:
            gpu = self._find(state, selector)
            if not gpu.lost:
                gpu.lost = True
                state.add_event(gpu, pynvml.nvmlEventTypeXidCriticalError, XID_OFF_THE_BUS)

    def restore_gpu(self, selector: Selector) -> None:
        """Let the GPU answer again. Sessions that were opened while it was lost must be reopened."""
        with self._change() as state:
            gpu = self._find(state, selector)
            gpu.lost = False
            gpu.recovery_action = 0

    def add_gpu(self, model: str) -> str:
        """Add a GPU, which processes see once they initialise NVML again. Returns its UUID."""
        with self._change() as state:
            gone = next((gpu for gpu in state.gpus if not gpu.present and gpu.model == model), None)
            if gone is not None:
                gone.present = True
                gone.lost = False
                pci.come_up(state, gone)
                return gone.uuid
            gpu, facts = catalogue.new_gpu(state, model)
            state.models[model] = facts
            state.gpus.append(gpu)
            return gpu.uuid

    def remove_gpu(self, selector: Selector) -> None:
        """Remove a GPU without warning. The kernel first waits, without a driver, for a virtual machine that has it
        open.
        """
        with self._change() as state:
            gpu = self._find(state, selector)
            if gpu.vfio is not None and gpu.holders:
                gpu.driver = ""
            else:
                self._removed(gpu)

    def _removed(self, gpu: Gpu) -> None:
        gpu.present = False
        gpu.instances = []
        gpu.set_holders([])
        gpu.mig_mode = gpu.mig_pending = gpu.recovery_action = 0
        gpu.forget_limits()
        self._policies.set(COMPUTE_MODE, gpu.uuid, 0)
        self._policies.set(TIMESLICE, gpu.uuid, 0)

    # --- health, and who uses the GPUs ---------------------------------------------------------

    def raise_xid(
        self,
        selector: Selector,
        xid: int,
        *,
        kind: int = pynvml.nvmlEventTypeXidCriticalError,
        gpu_instance: int | None = None,
        compute_instance: int | None = None,
    ) -> None:
        with self._change() as state:
            state.add_event(self._find(state, selector), kind, xid, gpu_instance, compute_instance)

    def set_recovery_action(self, selector: Selector, action: int) -> None:
        """Request an action (NVML_GPU_RECOVERY_ACTION_*), and report Xid 154."""
        with self._change() as state:
            gpu = self._find(state, selector)
            gpu.recovery_action = action
            state.add_event(gpu, pynvml.nvmlEventTypeXidCriticalError, XID_RECOVERY_ACTION)
            state.add_event(gpu, pynvml.nvmlEventTypeGpuRecoveryAction, action)

    def set_remapped_rows(
        self, selector: Selector, *, uncorrectable: int = 0, pending: int | None = 0, failed: int | None = 0
    ) -> None:
        with self._change() as state:
            rows = [0, uncorrectable, int(pending or 0), int(failed or 0)]
            self._find(state, selector).remapped_rows = rows

    def set_gpu(self, selector: Selector, **facts: Any) -> None:
        with self._change() as state:
            gpu = self._find(state, selector)
            if "persistence" in facts:
                self._policies.set(PERSISTENCE, gpu.uuid, 0)  # newer than what nvidia-smi set
            for name, value in facts.items():
                setattr(gpu, name, value)

    def reset_gpu(self, selector: Selector) -> None:
        with self._change() as state:
            self._find(state, selector).reset()

    def set_fabric(self, selector: Selector | None = None, **facts: Any) -> None:
        """Set fields of the fabric of one GPU or all: state, status, cluster, clique(s), health_mask,
        health_summary.
        """
        with self._change() as state:
            if selector is None:
                state.fabric = {**state.fabric, **facts}
            else:
                gpu = self._find(state, selector)
                gpu.fabric = {**gpu.fabric, **facts}

    def hold_gpu(self, selector: Selector, pid: int, name: str, **more: Any) -> None:
        """Start a process that uses the GPU or one of its instances, so changes are refused with IN_USE."""
        with self._change() as state:
            gpu = self._find(state, selector)
            gpu.set_holders([*gpu.holders, Holder(pid, name, **more)])

    def release_gpu(self, selector: Selector, pid: int | None = None) -> None:
        with self._change() as state:
            gpu = self._find(state, selector)
            gpu.set_holders([] if pid is None else [item for item in gpu.holders if item.pid != pid])
            if pci.is_leaving(gpu) and not gpu.holders:
                self._removed(gpu)

    # --- faults --------------------------------------------------------------------------------

    def set_fault(self, function: str, *, gpu: Selector | None = None, **more: Any) -> str:
        """Make the next calls of an NVML function (shell pattern), or writes to sysfs (`faults.WRITES`), fail or
        respond late.
        """
        with self._change() as state:
            subject = None if gpu is None else self._find(state, gpu).uuid
            state.faults.append(make_fault(function, subject, **more))
            return fault_text(state.faults[-1])

    def clear_faults(self) -> None:
        with self._change() as state:
            state.faults = []

    def consume_fault(self, fault: Fault) -> bool:
        """Return False if concurrent calls have used up a counted fault."""
        key = (fault.function, fault.code, fault.gpu)
        with self._change() as state:
            for item in state.faults:
                if (item.function, item.code, item.gpu) == key and item.remaining:
                    item.remaining -= 1
                    state.faults = [other for other in state.faults if other.remaining != 0]
                    return True
        return False

    def set_virtual_functions(self, selector: Selector, count: int) -> None:
        with self._change() as state:
            gpu = self._find(state, selector)
            others = [item for item in state.functions if item.physical != gpu.bus_id]
            state.functions = others + virtual_functions(state, gpu, count)

    # --- who drives it -------------------------------------------------------------------------

    def give_to(self, selector: Selector, driver: str) -> None:
        """Bind the GPU (for vfio, its IOMMU group) to a driver permanently, even if it is in use."""
        module = next((module for module, name in pci.VFIO_DRIVERS.items() if name == driver), None)
        if module is None and driver != NVIDIA:
            known = ", ".join((NVIDIA, *pci.VFIO_DRIVERS.values()))
            raise InvalidConfigError(f"there is no driver {driver!r} for a GPU; choose one of {known}")
        with self._change() as state:
            gpu = self._find(state, selector)
            if module is not None:
                # modprobe also loads the module for memory mapping, if it is installed
                after = {pci.MAPS_MEMORY}.intersection(state.system.get("vfio_modules", []))
                loaded = dict.fromkeys([*state.system.get("vfio_loaded", []), module, *after])
                state.system["vfio_loaded"] = list(loaded)
            for item in pci.functions(state).values():
                if pci.gpu_of(state, item.bus_id) is gpu:
                    item.boot_driver = (
                        driver if item is gpu or driver != NVIDIA else pci.driver_by_class(item)
                    )
                    pci.come_up(state, item)
            self._forgotten(gpu)

    def change_driver(self, word: str, bus_id: str, driver: str) -> None:
        with self._change() as state:
            if word == "drivers_probe":
                pci.probe(state, bus_id)
                return
            {"driver_override": pci.override, "unbind": pci.unbind, "bind": pci.bind}[word](
                state, bus_id, driver
            )
            item = pci.functions(state)[bus_id]
            if isinstance(item, Gpu) and word == "unbind":
                self._forgotten(item)

    def _forgotten(self, gpu: Gpu) -> None:
        """Clear the settings that the NVIDIA driver loses when it releases the GPU."""
        gpu.persistence = 0
        gpu.forget_limits()
        self._policies.forget(gpu.uuid)

    def load_module(self, module: str) -> bool:
        """Return False if the module does not exist."""
        with self._change() as state:
            loaded = state.system.get("vfio_loaded", [])
            if module not in state.system.get("vfio_modules", []):
                return False
            if module not in loaded:
                state.system["vfio_loaded"] = [*loaded, module]
        return True

    def add_function(self, function: Function) -> None:
        with self._change() as state:
            function.boot_driver = function.driver
            state.functions.append(function)

    # --- the rest of the machine ---------------------------------------------------------------

    def set_system(self, **facts: Any) -> None:
        """Change values of `system`; None keeps a value. Raises: InvalidConfigError."""
        given = {name: value for name, value in facts.items() if value is not None}
        catalogue.check_system(given)
        with self._change() as state:
            state.system |= given

    # --- driver and boot -----------------------------------------------------------------------

    def unload_driver(self) -> None:
        with self._change() as state:
            state.driver_loaded = False
            self._forget(state)

    def load_driver(self, version: str | None = None) -> None:
        with self._change() as state:
            state.driver_loaded = True
            state.driver_loads += 1
            if version is not None:
                state.driver_version = version
                state.cuda_version = catalogue.cuda_of_driver(version, state.cuda_version)
            self._forget(state)
            pci.after_load(state)

    def set_missing_functions(self, *names: str) -> None:
        with self._change() as state:
            state.missing_functions = list(names)

    def reboot(self) -> None:
        with self._change() as state:
            state.boot_id = str(uuid.uuid4())
            state.driver_loaded = True
            state.driver_loads += 1
            state.events = []
            for gpu in state.gpus:
                gpu.reset()
                gpu.lost, gpu.links_down = False, []
            self._forget(state)
            pci.after_boot(state)

    def _forget(self, state: State) -> None:
        state.system["confidential_ready"] = False
        for gpu in state.gpus:
            mig.after_reboot(gpu, state.model_of(gpu))
        self._policies.reset()

    # --- MIG and settings ----------------------------------------------------------------------

    def set_mig_mode(self, selector: Selector, on: bool) -> int:
        """Switch MIG mode even if sessions are open; return NVML's activation status."""
        gpu = self.gpu(selector)
        try:
            return self.change_mig_mode(gpu.uuid, int(on))
        except mig.Refusal as refusal:
            raise _refused("switch MIG mode", gpu, refusal) from refusal

    def change_mig_mode(self, gpu_uuid: str, on: int, *, has_clients: bool = False) -> int:
        with self._change() as state:
            gpu = state.by_uuid[gpu_uuid]
            before = gpu.mig_mode
            status = mig.set_mode(gpu, state.model_of(gpu), on, has_clients=has_clients)
            if gpu.mig_mode != before:
                gpu.resets += 1
                state.add_event(gpu, pynvml.nvmlEventMigConfigChange, gpu.mig_mode)
                if state.system.get("minors_move"):
                    taken = {other.minor for other in state.gpus}
                    gpu.minor = next(minor for minor in range(32) if minor not in taken)
            return status

    def create_mig(self, selector: Selector, profile: str, start: int) -> tuple[int, int, str]:
        """Return (GPU instance ID, compute instance ID, UUID)."""
        with self._change() as state:
            gpu = self._find(state, selector)
            try:
                created, compute = mig.make_device(gpu, state.model_of(gpu), profile, start)
            except mig.Refusal as refusal:
                raise _refused(f"create {profile} at {start}", gpu, refusal) from refusal
            return created.id, compute.id, compute.uuid

    def destroy_mig(self, selector: Selector, gi: int) -> None:
        with self._change() as state:
            gpu = self._find(state, selector)
            try:
                for compute in list(getattr(gpu.instance(gi), "compute", [])):
                    mig.destroy_compute_instance(gpu, gi, compute.id)
                mig.destroy_gpu_instance(gpu, gi)
            except mig.Refusal as refusal:
                raise _refused(f"destroy GPU instance {gi}", gpu, refusal) from refusal

    def compute_mode(self, gpu_uuid: str) -> int:
        return self._policies.get(COMPUTE_MODE, gpu_uuid)

    def set_compute_mode(self, gpu_uuid: str, mode: int) -> None:
        self._policies.set(COMPUTE_MODE, gpu_uuid, mode)

    def timeslice(self, selector: Selector) -> int:
        """Return 0 default, 1 short, 2 medium, 3 long."""
        return self._policies.get(TIMESLICE, self.gpu(selector).uuid)


def virtual_functions(state: State, gpu: Gpu, count: int) -> list[Function]:
    model, place = state.model_of(gpu), gpu.bus_id.partition(".")[0]
    return [
        Function(
            f"{place}.{4 + number}", gpu.pcie, model.pci_id >> 16, model.pci_class, gpu.numa, "", gpu.bus_id
        )
        for number in range(count)
    ]


def _refused(action: str, gpu: Gpu, refusal: mig.Refusal) -> InvalidConfigError:
    reason = error_text(refusal.code)
    return InvalidConfigError(f"cannot {action} on GPU {gpu.bus_id}: the NVIDIA driver returns {reason}")
