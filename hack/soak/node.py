"""The node that is worn: API server, scheduler and kubelet here, the daemon as a process that can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from playground.node import DRIVER, PlaygroundNode

NODE = "soak-node"
MACHINE = "dgx-h100"
SHARED_GPUS, PARTITIONED_GPUS = (0, 1), (4, 5, 6, 7)
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Wear:
    """What the daemon's process has at one moment."""

    memory_mib: float
    descriptors: int
    threads: int


def wait_for(what: str, done: Callable[[], Any], timeout_s: float = _WAIT_S) -> Any:
    """The first true value. Raises: TimeoutError that says what was waited for."""
    deadline = time.monotonic() + timeout_s
    while not (value := done()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.01)
    return value


class SoakNode(PlaygroundNode):
    """Everything of one node below `root`; the daemon runs from `start` to `end` or `kill`, any number of times."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, MACHINE, name=NODE)
        self.process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = (root / "driver.log").open("ab")
        self._write_config()

    def _write_config(self) -> None:
        def uuids(indices: tuple[int, ...]) -> list[str]:
            return [self.machine.gpu(index).uuid for index in indices]

        shared = {
            "selector": {"uuids": uuids(SHARED_GPUS)},
            "mode": "shares",
            "shares": 4,
            "enforce": "mps",
        }
        partitioned = {"enabled": True, "gpus": {"uuids": uuids(PARTITIONED_GPUS)}}
        (self.root / "config.yaml").write_text(json.dumps({"sharing": [shared], "dynamicMig": partitioned}))

    # --- the daemon ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the daemon and wait until the kubelet has it."""
        more = ["--config", str(self.root / "config.yaml"), "--mps-host", "child", "--log-level", "warning"]
        self.process = self.start_daemon(*more, log=self._log)
        wait_for("the registration", lambda: any(one.connected for one in self.kubelet.instances(DRIVER)))

    def end(self) -> None:
        """End the daemon as a kubelet does."""
        self._stop(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it in whatever it is doing."""
        self._stop(signal.SIGKILL)

    def _stop(self, how: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(_WAIT_S)
            self.process = None

    def stop(self) -> None:
        """End everything."""
        self.end()
        super().stop()
        self._log.close()

    def wear(self) -> Wear:
        """Memory, descriptors and threads of the daemon. Raises: OSError if it is gone."""
        place = Path(f"/proc/{self.process.pid if self.process else 0}")
        resident = next(
            line for line in (place / "status").read_text().splitlines() if line.startswith("VmRSS:")
        )
        counts = [len(list((place / name).iterdir())) for name in ("fd", "task")]
        return Wear(int(resident.split()[1]) / 1024, *counts)

    # --- what is there ---------------------------------------------------------------------------

    def is_tainted(self, gpu_uuid: str) -> bool:
        """Whether some device of the GPU is published with a taint."""
        return any(
            device.get("taints") and device["attributes"].get("uuid") == {"string": gpu_uuid}
            for device in self.devices()
        )

    def is_complete(self) -> bool:
        """Whether every slice of the pool is there."""
        pools = [entry["spec"]["pool"] for entry in self.server.objects("resourceslices")]
        return bool(pools) and pools[0]["resourceSliceCount"] == len(pools)

    def state(self) -> dict[str, Any]:
        """Everything that claims, crashes and faults may have left."""
        claims, ledger, cdi = self.plugin_dir / "claims", self.plugin_dir / "mig", self.cdi
        gpus = [self.machine.gpu(index) for index in range(8)]
        return {
            "records": sorted(path.name for path in claims.glob("*")),
            "debts": sorted(path.name for path in (self.plugin_dir / "debts").glob("*.json*")),
            "CDI files": sorted(path.name for path in cdi.glob("*")) if cdi.exists() else [],
            "MIG ledger": sorted(path.name for path in ledger.rglob("*.json")) if ledger.exists() else [],
            "MIG instances": [len(gpu.instances) for gpu in gpus],
            "MIG modes": [bool(gpu.mig_mode) for gpu in gpus],
            "time slices": [self.machine.timeslice(index) for index in range(8)],
            "compute modes": [self.machine.compute_mode(gpu.uuid) for gpu in gpus],
            "MPS daemons": self.mps_daemons(),
            "slices": {
                entry["name"]: entry
                for one in self.server.objects("resourceslices")
                for entry in (*one["spec"].get("devices", []), *one["spec"].get("sharedCounters", []))
            },
        }

    def mps_daemons(self) -> list[str]:
        """Control daemons of this node's MPS host that run."""
        return sorted(words for _, words in self._processes() if "nvidia-cuda-mps" in words)

    def _processes(self) -> list[tuple[int, str]]:
        """Processes whose command line names this node's directory, but for this one and the daemon."""
        own = {os.getpid(), self.process.pid if self.process else 0}
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
        """They and their mounts end with the boot. Only those of this node's own directory are touched."""
        for pid in self._mps_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for("the MPS daemons to end", lambda: not self._mps_pids())
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in mounts:
            if place.startswith(f"{self.root}/"):
                subprocess.run(["umount", "-l", place], check=False)

    def _mps_pids(self) -> list[int]:
        return [pid for pid, words in self._processes() if "mps" in words]

    def last_log_lines(self, count: int = 20) -> list[str]:
        """What the daemon said last."""
        self._log.flush()
        return (self.root / "driver.log").read_text(errors="replace").splitlines()[-count:]
