"""Compares the devices that discovery finds on this machine with nvidia-smi's output; `hack/gpu-check` runs it.

It changes nothing: it calls only getters and events of NVML, and runs nvidia-smi only with the arguments in `READS`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from dra_driver.app.logs import configure_logs
from dra_driver.app.platforms import platform_of
from dra_driver.app.settings import FLAGS, Settings
from dra_driver.cli.output import device_table, terminal_width
from dra_driver.errors import DraDriverError
from dra_driver.host.driver_programs import find_program
from dra_driver.host.driver_root import find_nvml_library
from dra_driver.host.rooted_tree import RootedTree
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.discovery import discover_once
from dra_driver.inventory.rules.assembly import nvlink_domains
from dra_driver.model.gpu import Gpu
from dra_driver.model.ids import pci_bus_id
from dra_driver.model.inventory import Inventory
from dra_driver.model.units import counted
from dra_driver.nvml.reader import NvmlReader
from dra_driver.nvml.session import open_device_files
from dra_driver.slices.rules.build import build_pool

OK, DIFFERENT, CANNOT_RUN = 0, 1, 2
READS = (("-L",), ("-q", "-x"), ("topo", "-m"))
"""The only arguments that are passed to nvidia-smi; none of them changes anything."""
POWER = "gpu_power_readings"
NOT_IN_EACH_RELEASE = (
    "product_architecture",
    "product_brand",
    "addressing_mode",
    *(f"{POWER}/{name}_power_limit" for name in ("default", "min", "max")),
)
NO_PERMISSION = 4
"""NVML's return code for a caller without permission."""
_SETTINGS = ("simulate", "nvidia_driver_root", "container_driver_root")
_GETTER = re.compile(
    r"nvml(InitWithFlags|Shutdown|EventSet(Create|Free)|DeviceRegisterEvents"
    r"|(System|Device|(Gpu|Compute)Instance)(Get|Is)[A-Z]\w*)\Z"
)
_TIMEOUT_S = 120
_UNKNOWN = {"", "N/A", "[N/A]", "Not Supported", "Unknown Error", "GPU requires reset"}


def main(arguments: list[str]) -> int:
    """Return the exit code. 0: no difference, 1: a difference, 2: the check cannot run."""
    parser = argparse.ArgumentParser(
        prog="gpu-check",
        description="Compare the devices that would be published for this machine with nvidia-smi. Changes nothing.",
        epilog="Exit codes: 0 if nothing differs, 1 if something differs, 2 if it cannot run, such as without NVML.",
    )
    for name in _SETTINGS:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=getattr(Settings(""), name), help=FLAGS[name].help)
    parser.add_argument(
        "--nvidia-smi", help="The nvidia-smi to compare with. Default: the one in the driver root."
    )
    parser.add_argument("--no-setup", action="store_true", help="Use $PYTHON and its packages as they are.")
    given = parser.parse_args(arguments)
    configure_logs("critical", "console")
    try:
        # Not the node's name, because users may share the output.
        with opened(Settings("gpu-check", **{name: getattr(given, name) for name in _SETTINGS})) as view:
            report = check(view, given.nvidia_smi)
    except (DraDriverError, OSError) as error:
        print(f"gpu-check: cannot run: {' '.join(str(error).split())}", file=sys.stderr)
        return CANNOT_RUN
    print(*report.lines(), sep="\n")
    return DIFFERENT if report.differences else OK


