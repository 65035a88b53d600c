"""`make soak ARGS="--random SECONDS"`: threads of a kubelet prepare and unprepare claims of every kind, while
daemons are killed and run in pairs, and nvidia-smi, the MPS host, NVML and the kernel fail or hang
temporarily.

Two claims must never hold the same device, unless it is shared, and a prepared claim must never lose its devices.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from churn import Claims, Life
from node import SoakNode
from playground.kubelet_client import KubeletError
from playground.node import DRIVER
from processes import wait_for, wear

from dra_driver.model.claim import Prepared

_PODS = 10
_LEFT_AFTER_S = 60.0
_PATIENCE_S, _NOTICED_S = 45.0, 2.0
"""The kubelet's timeout for a call, and the time until the kubelet notices that a daemon has exited."""
_MAX_MORE = 6
"""How many descriptors or threads a daemon may gain after its first claims, for connections and pools."""
_CALLS = (
    "nvmlInit*", "nvmlDeviceGetHandle*", "nvmlDeviceSetPersistenceMode", "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstance*", "nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceDestroy",
    "nvmlComputeInstanceDestroy",
)  # fmt: skip


class RandomNode(SoakNode):
    """A node with one or two daemons at a time, each in its own pod. The newest is the last in `daemons`."""

    cards = range(2, 8)

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.changed_at = time.monotonic()
        self._pods = 0

    def start(self) -> None:
        """Start one more daemon, and wait until it is registered with the kubelet."""
        if not self._pods:  # later, another thread stops and starts the MPS host
            self.start_mps_host()
        self._pods += 1
        try:
            self.begin(f"pod-{self._pods}")
        finally:
            if self.process is not None and self.process not in self.daemons:
                self.daemons.append(self.process)
        self.changed_at = time.monotonic()

    def finish(self, daemon: subprocess.Popen[bytes], how: signal.Signals) -> None:
        """Stop one of the daemons with a signal."""
        self.changed_at = time.monotonic()
        daemon.send_signal(how)
        daemon.wait(60)
        self.daemons.remove(daemon)
        self.process = self.daemons[-1] if self.daemons else None

    def end(self) -> None:
        """Kill the remaining daemons."""
        for daemon in list(self.daemons):
            self.finish(daemon, signal.SIGKILL)

    def signal_mps_host(self, what: signal.Signals) -> None:
        """Send a signal to the MPS host."""
        if self._mps_host is not None:
            self._mps_host.process.send_signal(what)

    def has_spec(self, life: Life) -> bool:
        """Whether containers of the claim could start."""
        return any(self.cdi.glob(f"*{life.ref.uid}*"))

    def lost(self, life: Life, device: str) -> str | None:
        """Return how a claim has lost its device; None if the claim still has it."""
        if life.kind == "vm":
            bus_id = "{}:{}:{}.{}".format(*device.removeprefix("vfio-").split("-"))
            driver = self.machine.gpu(bus_id).driver
            return None if driver == "vfio-pci" else f"the driver of {device} is {driver!r}"
        if life.kind.startswith("mig"):
            gpu, start = device.partition("-mig-")[0], int(device.rpartition("-")[2])
            made = [one.start for one in self.machine.gpu(gpu).instances]
            return None if start in made else f"{device} does not exist"
        return None


class Holders:
    """Tracks which claim holds which parts of GPUs, from Prepare's response until Unprepare."""

    def __init__(self, node: RandomNode) -> None:
        self._node = node
        self._units: dict[str, set[str]] = {}
        for device in node.devices():
            used = {
                f"{entry['counterSet']} {name}"
                for entry in device.get("consumesCounters", [])
                for name in entry["counters"]
                if name == "gpu" or name.startswith("memory-slice")
            }
            if not device.get("allowMultipleAllocations"):
                self._units[device["name"]] = used or {device["name"]}
        self._held: dict[str, tuple[Life, set[str]]] = {}
        self._lock = threading.Lock()
        self.faults: list[str] = []

    def take(self, life: Life, answer: Prepared) -> None:
        """Record a prepared claim, and a fault if another claim holds the same parts. Claims without a CDI spec do not
        count: after its deletion in the API server, a claim can lose its devices before the kubelet unprepares it.
        """
        names = [device.device for device in answer.devices if life.kind != "admin"]
        units = {unit for name in names for unit in self._units.get(name, ())}
        with self._lock:
            self._held[life.ref.uid] = life, units
            for other, theirs in self._held.values():
                if other is not life and units & theirs and self._node.has_spec(other):
                    both = f"{other.ref.name} ({other.kind}) and {life.ref.name} ({life.kind})"
                    self.faults.append(f"{both} hold {min(units & theirs)}")

    def drop(self, life: Life) -> None:
        """Stop tracking a claim, because it may lose its devices from now on."""
        with self._lock:
            self._held.pop(life.ref.uid, None)


