"""The measurements: one daemon process on a simulated node, called as a kubelet calls it."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from playground.kubelet import KubeletSettings
from playground.node import DRIVER, JsonObject, PlaygroundNode

import dra_driver
from dra_driver.model.claim import ClaimRef, Prepared

NODE = "bench-node"
GPUS = 8
_WAIT_S = 30.0
_WORKERS_LEAVE_S = 12.0
"""Worker threads of the gRPC server stay for ten seconds after their last call."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What many cycles have left behind."""

    memory_mib: float
    files: int
    descriptors: int
    threads: int


def cdi_root(root: Path) -> Path:
    """A directory in memory, as /var/run is on a node, for the CDI specs of what lies at `root`; on its disk where
    there is none. The caller removes it."""
    memory = Path("/dev/shm")
    chosen = (memory if os.access(memory, os.W_OK | os.X_OK) else root) / f"{root.name}-cdi"
    chosen.mkdir()
    return chosen


class Node(PlaygroundNode):
    """A node whose daemon is a process; `registered_s` and `published_s` count from its start.

    With `config`, the text of a configuration file, the driver has that.
    """

    def __init__(self, root: Path, config: str | None = None) -> None:
        # The hardware is there before the driver starts.
        super().__init__(
            root, name=NODE, kubelet=KubeletSettings(poll_s=0.002), cdi=cdi_root(root), device_nodes="auto"
        )
        self._claims = 0
        options = ["--http-endpoint", "127.0.0.1:0", "--healthcheck-port", "0", "--mps-host", "child"]
        if config is not None:
            (root / "config.yaml").write_text(config)
            options += ["--config", str(root / "config.yaml")]
        started = time.monotonic()
        self.process = self.start_daemon("--log-level", "warning", *options)
        self.published_s = 0.0
        published = threading.Thread(target=self._note_published, args=(started,))
        published.start()
        self.kubelet.wait_registered(DRIVER, timeout_s=_WAIT_S)
        self.registered_s = time.monotonic() - started
        published.join()

    def stop(self) -> None:
        """End everything."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(_WAIT_S)
        super().stop()
        shutil.rmtree(self.cdi)

    def _note_published(self, started: float) -> None:
        wait_for(lambda: len(self.devices()) == GPUS)
        self.published_s = time.monotonic() - started

    def add_claim(self, device: str, *, share: bool = False, looks: bool = False) -> ClaimRef:
        """A claim that is allocated one device, a share of it, or a look at it with admin access."""
        self._claims += 1
        name = f"claim-{self._claims}"
        result: JsonObject = {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device}
        if looks:
            result |= {"adminAccess": True}
        if share:
            result |= {"shareID": str(uuid.uuid4()), "consumedCapacity": {"shares": "1"}}
        stored = self.server.add(
            "resourceclaims",
            {
                "metadata": {"name": name, "namespace": "default"},
                "spec": {
                    "devices": {
                        "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]
                    }
                },
                "status": {"allocation": {"devices": {"results": [result]}}},
            },
            group="resource.k8s.io",
        )
        return ClaimRef("default", name, stored["metadata"]["uid"])

    def prepare(self, ref: ClaimRef) -> float:
        """Milliseconds of one Prepare as the kubelet measures it."""
        started = time.monotonic()
        outcome = self.kubelet.prepare(DRIVER, [ref])[ref.uid]
        duration = (time.monotonic() - started) * 1000
        if not isinstance(outcome, Prepared):
            raise AssertionError(outcome)  # noqa: TRY004
        return duration

    def unprepare(self, ref: ClaimRef) -> float:
        """Milliseconds of one Unprepare."""
        started = time.monotonic()
        outcome = self.kubelet.unprepare(DRIVER, [ref])[ref.uid]
        if outcome is not None:
            raise RuntimeError(outcome)
        return (time.monotonic() - started) * 1000

    def resident_mib(self) -> float:
        """Resident memory of the daemon."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("no VmRSS")

    def descriptors(self) -> int:
        """Open file descriptors of the daemon."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def threads(self) -> int:
        """Threads of the daemon."""
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def cpu_s(self) -> float:
        """Processor seconds that the daemon has used."""
        return ticks_cpu_s(self.process.pid)

    def files(self) -> set[str]:
        """Files of claims on disk."""
        places = (self.cdi, self.plugin_dir / "claims", self.plugin_dir / "debts")
        return {str(path) for place in places for path in place.glob("*")}


def ticks_cpu_s(pid: int) -> float:
    """Processor seconds that a process has used, also in threads that have ended, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def forget_files() -> None:
    """Have the pages of all Python files leave memory, as before the first start from an image. Those that this process
    itself has mapped stay: the interpreter and its compiled libraries."""
    for top in {sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")} | {
        dra_driver.__path__[0]
    }:
        for path in Path(top).rglob("*"):
            if path.suffix in {".py", ".pyc", ".so", ".yaml"} and path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def wait_for(done: Callable[[], object], timeout_s: float = _WAIT_S, every_s: float = 0.002) -> None:
    """Return as soon as `done` holds. Raises: TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(every_s)


def single_prepares(node: Node, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of Prepare and of Unprepare, one claim at a time."""
    names = [device["name"] for device in node.devices()]
    prepared: list[float] = []
    unprepared: list[float] = []
    for number in range(count + 1):
        ref = node.add_claim(names[number % len(names)])
        prepared.append(node.prepare(ref))
        unprepared.append(node.unprepare(ref))
    return prepared[1:], unprepared[1:]