class ReadOnlyLibrary:
    """Wraps the NVML library and allows only getters and events; `refused` records other calls."""

    def __init__(self, library: object) -> None:
        self.refused: set[str] = set()
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Raise AttributeError for a getter that the library lacks."""
        # nvmlErrorString returns a text, not a code, so the binding sets its result type.
        if _GETTER.match(name) or not name.startswith("nvml") or name == "nvmlErrorString":
            function: Callable[..., int] = getattr(self._library, name)
            return function

        def refuse(*_arguments: Any) -> int:
            self.refused.add(name)
            return NO_PERMISSION

        return refuse


@dataclass(frozen=True, slots=True)
class View:
    """A machine and the devices that discovery found. NVML is open until `opened` ends."""

    settings: Settings
    driver_root: str
    reader: NvmlReader
    nvml: ReadOnlyLibrary
    inventory: Inventory


@contextmanager
def opened(settings: Settings) -> Iterator[View]:
    """Discover the devices of the machine in the settings. Without `simulator_dir`, a simulated machine is deleted
    afterwards.

    Raises: DraDriverError if there is no NVML.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        if settings.simulate is not None and settings.simulator_dir is None:
            settings = replace(settings, simulator_dir=f"{scratch}/machine")
        platform = platform_of(settings)
        library: list[ReadOnlyLibrary] = []

        def load() -> object:
            library.append(ReadOnlyLibrary(platform.load_nvml()))
            return library[-1]

        reader = NvmlReader(load)
        try:
            reader.session.reopen()
            inventory = discover_once(reader, Sysfs(platform.paths.sys, platform.paths.proc), None)
            yield View(settings, platform.paths.driver_root, reader, library[-1], inventory)
        finally:
            reader.session.close()


@dataclass(slots=True)
class Report:
    """The number of checks by topic, and the results."""

    checked: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """What could not be compared, because nvidia-smi failed or printed something unexpected."""

    def same(self, topic: str, what: str, ours: object, theirs: object) -> None:
        """Count a check. Unequal values are a difference."""
        values = f"{ours or 'nothing'} from discovery, {theirs or 'nothing'} from nvidia-smi"
        self.good(topic, ours == theirs, f"{what}: {values}")

    def good(self, topic: str, condition: object, otherwise: str) -> None:
        """Count a check. A false condition is a difference, described by `otherwise`."""
        self.checked[topic] += 1
        if not condition:
            self.differences.append(f"{topic}: {otherwise}")

    def lines(self) -> list[str]:
        """Return a line for each topic, the findings, and the verdict."""
        checks = [f"{topic:<12} {counted(number, 'check')}" for topic, number in self.checked.items()]
        found = [f"  DIFFERS     {text}" for text in sorted(self.differences)]
        found += [f"  not checked {text}" for text in self.unknown]
        verdict = counted(len(self.differences), "difference") if self.differences else "nothing differs"
        return [*checks, *found, "", f"gpu-check: {verdict}"]


def check(view: View, smi: str | None = None) -> Report:
    """Print the devices, compare them, and return the report."""
    report, inventory = Report(), view.inventory
    pool = build_pool(inventory, view.settings.node_name)
    devices = [device for content in pool.slices for device in content.devices]
    counts = f"GPUs: {len(inventory.gpus)}, devices: {len(devices)}"
    print(f"NVIDIA driver {inventory.versions.driver}, {counts}\n")
    print("\n".join(device_table(devices, terminal_width())), end="\n\n")
    report.good("discovery", inventory.gpus, "NVML shows no GPU")
    for fault in inventory.faults:  # a GPU that is bound to another driver is not a difference
        report.good("discovery", fault.subject.startswith("PCI function"), f"{fault.subject}: {fault.text}")
    for text in pool.faults:
        report.good("slices", False, text)
    for arguments, compare in zip(READS, (_compare_list, _compare_facts, _compare_domains), strict=True):
        try:
            compare(report, inventory, ask_smi(*_smi(view, smi, arguments)))
        except (OSError, ValueError, SyntaxError, subprocess.SubprocessError, DraDriverError) as error:
            report.unknown.append(f"nvidia-smi: {' '.join(str(error).split())[:300]}")
    _check_shutdown(report, view)
    for name in sorted(view.nvml.refused):
        report.good("NVML", False, f"{name} was called and refused, because it is not a getter")
    return report


