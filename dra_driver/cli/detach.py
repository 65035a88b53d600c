"""`gpu-dra-driver detach`: close NVML on this node for a while."""

from __future__ import annotations

import re
from argparse import Namespace

from dra_driver.cli.flags import of_run, switch
from dra_driver.cli.scratch import node_settings
from dra_driver.errors import InvalidConfigError
from dra_driver.settings import Flag

_DURATION = re.compile(r"([0-9]{1,5})([smh])\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_LEAST_S, _MOST_S = 10, 24 * 3600


FLAGS = (
    Flag(
        "gpus",
        "The GPUs to be changed: device name, UUID, index or PCI bus ID. Claims on others do not count.",
        metavar="GPU",
        shown="all",
        count="*",
    ),
    Flag(
        "duration",
        "How long, such as 90s, 5m or 2h; 10s to 24h.",
        spelled=("--for",),
        env=(),
        metavar="TIME",
        shown="5m",
    ),
    switch("force", "Detach even if claims use the GPUs."),
    switch("end", "End the detachment now."),
    *of_run("driver_name", "kubelet_plugins_directory_path", "config", "nvidia_driver_root"),
    *of_run("container_driver_root", "simulate", "simulator_dir", "device_names"),
)
EXAMPLES = ("0000:1b:00.0 --for 10m", "--end")


def detach(given: Namespace) -> None:
    """Then GPUs can be reset, MIG modes switched and the NVIDIA driver unloaded. Returns when every instance of
    gpu-dra-driver on this node has closed NVML. No device is offered until the time is over; then gpu-dra-driver opens
    NVML again, and sets time slices and compute modes again. Refused while claims use the GPUs. Run it as root on the
    node, or with kubectl exec in the pod of gpu-dra-driver.
    """
    from dra_driver.app.commands.detach import attach_node, detach_node

    if given.end and (given.gpus or given.force or given.duration is not None):
        raise InvalidConfigError("--end ends all of it: leave out GPUs, --for and --force")
    seconds = _seconds("5m" if given.duration is None else given.duration)
    settings = node_settings(given)
    if given.end:
        print(attach_node(settings))
    else:
        print(detach_node(settings, seconds, given.gpus or [], force=given.force))


def _seconds(duration: str) -> int:
    match = _DURATION.match(duration)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not _LEAST_S <= seconds <= _MOST_S:
        raise InvalidConfigError(f"--for {duration}: give a time from 10s to 24h, such as 90s, 5m or 2h")
    return seconds
