"""`gpu-dra-driver serviced`."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence

from dra_driver.app.settings import Flag, Settings
from dra_driver.cli.detach import chosen_gpus
from dra_driver.cli.flags import OF_NODE
from dra_driver.cli.machine import CommandMachine
from dra_driver.cli.scratch import node_settings
from dra_driver.errors import PermanentError, RetryableError
from dra_driver.health.rules.state import waits_for_reset
from dra_driver.health.store import ServicedGpus
from dra_driver.model.health import Reason
from dra_driver.reporting.node_problems import read_problems

FLAGS = (
    Flag("gpu", "The GPU: device name, UUID, index or PCI bus ID.", metavar="GPU", count="1"),
    *OF_NODE,
)
EXAMPLES = ("gpu-6b45fc99", "0000:1b:00.0")


def serviced(given: Namespace) -> None:
    """Use this command after you reset a GPU whose taint `xid` or `ecc` stays, because the NVIDIA driver reports
    neither a recovery action nor the reset. gpu-dra-driver clears these reasons at the next poll that finds the GPU
    healthy. The command fails if the GPU has no reason that waits for a reset. Run it as root on the node, or with
    kubectl exec in the pod of gpu-dra-driver.
    """

    print(serviced_gpu(node_settings(given), given.gpu))


_TIMEOUT_S = 30.0
"""The plugin reads the list of serviced GPUs every 5 s, and polls a GPU every 10 s."""
_POLL_S = 0.1


def serviced_gpu(settings: Settings, name: str) -> str:
    """Wait until the plugin has cleared the reasons of a GPU that wait for a reset; returns a text for the user.

    Raises: InvalidConfigError for an unknown GPU; RetryableError if the plugin does not run, or does not clear them;
    PermanentError if there are none; StateError.
    """
    machine = CommandMachine(settings)
    [uuid] = chosen_gpus(machine, [name])
    waiting = [reason for reason in _reasons(machine, uuid) if waits_for_reset(reason)]
    if not waiting:
        others = "; ".join(reason.text for reason in _reasons(machine, uuid))
        health = (
            f"the GPU is still not healthy: {others}"
            if others
            else "gpu-dra-driver reports the GPU as healthy"
        )
        raise PermanentError(f"GPU {uuid} has no health reason that waits for a reset; {health}")
    if not read_problems(settings.plugin_directory)[0]:
        raise RetryableError("gpu-dra-driver is not running on this node; start it, then retry")
    serviced = ServicedGpus(settings.plugin_directory, machine.sysfs.this_boot())
    # Times are whole seconds, and an event in the same second as `at` counts as later.
    time.sleep(1 - time.time() % 1)
    at = int(time.time())
    serviced.add(uuid, at)
    ended = {reason.name: reason.text for reason in waiting}
    until = time.monotonic() + _TIMEOUT_S
    while left := [r for r in _reasons(machine, uuid) if r.name in ended and r.last_at < at]:
        if time.monotonic() >= until:
            raise RetryableError(
                f"the plugin still reports for GPU {uuid}: {'; '.join(reason.text for reason in left)}; this clears "
                "when the GPU answers, NVML requests no action, and no memory repair waits for a reset"
            )
        time.sleep(_POLL_S)
    return f"GPU {uuid}: cleared: {'; '.join(text.partition('; ')[0] for text in ended.values())}"


def _reasons(machine: CommandMachine, uuid: str) -> Sequence[Reason]:
    return [
        reason
        for state in machine.state().health.states
        if state.target.gpu_uuid == uuid
        for reason in state.reasons
    ]
