"""`gpu-dra-driver simulate`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra_driver.app.settings import DEFAULT_SIMULATOR_DIR, Flag
from dra_driver.cli.flags import Command, switch
from dra_driver.model.schema import Scalar

_LONGEST_S = 365 * 86400.0
_DROPPED = {"uuid": 3, "minor": 2, "model": 1}

_DIRECTORY = Flag(
    "directory",
    "Directory of the simulated machine.",
    spelled=("--simulator-dir",),
    env=("SIMULATOR_DIR",),
    default=DEFAULT_SIMULATOR_DIR,
    to=Path,
)
_GPU = Flag("selector", "Device name, index, UUID or PCI bus ID of the GPU.", metavar="GPU", count="1")
_WITHOUT_MACHINE = ("list_machines", "create_machine")
_READS = ("show", "mig_profiles")
_FORCE = switch("force", "Do this even while programs have NVML open.")


def _argument(name: str, help_text: str, metavar: str | None = None, count: str = "1") -> Flag:
    return Flag(name, help_text, metavar=metavar, count=count)


def _number(name: str, help_text: str, metavar: str | None = None) -> Flag:
    return Flag(name, help_text, Scalar(int), metavar=metavar, count="1")


def _option(name: str, help_text: str, kind: type = str, **more: Any) -> Flag:
    return Flag(name, help_text, Scalar(kind, least=more.pop("least", None)), env=(), **more)


def _calls(function: str, said: str = "", held_by: str = "", **fixed: Any) -> Callable[[Namespace], None]:
    """Return a function that prints what a function of `simulate_commands`, or with `said` a method of the machine,
    returns.
    """

    def act(given: Namespace) -> None:
        from dra_driver.simulator import open_machine, simulate_commands

        values = {name: value for name, value in vars(given).items() if name != "faults"} | fixed
        machine = None
        if function not in _WITHOUT_MACHINE:
            machine = open_machine(values.pop("directory"))
        if machine is not None and said:
            found: Any = simulate_commands.done(machine, function, said, values, held_by)
        else:
            found = getattr(simulate_commands, function)(
                **values if machine is None else {"machine": machine, **values}
            )
        for part in found if isinstance(found, tuple) else (found,):
            if isinstance(part, str):
                print(part)
            else:
                _print_table(part)
        if machine is not None and function not in _READS:
            print(f"changed: machine {machine.name} in {machine.directory}", file=sys.stderr)

    return act


def _print_table(rows: list[dict[str, str]]) -> None:
    from dra_driver.cli.output import drawn, table, terminal_width

    columns, width = {key.upper(): _DROPPED.get(key, 0) for key in (rows or [{}])[0]}, terminal_width()
    print("\n".join(drawn(table(columns, ([*row.values()] for row in rows), width), width)))


def _run_client(given: Namespace) -> None:
    import signal

    from dra_driver.simulator import open_machine

    stopped = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stopped)
    machine = open_machine(given.directory)
    session = machine.open_session(given.name)
    try:
        print(f"{given.name} has NVML open on {machine.name}", flush=True)
        signal.sigtimedwait(stopped, _LONGEST_S if given.seconds is None else given.seconds)
    finally:
        machine.close_session(session)


def _does(
    function: str | Callable[[Namespace], None],
    summary: str,
    example: str,
    *flags: Flag,
    about: str = "",
    said: str = "",
    held_by: str = "",
    **fixed: Any,
) -> Command:
    act = _calls(function, said, held_by, **fixed) if isinstance(function, str) else function
    return Command(summary, about, (*flags, _DIRECTORY), act, examples=(example,))


_CREATED = (
    "created {profile} at {start} on {called}: GPU instance {made[0]}, compute instance {made[1]}, {made[2]}"
)
_MIG = {
    "enable": _does("mig_mode", "Switch MIG mode on.", "0", _GPU, _FORCE, on=True),
    "disable": _does("mig_mode", "Switch MIG mode off.", "0", _GPU, _FORCE, on=False),
    "create": _does("create_mig", "Create a MIG device at a placement.", "0 1g.10gb 0", _GPU,
        _argument("profile", "MIG profile, such as 1g.10gb."), _number("start", "First memory slice."),
        said=_CREATED),
    "destroy": _does("destroy_mig", "Destroy a GPU instance with everything in it.", "0 1", _GPU,
        _number("gi", "Id of the GPU instance.", "GI"), said="destroyed GPU instance {gi} of {called}"),
    "profiles": _does("mig_profiles", "List the MIG profiles of a GPU with their placements.", "0", _GPU),
}  # fmt: skip
COMMANDS = {
    "list": Command("List the machines that can be simulated.", act=_calls("list_machines"), examples=("",)),
    "create": _does("create_machine", "Create a machine.", "dgx-h100 --simulator-dir /tmp/machine",
        _argument("name", "A name from `simulate list`, or a path to a YAML file.", "MACHINE"),
        _option("cdi_hook", "Also create nvidia-cdi-hook next to the NVIDIA driver's programs.", bool, shown="no"),
        _option("device_nodes", "auto, real (needs root) or described.", default="auto"),
        about="Keeps an existing machine of that name. Otherwise the directory must be empty or not exist yet."),
    "show": _does("show", "Show the machine and its GPUs.", ""),
    "lose": _does("lose_gpu", "Simulate a GPU falling off the bus (Xid 79).", "gpu-6b45fc99", _GPU,
        said="{called} is lost"),
    "restore": _does("restore_gpu", "Bring a lost GPU back.", "gpu-6b45fc99", _GPU, said="{called} is back"),
    "xid": _does("raise_xid", "Raise an Xid error on a GPU.", "0 79", _GPU,
        _number("xid", "Number of the Xid error, such as 48.", "XID"),
        _option("gpu_instance", "Only this GPU instance is affected.", int, spelled=("--gi",)),
        _option("compute_instance", "Only this compute instance.", int, spelled=("--ci",)),
        said="Xid {xid} raised on {called}"),
    "fault": _does("set_fault", "Make calls of an NVML function fail, or slow them down.",
        "nvmlDeviceGetUUID --error gpu-is-lost --count 3",
        _argument("function", "NVML function such as nvmlDeviceGetUUID (* matches anything), or a step like unbind."),
        _option("code", "Error to return: a number, or a name such as gpu-is-lost or EBUSY.", spelled=("--error",)),
        _option("delay_s", "Seconds until the function returns.", float, spelled=("--delay",), default=0.0),
        _option("count", "Only this many calls.", int, shown="until cleared"),
        _option("gpu", "Only calls for this GPU: device name, index, UUID or PCI bus ID."),
        switch("blocks_all", "No other NVML call of the process returns during the delay."),
        said="{function} is faulty now ({made})",
        about="The steps that bind a PCI function to another driver are driver_override, unbind, bind, drivers_probe "
        "and modprobe. A step can fail with an errno such as EBUSY, no-effect, hang (until the fault is cleared) or "
        "late-user (a program opens the GPU just before the step). The step nvidia-smi changes a setting; it can "
        "only have no-effect, although nvidia-smi reports success."),
    "clear-faults": _does("clear_faults", "Remove all injected faults.", "", said="no faults left"),
    "client": _does(_run_client, "Simulate a program that keeps NVML open, until Ctrl-C.", "dcgm --for 60",
        _argument("name", "Name of the program, such as dcgm."),
        _option("seconds", "Seconds after which the program stops.", float, least=0, spelled=("--for",), shown="never"),
        about="Monitoring agents do this. While the program runs, the NVIDIA driver cannot be unloaded, no GPU can be "
        "reset, and no MIG mode can be switched."),
    "unload-driver": _does("unload_driver", "Unload the NVIDIA driver.", "", _FORCE, said="driver unloaded",
        held_by="unload the driver: the module nvidia",
        about="The driver's /proc files disappear, and NVML calls return DRIVER_NOT_LOADED."),
    "load-driver": _does("load_driver", "Load the NVIDIA driver, or another version of it.", "580.95.05",
        Flag("version", "A version of the NVIDIA driver.", count="?", shown="the previous version"),
        said="driver {machine.driver_version} loaded"),
    "reboot": _does("reboot", "Reboot the machine.", "", said="rebooted, boot id {machine.boot_id}",
        about="The machine then has a new boot ID; MIG devices and settings are gone, and lost GPUs are back."),
    "imex": _does("set_system", "Set the state of the simulated nvidia-imex.", "ready",
        _argument("imex", "ready, initializing, hung, killed (the socket stays) or stopped.", "STATE"),
        _option("imex_channels", "Number of IMEX channels of the NVIDIA driver; 0: it has none.", int, least=0,
                spelled=("--channels",)),
        said="nvidia-imex of {machine.name} is {imex}"),
    "confidential": _does("set_system", "Set confidential computing and its ready state.", "on --ready",
        _argument("confidential_compute", "off, on, devtools or ppcie.", "MODE"),
        switch("confidential_ready", "The GPUs accept work, until a reboot.", "--ready"),
        said="confidential computing of {machine.name} is {confidential_compute}, its GPUs are {confidential_ready}"),
    "give": _does("give_to", "Bind a GPU to nvidia or a vfio driver by hand.", "0 vfio-pci", _GPU,
        _argument("driver", "nvidia, vfio-pci or nvgrace-gpu-vfio-pci."), said="{called} is bound to {driver}",
        about="The binding survives reboots, as with driverctl."),
    "vfio": _does("vfio", "Set the kernel's support for virtual machines.", "--no-iommu",
        _option("iommu", "Whether the IOMMU is on.", bool, shown="unchanged"),
        _option("iommufd", "Whether there is /dev/iommu.", bool, shown="unchanged"),
        _option("installed", "Installed modules, separated by commas, such as vfio_pci.", shown="unchanged"),
        _option("loaded", "Loaded modules, separated by commas.", shown="unchanged")),
    "host-devices": _does("set_system", "Set the device nodes for storage, RDMA and GDRCopy.", "gds mofed",
        _argument("host_devices", "gds, mofed, gdrcopy; without any, all are removed.", "KIND", "*"),
        said="{machine.name} has {host_devices}"),
    "add-gpu": _does("add_gpu", "Plug a GPU in.", "h100-sxm",
        _argument("model", "GPU model, such as h100-sxm or l40s."), said="added {made}",
        about="NVML lists the GPU after NVML's next initialisation."),
    "remove-gpu": _does("remove_gpu", "Pull a GPU out.", "0", _GPU,
        said="removed {called}; the GPUs after it have new indices"),
    "hold": _does("hold_gpu", "Simulate a process that uses a GPU.", "0 --name python3", _GPU,
        _option("pid", "Process id.", int, default=4242), _option("name", "Process name.", default="python3"),
        _option("gpu_instance", "The process uses only this GPU instance.", int, spelled=("--gi",)),
        _option("utilisation", "Percentage of the time that the process keeps the GPU busy.", int, least=0, default=40),
        said="process {pid} ({name}) uses {called}", about="MIG changes then fail with IN_USE."),
    "release": _does("release_gpu", "Stop the processes that use a GPU.", "0", _GPU,
        _option("pid", "Only this process.", int, shown="all"), said="{called} is released"),
    "reset": _does("reset_gpu", "Reset a GPU.", "0", _GPU, _FORCE, said="{called} was reset",
        held_by="reset {called}: it", about="Carries out pending repairs, and sets volatile error counters to 0."),
    "ecc": _does("set_gpu", "Set a GPU's volatile ECC counters.", "0 --uncorrected 1", _GPU,
        _option("ecc_corrected", "Errors that were corrected.", int, spelled=("--corrected",), default=0),
        _option("ecc_uncorrected", "Errors that were not corrected.", int, spelled=("--uncorrected",), default=0),
        said="{called} counts {ecc_corrected} corrected and {ecc_uncorrected} uncorrected ECC errors"),
    "remap": _does("set_remapped_rows", "Set the state of a GPU's row remapping.", "0 --pending", _GPU,
        _option("pending", "Rows wait for a reset to be remapped.", bool, shown="no"),
        _option("failed", "A row could not be remapped.", bool, shown="no"),
        said="row remapping of {called}: {pending}, {failed}"),
    "signals": _does("signals", "Set the health signals of a GPU's parts.", "0 sram nvlinks-down=3,4", _GPU,
        _argument("signals", "bank-remap, memory, nvlink-recoveries=COUNT, nvlinks-down=LINK,…, pcie-lanes=LANES, "
        "repair=channel,tpc, sram; without any, the GPU is healthy.", "SIGNAL", "*"),
        about="Signals that are not named are cleared. gpu-dra-driver reads the signals every 50 s while the GPU "
        "is healthy, and at once after an event, such as Xid 154."),
    "recovery-action": _does("set_recovery_action", "Make a GPU request a recovery action (Xid 154).", "0 1", _GPU,
        _number("action", "0 none, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset."),
        said="{called} requests recovery action {action}"),
    "mig": Command("MIG mode and MIG devices of a simulated GPU.", commands=_MIG),
}  # fmt: skip