def _check_shutdown(report: Report, view: View) -> None:
    """Listen to events like the plugin, shut NVML down, and check that no device file stays open: it would make GPU
    resets fail.
    """
    events = view.reader.health_source()
    events.open_events()
    for gpu in view.inventory.gpus:
        with suppress(DraDriverError):
            events.register(gpu.uuid, gpu.pci_bus_id)
    view.reader.session.close()
    left = open_device_files()
    report.good("shutdown", not left, f"{', '.join(left)}: open after the shutdown of NVML")


def ask_smi(program: str, arguments: tuple[str, ...], library_dir: str | None = None) -> str:
    """Return the output of nvidia-smi. Its exit code is ignored if the output names a GPU: others may be lost.

    `library_dir` is NVML's directory, if it is not a default one. Raises: ValueError, OSError, TimeoutExpired.
    """
    if arguments not in READS:
        raise AssertionError(f"nvidia-smi {' '.join(arguments)} may change something")
    environment = {**os.environ, "LC_ALL": "C"} | ({"LD_LIBRARY_PATH": library_dir} if library_dir else {})
    done = subprocess.run(
        [program, *arguments],
        capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S, env=environment,
    )  # fmt: skip
    if done.returncode != 0 and not re.search(r"GPU-[0-9a-f]{8}-", done.stdout):
        what = f"nvidia-smi {' '.join(arguments)} exited with code {done.returncode}"
        raise ValueError(f"{what}: {done.stderr or done.stdout}")
    return done.stdout


def _smi(
    view: View, given: str | None, arguments: tuple[str, ...]
) -> tuple[str, tuple[str, ...], str | None]:
    """Return the arguments of `ask_smi`. nvidia-smi is the given one, or that of the driver root; if the root is `/`,
    it can also be elsewhere in PATH.
    """
    root = view.driver_root
    tree = RootedTree(root)
    found = find_program(tree.program, "nvidia-smi")
    installed = tree.local(found[1]) if found is not None else None
    program = given or installed or (shutil.which("nvidia-smi") if root == "/" else None)
    if program is None:
        raise ValueError(f"nvidia-smi was not found in the driver root {root}")
    is_elsewhere = root != "/" and view.settings.simulate is None
    return program, arguments, str(Path(find_nvml_library(root)).parent) if is_elsewhere else None


def _compare_list(report: Report, inventory: Inventory, answer: str) -> None:
    """Compare with `nvidia-smi -L`: index and UUID of each GPU, profile and UUID of each MIG device."""
    lines = re.findall(
        r"^(GPU \d+):.*\(UUID: (GPU-[^)]+)\)|^ +MIG (\S+) .*\(UUID: (MIG-[^)]+)\)", answer, re.M
    )
    theirs = {(gpu or f"MIG {profile}", uuid or mig) for gpu, uuid, profile, mig in lines}
    ours = {(f"GPU {gpu.index}", gpu.uuid) for gpu in inventory.gpus}
    ours |= {(f"MIG {mig.profile.name}", mig.uuid) for gpu in inventory.gpus for mig in gpu.mig_devices}
    report.good("nvidia-smi", ours & theirs, "nvidia-smi -L lists no device that discovery found")
    for name, uuid in sorted(ours ^ theirs):
        fault = "discovery did not find it" if (name, uuid) in theirs else "nvidia-smi -L does not list it"
        report.good("nvidia-smi", False, f"{name} {uuid}: {fault}")


