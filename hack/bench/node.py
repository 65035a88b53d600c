"""The nodes of the measurements and of the churn. API server, scheduler and kubelet run in this process, the daemon in
a separate one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from playground import PATIENCE_S
from playground.kubelet import KubeletSettings
from playground.node import DRIVER, JsonObject, PlaygroundNode
from processes import wait_for

from dra_driver.model.claim import ClaimRef, Prepared
from dra_driver.simulator.pci import functions

GPUS = 8
SHARED_GPUS, PARTITIONED_GPUS = (0, 1), (4, 5, 6, 7)


class DaemonNode(PlaygroundNode):
    """A node whose files are all below `root`. The daemon runs from `start` to `end` or `kill`, any number of times."""

    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None
    more: tuple[str, ...] = ()
    """Additional flags of the daemon."""

    def configure(self, config: JsonObject) -> None:
        """Make the daemon start with this configuration."""
        (self.root / "config.yaml").write_text(json.dumps(config))
        self.more = (*self.more, "--config", str(self.root / "config.yaml"))

    @property
    def daemon(self) -> int:
        """The process ID of the daemon. Raises: OSError if it is not running."""
        if self.process is None:
            raise ProcessLookupError("the daemon is not running")
        return self.process.pid

    def start(self) -> None:
        """Start the daemon, and wait until it is registered with the kubelet."""
        flags = ("--log-level", "warning", *self.more)
        self.process = self.start_daemon(*flags, log=self.log)
        self.kubelet.wait_registered(DRIVER)

    def begin(self, pod_uid: str) -> None:
        """Start one more daemon, in a pod of its own, and wait until it is registered with the kubelet."""
        flags = ("--log-level", "warning", *self.more, "--pod-uid", pod_uid)
        daemon = self.process = self.start_daemon(*flags, log=self.log)

        def is_registered() -> bool:
            if daemon.poll() is not None:
                raise RuntimeError(f"the daemon of {pod_uid} exited with {daemon.returncode}")
            instances = self.kubelet.instances(DRIVER)
            return any(pod_uid in one.socket.name and one.connected for one in instances)

        wait_for(is_registered, what=f"the daemon of {pod_uid}")

    def end(self) -> None:
        """Stop the daemon with SIGTERM, like a kubelet."""
        self._stop(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the daemon with SIGKILL."""
        self._stop(signal.SIGKILL)

    def _stop(self, how: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(PATIENCE_S)
            self.process = None

    def stop(self) -> None:
        """Stop everything."""
        self.end()
        super().stop()


def memory_directory(root: Path) -> Path:
    """Create a directory for the CDI specs of the node at `root`. It is in memory, like /var/run on a real node, or on
    disk if that is not possible. The caller removes it.
    """
    memory = Path("/dev/shm")
    chosen = (memory if os.access(memory, os.W_OK | os.X_OK) else root) / f"{root.name}-cdi"
    chosen.mkdir()
    return chosen


class MeasuredNode(PlaygroundNode):
    """A node for measurements, with a kubelet that polls often, and with real device nodes if possible."""

    def __init__(self, root: Path) -> None:
        kubelet = KubeletSettings(poll_s=0.002)
        super().__init__(
            root, name="bench-node", kubelet=kubelet, cdi=memory_directory(root), device_nodes="auto"
        )

    def stop(self) -> None:
        """Stop everything."""
        super().stop()
        shutil.rmtree(self.cdi)

    def add_claim(
        self, device: str, *, share: bool = False, looks: bool = False, of: str = "gpu"
    ) -> ClaimRef:
        """Add a claim for a device, for a share of it, or with admin access to it (`looks`)."""
        name = f"claim-{uuid.uuid4()}"
        result: JsonObject = {"request": "gpu", "driver": DRIVER, "pool": self.name, "device": device}
        if looks:
            result |= {"adminAccess": True}
        if share:
            result |= {"shareID": str(uuid.uuid4()), "consumedCapacity": {"shares": "1"}}
        request = {"name": "gpu", "exactly": {"deviceClassName": f"{of}.nvidia.com"}}
        stored = self.server.add(
            "resourceclaims",
            {
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"devices": {"requests": [request]}},
                "status": {"allocation": {"devices": {"results": [result]}}},
            },
            group="resource.k8s.io",
        )
        return ClaimRef("default", name, stored["metadata"]["uid"])

    def prepare(self, ref: ClaimRef) -> float:
        """Prepare a claim, and return the duration in milliseconds, as the kubelet measures it."""
        started = time.monotonic()
        outcome = self.kubelet.prepare(DRIVER, [ref])[ref.uid]
        duration = (time.monotonic() - started) * 1000
        if not isinstance(outcome, Prepared):
            raise AssertionError(outcome)  # noqa: TRY004
        return duration

    def unprepare(self, ref: ClaimRef) -> float:
        """Unprepare a claim, and return the duration in milliseconds."""
        started = time.monotonic()
        outcome = self.kubelet.unprepare(DRIVER, [ref])[ref.uid]
        if outcome is not None:
            raise RuntimeError(outcome)
        return (time.monotonic() - started) * 1000


