"""`gpu-dra-driver simulate`: create simulated machines, and do to them what happens to real ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Make simulated machines, and break and heal them.\n\nFor tests, and for clusters without GPUs.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
mig_app = typer.Typer(help="MIG mode and MIG devices of a simulated GPU.", no_args_is_help=True)
app.add_typer(mig_app, name="mig")

Directory = Annotated[
    Path,
    typer.Option("--simulator-dir", envvar="SIMULATOR_DIR", help="Directory of the simulated machine."),
]
GpuArgument = Annotated[
    str, typer.Argument(metavar="GPU", help="Device name, index, UUID or PCI bus ID of the GPU.")
]
Force = Annotated[bool, typer.Option("--force", help="Also while programs have NVML open.")]
_LONGEST_S = 365 * 86400.0
DEFAULT_DIRECTORY = Path("/var/lib/gpu-dra-simulator")


def _table(rows: list[dict[str, str]], *, drop: Sequence[str] = (), cut: Sequence[str] = ()) -> None:
    """A column for each key. Where the terminal is narrow, those of `drop` go, the first one first, and those of `cut`
    are shortened."""
    from dra_driver.cli.tables import terminal_width
    from dra_driver.diagnostics.rules.tables import Column, table

    if rows:
        order = {key: len(drop) - index for index, key in enumerate(drop)}
        columns = [
            Column(key.upper(), drop=order.get(key, 0), cut=12 if key in cut else 0) for key in rows[0]
        ]
        typer.echo(table(columns, [list(row.values()) for row in rows], terminal_width()), nl=False)


@app.command("list")
def list_machines() -> None:
    """List the machines that can be simulated."""
    from dra_driver.simulator import commands

    _table(commands.list_machines(), cut=["description"])


@app.command()
def create(
    machine: Annotated[str, typer.Argument(help="A name from `simulate list`, or a path to a YAML file.")],
    directory: Directory = DEFAULT_DIRECTORY,
    cdi_hook: Annotated[
        bool, typer.Option(help="Put an nvidia-cdi-hook into the driver's programs.")
    ] = False,
    device_nodes: Annotated[str, typer.Option(help="auto, real (needs root) or described.")] = "auto",
) -> None:
    """Create a machine.

    One of the same name that is there is kept as it is.
    """
    from dra_driver.simulator import commands

    typer.echo(commands.create_machine(machine, directory, cdi_hook=cdi_hook, device_nodes=device_nodes))


@app.command()
def show(directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Show the machine and its GPUs."""
    from dra_driver.simulator import commands

    title, rows = commands.show(directory)
    typer.echo(title)
    _table(rows, drop=["uuid", "minor", "model"])


