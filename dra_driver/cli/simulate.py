"""`gpu-dra-driver simulate`: create simulated machines, and do to them what happens to real ones."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra_driver.cli.flags import Command, switch
from dra_driver.model.shapes import Scalar
from dra_driver.settings import Flag

_LONGEST_S = 365 * 86400.0
_DROPPED = ("uuid", "minor", "model")
"""Columns that go where the terminal is narrow, the first one first."""

_DIRECTORY = Flag(
    "directory",
    "Directory of the simulated machine.",
    spelled=("--simulator-dir",),
    env=("SIMULATOR_DIR",),
    default="/var/lib/gpu-dra-simulator",
    to=Path,
)
_GPU = Flag("gpu", "Device name, index, UUID or PCI bus ID of the GPU.", count="1")
_WITHOUT_MACHINE = ("list_machines", "create_machine")
_READS = ("show", "mig_profiles")
_FORCE = switch("force", "Also while programs have NVML open.")


def _argument(name: str, help_text: str, metavar: str | None = None, count: str = "1") -> Flag:
    return Flag(name, help_text, metavar=metavar, count=count)


def _number(name: str, help_text: str, metavar: str | None = None) -> Flag:
    return Flag(name, help_text, Scalar(int), metavar=metavar, count="1")


def _option(name: str, help_text: str, kind: type = str, **more: Any) -> Flag:
    return Flag(name, help_text, Scalar(kind, least=more.pop("least", None)), env=(), **more)


def _calls(function: str, **fixed: Any) -> Callable[[Namespace], None]:
    """What prints the lines or the table that a function of `simulator.commands` returns; it takes the machine and the
    values of the command's flags by their names."""

    def act(given: Namespace) -> None:
        from dra_driver.simulator import commands
        from dra_driver.simulator.machine import open_machine

        values = {name: value for name, value in vars(given).items() if name != "faults"}
        if function not in _WITHOUT_MACHINE:
            values["machine"] = open_machine(values.pop("directory"))
        found = getattr(commands, function)(**values, **fixed)
        for part in found if isinstance(found, tuple) else (found,):
            if isinstance(part, str):
                print(part)
            else:
                _print_table(part)
        if "machine" in values and function not in _READS:
            changed = values["machine"]
            print(f"changed: machine {changed.name} in {changed.directory}", file=sys.stderr)

    return act


def _print_table(rows: list[dict[str, str]]) -> None:
    from dra_driver.cli.tables import terminal_width
    from dra_driver.diagnostics.rules.tables import Column, hanging, table

    if rows and "description" in rows[0]:
        names = max(len(row["machine"]) for row in rows)
        for row in [{key: key.upper() for key in rows[0]}, *rows]:
            print(hanging(f"{row['machine']:<{names}}   ", row["description"], terminal_width()))
    elif rows:
        drops = {key: len(_DROPPED) - index for index, key in enumerate(_DROPPED)}
        columns = [Column(key.upper(), drop=drops.get(key, 0)) for key in rows[0]]
        print(table(columns, [list(row.values()) for row in rows], terminal_width()), end="")


def _be_a_client(given: Namespace) -> None:
    import signal

    from dra_driver.simulator import commands
    from dra_driver.simulator.machine import open_machine

    stopped = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stopped)
    with commands.client(open_machine(given.directory), given.name) as said:
        print(said, flush=True)
        signal.sigtimedwait(stopped, _LONGEST_S if given.seconds is None else given.seconds)


def _command(
    summary: str, act: Callable[[Namespace], None], *flags: Flag, example: str, about: str = ""
) -> Command:
    return Command(summary, about, (*flags, _DIRECTORY), act, examples=(example,))


