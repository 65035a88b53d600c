"""The `simulate` commands without the command line: arguments in, lines or rows out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dra_driver.errors import InvalidConfigError, StateError
from dra_driver.model.units import counted
from dra_driver.simulator import catalogue
from dra_driver.simulator import machine as machines
from dra_driver.simulator.faults import error_text, fault_text
from dra_driver.simulator.machine import Machine
from dra_driver.simulator.state import Fault

Rows = list[dict[str, str]]


def list_machines() -> Rows:
    return [{"machine": name, "description": text} for name, text in catalogue.machine_summaries()]


def create_machine(
    name: str, directory: Path, *, cdi_hook: bool | None = None, device_nodes: str = "auto"
) -> str:
    machine = machines.create_machine(name, directory, cdi_hook=cdi_hook, device_nodes=device_nodes)
    gpus = len(machine.current().present)
    return f"{machine.name}: {gpus} GPUs, driver {machine.driver_version}, host root {machine.host_root}"


def show(machine: Machine) -> tuple[str, Rows]:
    state = machine.current()
    loaded = "loaded" if state.driver_loaded else "not loaded"
    faults = [f"{item.function} ({_fault(item)})" for item in state.faults]
    title = f"{machine.name}: driver {machine.driver_version} {loaded}, boot {state.boot_id}"
    return "\n".join([title, *(f"fault: {text}" for text in faults)]), machine.describe()


def _fault(fault: Fault) -> str:
    parts = [
        *([] if fault.code is None else [fault_text(fault)]),
        *([f"after {fault.delay_s:g} s"] if fault.delay_s else []),
        *([] if fault.remaining is None else [counted(fault.remaining, "time")]),
    ]
    return ", ".join(parts)


def lose(machine: Machine, gpu: str) -> str:
    machine.lose_gpu(gpu)
    return f"{machine.called(gpu)} is lost"


def restore(machine: Machine, gpu: str) -> str:
    machine.restore_gpu(gpu)
    return f"{machine.called(gpu)} is back"


def xid(
    machine: Machine, gpu: str, number: int, gpu_instance: int | None, compute_instance: int | None
) -> str:
    machine.raise_xid(gpu, number, gpu_instance=gpu_instance, compute_instance=compute_instance)
    return f"Xid {number} raised on {machine.called(gpu)}"


def fault(
    machine: Machine, function: str, *, code: str | None, delay_s: float, count: int | None, gpu: str | None
) -> str:
    machine.set_fault(function, code=code, delay_s=delay_s, count=count, gpu=gpu)
    return f"{function} is faulty now ({_fault(machine.current().faults[-1])})"


def clear_faults(machine: Machine) -> str:
    machine.clear_faults()
    return "no faults any more"


def unload_driver(machine: Machine, *, force: bool) -> str:
    _refuse_while_open(machine, "unload the driver: the module nvidia", force)
    machine.unload_driver()
    return "driver unloaded"


def _refuse_while_open(machine: Machine, what: str, force: bool) -> None:
    clients = [] if force else machine.clients()
    if clients:
        raise StateError(
            f"cannot {what} is in use by {', '.join(clients)}; end that, or make it let go "
            "(`gpu-dra-driver detach`); --force skips this check, which real hardware enforces"
        )


@contextmanager
def client(machine: Machine, name: str) -> Iterator[str]:
    """An NVML session of another program, open within; yields what to say."""
    session = machine.open_session(name)
    try:
        yield f"{name} has NVML open on {machine.name}"
    finally:
        machine.close_session(session)


def load_driver(machine: Machine, version: str | None) -> str:
    machine.load_driver(version)
    return f"driver {machine.driver_version} loaded"


def reboot(machine: Machine) -> str:
    machine.reboot()
    return f"rebooted, boot id {machine.boot_id}"


def imex(machine: Machine, state: str, channels: int | None) -> str:
    machine.set_imex(state, channels)
    return f"nvidia-imex of {machine.name} is {state}"


def confidential_compute(machine: Machine, mode: str, *, ready: bool) -> str:
    machine.set_confidential_compute(mode, ready=ready)
    accepts = "" if mode == "off" else f", its GPUs are {'ready' if ready else 'not ready'}"
    return f"confidential computing of {machine.name} is {mode}{accepts}"


def give(machine: Machine, gpu: str, driver: str) -> str:
    machine.give_to(gpu, driver)
    return f"{driver} has {machine.called(gpu)}"


def vfio(
    machine: Machine, *, iommu: bool | None, iommufd: bool | None, installed: str | None, loaded: str | None
) -> str:
    given = {"iommu": iommu, "iommufd": iommufd, "vfio_modules": installed, "vfio_loaded": loaded}
    machine.set_vfio(
        **{
            name: [module for module in value.split(",") if module] if isinstance(value, str) else value
            for name, value in given.items()
            if value is not None
        }
    )
    now = machine.current().system
    said = {
        "IOMMU": "on" if now["iommu"] else "off",
        "iommufd": "there" if now["iommufd"] else "missing",
        "modules": ", ".join(now["vfio_modules"]) or "none",
        "loaded": ", ".join(now["vfio_loaded"]) or "none",
    }
    return "; ".join(f"{name}: {value}" for name, value in said.items())


def host_devices(machine: Machine, kinds: list[str]) -> str:
    machine.set_host_devices(kinds)
    return f"{machine.name} has {', '.join(kinds) or 'no such nodes'}"


def add_gpu(machine: Machine, model: str) -> str:
    return f"added {machine.add_gpu(model)}"


def remove_gpu(machine: Machine, gpu: str) -> str:
    called = machine.called(gpu)
    machine.remove_gpu(gpu)
    return f"removed {called}; GPUs after it have other indices now"


def hold(machine: Machine, gpu: str, pid: int, name: str, gpu_instance: int | None, utilisation: int) -> str:
    machine.hold_gpu(gpu, pid, name, gpu_instance=gpu_instance, utilisation=utilisation)
    return f"process {pid} ({name}) uses {machine.called(gpu)}"


def release(machine: Machine, gpu: str, pid: int | None) -> str:
    machine.release_gpu(gpu, pid)
    return f"{machine.called(gpu)} is released"


def reset(machine: Machine, gpu: str, *, force: bool) -> str:
    _refuse_while_open(machine, f"reset {machine.called(gpu)}: it", force)
    machine.reset_gpu(gpu)
    return f"{machine.called(gpu)} was reset"


def ecc(machine: Machine, gpu: str, corrected: int, uncorrected: int) -> str:
    machine.set_gpu(gpu, ecc_corrected=corrected, ecc_uncorrected=uncorrected)
    return f"{machine.called(gpu)} counts {corrected} corrected and {uncorrected} uncorrected ECC errors"


def remap(machine: Machine, gpu: str, *, pending: bool | None, failed: bool | None) -> str:
    machine.set_remapped_rows(gpu, pending=int(bool(pending)), failed=int(bool(failed)))
    said = ", ".join(
        f"{what} {'yes' if on else 'no'}" for what, on in (("pending", pending), ("failed", failed))
    )
    return f"row remapping of {machine.called(gpu)}: {said}"


def recovery_action(machine: Machine, gpu: str, action: int) -> str:
    machine.set_recovery_action(gpu, action)
    return f"{machine.called(gpu)} asks for recovery action {action}"


def mig_mode(machine: Machine, gpu: str, on: bool, *, force: bool) -> str:
    _refuse_while_open(machine, f"switch the MIG mode of {machine.called(gpu)}: it", force)
    status = machine.set_mig_mode(gpu, on)
    if status:
        raise InvalidConfigError(
            f"MIG mode of {machine.called(gpu)} did not change: {error_text(status)}; "
            "free the GPU or reboot the machine"
        )
    return f"MIG mode of {machine.called(gpu)} is {'on' if on else 'off'}"


def mig_create(machine: Machine, gpu: str, profile: str, start: int) -> str:
    gi, ci, uuid = machine.create_mig(gpu, profile, start)
    return f"created {profile} at {start} on {machine.called(gpu)}: GPU instance {gi}, compute instance {ci}, {uuid}"


def mig_destroy(machine: Machine, gpu: str, gpu_instance: int) -> str:
    machine.destroy_mig(gpu, gpu_instance)
    return f"destroyed GPU instance {gpu_instance} of {machine.called(gpu)}"


def mig_profiles(machine: Machine, gpu: str) -> Rows:
    found = machine.gpu(gpu)
    return [
        {
            "profile": row.name,
            "id": str(row.id),
            "memory MiB": str(row.memory_mib),
            "SMs": str(row.multiprocessors),
            "max": str(row.max_instances),
            "placements": f"{{{','.join(str(start) for start in row.starts)}}}:{row.size}",
        }
        for row in machine.current().model_of(found).mig
    ]
