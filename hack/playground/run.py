"""`make playground`: a node to play with, until Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dra_driver.app.config_file import read_document
from dra_driver.app.logs import configure_logs
from dra_driver.app.posix_signals import SignalWatch
from dra_driver.app.settings import config_values
from dra_driver.cli.scratch import scratch_directory
from dra_driver.cli.validation.rules.standard_classes import standard_classes
from dra_driver.model.ids import gpu_device_names
from playground.node import DRIVER, PlaygroundNode
from playground.pods import PodLoop

_WAIT_S = 20.0


def run(machine: str, config: Path | None, log_level: str) -> None:
    """Run the real daemon on a simulated machine, with an API server, a scheduler and a kubelet, until Ctrl-C."""
    ended = threading.Event()
    SignalWatch().on(ended.set, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    configure_logs(log_level, "console")
    with scratch_directory("run") as scratch, ExitStack() as stack:
        node = stack.enter_context(PlaygroundNode(Path(scratch), machine, name="playground-node"))
        changes: dict[str, Any] = {"log_level": log_level, "log_format": "console"}
        if config is not None:
            node.options["--config"] = str(config.resolve())
            changes |= config_values(read_document(config), config)
        for entry in _installed_classes():
            resource = node.server.resource("deviceclasses")
            if node.server.store.get(resource, ("", entry["metadata"]["name"])) is not None:
                node.server.operations.delete(resource, ("", entry["metadata"]["name"]), {})
            node.server.add("deviceclasses", entry, group="resource.k8s.io")
        node.start_mps_host()
        driver = node.make_driver(**changes)
        stack.callback(driver.stop)
        driver.start()
        node.kubelet.wait_registered(DRIVER, timeout_s=_WAIT_S)
        stack.enter_context(PodLoop(node, _tell))
        exports = "".join(f"export {name}={value}\n" for name, value in node.environment().items())
        (Path(scratch) / "env").write_text(exports)
        _tell(_welcome(node, machine))
        ended.wait()
        _tell("\nstopping; nothing stays behind")


def _installed_classes() -> Iterator[dict[str, Any]]:
    """Those of the chart, with the extended resources that they serve."""
    import yaml

    directory = Path(__file__).resolve().parents[2] / "daemonset"
    for file in ("install.yaml", "chart/files/mig-classes.yaml"):
        for entry in yaml.safe_load_all((directory / file).read_text()):
            if entry["kind"] == "DeviceClass":
                yield entry
    yield standard_classes(DRIVER)["shares.gpu.nvidia.com"]


def _tell(line: str) -> None:
    print(line, flush=True)


def _welcome(node: PlaygroundNode, machine: str) -> str:
    here = Path.cwd()
    program = Path(sys.executable).parent / "gpu-dra-driver"
    program = program.relative_to(here) if program.is_relative_to(here) else program
    examples = Path(__file__).resolve().parents[2] / "examples"
    examples = examples.relative_to(here) if examples.is_relative_to(here) else examples
    uuids = [gpu.uuid for gpu in node.machine.current().present]
    gpu = gpu_device_names(uuids)[uuids[0]]
    return f"""\
A node with the simulated machine {machine} is up. In another terminal:

  cd {here}
  . {node.root}/env

1. See what the node publishes:
  kubectl get resourceslices -o yaml
  {program} inspect

2. Run a pod with one GPU and see who holds it; this terminal shows what happens to the pod:
  kubectl apply -f {examples}/one-gpu
  kubectl wait --for=condition=Ready pod/one-gpu
  kubectl describe pod one-gpu
  {program} claims
  {program} cluster --by pod

3. Break a GPU, and see its health, its taints and the events:
  {program} simulate lose {gpu}
  {program} top --once
  kubectl get resourceslices -o jsonpath='{{.items[*].spec.devices[*].taints}}'
  kubectl events
  {program} cluster

4. Mend it, and end the pod:
  {program} simulate restore {gpu}
  {program} cluster
  kubectl delete -f {examples}/one-gpu

Ctrl-C ends it.
"""