@app.command()
def lose(gpu: GpuArgument, directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Let a GPU fall off the bus: Xid 79, then GPU_IS_LOST."""
    from dra_driver.simulator import commands

    typer.echo(commands.lose(directory, gpu))


@app.command()
def restore(gpu: GpuArgument, directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Bring a lost GPU back."""
    from dra_driver.simulator import commands

    typer.echo(commands.restore(directory, gpu))


@app.command()
def xid(
    gpu: GpuArgument,
    number: Annotated[int, typer.Argument(metavar="XID", help="Number of the Xid error, such as 48.")],
    gpu_instance: Annotated[
        int | None, typer.Option("--gi", help="Only this GPU instance is affected.")
    ] = None,
    compute_instance: Annotated[int | None, typer.Option("--ci", help="Only this compute instance.")] = None,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Raise an Xid error on a GPU."""
    from dra_driver.simulator import commands

    typer.echo(commands.xid(directory, gpu, number, gpu_instance, compute_instance))


@app.command()
def fault(
    function: Annotated[
        str, typer.Argument(help="NVML function, such as nvmlDeviceGetUUID; * matches anything.")
    ],
    error: Annotated[
        str | None, typer.Option(help="What it answers: a number or a name such as gpu-is-lost.")
    ] = None,
    delay: Annotated[float, typer.Option(help="Seconds by which the answer is late.")] = 0.0,
    count: Annotated[int | None, typer.Option(help="Only this many calls; default: until cleared.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Only calls about this GPU: device name, index, UUID or PCI bus ID.")
    ] = None,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Make calls of an NVML function fail, or slow."""
    from dra_driver.simulator import commands

    typer.echo(commands.fault(directory, function, code=error, delay_s=delay, count=count, gpu=gpu))


@app.command("clear-faults")
def clear_faults(directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Remove all injected faults."""
    from dra_driver.simulator import commands

    typer.echo(commands.clear_faults(directory))


@app.command()
def client(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the program, such as dcgm.")],
    seconds: Annotated[
        float | None, typer.Option("--for", min=0, help="Seconds after which it ends. [default: never]")
    ] = None,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Be a program that keeps NVML open, until Ctrl-C.

    As a monitoring agent does. While it runs, the driver cannot be unloaded, no GPU be reset, and no MIG mode be
    switched.
    """
    import signal

    from dra_driver.simulator import commands

    stopped = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stopped)
    with ExitStack() as session:
        typer.echo(session.enter_context(commands.client(directory, name)))
        signal.sigtimedwait(stopped, _LONGEST_S if seconds is None else seconds)


@app.command("unload-driver")
def unload_driver(force: Force = False, directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Unload the NVIDIA driver.

    Its /proc files go, calls answer DRIVER_NOT_LOADED.
    """
    from dra_driver.simulator import commands

    typer.echo(commands.unload_driver(directory, force=force))


@app.command("load-driver")
def load_driver(
    version: Annotated[str | None, typer.Argument(help="A driver version; default: the one it had.")] = None,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Load the NVIDIA driver, or another version of it."""
    from dra_driver.simulator import commands

    typer.echo(commands.load_driver(directory, version))


@app.command()
def reboot(directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Reboot the machine.

    It has a new boot ID, MIG devices and settings are gone, lost GPUs are back.
    """
    from dra_driver.simulator import commands

    typer.echo(commands.reboot(directory))


@app.command()
def imex(
    state: Annotated[
        str, typer.Argument(help="ready, initializing, hung, killed (the socket stays) or stopped.")
    ],
    channels: Annotated[
        int | None, typer.Option(min=0, help="How many IMEX channels the driver has; 0: it knows none.")
    ] = None,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Say what nvidia-imex of a machine in a fabric does."""
    from dra_driver.simulator import commands

    typer.echo(commands.imex(directory, state, channels))


@app.command("confidential")
def confidential(
    mode: Annotated[str, typer.Argument(help="off, on, devtools or ppcie.")],
    ready: Annotated[
        bool, typer.Option("--ready/--not-ready", help="Whether the GPUs accept work; a reboot ends that.")
    ] = False,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Set confidential computing and its ready state."""
    from dra_driver.simulator import commands

    typer.echo(commands.confidential_compute(directory, mode, ready=ready))


@app.command("host-devices")
def host_devices(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KIND]...", help="Of gds, mofed and gdrcopy; none: take all away."),
    ] = None,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Give the machine nodes for storage, RDMA, GDRCopy."""
    from dra_driver.simulator import commands

    typer.echo(commands.host_devices(directory, kinds or []))


@app.command("add-gpu")
def add_gpu(
    model: Annotated[str, typer.Argument(help="GPU model, such as h100-sxm or l40s.")],
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Plug a GPU in.

    NVML sees it after it is initialised anew.
    """
    from dra_driver.simulator import commands

    typer.echo(commands.add_gpu(directory, model))


@app.command("remove-gpu")
def remove_gpu(gpu: GpuArgument, directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Pull a GPU out."""
    from dra_driver.simulator import commands

    typer.echo(commands.remove_gpu(directory, gpu))


@app.command()
def hold(
    gpu: GpuArgument,
    pid: Annotated[int, typer.Option(help="Process id.")] = 4242,
    name: Annotated[str, typer.Option(help="Process name.")] = "python3",
    gpu_instance: Annotated[int | None, typer.Option("--gi", help="It uses only this GPU instance.")] = None,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Let a process use a GPU.

    Then MIG changes are refused with IN_USE.
    """
    from dra_driver.simulator import commands

    typer.echo(commands.hold(directory, gpu, pid, name, gpu_instance))


@app.command()
def release(
    gpu: GpuArgument,
    pid: Annotated[int | None, typer.Option(help="Only this process; default: all.")] = None,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """End the processes that use a GPU."""
    from dra_driver.simulator import commands

    typer.echo(commands.release(directory, gpu, pid))


@app.command()
def reset(gpu: GpuArgument, force: Force = False, directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Reset a GPU.

    Pending repairs are done, volatile error counters start anew.
    """
    from dra_driver.simulator import commands

    typer.echo(commands.reset(directory, gpu, force=force))


@app.command()
def ecc(
    gpu: GpuArgument,
    corrected: Annotated[int, typer.Option(help="Errors that were corrected.")] = 0,
    uncorrected: Annotated[int, typer.Option(help="Errors that were not.")] = 0,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Set a GPU's volatile ECC counters."""
    from dra_driver.simulator import commands

    typer.echo(commands.ecc(directory, gpu, corrected, uncorrected))


@app.command()
def remap(
    gpu: GpuArgument,
    pending: Annotated[bool, typer.Option(help="Rows wait for a reset to be remapped.")] = False,
    failed: Annotated[bool, typer.Option(help="A row could not be remapped.")] = False,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Set the state of a GPU's row remapping."""
    from dra_driver.simulator import commands

    typer.echo(commands.remap(directory, gpu, pending=pending, failed=failed))


@app.command("recovery-action")
def recovery_action(
    gpu: GpuArgument,
    action: Annotated[
        int, typer.Argument(help="0 none, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset.")
    ],
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Let a GPU ask for a recovery action (Xid 154)."""
    from dra_driver.simulator import commands

    typer.echo(commands.recovery_action(directory, gpu, action))


@mig_app.command("enable")
def mig_enable(gpu: GpuArgument, force: Force = False, directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Switch MIG mode on."""
    from dra_driver.simulator import commands

    typer.echo(commands.mig_mode(directory, gpu, True, force=force))


@mig_app.command("disable")
def mig_disable(gpu: GpuArgument, force: Force = False, directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Switch MIG mode off."""
    from dra_driver.simulator import commands

    typer.echo(commands.mig_mode(directory, gpu, False, force=force))


@mig_app.command("create")
def mig_create(
    gpu: GpuArgument,
    profile: Annotated[str, typer.Argument(help="MIG profile, such as 1g.10gb.")],
    start: Annotated[int, typer.Argument(help="First memory slice.")],
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Create a MIG device at a placement."""
    from dra_driver.simulator import commands

    typer.echo(commands.mig_create(directory, gpu, profile, start))


@mig_app.command("destroy")
def mig_destroy(
    gpu: GpuArgument,
    gpu_instance: Annotated[int, typer.Argument(metavar="GI", help="Id of the GPU instance.")],
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Destroy a GPU instance with everything in it."""
    from dra_driver.simulator import commands

    typer.echo(commands.mig_destroy(directory, gpu, gpu_instance))


@mig_app.command("profiles")
def mig_profiles(gpu: GpuArgument, directory: Directory = DEFAULT_DIRECTORY) -> None:
    """List the MIG profiles of a GPU with their placements."""
    from dra_driver.simulator import commands

    _table(commands.mig_profiles(directory, gpu))