def _compare_facts(report: Report, inventory: Inventory, answer: str) -> None:
    """Compare with `nvidia-smi -q -x`: the properties of each GPU."""
    log = ElementTree.fromstring(answer)
    report.same("nvidia-smi", "driver_version", inventory.versions.driver, log.findtext("driver_version"))
    theirs = {gpu.findtext("uuid"): gpu for gpu in log.iter("gpu")}
    for gpu in inventory.gpus:
        if (shown := theirs.get(gpu.uuid)) is None:
            report.good("nvidia-smi", False, f"{gpu.uuid}: nvidia-smi -q does not list it")
            continue
        fabric = gpu.fabric and f"{gpu.fabric.cluster_uuid} {gpu.fabric.clique_id}"
        answers = {path: (shown.findtext(path) or "").strip().strip("[]") for path in facts(gpu)}
        for path, text in (answers | _fabric(shown)).items():
            if text not in _UNKNOWN or path not in NOT_IN_EACH_RELEASE:
                ours = fabric if path == "fabric" else facts(gpu)[path]
                known = None if text in _UNKNOWN else text
                report.same("nvidia-smi", f"{gpu.uuid}: {path}", _plain(ours), _plain(known))


def facts(gpu: Gpu) -> dict[str, object]:
    """Return a GPU's properties from discovery, by their paths in nvidia-smi's XML."""
    return {
        "product_name": gpu.product_name,
        "pci/pci_bus_id": gpu.pci_bus_id,
        "fb_memory_usage/total": gpu.memory_bytes and f"{gpu.memory_bytes >> 20} MiB",
        "mig_mode/current_mig": ("Enabled" if gpu.mig_enabled else "Disabled") if gpu.mig_capable else None,
        "minor_number": gpu.minor,
        "product_architecture": gpu.architecture,
        "product_brand": gpu.brand,
        "addressing_mode": gpu.addressing_mode,
        f"{POWER}/default_power_limit": _watts(gpu.power_limit_default_w),
        f"{POWER}/min_power_limit": _watts(gpu.power_limits_w and gpu.power_limits_w[0]),
        f"{POWER}/max_power_limit": _watts(gpu.power_limits_w and gpu.power_limits_w[1]),
    }


def _watts(limit: int | None) -> str | None:
    return None if limit is None else f"{limit}.00 W"


def _fabric(gpu: ElementTree.Element) -> dict[str, str]:
    """Return the cluster and clique of the NVLink fabric, if this release of nvidia-smi reports them; empty if the GPU
    has not joined a clique.
    """
    found = [gpu.findtext(f"fabric/{name}") for name in ("clusterUUID", "clusterUuid")]
    for cluster in filter(None, found):
        is_joined = gpu.findtext("fabric/state") == "Completed" and set(cluster) - set("0-")
        return {"fabric": f"{cluster} {gpu.findtext('fabric/cliqueId')}" if is_joined else ""}
    return {}


def _plain(value: object) -> str | None:
    """Return a value in comparable form: bus IDs as this plugin writes them, and other texts in lower case without
    spaces between letters, because one side may write `NvidiaRTX` and the other side `NVIDIA RTX`.
    """
    try:
        return None if value is None else pci_bus_id(str(value))
    except ValueError:
        return re.sub(r"[^a-z0-9 :.-]|(?<=[a-z]) (?=[a-z])", "", str(value).lower())


def _compare_domains(report: Report, inventory: Inventory, answer: str) -> None:
    """Check that the NVLink domains match the matrix of `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in answer.splitlines()]
    columns = next((line for line in lines if line[:1] == ["GPU0"] and "X" not in line), [])
    links = {
        (name, column): int(cell[2:])
        for name, *cells in filter(None, lines)
        for column, cell in zip(columns, cells, strict=False)
        if re.fullmatch(r"NV\d+", cell) and name.startswith("GPU") and column.startswith("GPU")
    }
    uuids = {f"GPU{gpu.index}": gpu.uuid for gpu in inventory.gpus}
    pairs = {
        frozenset((uuids[one], uuids[other])): min(count, links[other, one])
        for (one, other), count in links.items()
        if (other, one) in links and {one, other} <= uuids.keys()
    }
    expected = nvlink_domains(inventory.gpus, pairs)
    for gpu in inventory.gpus:
        ours = inventory.nvlink_domains.get(gpu.uuid)
        report.same("NVLink", f"{gpu.uuid}: nvlinkDomain", ours, expected.get(gpu.uuid))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