class Pods(Claims):
    """A thread of the kubelet, which prepares and unprepares one claim after the other, some of them several times."""

    kinds = (
        "whole", "several", "slices", "mps", "several mps", "share", "share", "mig", "mig", "mig mps", "vm", "vm",
        "admin",
    )  # fmt: skip

    def __init__(self, node: RandomNode, seed: int, number: int, holders: Holders) -> None:
        super().__init__(node, seed, f"pod{number}")
        self._random_node, self._holders = node, holders
        self.waits: dict[str, list[float]] = defaultdict(list)
        self.refusals: Counter[str] = Counter()
        self.faults: list[str] = []
        self.give_up_at = float("inf")

    def warm_up(self) -> None:
        """Prepare and unprepare a claim of each kind, while nothing is broken."""
        for kind in dict.fromkeys(self.kinds):
            life = self._new(kind)
            if life is None or not self._prepare(life, _PATIENCE_S):
                raise RuntimeError(f"a claim of kind {kind} failed on a healthy node: {self.refusals}")
            self._unprepare(life)
            self._delete(life.ref)

    def run(self, is_over: threading.Event) -> None:
        """Run claims until `is_over` is set and the last claim is unprepared."""
        while not is_over.is_set():
            if (life := self._any()) is not None:
                self._live(life, is_over)
            is_over.wait(self._choose.uniform(0.05, 0.5))

    def _live(self, life: Life, is_over: threading.Event) -> None:
        choose, is_deleted = self._choose, False
        for _ in range(choose.choice((1, 1, 2, 3))):
            answer, attempts = None, choose.randint(1, 6)
            while answer is None and attempts and not is_over.is_set():
                answer = self._prepare(life)
                attempts -= 1
                is_over.wait(choose.uniform(0.05, 1.0))
            is_over.wait(choose.choice((0.0, choose.uniform(0.0, 3.0))))
            if answer is not None:
                self._check(life, answer)
            if (
                is_deleted := choose.random() < 0.1
            ):  # force-delete: other claims can get its devices before the kubelet unprepares it
                self._delete(life.ref)
                is_over.wait(choose.uniform(0.0, 5.0))
            self._unprepare(life)
            if is_deleted or is_over.is_set():
                break
        if not is_deleted:
            self._delete(life.ref)

    def _prepare(self, life: Life, patience_s: float | None = None) -> Prepared | None:
        """Call Prepare. Return the response with its devices; None if Prepare failed."""
        began = time.monotonic()
        answer = self._ask(self._node.kubelet.prepare, life, patience_s)
        if isinstance(answer, Prepared):
            self.waits[f"{life.kind} prepare"].append(time.monotonic() - began)
            self._holders.take(life, answer)
            self._check(life, answer)
            return answer
        self.counts[f"{life.kind} {'cancelled' if isinstance(answer, KubeletError) else 'refused'}"] += 1
        return None

    def _ask(self, call: Callable[..., dict[str, Any]], life: Life, patience_s: float | None = None) -> Any:
        """Return the outcome, or the error of the call. Sometimes use a short timeout, as if the kubelet gave up."""
        patience_s = patience_s or self._choose.choice(
            (_PATIENCE_S, 10.0, 10.0, self._choose.uniform(0.005, 2.0))
        )
        began, changed_at = time.monotonic(), self._random_node.changed_at
        try:
            outcome = call(DRIVER, [life.ref], patience_s)[life.ref.uid]
        except KubeletError as error:
            is_same = changed_at == self._random_node.changed_at < began - _NOTICED_S
            if is_same and time.monotonic() - began >= _PATIENCE_S:
                self.faults.append(f"a call for {life.ref.name} ({life.kind}) timed out: {error}")
            outcome = error
        if outcome is not None and not isinstance(outcome, Prepared):
            self.refusals[str(getattr(outcome, "error", outcome)).rpartition("): ")[2]] += 1
        return outcome

    def _check(self, life: Life, answer: Prepared) -> None:
        lost = [self._random_node.lost(life, device.device) for device in answer.devices]
        lost += [] if self._random_node.has_spec(life) else ["it has no CDI spec"]
        self.faults += [f"{life.ref.name} ({life.kind}) is prepared, but {what}" for what in lost if what]

    def _unprepare(self, life: Life) -> None:
        """Retry, like the kubelet, until it succeeds or `give_up_at` has passed."""
        self._holders.drop(life)
        began, why = time.monotonic(), None
        while time.monotonic() < self.give_up_at:
            if (why := self._ask(self._node.kubelet.unprepare, life)) is None:
                self.waits[f"{life.kind} unprepare"].append(time.monotonic() - began)
                return
            time.sleep(self._choose.uniform(0.05, 0.5))
        self.faults.append(f"{life.ref.name} ({life.kind}) could not be unprepared: {why}")


