"""The command line: look, compare, tell, and record if asked."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dra_driver.cli.tables import device_table, terminal_width
from dra_driver.logs import configure_logs
from dra_driver.model.inventory import Inventory
from dra_driver.slices.rules.build import Pool, build_pool
from gpucheck.cdispec import check_spec
from gpucheck.findings import Section, count_differences, verdict
from gpucheck.smicompare import check_kernel, check_smi, find_smi
from gpucheck.toolkit import check_toolkit
from gpucheck.view import NODE, CannotRunError, Options, View, chosen_machine, opened

if TYPE_CHECKING:
    from gpucheck.replay import Recording

JsonObject = dict[str, Any]

CHECKLIST = Path(__file__).parents[2] / "docs/hardware-checklist.md"
OK, DIFFERENT, CANNOT_RUN = 0, 1, 2


def main(arguments: list[str]) -> int:
    """Exit codes. 0: no difference, 1: a difference, 2: there is nothing to check."""
    parsed = _parser().parse_args(arguments)
    if parsed.checklist:
        print(CHECKLIST.read_text(), end="")
        return OK
    configure_logs("critical", "console")
    options = Options(
        nvidia_driver_root=parsed.nvidia_driver_root,
        container_driver_root=parsed.container_driver_root,
        nvidia_cdi_hook_path=parsed.nvidia_cdi_hook_path,
        simulate=parsed.simulate,
        nvidia_smi=parsed.nvidia_smi,
        nvidia_ctk=parsed.nvidia_ctk,
    )
    try:
        inventory, pool, sections = check(options, parsed.record, anonymous=parsed.anonymise)
    except CannotRunError as error:
        reason = " ".join(str(error).split())
        if parsed.output == "json":
            print(json.dumps({"verdict": "cannot run", "reason": reason}, indent=2))
        print(f"gpu-check: cannot run: {reason}", file=sys.stderr)
        return CANNOT_RUN
    if parsed.output == "json":
        print(json.dumps(as_json(inventory, pool, sections), indent=2))
    else:
        print(as_text(inventory, pool, sections))
    return DIFFERENT if count_differences(sections) else OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-check",
        description="Compare what the driver makes of this machine's GPUs with nvidia-smi, /proc, the files on the "
        "host and nvidia-ctk. Changes nothing: NVML is reached through a list of getters.",
        epilog="Exit code 0: nothing differs; 1: something does; 2: it cannot run, for instance without NVML.",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="how to print")
    parser.add_argument(
        "--checklist", action="store_true", help="print what else to try on a machine with GPUs, and exit"
    )
    parser.add_argument("--nvidia-driver-root", default="/", help="the driver's root on the host [/]")
    parser.add_argument(
        "--container-driver-root",
        default="/driver-root",
        help="the driver's root as this process sees it, if that directory exists [/driver-root]",
    )
    parser.add_argument("--nvidia-cdi-hook-path", help="nvidia-cdi-hook on the host, if in no usual place")
    parser.add_argument("--nvidia-smi", help="the nvidia-smi to compare with [that of the driver root]")
    parser.add_argument("--nvidia-ctk", help="the nvidia-ctk to compare with [that of the host]")
    parser.add_argument(
        "--simulate", metavar="MACHINE", help="try it on a simulated machine: a name or a file"
    )
    parser.add_argument(
        "--record", metavar="FILE", type=Path, help="write this machine as a file for --simulate"
    )
    parser.add_argument("--anonymise", action="store_true", help="record invented UUIDs and serial numbers")
    parser.add_argument(
        "--no-setup", action="store_true", help="use $PYTHON [python3] and its packages as they are"
    )
    return parser


def check(
    options: Options, record_to: Path | None, *, anonymous: bool = False
) -> tuple[Inventory, Pool, list[Section]]:
    """What was found, the pool that would be published, and all sections. Raises: CannotRunError."""
    recording: Recording | None = None
    with chosen_machine(options) as machine, opened(machine) as view:
        pool = build_pool(view.inventory, NODE)
        spec_section, spec = check_spec(view, options)
        sections = [
            check_kernel(view),
            spec_section,
            *check_smi(view, find_smi(view, options)),
            check_toolkit(view, options, spec),
        ]
        if record_to is not None:
            from gpucheck.replay import Recording

            recording = Recording(view)
        sections.insert(0, check_discovery(view, pool))
        inventory = view.inventory
    if record_to is not None and recording is not None:
        sections.append(recording.save(record_to, anonymous=anonymous))
    return inventory, pool, sections


def check_discovery(view: View, pool: Pool) -> Section:
    """What could not be read or published. A GPU that is bound to another driver is not a fault."""
    section = Section("discovery", checked=len(view.inventory.gpus))
    for fault in view.inventory.faults:
        tell = section.note if fault.subject.startswith("PCI function") else section.differs
        tell(fault.subject, fault.text)
    for text in pool.faults:
        section.differs("slices", text)
    for name in sorted(view.nvml.refused):
        section.differs("NVML", f"{name} was called and refused, because it is not on the list of getters")
    return section


def _devices(pool: Pool) -> list[JsonObject]:
    return [device for content in pool.slices for device in content.devices]


def as_json(inventory: Inventory, pool: Pool, sections: list[Section]) -> JsonObject:
    """The whole report for machines."""
    cuda = inventory.versions.cuda
    return {
        "verdict": "differences" if count_differences(sections) else "ok",
        "differences": count_differences(sections),
        "driver": inventory.versions.driver,
        "cuda": None if cuda is None else f"{cuda[0]}.{cuda[1]}",
        "devices": _devices(pool),
        "sections": [section.as_json() for section in sections],
    }


def as_text(inventory: Inventory, pool: Pool, sections: list[Section]) -> str:
    """The whole report for people; the last line is the verdict."""
    cuda = inventory.versions.cuda
    devices = _devices(pool)
    versions = f"driver {inventory.versions.driver or 'unknown'}"
    if cuda is not None:
        versions += f", CUDA {cuda[0]}.{cuda[1]}"
    lines = [
        f"{versions}, GPUs: {len(inventory.gpus)}, devices: {len(devices)}",
        "",
        *device_table(devices, terminal_width()).splitlines(),
        "",
    ]
    for section in sections:
        lines += section.as_lines()
    return "\n".join([*lines, "", f"gpu-check: {verdict(sections)}"])
