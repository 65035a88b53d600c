"""`gpu-dra-driver serviced`: say that a GPU was reset or replaced."""

from __future__ import annotations

from argparse import Namespace

from dra_driver.cli.flags import of_run
from dra_driver.cli.scratch import node_settings
from dra_driver.settings import Flag

FLAGS = (
    Flag("gpu", "The GPU: device name, UUID, index or PCI bus ID.", metavar="GPU", count="1"),
    *of_run("driver_name", "kubelet_plugins_directory_path", "config", "nvidia_driver_root"),
    *of_run("container_driver_root", "simulate", "simulator_dir", "device_names"),
)
EXAMPLES = ("gpu-6b45fc99", "0000:1b:00.0")


def serviced(given: Namespace) -> None:
    """Use it after you reset a GPU whose taint `xid` or `ecc` stays because the NVIDIA driver reports neither a
    recovery action nor the reset. gpu-dra-driver ends these reasons with the next poll that finds the GPU well. It
    fails if no reason of the GPU waits for a reset. Run it as root on the node, or with kubectl exec in the pod of
    gpu-dra-driver.
    """
    from dra_driver.app.commands.serviced import serviced_gpu

    print(serviced_gpu(node_settings(given), given.gpu))
