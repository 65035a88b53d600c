"""A machine as a file for the simulator: `--simulate FILE.yaml` then shows the same devices without the GPUs."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dra_driver.errors import DraDriverError
from dra_driver.host.mig_caps import MigCaps
from dra_driver.host.sysfs import Sysfs
from dra_driver.model.gpu import Gpu
from dra_driver.model.host import PciFunction
from gpucheck.gpufacts import Reader, model_facts
from gpucheck.migfacts import instances
from gpucheck.view import View
from gpucheck.wiring import links_down, nvlink

JsonObject = dict[str, Any]

_NAMESPACE = uuid.UUID("3a2d1f0e-6c1b-5b7c-8f37-67707563686b")
# What may differ between two GPUs of one product, and is taken from the first.
_PER_BOARD = {"reserved_bytes", "power", "part", "vbios", "events"}
_MAJORS = {
    "uvm_major": "nvidia-uvm", "caps_major": "nvidia-caps", "imex_major": "nvidia-caps-imex-channels",
}  # fmt: skip
_UUID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_BUS_ID = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")


def record(view: View) -> JsonObject:
    """The machine file's content. Raises: CannotRecordError if the format cannot hold the machine."""
    try:
        return _document(view)
    except DraDriverError as error:
        raise CannotRecordError(f"the machine cannot be recorded: {error}") from error


def _document(view: View) -> JsonObject:
    paths = view.machine.paths
    sysfs = Sysfs(paths.sys, paths.proc)
    functions = {function.bus_id: function for function in sysfs.nvidia_functions()}
    readers = [Reader(gpu) for gpu in view.inventory.gpus]
    models: dict[str, JsonObject] = {}
    fabrics = [reader.fabric() for reader in readers]
    fabric = _most_common(fabrics)
    wiring = nvlink(readers)
    gpus = []
    for reader, own_fabric in zip(readers, fabrics, strict=True):
        function = functions.get(reader.gpu.pci_bus_id or "")
        facts = model_facts(reader, None if function is None else function.class_code)
        entry = _gpu(view, reader, _model_key(models, facts))
        if own_fabric is not None and own_fabric != fabric:
            entry["fabric"] = own_fabric
        if wiring.get("topology") == "switched" and links_down(reader):
            entry["links_down"] = links_down(reader)
        gpus.append(entry)
    shown = {entry["bus"] for entry in gpus}
    versions = view.inventory.versions
    cuda = versions.cuda
    document: JsonObject = {
        "description": _description(view.inventory.gpus),
        "driver": {
            "version": versions.driver or "0.0",
            "cuda": "0.0" if cuda is None else f"{cuda[0]}.{cuda[1]}",
        },
        "system": _system(view),
        "gpus": gpus,
        "nvlink": wiring,
        "fabric": fabric,
        "functions": [_function(view, item) for bus, item in sorted(functions.items()) if bus not in shown],
        "models": models,
        "missing_functions": sorted(view.nvml.missing),
    }
    return {name: value for name, value in document.items() if value}


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write the file. Raises: CannotRecordError."""
    text = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=160)
    try:
        path.write_text(f"# Recorded by hack/gpu-check; for --simulate.\n{text}")
    except OSError as error:
        raise CannotRecordError(f"cannot write the recording {path}: {error.strerror}") from error


def anonymise(document: JsonObject) -> JsonObject:
    """The same machine with invented UUIDs and serial numbers; what it is made of stays."""
    gpus = []
    for position, gpu in enumerate(document.get("gpus", [])):
        entry = {**gpu, "uuid": f"GPU-{_invented('gpu', position)}"}
        if "serial" in gpu:
            entry["serial"] = f"165{position:010d}"
        if "mig" in gpu:
            entry["mig"] = [_anonymous_instance(position, instance) for instance in gpu["mig"]]
        gpus.append(_anonymous_place(entry))
    renamed = {**_anonymous_place(document), "gpus": gpus}
    if "functions" in document:
        renamed["functions"] = [_anonymous_place(item) for item in document["functions"]]
    return {name: renamed[name] for name in document}


class CannotRecordError(Exception):
    """The machine cannot be recorded; the text is one line and says why."""


class _Dumper(yaml.SafeDumper):
    """Writes no anchors: people read these files and copy parts of them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _invented(*names: object) -> uuid.UUID:
    """A UUID made from positions alone, so that it does not identify the machine."""
    return uuid.uuid5(_NAMESPACE, "/".join(map(str, names)))


def _anonymous_instance(position: int, instance: JsonObject) -> JsonObject:
    compute = [
        {**item, "uuid": f"MIG-{_invented('mig', position, instance['instance'], item['id'])}"}
        for item in instance["compute"]
    ]
    return {**instance, "compute": compute}


def _anonymous_place(item: JsonObject) -> JsonObject:
    """Without the rack's serial number, the fabric's UUID and those that hypervisors put into device paths."""
    changed = dict(item)
    if "pcie" in item:
        changed["pcie"] = _UUID.sub(lambda found: str(_invented("path", found.start())), item["pcie"])
    if "platform" in item:
        changed["platform"] = {**item["platform"], "chassis_serial": "0"}
    if item.get("fabric", {}).get("cluster", "none") != "none":
        changed["fabric"] = {**item["fabric"], "cluster": str(_invented("fabric"))}
    return changed