_MIG = {
    "enable": _command("Switch MIG mode on.", _calls("mig_mode", on=True), _GPU, _FORCE, example="0"),
    "disable": _command("Switch MIG mode off.", _calls("mig_mode", on=False), _GPU, _FORCE, example="0"),
    "create": _command(
        "Create a MIG device at a placement.",
        _calls("mig_create"),
        _GPU,
        _argument("profile", "MIG profile, such as 1g.10gb."),
        _number("start", "First memory slice."),
        example="0 1g.10gb 0",
    ),
    "destroy": _command(
        "Destroy a GPU instance with everything in it.",
        _calls("mig_destroy"),
        _GPU,
        _number("gpu_instance", "Id of the GPU instance.", "GI"),
        example="0 1",
    ),
    "profiles": _command(
        "List the MIG profiles of a GPU with their placements.", _calls("mig_profiles"), _GPU, example="0"
    ),
}
COMMANDS = {
    "list": Command("List the machines that can be simulated.", act=_calls("list_machines"), examples=("",)),
    "create": _command(
        "Create a machine.",
        _calls("create_machine"),
        _argument("name", "A name from `simulate list`, or a path to a YAML file.", "MACHINE"),
        _option("cdi_hook", "Put nvidia-cdi-hook among the programs of the NVIDIA driver.", bool, shown="no"),
        _option("device_nodes", "auto, real (needs root) or described.", default="auto"),
        about="A machine of that name that is there already is kept. The directory is empty, or does not exist yet.",
        example="dgx-h100 --simulator-dir /tmp/machine",
    ),
    "show": _command("Show the machine and its GPUs.", _calls("show"), example=""),
    "lose": _command(
        "Let a GPU fall off the bus: Xid 79, then GPU_IS_LOST.", _calls("lose"), _GPU, example="gpu-6b45fc99"
    ),
    "restore": _command("Bring a lost GPU back.", _calls("restore"), _GPU, example="gpu-6b45fc99"),
    "xid": _command(
        "Raise an Xid error on a GPU.",
        _calls("xid"),
        _GPU,
        _number("number", "Number of the Xid error, such as 48.", "XID"),
        _option("gpu_instance", "Only this GPU instance is affected.", int, spelled=("--gi",)),
        _option("compute_instance", "Only this compute instance.", int, spelled=("--ci",)),
        example="0 79",
    ),
    "fault": _command(
        "Make calls of an NVML function fail, or slow.",
        _calls("fault"),
        _argument("function", "NVML function, such as nvmlDeviceGetUUID; * matches anything."),
        _option("code", "What it returns: a number or a name such as gpu-is-lost.", spelled=("--error",)),
        _option("delay_s", "Seconds until it returns.", float, spelled=("--delay",), default=0.0),
        _option("count", "Only this many calls.", int, shown="until cleared"),
        _option("gpu", "Only calls about this GPU: device name, index, UUID or PCI bus ID."),
        example="nvmlDeviceGetUUID --error gpu-is-lost --count 3",
    ),
    "clear-faults": _command("Remove all injected faults.", _calls("clear_faults"), example=""),
    "client": _command(
        "Simulate a program that keeps NVML open, until Ctrl-C.",
        _be_a_client,
        _argument("name", "Name of the program, such as dcgm."),
        _option("seconds", "Seconds after which it ends.", float, least=0, spelled=("--for",), shown="never"),
        about="A monitoring agent does this. While it runs, the NVIDIA driver cannot be unloaded, no GPU can be "
        "reset, and no MIG mode can be switched.",
        example="dcgm --for 60",
    ),
    "unload-driver": _command(
        "Unload the NVIDIA driver.",
        _calls("unload_driver"),
        _FORCE,
        about="Its /proc files go, calls return DRIVER_NOT_LOADED.",
        example="",
    ),
    "load-driver": _command(
        "Load the NVIDIA driver, or another version of it.",
        _calls("load_driver"),
        Flag("version", "A version of the NVIDIA driver.", count="?", shown="the one it had"),
        example="580.95.05",
    ),
    "reboot": _command(
        "Reboot the machine.",
        _calls("reboot"),
        about="It has a new boot ID, MIG devices and settings are gone, lost GPUs are back.",
        example="",
    ),
    "imex": _command(
        "Set the state of the simulated nvidia-imex.",
        _calls("imex"),
        _argument("state", "ready, initializing, hung, killed (the socket stays) or stopped."),
        _option("channels", "Number of IMEX channels of the NVIDIA driver; 0: it has none.", int, least=0),
        example="ready",
    ),
    "confidential": _command(
        "Set confidential computing and its ready state.",
        _calls("confidential_compute"),
        _argument("mode", "off, on, devtools or ppcie."),
        switch("ready", "The GPUs accept work, until a reboot."),
        example="on --ready",
    ),
    "host-devices": _command(
        "Set the device nodes for storage, RDMA, GDRCopy.",
        _calls("host_devices"),
        _argument("kinds", "gds, mofed, gdrcopy; without any, all are removed.", "KIND", "*"),
        example="gds mofed",
    ),
    "add-gpu": _command(
        "Plug a GPU in.",
        _calls("add_gpu"),
        _argument("model", "GPU model, such as h100-sxm or l40s."),
        about="NVML shows it after its next initialisation.",
        example="h100-sxm",
    ),
    "remove-gpu": _command("Pull a GPU out.", _calls("remove_gpu"), _GPU, example="0"),
    "hold": _command(
        "Let a process use a GPU.",
        _calls("hold"),
        _GPU,
        _option("pid", "Process id.", int, default=4242),
        _option("name", "Process name.", default="python3"),
        _option("gpu_instance", "It uses only this GPU instance.", int, spelled=("--gi",)),
        _option(
            "utilisation", "Percent of the time in which it keeps the GPU busy.", int, least=0, default=40
        ),
        about="Then MIG changes are refused with IN_USE.",
        example="0 --name python3",
    ),
    "release": _command(
        "End the processes that use a GPU.",
        _calls("release"),
        _GPU,
        _option("pid", "Only this process.", int, shown="all"),
        example="0",
    ),
    "reset": _command(
        "Reset a GPU.",
        _calls("reset"),
        _GPU,
        _FORCE,
        about="Pending repairs are done, volatile error counters start anew.",
        example="0",
    ),
    "ecc": _command(
        "Set a GPU's volatile ECC counters.",
        _calls("ecc"),
        _GPU,
        _option("corrected", "Errors that were corrected.", int, default=0),
        _option("uncorrected", "Errors that were not corrected.", int, default=0),
        example="0 --uncorrected 1",
    ),
    "remap": _command(
        "Set the state of a GPU's row remapping.",
        _calls("remap"),
        _GPU,
        _option("pending", "Rows wait for a reset to be remapped.", bool, shown="no"),
        _option("failed", "A row could not be remapped.", bool, shown="no"),
        example="0 --pending",
    ),
    "recovery-action": _command(
        "Let a GPU request a recovery action (Xid 154).",
        _calls("recovery_action"),
        _GPU,
        _number("action", "0 none, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset."),
        example="0 1",
    ),
    "mig": Command("MIG mode and MIG devices of a simulated GPU.", commands=_MIG),
}
