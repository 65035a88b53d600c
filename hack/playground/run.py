"""`make playground`: runs a node to experiment with, until Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import Any

from dra_driver.app.config_file import read_document
from dra_driver.app.logs import SignalWatch, configure_logs
from dra_driver.app.settings import config_values
from dra_driver.cli.scratch import scratch_directory
from dra_driver.cli.validation.rules.classes import standard_classes
from dra_driver.model.ids import gpu_device_names
from playground.node import DRIVER, PlaygroundNode
from playground.pods import PodLoop


def run(machine: str, config: Path | None, log_level: str) -> None:
    """Run the real daemon on a simulated machine, with an API server, a scheduler and a kubelet, until Ctrl-C."""
    ended = threading.Event()
    SignalWatch().on(ended.set, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    configure_logs(log_level, "console")
    with scratch_directory("run") as scratch, ExitStack() as stack:
        node = stack.enter_context(
            PlaygroundNode(Path(scratch), machine, name="playground-node", cdi_hook=True)
        )
        changes: dict[str, Any] = {"log_level": log_level, "log_format": "console"}
        if config is not None:
            node.options["--config"] = str(config.resolve())
            changes |= config_values(read_document(config), config)
        node.configure_runtime()
        _fit_classes(node, changes)
        node.start_mps_host()
        driver = node.make_driver(**changes)
        stack.callback(driver.stop)
        driver.start()
        node.kubelet.wait_registered(DRIVER)
        stack.enter_context(PodLoop(node, _tell))
        programs = Path(sys.executable).parent
        exports = [f"export {name}={quote(value)}\n" for name, value in node.environment().items()]
        (node.root / "env").write_text("".join([*exports, f"export PATH={quote(str(programs))}:$PATH\n"]))
        _tell(_welcome(node, machine))
        ended.wait()
        _tell("\nstopping and removing everything")


def _fit_classes(node: PlaygroundNode, changes: Mapping[str, Any]) -> None:
    """Create the classes of an installation for this machine and configuration, with nvidia.com/gpu for whole GPUs."""
    server, resource = node.server, node.server.resource("deviceclasses")
    state = node.machine.current()
    profiles = {row.name for gpu in state.present for row in state.model_of(gpu).mig}
    found = dict(standard_classes(DRIVER, profiles))
    found["gpu.nvidia.com"]["spec"]["extendedResourceName"] = "nvidia.com/gpu"
    for name, setting in (("shares.gpu.nvidia.com", "sharing"), ("vfio.gpu.nvidia.com", "passthrough")):
        if not changes.get(setting):
            del found[name]
    for entry in server.objects("deviceclasses"):
        server.operations.delete(resource, ("", entry["metadata"]["name"]), {})
    for entry in found.values():
        server.add("deviceclasses", entry, group="resource.k8s.io")


def _tell(line: str) -> None:
    print(line, flush=True)


def _welcome(node: PlaygroundNode, machine: str) -> str:
    here = Path.cwd()
    examples = Path(__file__).resolve().parents[2] / "examples"
    shown = quote(str(examples.relative_to(here) if examples.is_relative_to(here) else examples))
    uuids = [gpu.uuid for gpu in node.machine.current().present]
    gpu = gpu_device_names(uuids)[uuids[0]]
    return f"""\
A node with the simulated machine {machine} is running. In another terminal:

  cd {quote(str(here))}
  . {quote(str(node.root / "env"))}

1. See what the node publishes:
  kubectl get resourceslices -o yaml
  gpu-dra-driver inspect

2. Run a pod with one GPU, and see which claim has the GPU. This terminal shows the steps of the pod:
  kubectl apply -f {shown}/one-gpu
  kubectl wait --for=condition=Ready pod/one-gpu
  kubectl describe pod one-gpu
  gpu-dra-driver claims
  gpu-dra-driver cluster

3. Break a GPU, and see its health, its taints and the events:
  gpu-dra-driver simulate lose {gpu}
  gpu-dra-driver top --once
  kubectl get resourceslices -o jsonpath='{{.items[*].spec.devices[*].taints}}'
  kubectl events
  gpu-dra-driver cluster

4. Repair the GPU, and delete the pod:
  gpu-dra-driver simulate restore {gpu}
  gpu-dra-driver cluster
  kubectl delete -f {shown}/one-gpu

Press Ctrl-C to stop.
"""