def _gpu(view: View, reader: Reader, model: str) -> JsonObject:
    gpu = reader.gpu
    bus = gpu.pci_bus_id or ""
    if _BUS_ID.match(bus) is None:
        raise CannotRecordError(
            f"the machine cannot be recorded: GPU {gpu.uuid} has the PCI bus ID {bus or 'unknown'}"
        )
    entry: JsonObject = {
        "bus": bus,
        "model": model,
        "uuid": gpu.uuid,
        "minor": gpu.minor,
        "numa": -1 if gpu.numa_node is None else gpu.numa_node,
        "cpus": _text(view, bus, "local_cpulist") or None,
        # Some containers do not see where the GPU is; the recording then has no PCI root for it.
        "pcie": _parents(view, bus) or "unknown",
        "addressing": None if gpu.addressing_mode is None else gpu.addressing_mode.lower(),
        **reader.board(),
    }
    entry = {name: value for name, value in entry.items() if value is not None}
    entry["drm"] = _drm(view, bus)
    if gpu.mig_enabled:
        entry["mig"] = instances(reader.handle, gpu)
    return entry


def _model_key(models: dict[str, JsonObject], facts: JsonObject) -> str:
    """The key of a product in `models`; GPUs that differ in more than the board get one each."""
    slug = re.sub(r"[^a-z0-9]+", "-", facts["name"].lower()).strip("-") or "unknown"
    for number in range(1, len(models) + 2):
        key = f"recorded-{slug}" if number == 1 else f"recorded-{slug}-{number}"
        known = models.setdefault(key, facts)
        if all(known.get(name) == facts.get(name) for name in (known.keys() | facts.keys()) - _PER_BOARD):
            return key
    raise AssertionError("one key more than there are models is always free")


def _most_common(fabrics: list[JsonObject | None]) -> JsonObject | None:
    known = [fabric for fabric in fabrics if fabric is not None]
    if not known:
        return None
    texts = Counter(map(repr, known))
    return max(known, key=lambda fabric: texts[repr(fabric)])


def _system(view: View) -> JsonObject:
    paths = view.machine.paths
    version = _read(Path(paths.proc, "driver/nvidia/version"))
    arch = re.search(r"\b(x86_64|aarch64)\b", version)
    majors = MigCaps(paths.proc).majors()
    system: JsonObject = {
        "arch": arch[1] if arch else None,
        "kernel": _read(Path(paths.proc, "sys/kernel/osrelease")).strip() or None,
        "open_kernel_module": "Open Kernel Module" in version if version else None,
        **{name: majors.get(driver) for name, driver in _MAJORS.items()},
        "cap_nodes": _cap_nodes_are_made(view),
        "cdi_hook": view.machine.found("/usr/bin/nvidia-cdi-hook") is not None or None,
        "confidential_compute": view.inventory.confidential_compute,
    }
    return {name: value for name, value in system.items() if value is not None}


def _cap_nodes_are_made(view: View) -> bool | None:
    """Whether each MIG device has its capability nodes; None where there is no MIG device to tell it by."""
    paths = view.machine.paths
    caps = MigCaps(paths.proc)
    for gpu in view.inventory.gpus:
        for mig in gpu.mig_devices if gpu.minor is not None else ():
            nodes = caps.nodes(gpu.minor or 0, mig.gpu_instance_id, mig.compute_instance_id)
            return all(any(map(view.machine.nodes.read, view.machine.local(node.path))) for node in nodes)
    return None


def _function(view: View, function: PciFunction) -> JsonObject:
    numa = _text(view, function.bus_id, "numa_node")
    entry: JsonObject = {
        "bus": function.bus_id,
        "device": function.device_id,
        "class": function.class_code,
        "numa": int(numa) if numa.lstrip("-").isdecimal() else -1,
        "pcie": _parents(view, function.bus_id) or f"pci{function.bus_id[:7]}",
    }
    known = {"driver": function.driver, "physical": function.physical}
    return {**entry, **{key: value for key, value in known.items() if value is not None}}


def _parents(view: View, bus: str) -> str | None:
    """The path of the parents below /sys/devices."""
    try:
        place = Path(view.machine.paths.sys, "bus/pci/devices", bus).resolve(strict=True)
        return place.parent.relative_to(Path(view.machine.paths.sys, "devices").resolve()).as_posix()
    except (OSError, ValueError):
        return None


def _drm(view: View, bus: str) -> int | None:
    """N of /dev/dri/cardN."""
    names = Sysfs(view.machine.paths.sys, view.machine.paths.proc).drm_nodes(bus)
    return next((int(name.removeprefix("card")) for name in names if name.startswith("card")), None)


def _text(view: View, bus: str, name: str) -> str:
    return _read(Path(view.machine.paths.sys, "bus/pci/devices", bus, name)).strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _description(gpus: tuple[Gpu, ...]) -> str:
    counts = Counter(gpu.product_name or "unknown" for gpu in gpus)
    return "Recorded: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
