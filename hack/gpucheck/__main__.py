"""`python -m gpucheck`, with hack/ and the repository on PYTHONPATH: look, compare, report."""

from __future__ import annotations

import argparse
import sys

from dra_driver.app.logs import configure_logs
from dra_driver.app.settings import Settings
from dra_driver.cli.tables import device_table, terminal_width
from dra_driver.errors import DraDriverError
from dra_driver.slices.rules.build import build_pool
from gpucheck.compare import SPEC, check_smi, check_spec, spec_of_all
from gpucheck.machine import Report, View, opened

OK, DIFFERENT, CANNOT_RUN = 0, 1, 2


def main(arguments: list[str]) -> int:
    """Exit codes. 0: no difference, 1: a difference, 2: there is nothing to check."""
    given = _parser().parse_args(arguments)
    configure_logs("critical", "console")
    settings = Settings(
        "gpu-check",  # not the node's name, because what is printed may be passed on
        nvidia_driver_root=given.nvidia_driver_root,
        container_driver_root=given.container_driver_root,
        nvidia_cdi_hook_path=given.nvidia_cdi_hook_path,
        simulate=given.simulate,
    )
    try:
        with opened(settings) as view:
            report = check(view, given.nvidia_smi)
    except (DraDriverError, OSError) as error:
        print(f"gpu-check: cannot run: {' '.join(str(error).split())}", file=sys.stderr)
        return CANNOT_RUN
    print(*report.lines(), sep="\n")
    return DIFFERENT if report.differences else OK


def check(view: View, smi: str | None = None) -> Report:
    """Print the devices, and compare everything."""
    report, inventory = Report(), view.inventory
    pool = build_pool(inventory, view.settings.node_name)
    devices = [device for content in pool.slices for device in content.devices]
    print(
        f"NVIDIA driver {inventory.versions.driver}, GPUs: {len(inventory.gpus)}, devices: {len(devices)}\n"
    )
    print(device_table(devices, terminal_width()), end="\n\n")
    report.good("discovery", inventory.gpus, "NVML shows no GPU")
    for fault in inventory.faults:  # a GPU that is bound to another driver is not a difference
        is_bound_elsewhere = fault.subject.startswith("PCI function")
        report.good("discovery", is_bound_elsewhere, f"{fault.subject}: {fault.text}")
    for text in pool.faults:
        report.good("slices", False, text)
    check_smi(report, view, smi)
    try:
        if devices:
            check_spec(report, view, spec_of_all(view))
    except DraDriverError as error:
        report.good(SPEC, False, f"all devices cannot be prepared: {error}")
    for name in sorted(view.nvml.refused):
        report.good("NVML", False, f"{name} was called and refused, because it is not a getter")
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-check",
        description="Compare what would be published of this machine's GPUs, and the CDI spec that would be written, "
        "with nvidia-smi and the files on the host. Changes nothing: of NVML only getters are called.",
        epilog="Exit code 0: nothing differs; 1: something does; 2: it cannot run, for instance without NVML.",
    )
    for flag, default, what in (
        ("--nvidia-driver-root", "/", "the driver's root on the host [/]"),
        ("--container-driver-root", "/driver-root", "the same for this process, if it exists [/driver-root]"),
        ("--nvidia-cdi-hook-path", None, "nvidia-cdi-hook on the host, if in no usual place"),
        ("--nvidia-smi", None, "the nvidia-smi to compare with [that of the driver root]"),
        ("--simulate", None, "try it on a simulated machine: a name or a file"),
    ):
        parser.add_argument(flag, default=default, help=what)
    parser.add_argument(
        "--no-setup", action="store_true", help="use $PYTHON [python3] and its packages as they are"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
