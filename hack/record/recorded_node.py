"""A node with something of everything on it: the daemon as a process, API server and kubelet in this one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from dra_driver.core.standardclasses import standard_classes
from dra_driver.embedded.apiserver.server import EmbeddedApiServer
from dra_driver.embedded.kubelet import EmbeddedKubelet
from dra_driver.model.claim import ClaimRef, Prepared
from dra_driver.simulator import create_machine

JsonObject = dict[str, Any]

DRIVER = "gpu.nvidia.com"
NODE = "gpu-node-1"
MACHINE = "dgx-h100"
_NAMESPACE = "ml"
_WAIT_S = 30.0
_BROKEN = 3
_UNCONTAINED_MEMORY_ERROR = 95
_CONTAINERD = """\
version = 3
[plugins."io.containerd.cri.v1.runtime"]
enable_cdi = true
cdi_spec_dirs = ["{cdi}"]
"""
_CONFIG = """\
# The seventh GPU is shared in quarters, the eighth is cut into MIG devices on demand.
sharing:
- selector: {pciBusIDs: ["0000:d1:00.0"]}
  mode: shares
  shares: 4
  enforce: mps
dynamicMig:
  enabled: true
  gpus: {pciBusIDs: ["0000:df:00.0"]}
"""


class RecordedNode:
    """Inside `with` the node is at work; `uids` are those of its claims, in the order of their making."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.uids: list[str] = []

    def __enter__(self) -> RecordedNode:
        root = self._root
        (root / "plugins_registry").mkdir()
        (root / "device-plugins").mkdir()
        (root / "config.yaml").write_text(_CONFIG)
        self._machine = create_machine(MACHINE, root / "machine", device_nodes="described", cdi_hook=True)
        runtime = self._machine.host_root / "etc/containerd/config.toml"
        runtime.parent.mkdir(parents=True)
        runtime.write_text(_CONTAINERD.format(cdi=root / "cdi"))
        self._server = EmbeddedApiServer()
        self._server.start()
        self._server.add("nodes", {"metadata": {"name": NODE}})
        self._server.add("namespaces", {"metadata": {"name": _NAMESPACE}})
        for entry in standard_classes(DRIVER).values():
            self._server.add("deviceclasses", dict(entry), group="resource.k8s.io")
        self._server.write_kubeconfig(root / "kubeconfig")
        self._kubelet = EmbeddedKubelet(root / "plugins_registry")
        self._kubelet.start()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dra_driver.cli.main", "run", *self._options()]
        )
        try:
            self._begin()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def where(self, *names: str) -> list[str]:
        """The options of a command that say where this node is, of those it has."""
        values = {
            "--node-name": NODE,
            "--kubeconfig": str(self._root / "kubeconfig"),
            "--config": str(self._root / "config.yaml"),
            "--simulate": MACHINE,
            "--simulator-dir": str(self._root / "machine"),
            "--cdi-root": str(self._root / "cdi"),
            "--kubelet-registrar-directory-path": str(self._root / "plugins_registry"),
            "--kubelet-plugins-directory-path": str(self._root / "plugins"),
        }
        return [part for name in names for part in (name, values[name])]

    def _options(self) -> Sequence[str]:
        where = self.where(
            "--node-name", "--kubeconfig", "--config", "--simulate", "--simulator-dir", "--cdi-root",
            "--kubelet-registrar-directory-path", "--kubelet-plugins-directory-path",
        )  # fmt: skip
        return [*where, "--mps-host", "child", "--healthcheck-port", "-1", "--log-level", "error"]

    def _begin(self) -> None:
        self._kubelet.wait_registered(DRIVER, timeout_s=_WAIT_S)
        gpus = [str(row["uuid"]) for row in self._machine.describe()]
        names = [f"gpu-{uuid[4:12]}" for uuid in gpus]
        small, large = f"{names[7]}-mig-1g10gb-19-0", f"{names[7]}-mig-3g40gb-9-4"
        self._wait("the devices", lambda: {*names[:7], small, large} <= self._devices())
        self._prepare("training", names[2], names[_BROKEN], pods=("training-0", "training-1"))
        self._prepare("embedding", small, pods=("embedding-7d9c5b8f64-x2k9q",))
        self._prepare("inference", large, pods=("inference-0",))
        for number in (1, 2):
            share = {
                "shareID": f"0000000{number}-1111-4222-8333-444444444444",
                "consumedCapacity": {"shares": "1"},
            }
            self._prepare(f"notebook-{number}", names[6], pods=(f"notebook-{number}",), **share)
        self._machine.set_remapped_rows(_BROKEN, uncorrectable=1, pending=True)
        self._machine.raise_xid(_BROKEN, _UNCONTAINED_MEMORY_ERROR)
        self._machine.hold_gpu(2, 4711, "python")
        wanted = {"xid", "row-remap"}
        self._wait("the broken GPU's taints", lambda: self._taints(names[_BROKEN]) >= wanted)
        # It is written after they are published, and not again until something changes.
        self._wait(
            "the kept health", lambda: {reason["key"] for reason in _reasons(self._health())} >= wanted
        )
        self._grow_old()

    def _prepare(self, name: str, *devices: str, pods: Sequence[str], **more: Any) -> None:
        results = [
            {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device, **more} for device in devices
        ]
        reserved = [{"resource": "pods", "name": pod, "uid": f"uid-of-{pod}"} for pod in pods]
        one = {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}
        stored = self._server.add(
            "resourceclaims",
            {
                "metadata": {"name": name, "namespace": _NAMESPACE},
                "spec": {"devices": one},
                "status": {"allocation": {"devices": {"results": results}}, "reservedFor": reserved},
            },
            group="resource.k8s.io",
        )
        ref = ClaimRef(_NAMESPACE, name, stored["metadata"]["uid"])
        self.uids.append(ref.uid)
        outcome = self._kubelet.prepare(DRIVER, [ref])[ref.uid]
        if not isinstance(outcome, Prepared):
            raise SystemExit(f"record: claim {name} could not be prepared: {outcome.error}")

    def _grow_old(self) -> None:
        """Let everything be some hours old, so that ages do not depend on how fast this machine is."""
        now = datetime.now(UTC)
        ages = (timedelta(days=2, hours=5), timedelta(hours=26), timedelta(hours=7, minutes=30))
        directory = self._root / "plugins" / DRIVER
        for number, uid in enumerate(self.uids):
            age = ages[number] if number < len(ages) else timedelta(minutes=50 - number, seconds=30)
            file = directory / "claims" / f"{uid}.json"
            record = json.loads(file.read_text())
            record["preparedAt"] = (now - age).isoformat(timespec="milliseconds")
            file.write_text(json.dumps(record))
        health = self._health()
        for reason in _reasons(health):
            reason["since"] = int(now.timestamp()) - 12 * 60 - 30
        (directory / "health.json").write_text(json.dumps(health))

    def _health(self) -> JsonObject:
        file = self._root / "plugins" / DRIVER / "health.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def _devices(self) -> set[str]:
        return {device["name"] for device in self._published()}

    def _taints(self, name: str) -> set[str]:
        found = (device for device in self._published() if device["name"] == name)
        return {taint["key"].partition("/")[2] for device in found for taint in device.get("taints", ())}

    def _published(self) -> list[JsonObject]:
        slices = self._server.objects("resourceslices")
        return [device for entry in slices for device in entry["spec"].get("devices", [])]

    def _wait(self, what: str, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not done():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit(f"record: waited in vain for {what}")
            time.sleep(0.01)

    def _leave(self) -> None:
        """No MPS daemon may outlive the node."""
        try:
            if self.uids:
                self._kubelet.unprepare(DRIVER, [ClaimRef(_NAMESPACE, "any", uid) for uid in self.uids])
        finally:
            self._stop()

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_WAIT_S)
        self._kubelet.stop()
        self._server.stop()


def _reasons(health: JsonObject) -> list[JsonObject]:
    return [reason for state in health.get("states", ()) for reason in state.get("reasons", ())]
