"""The `simulate` commands without the command line: arguments in, lines or rows out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dra_driver import simulator
from dra_driver.errors import InvalidConfigError, StateError
from dra_driver.model.ids import gpu_device_names
from dra_driver.model.units import counted
from dra_driver.simulator import catalogue, mig
from dra_driver.simulator.faults import error_text, fault_text, signal_facts, signal_names
from dra_driver.simulator.machine import Machine
from dra_driver.simulator.machine_state import State

Rows = list[dict[str, str]]


def done(machine: Machine, method: str, said: str, values: Mapping[str, Any], held_by: str = "") -> str:
    """Call a method of the machine with these values as arguments, and return a message.

    `said` is a format string with the names of values, `called` for the GPU of `selector`, `made` for the method's
    result, and `machine`. Open NVML sessions prevent what `held_by` describes, unless `force` is set.
    """
    called = machine.called(values["selector"]) if "selector" in values else ""
    if held_by:
        _refuse_while_open(machine, held_by.format(called=called), values["force"])
    made = getattr(machine, method)(**{name: value for name, value in values.items() if name != "force"})
    shown = {name: _shown(name, value) for name, value in values.items()}
    return said.format(**shown, called=called, made=made, machine=machine)


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(value) or "no extra device nodes"
    word = name.rpartition("_")[2]
    return value if not isinstance(value, bool | None) else word if value else f"not {word}"


def _refuse_while_open(machine: Machine, what: str, force: bool) -> None:
    clients = [] if force else machine.clients()
    if clients:
        raise StateError(
            f"cannot {what} is in use by {', '.join(clients)}; stop all programs that use it, or close NVML "
            "(`gpu-dra-driver detach`); --force skips this check, which real hardware enforces"
        )


def list_machines() -> Rows:
    return [{"machine": name, "description": text} for name, text in catalogue.machine_summaries()]


def create_machine(
    name: str, directory: Path, *, cdi_hook: bool | None = None, device_nodes: str = "auto"
) -> str:
    machine = simulator.create_machine(name, directory, cdi_hook=cdi_hook, device_nodes=device_nodes)
    gpus = len(machine.current().present)
    return f"{machine.name}: {counted(gpus, 'GPU')}, driver {machine.driver_version}, host root {machine.host_root}"


def show(machine: Machine) -> tuple[str, Rows]:
    state = machine.current()
    loaded = "loaded" if state.driver_loaded else "not loaded"
    faults = [f"fault: {item.function} ({fault_text(item)})" for item in state.faults]
    title = f"{machine.name}: driver {machine.driver_version} {loaded}, boot {state.boot_id}"
    return "\n".join([title, *faults]), _rows(state)


def _rows(state: State) -> Rows:
    devices = gpu_device_names(gpu.uuid for gpu in state.present)
    rows = []
    for index, gpu in enumerate(state.present):
        model = state.model_of(gpu)
        condition = [
            *(["lost"] if gpu.lost else []),
            *([f"recovery action {gpu.recovery_action}"] if gpu.recovery_action else []),
            *signal_names(gpu),
            *([counted(len(gpu.holders), "process", "processes")] if gpu.holders else []),
        ]
        names = [mig.profile_by_id(model, gi.profile_id) for gi in gpu.instances]
        layout = [f"{row.name}@{gi.start}" for row, gi in zip(names, gpu.instances, strict=True) if row]
        rows.append(
            {
                "device": devices[gpu.uuid],
                "index": str(index),
                "pci bus id": gpu.bus_id,
                "minor": str(gpu.minor),
                "uuid": gpu.uuid,
                "model": model.name,
                "mig": ("on " if gpu.mig_mode else "off ") + " ".join(layout) if model.mig else "-",
                "state": ", ".join(condition) or "ok",
            }
        )
    return rows


def signals(machine: Machine, *, selector: str, signals: list[str]) -> str:
    model = machine.current().model_of(machine.gpu(selector))
    machine.set_gpu(selector, **signal_facts(signals, model))
    return f"{machine.called(selector)} reports {', '.join(signals) or 'no signal'}"


def vfio(
    machine: Machine, *, iommu: bool | None, iommufd: bool | None, installed: str | None, loaded: str | None
) -> str:
    given = {"iommu": iommu, "iommufd": iommufd, "vfio_modules": installed, "vfio_loaded": loaded}
    machine.set_system(
        **{
            name: [module for module in value.split(",") if module] if isinstance(value, str) else value
            for name, value in given.items()
            if value is not None
        }
    )
    now = machine.current().system
    said = {
        "IOMMU": "on" if now["iommu"] else "off",
        "iommufd": "present" if now["iommufd"] else "missing",
        "modules": ", ".join(now["vfio_modules"]) or "none",
        "loaded": ", ".join(now["vfio_loaded"]) or "none",
    }
    return "; ".join(f"{name}: {value}" for name, value in said.items())


def mig_mode(machine: Machine, selector: str, on: bool, *, force: bool) -> str:
    called = machine.called(selector)
    _refuse_while_open(machine, f"switch the MIG mode of {called}: it", force)
    status = machine.set_mig_mode(selector, on)
    if status:
        raise InvalidConfigError(
            f"MIG mode of {called} did not change: {error_text(status)}; free the GPU or reboot the machine"
        )
    return f"MIG mode of {called} is {'on' if on else 'off'}"


def mig_profiles(machine: Machine, selector: str) -> Rows:
    found = machine.gpu(selector)
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
