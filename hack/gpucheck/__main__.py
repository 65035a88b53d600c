"""`python -m gpucheck`, with hack/ and the repository on PYTHONPATH: look, compare, report."""

from __future__ import annotations

import argparse
import sys

from dra_driver.app.logs import configure_logs
from dra_driver.app.settings import FLAGS, Settings
from dra_driver.cli.output import device_table, terminal_width
from dra_driver.errors import DraDriverError
from dra_driver.slices.rules.build import build_pool
from gpucheck.compare import check_smi, check_spec, spec_of_all
from gpucheck.machine import Report, View, opened

OK, DIFFERENT, CANNOT_RUN = 0, 1, 2
_SETTINGS = ("simulate", "nvidia_driver_root", "container_driver_root", "nvidia_cdi_hook_path")


def main(arguments: list[str]) -> int:
    """Exit codes. 0: no difference, 1: a difference, 2: there is nothing to check."""
    parser = argparse.ArgumentParser(
        prog="gpu-check",
        description="Compare what would be published of this machine's GPUs, and the CDI spec that would be written, "
        "with nvidia-smi and the files on the host. Changes nothing: of NVML only getters are called.",
        epilog="Exit code 0: nothing differs; 1: something does; 2: it cannot run, for instance without NVML.",
    )
    for name in _SETTINGS:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=getattr(Settings(""), name), help=FLAGS[name].help)
    parser.add_argument(
        "--nvidia-smi", help="The nvidia-smi to compare with, if not that of the driver root."
    )
    parser.add_argument("--no-setup", action="store_true", help="Use $PYTHON and its packages as they are.")
    given = parser.parse_args(arguments)
    configure_logs("critical", "console")
    try:
        # Not the node's name, because what is printed may be passed on.
        with opened(Settings("gpu-check", **{name: getattr(given, name) for name in _SETTINGS})) as view:
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
    counts = f"GPUs: {len(inventory.gpus)}, devices: {len(devices)}"
    print(f"NVIDIA driver {inventory.versions.driver}, {counts}\n")
    print(device_table(devices, terminal_width()), end="\n\n")
    report.good("discovery", inventory.gpus, "NVML shows no GPU")
    for fault in inventory.faults:  # a GPU that is bound to another driver is not a difference
        report.good("discovery", fault.subject.startswith("PCI function"), f"{fault.subject}: {fault.text}")
    for text in pool.faults:
        report.good("slices", False, text)
    check_smi(report, view, smi)
    try:
        if devices:
            check_spec(report, view, spec_of_all(view))
    except DraDriverError as error:
        report.good("CDI spec", False, f"all devices cannot be prepared: {error}")
    for name in sorted(view.nvml.refused):
        report.good("NVML", False, f"{name} was called and refused, because it is not a getter")
    return report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