class Node(MeasuredNode, DaemonNode):
    """A node whose daemon runs from the constructor to `stop`. `registered_s` and `published_s` are the seconds from
    the daemon's start to its registration and to its slices.
    """

    more = ("--http-endpoint", "127.0.0.1:0")

    def __init__(self, root: Path, config: JsonObject | None = None) -> None:
        # Create the machine first, so that its time does not count.
        super().__init__(root)
        if config is not None:
            self.configure(config)
        self.published_s = 0.0
        started = time.monotonic()
        published = threading.Thread(target=self._note_published, args=(started,))
        published.start()
        self.start()
        self.registered_s = time.monotonic() - started
        published.join()

    def _note_published(self, started: float) -> None:
        wait_for(lambda: len(self.devices()) == GPUS)
        self.published_s = time.monotonic() - started

    def files(self) -> set[str]:
        """Return the paths of the files of claims."""
        places = (self.cdi, self.plugin_dir / "claims", self.plugin_dir / "ledger")
        return {str(path) for place in places for path in place.glob("*")}


class SoakNode(DaemonNode):
    """A node with shared, partitioned and whole GPUs. `state` returns everything that may be left on it."""

    cards: Sequence[int] = ()
    """Indices of the GPUs that virtual machines may get."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, name="soak-node")
        self.log = (root / "driver.log").open("ab")
        shared, partitioned = (
            {"uuids": [self.machine.gpu(index).uuid for index in indices]}
            for indices in (SHARED_GPUS, PARTITIONED_GPUS)
        )
        rule = {"selector": shared, "mode": "shares", "shares": 4, "enforce": "mps"}
        config: JsonObject = {"sharing": [rule], "dynamicMig": {"enabled": True, "gpus": partitioned}}
        if self.cards:
            cards = {"pciBusIDs": [self.machine.gpu(index).bus_id for index in self.cards]}
            config |= {"passthrough": {"enabled": True, "gpus": cards}, "deviceMetadata": "both"}
        self.configure(config)

    def start(self) -> None:
        """Start the daemon, and the MPS host unless it is already running."""
        self.start_mps_host()
        super().start()

    # --- state -----------------------------------------------------------------------------------

    def is_tainted(self, gpu_uuid: str) -> bool:
        """Whether the whole GPU is published with a taint."""
        return any(
            device.get("taints") and device["attributes"].get("uuid") == {"string": gpu_uuid}
            for device in self.devices()
        )

    def is_complete(self) -> bool:
        """Whether all slices of the pool are published."""
        pools = [entry["spec"]["pool"] for entry in self.server.objects("resourceslices")]
        return bool(pools) and pools[0]["resourceSliceCount"] == len(pools)

    def state(self) -> dict[str, Any]:
        """Return everything that claims, crashes and faults may leave behind."""
        claims, cdi = self.plugin_dir / "claims", self.cdi
        gpus = [self.machine.gpu(index) for index in range(8)]
        every_function = functions(self.machine.current())
        return {
            "records": sorted(path.name for path in claims.glob("*")),
            "ledgers": sorted(path.name for path in (self.plugin_dir / "ledger").glob("*.json*")),
            "CDI files": sorted(path.name for path in cdi.glob("*")) if cdi.exists() else [],
            "MIG instances": [len(gpu.instances) for gpu in gpus],
            "MIG modes": [bool(gpu.mig_mode) for gpu in gpus],
            "time slices": [self.machine.timeslice(index) for index in range(8)],
            "compute modes": [self.machine.compute_mode(gpu.uuid) for gpu in gpus],
            "drivers": {name: (item.driver, item.override) for name, item in every_function.items()},
            "persistence": [gpu.persistence for gpu in gpus],
            "metadata": sorted(path.name for path in (self.plugin_dir / "dra-device-metadata").rglob("*")),
            "MPS daemons": self.mps_daemons(),
            "MPS directories": sorted(
                path.name for path in (self.plugin_dir / "mps").glob("*/*") if path.is_dir()
            ),
            "slices": {
                entry["name"]: entry
                for one in self.server.objects("resourceslices")
                for entry in (*one["spec"].get("devices", []), *one["spec"].get("sharedCounters", []))
            },
        }

    def mps_daemons(self) -> list[str]:
        """Return the command lines of the running control daemons of this node's MPS host."""
        return sorted(words for _, words in self._processes() if "nvidia-cuda-mps" in words)

    def _processes(self) -> list[tuple[int, str]]:
        """Return PID and arguments of the processes that name this node's directory, except this one and the daemon."""
        own = {os.getpid(), self.daemon if self.process else 0}
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = file.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if str(self.root) in words and int(file.parent.name) not in own:
                found.append((int(file.parent.name), words))
        return found

    def stop_mps_daemons(self) -> None:
        """Stop this node's MPS host and MPS daemons, and remove the mounts in its directory, as a reboot does."""
        self.stop_mps_host()
        for pid in self._mps_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not self._mps_pids(), every_s=0.01, what="the MPS daemons to exit")
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in mounts:
            if place.startswith(f"{self.root}/"):
                subprocess.run(["umount", "-l", place], check=False)

    def _mps_pids(self) -> list[int]:
        return [pid for pid, words in self._processes() if "mps" in words]

    def last_log_lines(self, count: int = 20) -> list[str]:
        """Return the last lines of the daemon's log."""
        return (self.root / "driver.log").read_text(errors="replace").splitlines()[-count:]
