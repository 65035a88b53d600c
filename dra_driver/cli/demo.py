"""`gpu-dra-driver demo`: the real daemon on a simulated machine, with an embedded API server and kubelet."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from dra_driver.cli.scratch import scratch_directory

JsonObject = dict[str, Any]

_DRIVER = "gpu.nvidia.com"
_NODE = "demo-node"
_NAMESPACE = "default"
_WAIT_S = 20.0


def demo(
    machine: Annotated[
        str, typer.Option("--simulate", metavar="MACHINE", help="A machine with NVLink and MIG.")
    ] = "dgx-h100",
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Keep sockets, specs and records below this directory.")
    ] = None,
) -> None:
    """Show a GPU node at work, without GPU, cluster or root: devices, claims, CDI specs, a refusal, clean-up."""
    from dra_driver.logs import configure_logs

    configure_logs("critical", "console")
    with scratch_directory("demo") as scratch:
        root = keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            _Demo(root, machine, stack).play()


class _Demo:
    """One run of the demo: a node below `root`, everything stopped when `stack` is closed."""

    def __init__(self, root: Path, machine: str, stack: ExitStack) -> None:
        from dra_driver.app.driver import Driver
        from dra_driver.embedded.apiserver.server import EmbeddedApiServer
        from dra_driver.embedded.kubelet import EmbeddedKubelet
        from dra_driver.embedded.scheduler import EmbeddedScheduler
        from dra_driver.settings import Settings

        self._root = root
        self._machine_name = machine
        self._simulator_dir = root / "machine"
        self._registry = root / "plugins_registry"
        self._registry.mkdir(exist_ok=True)
        self._partition_one_gpu()
        self._server = stack.enter_context(EmbeddedApiServer())
        self._server.add("nodes", {"metadata": {"name": _NODE}})
        self._server.write_kubeconfig(root / "kubeconfig")
        self._add_classes()
        self._scheduler = EmbeddedScheduler(self._server)
        self._kubelet = EmbeddedKubelet(self._registry)
        self._kubelet.start()
        stack.callback(self._kubelet.stop)
        settings = Settings(
            node_name=_NODE,
            cdi_root=str(root / "cdi"),
            kubelet_registrar_directory_path=str(self._registry),
            kubelet_plugins_directory_path=str(root / "plugins"),
            kubeconfig=str(root / "kubeconfig"),
            simulate=machine,
            simulator_dir=str(self._simulator_dir),
        )
        self._driver = Driver(settings)
        stack.callback(self._driver.stop)

    def play(self) -> None:
        """Every scene in order; an expectation that does not hold ends the demo with an error."""
        self._publish()
        self._prepare_two_gpus()
        self._prepare_mig()
        self._refuse_double_allocation()
        self._take_back()

    def _partition_one_gpu(self) -> None:
        """The last GPU gets two MIG devices before the driver starts, as an administrator would make them."""
        from dra_driver.simulator import create_machine

        machine = create_machine(self._machine_name, self._simulator_dir)
        last = len(machine.describe()) - 1
        machine.set_mig_mode(last, on=True)
        machine.create_mig(last, "1g.10gb", 0)
        machine.create_mig(last, "3g.40gb", 4)

    def _publish(self) -> None:
        from dra_driver.cli.tables import device_table

        started = time.monotonic()
        self._driver.start()
        self._kubelet.wait_registered(_DRIVER, timeout_s=_WAIT_S)
        registered = time.monotonic() - started
        _wait("the slices to be published", lambda: bool(self._devices()))
        published = time.monotonic() - started
        _scene(1, f"The node publishes its devices ({self._machine_name}, last GPU partitioned)")
        typer.echo(device_table(self._devices()), nl=False)
        typer.echo(
            f"\n  registered with the kubelet after {registered:.2f} s, published after {published:.2f} s"
        )

    def _prepare_two_gpus(self) -> None:
        _scene(2, "A claim for two GPUs in one NVLink domain")
        spec = {
            "devices": {
                "requests": [{"name": "gpus", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 2}}],
                "constraints": [{"requests": ["gpus"], "matchAttribute": "gpu.nvidia.com/nvlinkDomain"}],
            }
        }
        self._claim_and_prepare("training", spec)
        self._show_spec("training")

    def _prepare_mig(self) -> None:
        _scene(3, "A claim for a MIG device with at least 30Gi")
        expression = "device.attributes['gpu.nvidia.com'].profile == '3g.40gb'"
        request = {"deviceClassName": "mig.nvidia.com", "selectors": [{"cel": {"expression": expression}}]}
        self._claim_and_prepare("inference", {"devices": {"requests": [{"name": "mig", "exactly": request}]}})
        self._show_spec("inference")

    def _refuse_double_allocation(self) -> None:
        from dra_driver.model.claim import Failed

        _scene(4, "A scheduler gives a GPU out twice: the driver refuses and names the holder")
        taken = self._claim("training")["status"]["allocation"]["devices"]["results"][0]
        spec = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}}
        allocation = {"devices": {"results": [{**taken, "request": "gpu"}]}}
        self._add_claim("thief", spec, {"allocation": allocation})
        outcome = self._call("prepare", "thief")
        _expect(isinstance(outcome, Failed), "the second claim was not refused")
        typer.echo(f"  {outcome.error}")

    def _take_back(self) -> None:
        _scene(5, "Unprepare, and nothing is left")
        for name in ("training", "inference", "thief"):
            outcome = self._call("unprepare", name)
            _expect(outcome is None, f"unprepare of {name} failed: {outcome}")
            typer.echo(f"  unprepared {_NAMESPACE}/{name}")
        self._driver.stop()
        left = [*(self._root / "cdi").glob("*"), *(self._root / "plugins" / _DRIVER / "claims").glob("[!.]*")]
        left += [path for path in self._root.rglob("*.sock") if self._simulator_dir not in path.parents]
        _expect(not left, f"something is left: {left}")
        typer.echo("  CDI specs: 0   claim records: 0   sockets after the driver's stop: 0")
        typer.echo(
            "\nThat was the real daemon; only the hardware, the API server and the kubelet were stand-ins."
        )

    def _add_classes(self) -> None:
        for kind in ("gpu", "mig"):
            expression = f"device.driver == '{_DRIVER}' && device.attributes['{_DRIVER}'].type == '{kind}'"
            self._server.add(
                "deviceclasses",
                {
                    "metadata": {"name": f"{kind}.nvidia.com"},
                    "spec": {"selectors": [{"cel": {"expression": expression}}]},
                },
                group="resource.k8s.io",
            )

    def _devices(self) -> list[JsonObject]:
        slices = self._server.objects("resourceslices")
        return [device for entry in slices for device in entry["spec"].get("devices", [])]

    def _add_claim(self, name: str, spec: JsonObject, status: JsonObject | None = None) -> None:
        claim: JsonObject = {"metadata": {"name": name, "namespace": _NAMESPACE}, "spec": spec}
        if status is not None:
            claim["status"] = status
        self._server.add("resourceclaims", claim, group="resource.k8s.io")

    def _claim(self, name: str) -> JsonObject:
        return next(
            claim for claim in self._server.objects("resourceclaims") if claim["metadata"]["name"] == name
        )

    def _call(self, action: str, name: str) -> Any:
        """The driver's outcome for one claim, through its socket."""
        from dra_driver.model.claim import ClaimRef

        uid = self._claim(name)["metadata"]["uid"]
        call = self._kubelet.prepare if action == "prepare" else self._kubelet.unprepare
        return call(_DRIVER, [ClaimRef(_NAMESPACE, name, uid)])[uid]

    def _claim_and_prepare(self, name: str, spec: JsonObject) -> None:
        from dra_driver.model.claim import Failed

        self._add_claim(name, spec)
        # A claim that no pod uses would be about to leave its devices.
        pod = {"metadata": {"name": name, "uid": f"{name}-pod"}}
        self._scheduler.allocate_claim(_NAMESPACE, name, pod=pod)
        started = time.monotonic()
        outcome = self._call("prepare", name)
        duration_ms = (time.monotonic() - started) * 1000
        if isinstance(outcome, Failed):
            _expect(False, outcome.error)
        typer.echo(f"  prepared {_NAMESPACE}/{name} in {duration_ms:.0f} ms:")
        for device in outcome.devices:
            typer.echo(f"    {device.device}  ->  {', '.join(device.cdi_ids)}")

    def _show_spec(self, name: str) -> None:
        """The part of the CDI spec that is particular to the claim, and how much is common."""
        import json

        uid = self._claim(name)["metadata"]["uid"]
        file = next((self._root / "cdi").glob(f"*{uid}*"))
        spec = json.loads(file.read_text())
        common = spec["containerEdits"]
        typer.echo(f"  CDI spec {file.name} (cdiVersion {spec['cdiVersion']}):")
        nodes = ", ".join(node["path"] for node in common["deviceNodes"])
        typer.echo(f"    every container: {nodes}; {len(common['mounts'])} driver files; {common['env'][0]}")
        for device in spec["devices"]:
            nodes = ", ".join(node["path"] for node in device["containerEdits"]["deviceNodes"])
            typer.echo(f"    {device['name'].removeprefix(uid + '-')}: {nodes}")


def _scene(number: int, title: str) -> None:
    typer.echo(f"\n{number}. {title}\n")


def _expect(holds: bool, otherwise: str) -> None:
    from dra_driver.errors import FatalError

    if not holds:
        raise FatalError(f"demo: {otherwise}")


def _wait(what: str, done: Any) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not done():
        _expect(time.monotonic() < deadline, f"waited {_WAIT_S:.0f} s for {what}")
        time.sleep(0.01)
