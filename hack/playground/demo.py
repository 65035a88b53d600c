"""`make demo`: shows a GPU node in operation, in the scenes that the machine supports, and removes everything again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra_driver.app.daemon import Driver
from dra_driver.app.logs import configure_logs
from dra_driver.cli.output import device_table, hanging, terminal_width
from dra_driver.cli.scratch import scratch_directory
from dra_driver.errors import FatalError
from dra_driver.model.claim import ClaimRef, Failed
from playground import PATIENCE_S
from playground.node import DRIVER, JsonObject, PlaygroundNode

_NAMESPACE = "default"
_LONG = 3
"""The number of a long time slice in nvidia-smi."""
_LONG_SLICES = {
    "apiVersion": "resource.nvidia.com/v1beta1",
    "kind": "GpuConfig",
    "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}},
}


def demo(machine: str) -> None:
    """Show a GPU node in operation, without a GPU, cluster or root: devices, claims, CDI specs, a refusal, cleanup."""
    configure_logs("critical", "console")
    with scratch_directory("demo") as root, PlaygroundNode(Path(root), machine, name="demo-node") as node:
        _partition_one_gpu(node)
        driver = node.make_driver()
        try:
            _Demo(node, driver).play()
        finally:
            driver.stop()


def _partition_one_gpu(node: PlaygroundNode) -> None:
    """Create two MIG devices before the driver starts, as an administrator would, unless the machine has some.

    On the last MIG-capable GPU, create the smallest MIG device, and one of half the GPU at the last placement.
    """
    machine, state = node.machine, node.machine.current()
    capable = [gpu for gpu in state.present if state.model_of(gpu).mig]
    if not capable or any(gpu.instances for gpu in capable):
        return
    gpu = capable[-1]
    profiles = [row for row in state.model_of(gpu).mig if not set("+-") & set(row.name)]
    half = next(row for row in profiles if row.size * 2 == profiles[-1].size)
    if machine.set_mig_mode(gpu.uuid, on=True):
        machine.reboot()  # a virtual machine cannot reset its GPU
    machine.create_mig(gpu.uuid, profiles[0].name, profiles[0].starts[0])
    machine.create_mig(gpu.uuid, half.name, half.starts[-1])


class _Demo:
    """A run of the demo. A failed expectation ends it with an error."""

    def __init__(self, node: PlaygroundNode, driver: Driver) -> None:
        self._node, self._driver = node, driver
        self._scenes = 0

    def play(self) -> None:
        """Show all scenes that the machine supports."""
        started = time.monotonic()
        self._driver.start()
        self._node.kubelet.wait_registered(DRIVER)
        registered = time.monotonic() - started
        _wait("the slices to be published", lambda: bool(self._node.devices()))
        published = time.monotonic() - started
        self._scene(f"The node publishes its devices ({self._node.settings.simulate})")
        print("\n".join(device_table(self._node.devices(), terminal_width())))
        print(f"\n  registered with the kubelet after {registered:.2f} s, published after {published:.2f} s")
        self._claim_gpus()
        if profiles := self._published("mig", "profile"):
            self._scene(f"A claim for a MIG device by its profile, {profiles[-1]}")
            expression = f"device.attributes['{DRIVER}'].profile == '{profiles[-1]}'"
            self._prepare("inference", "mig.nvidia.com", selectors=[{"cel": {"expression": expression}}])
            self._show_spec("inference")
        if set(self._published("gpu", "uuid")) - self._uuids_of("training"):
            self._scene("A claim for a GPU with long time slices, for pods that share it")
            config = [{"requests": ["gpu"], "opaque": {"driver": DRIVER, "parameters": _LONG_SLICES}}]
            self._prepare("notebooks", of_devices={"config": config})
            [uuid] = self._uuids_of("notebooks")
            _expect(self._node.machine.timeslice(uuid) == _LONG, "the GPU does not use long time slices")
            print("    the GPU now uses long time slices")
        self._refuse_double_allocation()
        self._unprepare_all()

    def _claim_gpus(self) -> None:
        domains, free = self._published("gpu", "nvlinkDomain"), len(self._published("gpu", "uuid"))
        constraints = {}
        if len(domains) > len(set(domains)):
            self._scene("A claim for two GPUs in one NVLink domain")
            constraints = {"constraints": [{"requests": ["gpu"], "matchAttribute": f"{DRIVER}/nvlinkDomain"}]}
        elif free > 1:
            self._scene("A claim for two GPUs; this machine has no NVLink between GPUs")
        else:
            self._scene("A claim for a GPU")
        self._prepare("training", of_devices=constraints, count=min(free, 2))
        self._show_spec("training")

    def _refuse_double_allocation(self) -> None:
        self._scene(
            "The scheduler allocates a GPU twice: the driver refuses the second claim and names the first"
        )
        taken = self._claims()["training"]["status"]["allocation"]["devices"]["results"][0]
        self._add_claim("thief", {}, {"allocation": {"devices": {"results": [taken]}}})
        outcome = self._call("prepare", "thief")
        _expect(isinstance(outcome, Failed), "the second claim was not refused")
        _tell("  ", outcome.error)

    def _unprepare_all(self) -> None:
        self._scene("Unprepare leaves nothing behind")
        for name in sorted(self._claims()):
            outcome = self._call("unprepare", name)
            _expect(outcome is None, f"unprepare of {name} failed: {outcome}")
            print(f"  unprepared {_NAMESPACE}/{name}")
        self._driver.stop()
        left = [*self._node.cdi.glob("*"), *(self._node.plugin_dir / "claims").glob("[!.]*")]
        for directory in (self._node.registry, self._node.plugin_dir):
            left += directory.rglob("*.sock")
        _expect(not left, f"something is left: {left}")
        print("  CDI specs: 0   claim records: 0   sockets after the driver's stop: 0")
        print(
            "\nThat was the real daemon; only the hardware, API server, scheduler and kubelet were simulated."
        )

    def _scene(self, title: str) -> None:
        self._scenes += 1
        print(f"\n{self._scenes}. {title}\n")

    def _published(self, kind: str, attribute: str) -> list[str]:
        """Return the values of this attribute on the published devices of a kind."""
        found = [device["attributes"] for device in self._node.devices()]
        return [
            one[attribute]["string"] for one in found if one["type"]["string"] == kind and attribute in one
        ]

    def _uuids_of(self, claim: str) -> set[str]:
        results = self._claims()[claim]["status"]["allocation"]["devices"]["results"]
        names = {result["device"] for result in results}
        published = [device for device in self._node.devices() if device["name"] in names]
        return {device["attributes"]["uuid"]["string"] for device in published}

    def _claims(self) -> dict[str, JsonObject]:
        return {claim["metadata"]["name"]: claim for claim in self._node.server.objects("resourceclaims")}

    def _add_claim(self, name: str, of_devices: JsonObject, status: JsonObject, **exactly: Any) -> None:
        request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", **exactly}}
        claim = {
            "metadata": {"name": name, "namespace": _NAMESPACE},
            "spec": {"devices": {"requests": [request], **of_devices}},
            "status": status,
        }
        self._node.server.add("resourceclaims", claim, group="resource.k8s.io")

    def _call(self, action: str, name: str) -> Any:
        """Call the driver for a claim through its socket, and return the outcome."""
        uid = self._claims()[name]["metadata"]["uid"]
        call = self._node.kubelet.prepare if action == "prepare" else self._node.kubelet.unprepare
        return call(DRIVER, [ClaimRef(_NAMESPACE, name, uid)])[uid]

    def _prepare(
        self, name: str, of: str = "gpu.nvidia.com", *, of_devices: JsonObject | None = None, **exactly: Any
    ) -> None:
        """Create and prepare a claim for devices of a class, and print its devices."""
        self._add_claim(name, of_devices or {}, {}, deviceClassName=of, **exactly)
        # The claim is reserved for a pod, because a claim without a pod is about to release its devices.
        pod = {"metadata": {"name": name, "uid": f"{name}-pod"}}
        self._node.scheduler.allocate_claim(_NAMESPACE, name, pod=pod)
        started = time.monotonic()
        outcome = self._call("prepare", name)
        duration_ms = (time.monotonic() - started) * 1000
        if isinstance(outcome, Failed):
            raise FatalError(outcome.error)
        print(f"  prepared {_NAMESPACE}/{name} in {duration_ms:.0f} ms:")
        for device in outcome.devices:
            print(f"    {device.device}  ->  {', '.join(device.cdi_ids)}")

    def _show_spec(self, name: str) -> None:
        """Print the claim's part of the CDI spec, and a summary of the part that all containers get."""
        uid = self._claims()[name]["metadata"]["uid"]
        file = next(self._node.cdi.glob(f"*{uid}*"))
        spec = json.loads(file.read_text())
        common = spec["containerEdits"]
        print(f"  CDI spec {file.name} (cdiVersion {spec['cdiVersion']}):")
        nodes = ", ".join(node["path"] for node in common["deviceNodes"])
        _tell("    every container: ", f"{nodes}; {len(common['mounts'])} driver files; {common['env'][0]}")
        for device in spec["devices"]:
            nodes = ", ".join(node["path"] for node in device["containerEdits"]["deviceNodes"])
            _tell(f"    {device['name'].removeprefix(uid + '-')}: ", nodes)


def _tell(prefix: str, text: str) -> None:
    print(hanging(prefix, text, terminal_width()))


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise FatalError(otherwise)


def _wait(what: str, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        _expect(time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s for {what}")
        time.sleep(0.01)
