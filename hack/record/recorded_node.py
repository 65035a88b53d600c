"""The node of docs/commands.md, with claims and a bad GPU. The daemon and the MPS host run as separate processes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from playground import PATIENCE_S
from playground.node import DRIVER, JsonObject, PlaygroundNode

from dra_driver.model.claim import ClaimRef, Prepared

NODE = "gpu-node-1"
MACHINE = "dgx-h100"
_GROUP = "resource.k8s.io"
_NAMESPACE = "ml"
_ONE_SHARE = {"consumedCapacity": {"shares": "1"}}
_BROKEN = 3
_UNCONTAINED_MEMORY_ERROR = 95
_CONFIG = """\
# The seventh GPU is shared in quarters, the eighth is partitioned into MIG devices on demand.
sharing:
- selector: {pciBusIDs: ["0000:d1:00.0"]}
  mode: shares
  shares: 4
  enforce: mps
dynamicMig:
  enabled: true
  gpus: {pciBusIDs: ["0000:df:00.0"]}
"""


class RecordedNode(PlaygroundNode):
    """A node that starts in the constructor. `uids` are the UIDs of its prepared claims, in creation order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, MACHINE, name=NODE, cdi_hook=True)
        self.uids: list[str] = []
        (root / "device-plugins").mkdir()
        (root / "config.yaml").write_text(_CONFIG)
        self.options["--config"] = str(root / "config.yaml")
        self.configure_runtime()
        self.server.add("namespaces", {"metadata": {"name": _NAMESPACE}})
        self.start_mps_host()
        self._process = self.start_daemon("--healthcheck-port", "-1", "--log-level", "error")
        try:
            self._begin()
        except BaseException:
            self.stop()
            raise

    def _begin(self) -> None:
        self.kubelet.wait_registered(DRIVER)
        names = [f"gpu-{gpu.uuid[4:12]}" for gpu in self.machine.current().present]
        small, large = f"{names[7]}-mig-1g10gb-19-0", f"{names[7]}-mig-3g40gb-9-4"
        published = {*names[:7], small, large}
        self._wait("the devices", lambda: published <= {device["name"] for device in self.devices()})
        self._prepare("training", names[2], names[_BROKEN], pods=("training-0", "training-1"))
        self._prepare("embedding", small, pods=("embedding-7d9c5b8f64-x2k9q",))
        self._prepare("inference", large, pods=("inference-0",))
        for number in (1, 2):
            share = {"shareID": f"0000000{number}-1111-4222-8333-444444444444"}
            self._prepare(f"notebook-{number}", names[6], pods=(f"notebook-{number}",), **share, **_ONE_SHARE)
        self.machine.set_remapped_rows(_BROKEN, uncorrectable=1, pending=True)
        self.machine.raise_xid(_BROKEN, _UNCONTAINED_MEMORY_ERROR)
        self.machine.hold_gpu(2, 4711, "python")
        # The two reasons may appear in any order, and the second taint some time after the first.
        self._wait("health", lambda: {reason["key"] for reason in self._reasons()} >= {"xid", "row-remap"})
        self._wait("taints", lambda: max(len(device.get("taints", ())) for device in self.devices()) == 2)
        self._add("resourceclaims", "tuning", _GROUP, spec=_claim_spec(allocationMode="ExactCount", count=7))
        says = "0/1 nodes are available: 1 cannot allocate all claims. still not schedulable, preemption: not helpful."
        waits = {"type": "PodScheduled", "status": "False", "message": says}
        pod = {"resourceClaims": [{"name": "gpus", "resourceClaimName": "tuning"}]}
        self._add("pods", "tuning-0", "", spec=pod, status={"phase": "Pending", "conditions": [waits]})
        self.grow_old()

    def _add(self, plural: str, name: str, group: str, **parts: Any) -> JsonObject:
        metadata = {"name": name, "namespace": _NAMESPACE}
        return self.server.add(plural, {"metadata": metadata, **parts}, group=group)

    def _prepare(self, name: str, *devices: str, pods: Sequence[str], **more: Any) -> None:
        place = {"request": "gpu", "driver": DRIVER, "pool": NODE, **more}
        status = {
            "allocation": {"devices": {"results": [{**place, "device": device} for device in devices]}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": f"uid-of-{pod}"} for pod in pods],
        }
        stored = self._add("resourceclaims", name, _GROUP, spec=_claim_spec(), status=status)
        ref = ClaimRef(_NAMESPACE, name, stored["metadata"]["uid"])
        self.uids.append(ref.uid)
        outcome = self.kubelet.prepare(DRIVER, [ref])[ref.uid]
        if not isinstance(outcome, Prepared):
            raise SystemExit(f"record: claim {name} could not be prepared: {outcome.error}")

    def grow_old(self) -> None:
        """Backdate the records by hours, so that the ages shown stay the same for 58 s, however slow this machine
        is.
        """
        now = datetime.now(UTC)
        for number, uid in enumerate(self.uids):
            file = self.plugin_dir / f"claims/{uid}.json"
            age = timedelta(hours=53 - 13 * number, minutes=30, seconds=2)
            record = json.loads(file.read_text()) | {
                "preparedAt": (now - age).isoformat(timespec="milliseconds")
            }
            file.write_text(json.dumps(record))
        file = self.plugin_dir / "health.json"
        health = json.loads(file.read_text())
        for state in health["states"]:
            for reason in state.get("reasons", ()):
                reason["since"] = int(now.timestamp()) - 12 * 60 - 2
        file.write_text(json.dumps(health))

    def _reasons(self) -> list[JsonObject]:
        file = self.plugin_dir / "health.json"
        health = json.loads(file.read_text()) if file.exists() else {}
        return [reason for state in health.get("states", ()) for reason in state.get("reasons", ())]

    def _wait(self, what: str, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit(f"record: gave up waiting for {what}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Unprepare all claims, so that no MPS daemon outlives the node, and stop everything."""
        try:
            if self.uids:
                self.kubelet.unprepare(DRIVER, [ClaimRef(_NAMESPACE, "any", uid) for uid in self.uids])
        finally:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(PATIENCE_S)
            super().stop()


def _claim_spec(**more: Any) -> JsonObject:
    return {
        "devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", **more}}]}
    }