class Trouble:
    """Breaks things, one at a time in each of two threads: one for daemons, one for tools."""

    def __init__(self, node: RandomNode, seed: int) -> None:
        self._node, self._choose = node, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def with_daemons(self, is_over: threading.Event) -> None:
        """Kill, restart and update daemons until `is_over` is set."""
        self._go_on(is_over, (self._kill, self._kill, self._restart, self._roll, self._roll_back))

    def with_tools(self, is_over: threading.Event) -> None:
        """Break programs, the MPS host, NVML and the kernel until `is_over` is set."""
        of_mps = (self._mps_host_hangs, self._mps_host_dies, self._mps_daemons_fail)
        self._go_on(
            is_over, (self._smi_fails, self._smi_hangs, *of_mps, self._nvml, self._nvml, self._writes)
        )

    def _go_on(self, is_over: threading.Event, choices: Sequence[Callable[[], None]]) -> None:
        choose = random.Random(self._choose.random())
        while not is_over.wait(choose.uniform(0.5, 6.0)):
            action = choose.choice(choices)
            self.counts[action.__name__.replace("_", " ").strip()] += 1
            try:
                action()
            except Exception as error:
                self.faults.append(f"{action.__name__}: {error!r}")

    def _kill(self) -> None:
        self._node.finish(self._node.daemons[-1], signal.SIGKILL)
        time.sleep(self._choose.choice((0.0, 2.0)))
        self._node.start()

    def _restart(self) -> None:
        self._node.finish(self._node.daemons[-1], signal.SIGTERM)
        self._node.start()

    def _roll(self) -> None:
        """Start a new instance before the old one exits."""
        self._node.start()
        time.sleep(self._choose.uniform(0.0, 6.0))
        self._node.finish(self._node.daemons[0], self._choose.choice((signal.SIGTERM, signal.SIGKILL)))

    def _roll_back(self) -> None:
        """Start and kill a new instance, so that the kubelet calls the old one again."""
        self._node.start()
        time.sleep(self._choose.uniform(0.0, 6.0))
        self._node.finish(self._node.daemons[-1], signal.SIGKILL)

    def _smi_fails(self) -> None:
        self._with_smi("echo 'Unable to determine the device handle: Unknown Error'; exit 255")

    def _smi_hangs(self) -> None:
        """Let calls of nvidia-smi hang for a while. They take effect afterwards."""
        hangs = self._node.root / "hangs"
        hangs.touch()
        try:
            self._with_smi(f'while [ -e {hangs} ]; do sleep 0.1; done; sleep 0.3; exec "$0" "$@"')
        finally:
            hangs.unlink()

    def _with_smi(self, script: str) -> None:
        """Replace nvidia-smi with a script for a while, even if the simulator rewrites it after a MIG change."""
        program = self._node.machine.host_root / "usr/bin/nvidia-smi"
        text, new = f"#!/bin/sh\n{script}\n", program.with_name(".soak")
        until = time.monotonic() + self._a_while()
        while time.monotonic() < until:
            if program.read_text() != text:
                new.write_text(text)
                new.chmod(0o755)
                new.replace(program)
            time.sleep(0.05)
        (self._node.machine.directory / "rendered").unlink(missing_ok=True)
        self._node.machine.heal()

    def _mps_host_hangs(self) -> None:
        self._node.signal_mps_host(signal.SIGSTOP)
        time.sleep(self._a_while())
        self._node.signal_mps_host(signal.SIGCONT)

    def _mps_host_dies(self) -> None:
        self._node.signal_mps_host(signal.SIGKILL)
        self._node.stop_mps_host()
        time.sleep(self._a_while())
        self._node.start_mps_host()

    def _mps_daemons_fail(self) -> None:
        rules = self._node.machine.host_root / "var/lib/nvidia-simulator/mps.json"
        rules.write_text(json.dumps({"*": self._choose.choice(({"exit": 1}, {"silent": True}))}))
        time.sleep(self._a_while())
        rules.unlink()

    def _nvml(self) -> None:
        delay_s = self._choose.choice((0.0, 0.5, 5.0))
        code = None if delay_s else self._choose.choice(("unknown", "in-use", "timeout"))
        self._with_fault(self._choose.choice(_CALLS), code, delay_s)

    def _writes(self) -> None:
        function = self._choose.choice(("unbind", "bind", "drivers_probe"))
        self._with_fault(function, self._choose.choice(("EBUSY", "no-effect", "hang")), 0.0)

    def _with_fault(self, function: str, code: str | None, delay_s: float) -> None:
        gpu = self._choose.choice((None, None, *range(8)))
        self._node.machine.set_fault(function, code=code, delay_s=delay_s, gpu=gpu)
        time.sleep(self._a_while())
        self._node.machine.clear_faults()

    def _a_while(self) -> float:
        return self._choose.choice((1.0, 4.0, 12.0))