def cpu_of_prepares(node: Node, count: int) -> float:
    """Milliseconds of processor time, user and system, of one Prepare and its Unprepare."""
    before = node.cpu_s()
    single_prepares(node, count)
    return (node.cpu_s() - before) / (count + 1) * 1000


def crowded(node: Node, few: int, many: int, count: int) -> tuple[list[float], list[float], list[float]]:
    """How many times as long a Prepare takes beside `many` prepared claims as beside `few`, the same for an Unprepare,
    and for a Prepare while a record is unreadable. Each beside the median with few."""
    name = node.devices()[0]["name"]
    others: list[ClaimRef] = []

    def fill(total: int) -> None:
        while len(others) < total:
            others.append(node.add_claim(name, looks=True))
            node.prepare(others[-1])

    fill(few)
    prepared, unprepared = (statistics.median(values) for values in single_prepares(node, count))
    fill(many)
    more_prepared, more_unprepared = single_prepares(node, count)
    (node.plugin_dir / "claims" / f"{others[0].uid}.json").write_text("{")
    spoiled, _ = single_prepares(node, count)
    for ref in others:
        node.unprepare(ref)
    for aside in (node.plugin_dir / "claims").glob("*.unreadable-*"):
        aside.unlink()
    return (
        [value / prepared for value in more_prepared],
        [value / unprepared for value in more_unprepared],
        [value / prepared for value in spoiled],
    )


def parallel_prepares(node: Node, count: int) -> list[float]:
    """Mean milliseconds of a Prepare in bursts of eight, one mean a burst."""
    names = [device["name"] for device in node.devices()]
    means: list[float] = []
    with ThreadPoolExecutor(GPUS) as pool:
        for _ in range(count):
            refs = [node.add_claim(name) for name in names]
            means.append(sum(pool.map(node.prepare, refs)) / len(refs))
            list(pool.map(node.unprepare, refs))
    return means


def wipes(node: Node, count: int) -> list[float]:
    """Seconds from the deletion of all slices, as by a kubelet that starts, until the devices are back."""
    took: list[float] = []
    for _ in range(count):
        time.sleep(0.3)
        node.wipe()
        started = time.monotonic()
        wait_for(lambda: len(node.devices()) == GPUS)
        took.append(time.monotonic() - started)
    return took


def idle(node: Node, duration_s: float) -> tuple[float, float]:
    """Percent of a core, and API writes, while nothing happens."""
    time.sleep(1.0)
    writes, cpu = len(node.server.writes()), _threads_cpu_s(node.process.pid)
    time.sleep(duration_s)
    used = _threads_cpu_s(node.process.pid) - cpu
    return used / duration_s * 100, float(len(node.server.writes()) - writes)


def _threads_cpu_s(pid: int) -> float:
    """Processor seconds of the threads that live, to a nanosecond: at rest a clock tick is a tenth of the budget."""
    spent = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        spent += int((thread / "schedstat").read_text().split()[0])
    return spent / 1e9


def growth_over_cycles(node: Node, cycles: int) -> Growth:
    """What many cycles of Prepare and Unprepare leave behind."""
    names = [device["name"] for device in node.devices()]
    refs = [node.add_claim(name) for name in names]

    def cycle(count: int) -> None:
        for number in range(count):
            node.prepare(refs[number % len(refs)])
            node.unprepare(refs[number % len(refs)])

    cycle(min(500, cycles))  # caches reach their size first
    time.sleep(_WORKERS_LEAVE_S)
    files, descriptors, threads, memory = (
        node.files(),
        node.descriptors(),
        node.threads(),
        node.resident_mib(),
    )
    cycle(cycles)
    time.sleep(_WORKERS_LEAVE_S)
    return Growth(
        memory_mib=node.resident_mib() - memory,
        files=len(node.files() - files),
        descriptors=max(0, node.descriptors() - descriptors),
        threads=max(0, node.threads() - threads),
    )


def shares(node: Node, count: int) -> tuple[float, list[float]]:
    """Milliseconds of the Prepare that starts a device's MPS daemon, and of later ones on the running daemon."""
    time.sleep(2.0)  # as for other claims: the driver's files are not of this second
    device = node.devices()[0]["name"]
    first = node.add_claim(device, share=True)
    cold = node.prepare(first)
    warm: list[float] = []
    for _ in range(count):
        ref = node.add_claim(device, share=True)
        warm.append(node.prepare(ref))
        node.unprepare(ref)
    node.unprepare(first)
    return cold, warm
