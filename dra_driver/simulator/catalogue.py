"""Machines as data: builds a machine's initial state from YAML files."""

from __future__ import annotations

import functools
import pickle
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dra_driver.errors import InvalidConfigError
from dra_driver.model.schema import YAML_ERRORS
from dra_driver.simulator import mig, pci
from dra_driver.simulator.machine_state import (
    NVIDIA,
    Function,
    Gpu,
    MigProfile,
    Model,
    State,
    switch_links,
    wire_pairs,
)

MACHINES = Path(__file__).parent / "machines"
PLACEHOLDER_BUS = "ffff:ff:ff.f"
_BUS_ID = re.compile(r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_ADDRESSING = {"none": 0, "hmm": 1, "ats": 2}
_FABRIC_STATES = {"not-supported": 0, "not-started": 1, "in-progress": 2, "completed": 3}
_VFIO_MODULES = (*pci.VFIO_DRIVERS, pci.MAPS_MEMORY)
_SYSTEM = {
    "imex": ("ready", "initializing", "hung", "killed", "stopped"),
    "confidential_compute": ("off", "on", "devtools", "ppcie"),
    "host_devices": ("gds", "mofed", "gdrcopy"),
    "vfio_modules": _VFIO_MODULES,
    "vfio_loaded": _VFIO_MODULES,
}
"""`stopped` removes nvidia-imex's socket; `killed` leaves a socket on which no process listens."""
_REMOTE_PCI = ("real", "placeholder", "not-supported")
_NAMESPACE = uuid.UUID("0f0c8c0e-5a70-5f0e-9a53-53696d4e5643")

_MODEL_KEYS = {
    "arch": "architecture",
    "sm": "multiprocessors",
    "power": "power_limit_w",
    "power_min": "power_min_w",
    "subsystem": "subsystem_id",
}
_TOP_KEYS = {
    "description", "name", "driver", "system", "defaults", "gpus", "nvlink", "fabric", "functions",
    "models", "missing_functions",
}  # fmt: skip
_GPU_KEYS = {
    "bus", "model", "numa", "cpus", "pcie", "uuid", "serial", "minor", "drm", "mig", "addressing",
    "memory_numa", "module", "chassis", "virtualization", "persistence", "fabric", "links_down",
    "links_unsupported", "driver",
}  # fmt: skip


def machine_names() -> list[str]:
    return sorted(path.stem for path in MACHINES.glob("*.yaml") if not path.stem.startswith("_"))


def machine_summaries() -> list[tuple[str, str]]:
    return [(name, str(_read(MACHINES / f"{name}.yaml").get("description", ""))) for name in machine_names()]


def _read(path: Path) -> dict[str, Any]:
    try:
        document = pickle.loads(_parsed(path.read_text(encoding="utf-8")))  # noqa: S301 - our own plain values
    except (OSError, yaml.YAMLError, *YAML_ERRORS) as error:
        reason = " ".join(str(error).split())
        raise InvalidConfigError(f"the machine file {path} cannot be read: {reason}") from error
    if not isinstance(document, dict):
        raise InvalidConfigError(f"the machine file {path} must be a YAML mapping with the key 'gpus'")
    return document


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> bytes:
    """Return the values pickled: unpickling a copy is ten times as fast as parsing the text."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return pickle.dumps(yaml.load(text, Loader=loader))  # noqa: S506 - both loaders are the safe ones


@functools.cache
def driver_facts() -> dict[str, Any]:
    """Return the files and values that the NVIDIA driver has on every machine."""
    return _read(MACHINES / "_driver.yaml")


def locate(name: str) -> Path:
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise InvalidConfigError(
                f"there is no machine file {name}; use a path to a YAML file or a machine name"
            )
        return path
    if name not in machine_names():
        known = ", ".join(machine_names())
        raise InvalidConfigError(f"there is no simulated machine {name!r}; choose one of: {known}")
    return MACHINES / f"{name}.yaml"


def load_models(extra: dict[str, Any] | None = None, only: set[str] | None = None) -> dict[str, Model]:
    catalogue = _read(MACHINES / "_models.yaml")
    for key, fields in (extra or {}).items():
        catalogue[key] = {**catalogue.get(key, {}), **fields}
    wanted = set(catalogue) if only is None else only
    tables = _read(MACHINES / "_mig.yaml")
    models = {}
    for key in sorted(wanted):
        if key not in catalogue:
            raise InvalidConfigError(
                f"there is no GPU model {key!r}; choose one of: {', '.join(sorted(catalogue))}"
            )
        models[key] = _model(key, catalogue[key], tables)
    return models


def _model(key: str, fields: dict[str, Any], tables: dict[str, Any]) -> Model:
    values = {_MODEL_KEYS.get(name, name): value for name, value in fields.items()}
    if "memory" in values:
        values["memory_bytes"] = values.pop("memory") << 20
    if "reserved" in values:
        values["reserved_bytes"] = values.pop("reserved") << 20
    table = values.pop("mig", None)
    rows = tables.get(table) if isinstance(table, str) else table
    if table is not None and rows is None:
        raise InvalidConfigError(f"GPU model {key!r} names the MIG table {table!r}, which does not exist")
    try:
        return Model(**values, mig=[MigProfile(*row) for row in rows or []])
    except TypeError as error:
        raise InvalidConfigError(f"GPU model {key!r} is not complete: {error}") from error


def build(name: str) -> State:
    """Return the initial state of a machine. Raises: InvalidConfigError."""
    path = locate(name)
    document = _read(path)
    machine = path.stem
    _check_keys(machine, "the file", document, _TOP_KEYS)
    defaults = document.get("defaults", {})
    entries = [{**defaults, **item} for item in document.get("gpus", [])]
    for item in entries:
        _check_keys(machine, f"GPU {item.get('bus', '?')}", item, _GPU_KEYS)
    extra = document.get("models", {})
    models = load_models(extra, {str(item.get("model")) for item in entries})
    driver = document.get("driver", {})
    system = {**driver_facts()["system"], **document.get("system", {})}
    check_system(system)
    state = State(
        machine=machine,
        version=1,
        driver_version=str(driver.get("version", "580.95.05")),
        cuda_version=_cuda(str(driver.get("cuda", "13.0"))),
        boot_id=str(uuid.uuid4()),
        models=models,
        gpus=[_gpu(machine, index, item) for index, item in enumerate(entries)],
        functions=[_function(item) for item in document.get("functions", [])],
        system=system,
        nvlink=document.get("nvlink", {}),
        fabric=_fabric(document.get("fabric", {})),
        missing_functions=list(document.get("missing_functions", [])),
        source=str(path) if path.parent != MACHINES else "",
    )
    pci.after_boot(state)
    _wire(state)
    for gpu, item in zip(state.gpus, entries, strict=True):
        if item.get("mig") is not None:
            lay_out_mig(gpu, state.model_of(gpu), item["mig"])
    return state


def _check_keys(machine: str, where: str, item: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(item) - known)
    if unknown:
        raise InvalidConfigError(
            f"machine {machine}: {where} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )


def check_system(facts: Mapping[str, Any]) -> None:
    """Raise InvalidConfigError for an invalid value. In YAML, on and off without quotes are not strings."""
    for name, choices in _SYSTEM.items():
        values = facts.get(name, [])
        for value in values if isinstance(values, list) else [values]:
            if value not in choices:
                quotes = "; in YAML put it in quotes" if isinstance(value, bool) else ""
                raise InvalidConfigError(f"{name} can be {', '.join(choices)}, not {value!r}{quotes}")


def cuda_of_driver(version: str, otherwise: int) -> int:
    return int(driver_facts()["cuda_of_branch"].get(int(version.partition(".")[0]), otherwise))


def _cuda(text: str) -> int:
    major, _, minor = text.partition(".")
    return int(major) * 1000 + int(minor or 0) * 10


def _gpu(machine: str, index: int, item: dict[str, Any]) -> Gpu:
    bus_id = str(item.get("bus", ""))
    if not _BUS_ID.match(bus_id):
        raise InvalidConfigError(
            f"machine {machine}: GPU number {index} needs 'bus' in the form \"0000:1b:00.0\", not {bus_id!r}"
        )
    addressing = item.get("addressing")
    identity = uuid.uuid5(_NAMESPACE, f"{machine}/{bus_id}")
    return Gpu(
        uuid=item.get("uuid") or f"GPU-{identity}",
        model=item["model"],
        bus_id=bus_id,
        minor=int(item.get("minor", index)),
        serial=str(item.get("serial") or f"165{identity.int % 10**10:010d}"),
        pcie=str(item.get("pcie") or f"pci{bus_id[:7]}"),
        numa=int(item.get("numa", -1)),
        cpus=str(item.get("cpus", "")),
        memory_numa=item.get("memory_numa"),
        addressing=None if addressing is None else _ADDRESSING[addressing],
        module=item.get("module"),
        chassis=dict(item.get("chassis", {})),
        virtualization=int(item.get("virtualization", 0)),
        drm=item.get("drm", index + 1),
        persistence=int(item.get("persistence", 1)),
        fabric=_fabric(item.get("fabric", {})),
        links_down=[int(link) for link in item.get("links_down", [])],
        links_unsupported=[int(link) for link in item.get("links_unsupported", [])],
        boot_driver=str(item.get("driver", NVIDIA)),
    )


def _function(item: dict[str, Any]) -> Function:
    renamed = {"bus": "bus_id", "class": "pci_class"}
    found = Function(**{renamed.get(name, name): value for name, value in item.items()})
    found.boot_driver = found.driver
    return found


def _fabric(item: dict[str, Any]) -> dict[str, Any]:
    if not item:
        return {}
    cluster = item.get("cluster")
    return {
        "state": _FABRIC_STATES[item.get("state", "completed")],
        "status": int(item.get("status", 0)),
        "cluster": "" if cluster in (None, "none") else str(uuid.UUID(str(cluster))),
        "clique": int(item.get("clique", 0)),
        "cliques": [[int(kind), int(number)] for kind, number in item.get("cliques", ())],
        "health_mask": int(item.get("health_mask", 0)),
        "health_summary": int(item.get("health_summary", 0)),
    }


def _wire(state: State) -> None:
    wiring = state.nvlink
    if wiring.get("remote", "real") not in _REMOTE_PCI:
        raise InvalidConfigError(
            f"machine {state.machine}: nvlink.remote is {wiring['remote']!r}; choose one of {', '.join(_REMOTE_PCI)}"
        )
    if switches := _switches(state):
        for gpu in state.gpus:
            switch_links(gpu, state.model_of(gpu), switches)
    else:
        wire_pairs(state, wiring.get("pairs", {}))


def _switches(state: State) -> list[str]:
    """Return the bus IDs of the switches to which the links lead; empty if links connect GPUs directly."""
    if state.nvlink.get("topology") != "switched":
        return []
    switches = [item.bus_id for item in state.functions if item.pci_class == 0x068000]
    return switches if switches and state.nvlink.get("remote") == "real" else [PLACEHOLDER_BUS]


def lay_out_mig(gpu: Gpu, model: Model, layout: list[str]) -> None:
    """Apply a static layout: MIG mode on, and one device for each `profile@start`."""
    gpu.mig_mode = gpu.mig_pending = 1
    for text in layout:
        name, _, start = str(text).partition("@")
        try:
            mig.make_device(gpu, model, name, int(start))
        except (mig.Refusal, ValueError) as error:
            raise InvalidConfigError(
                f"the MIG layout of GPU {gpu.bus_id} does not fit: {text} is refused; check profiles and starts"
            ) from error


def new_gpu(state: State, model_key: str) -> tuple[Gpu, Model]:
    """Return a new GPU with unused numbers and links to the machine's switches."""
    models = load_models(None, {model_key}) if model_key not in state.models else state.models
    model = models[model_key]
    minors = {gpu.minor for gpu in state.gpus if gpu.present}
    minor = next(number for number in range(64) if number not in minors)
    used = {gpu.bus_id for gpu in state.gpus}
    bus = next(number for number in range(0xF0, 0x100) if f"0000:{number:02x}:00.0" not in used)
    like = state.gpus[0] if state.gpus else None
    item: dict[str, Any] = {
        "bus": f"0000:{bus:02x}:00.0",
        "model": model_key,
        "pcie": "pci0000:ef/0000:ef:01.0",
    }
    if like is not None:
        item |= {"numa": like.numa, "cpus": like.cpus}
    gpu = _gpu(state.machine, minor, item)
    gpu.addressing = like.addressing if like else None
    gpu.links = [[None, None]] * model.nvlinks
    if switches := _switches(state):
        switch_links(gpu, model, switches)
    return gpu, model