def churn(
    node: RandomNode, seconds: float, seed: int
) -> tuple[dict[str, object], dict[str, object], list[str]]:
    """Run the churn. Return the node's state before and after it, and the faults that were found."""
    wait_for(node.is_complete, what="all slices")
    fresh, holders, trouble, is_over = node.state(), Holders(node), Trouble(node, seed), threading.Event()
    pods = [Pods(node, seed * 100 + number, number, holders) for number in range(_PODS)]
    pods[0].warm_up()
    usual = wear(node.daemon)
    breaking = [
        threading.Thread(target=run, args=(is_over,)) for run in (trouble.with_daemons, trouble.with_tools)
    ]
    working = [threading.Thread(target=pod.run, args=(is_over,)) for pod in pods]
    try:
        for thread in (*working, *breaking):
            thread.start()
        is_over.wait(seconds)
    finally:
        is_over.set()
        for thread in breaking:
            thread.join()
        mended = time.monotonic()
        for pod in pods:
            pod.give_up_at = mended + _LEFT_AFTER_S
        for thread in working:
            thread.join()
    with suppress(TimeoutError):
        wait_for(lambda: node.state() == fresh, _LEFT_AFTER_S, 0.2)
    worn = wear(node.daemon)
    _report(pods, trouble)
    print(
        f"compared the state {time.monotonic() - mended:.0f} s after the last repair; descriptors "
        f"{usual.descriptors} -> {worn.descriptors}, threads {usual.threads} -> {worn.threads}"
    )
    faults = [*holders.faults, *trouble.faults, *(fault for pod in pods for fault in pod.faults)]
    if max(worn.descriptors - usual.descriptors, worn.threads - usual.threads) > _MAX_MORE:
        faults.append("the daemon leaks descriptors or threads")
    return fresh, node.state(), faults


def _report(pods: Sequence[Pods], trouble: Trouble) -> None:
    """Print a line for each kind of claim, the number of breaks of each kind, and the most frequent refusals."""
    for kind in dict.fromkeys(Pods.kinds):
        words = [
            f"{sum(pod.counts[f'{kind} {what}'] for pod in pods):4} {what}"
            for what in ("refused", "cancelled")
        ]
        for name in ("prepare", "unprepare"):
            waits = [wait for pod in pods for wait in pod.waits[f"{kind} {name}"]] or [0.0]
            words.append(f"{len(waits):4} {name}, median {median(waits):5.2f} s, longest {max(waits):5.1f} s")
        print(f"{kind:12}{';'.join(words)}")
    print(", ".join(f"{name}: {count}" for name, count in sorted(trouble.counts.items())))
    refusals = sum((pod.refusals for pod in pods), Counter[str]())
    for text, count in refusals.most_common(12):
        print(f"{count:6}  {text[:200]}")
