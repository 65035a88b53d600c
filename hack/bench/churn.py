"""Changes to the node in an order that depends on the seed: claims come and go, and everything else breaks."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from node import PARTITIONED_GPUS, SoakNode
from playground.kubelet_client import KubeletError
from playground.node import DRIVER
from processes import wait_for

from dra_driver.cli.validation.rules.allocator import AllocationError
from dra_driver.health.rules.state import FLAPS
from dra_driver.model.claim import ClaimRef, Prepared

JsonObject = dict[str, Any]

_SETTLE_S = 60.0
_MAX_ALIVE = 24
_NOTICED_S = 5.0
"""How long a Prepare may still fail after a repair, because the daemon has not noticed the repair yet."""
_PROFILES = ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "7g.80gb")


@dataclass(frozen=True, slots=True)
class Life:
    """A claim and its kind."""

    ref: ClaimRef
    kind: str


class Claims:
    """Creates, allocates and deletes claims of random kinds."""

    kinds: Sequence[str] = ("whole", "whole", "slices", "mig", "mig", "share", "mps")

    def __init__(self, node: SoakNode, seed: int, prefix: str = "claim") -> None:
        self._node = node
        self._choose = random.Random(seed)
        self._number = 0
        self._prefix = prefix
        self.counts: Counter[str] = Counter()

    def _any(self) -> Life | None:
        """Create and allocate a claim of a random kind; return None if no devices are left."""
        return self._new(self._choose.choice(self.kinds))

    def _new(self, kind: str) -> Life | None:
        """Create and allocate a claim; return None if no devices are left."""
        self._number += 1
        name = f"{self._prefix}-{self._number}"
        stored = self._node.server.add(
            "resourceclaims",
            {"metadata": {"name": name, "namespace": "default"}, "spec": {"devices": self._request(kind)}},
            group="resource.k8s.io",
        )
        ref = ClaimRef("default", name, stored["metadata"]["uid"])
        try:
            self._node.scheduler.allocate_claim("default", name)
        except AllocationError:
            self.counts["no device left"] += 1
            self._delete(ref)
            return None
        return Life(ref, kind)

    def _request(self, kind: str) -> JsonObject:
        attributes = f"device.attributes['{DRIVER}']"
        expression = f"{attributes}.type == 'gpu' && device.allowMultipleAllocations != true"
        device_class, parameters = "gpu.nvidia.com", None
        if kind.startswith("mig"):
            device_class = "mig.nvidia.com"
            expression = f"{attributes}.profile == '{self._choose.choice(_PROFILES)}'"
        elif kind == "share":
            expression = "device.allowMultipleAllocations == true"
        elif kind == "vm":
            device_class, expression = "vfio.gpu.nvidia.com", "true"
        if kind == "slices":
            interval = self._choose.choice(("Short", "Medium", "Long"))
            parameters = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}
        elif kind.endswith("mps"):
            parameters = {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}}
        exactly: JsonObject = {
            "deviceClassName": device_class,
            "selectors": [{"cel": {"expression": expression}}],
        }
        exactly |= {"count": 2} if kind.startswith("several") else {}
        exactly |= {"adminAccess": True} if kind == "admin" else {}
        request: JsonObject = {"requests": [{"name": "gpu", "exactly": exactly}]}
        if parameters is not None:
            of = "MigDeviceConfig" if kind.startswith("mig") else "GpuConfig"
            body = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": of, "sharing": parameters}
            request["config"] = [{"opaque": {"driver": DRIVER, "parameters": body}}]
        return request

    def _delete(self, ref: ClaimRef) -> None:
        server = self._node.server
        server.operations.delete(server.resource("resourceclaims"), (ref.namespace, ref.name), {})


class Churn(Claims):
    """Cycles of churn. The same seed makes the same choices, independent of the timing."""

    def __init__(self, node: SoakNode, seed: int) -> None:
        super().__init__(node, seed)
        self._alive: list[Life] = []
        self.faults: list[str] = []
        self._broken: list[Callable[[], object]] = []
        self._setbacks: Counter[int] = Counter()  # how often each GPU was broken
        self._mended = 0.0
        self._trouble: Sequence[tuple[int, str, Callable[[], object]]] = (
            (6, "restart of the driver's daemon", self._restart),
            (6, "kill -9 of the daemon", self._kill),
            (4, "kill -9 during calls", self._kill_amid_calls),
            (4, "restart of the kubelet", self._restart_kubelet),
            (4, "slices deleted", node.wipe),
            (4, "reload of the NVIDIA driver", self._reload),
            (6, "Xid", self._xid),
            (4, "GPU off the bus", self._lose),
            (4, "API server unreachable", self._api_outage),
            (3, "reboot", self._reboot),
        )

    def cycle(self) -> None:
        """Prepare and unprepare some claims, and sometimes break or repair something."""
        self.cycle_of_claims()
        choose = self._choose
        if choose.random() < 0.15:
            weights, names, actions = zip(*self._trouble, strict=True)
            [index] = choose.choices(range(len(actions)), weights)
            self.counts[names[index]] += 1
            actions[index]()
        if self._broken and choose.random() < 0.3:
            self._mend()

    def cycle_of_claims(self) -> None:
        """Prepare some new and some existing claims, then unprepare some."""
        choose = self._choose
        fresh = [
            life
            for _ in range(choose.randint(1, 6))
            if (life := self._new(self._choose.choice(self.kinds))) is not None
        ]
        again = choose.sample(self._alive, min(len(self._alive), choose.randint(0, 3)))
        self._alive += fresh
        self._each(self._prepare, [*fresh, *again])
        going = choose.sample(self._alive, choose.randint(0, min(6, len(self._alive))))
        going += [life for life in self._alive if life not in going][: max(0, len(self._alive) - _MAX_ALIVE)]
        self._each(self._unprepare, going)

    def calm(self) -> None:
        """Repair everything, and unprepare all claims, so that the node is idle."""
        while self._broken:
            self._mend()
        self._each(self._unprepare, list(self._alive))

    def _mend(self) -> None:
        self._broken.pop(0)()
        self._mended = time.monotonic()

    # --- claims ----------------------------------------------------------------------------------

    def _each(self, action: Callable[[Life], None], lives: Sequence[Life]) -> None:
        if lives:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(action, lives))

    def _prepare(self, life: Life) -> None:
        outcome = self._ask(self._node.kubelet.prepare, life)
        if isinstance(outcome, Prepared):
            self.counts[f"prepared: {life.kind}"] += 1
        else:
            self.counts["prepare failed"] += 1
            if outcome is not None and not self._broken and time.monotonic() > self._mended + _NOTICED_S:
                self.counts["prepare failed while nothing was broken"] += 1
                self.faults.append(f"{life.ref.name} ({life.kind}): {outcome.error}")

    def _unprepare(self, life: Life) -> None:
        """Retry until it succeeds, like the kubelet, then delete the claim."""

        def done() -> bool:
            try:
                return self._node.kubelet.unprepare(DRIVER, [life.ref], 20.0) == {life.ref.uid: None}
            except KubeletError:
                return False

        wait_for(done, _SETTLE_S, 0.01, f"the Unprepare of {life.ref.name} ({life.kind})")
        self.counts["unprepared"] += 1
        self._delete(life.ref)
        self._alive.remove(life)

    def _ask(self, call: Callable[..., dict[str, Any]], life: Life) -> Any:
        try:
            return call(DRIVER, [life.ref], 20.0)[life.ref.uid]
        except KubeletError:
            return None

    # --- trouble ---------------------------------------------------------------------------------

    def _restart(self) -> None:
        self._node.end()
        self._node.start()

    def _kill(self) -> None:
        self._node.kill()
        self._node.start()

    def _kill_amid_calls(self) -> None:
        """Kill the daemon while the kubelet waits for its responses."""
        delay = self._choose.random() * 0.1
        victims = [life for _ in range(4) if (life := self._any()) is not None]
        self._alive += victims
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(self._ask, self._node.kubelet.prepare, life) for life in victims]
            time.sleep(delay)
            self._kill()
            for call in calls:
                call.result()

    def _restart_kubelet(self) -> None:
        """Restart the kubelet, which then prepares every claim again."""
        self._node.kubelet.restart()
        self._node.kubelet.wait_registered(DRIVER, timeout_s=_SETTLE_S)
        self._each(self._prepare, list(self._alive))

    def _reload(self) -> None:
        self._node.machine.unload_driver()
        self._broken.append(self._node.machine.load_driver)

    def _reboot(self) -> None:
        """Reboot the machine. Processes, kernel state and /var/run are lost; the disk remains."""
        node = self._node
        node.end()
        node.stop_mps_daemons()
        node.machine.reboot()
        for file in (node.root / "cdi").glob("*"):
            file.unlink()
        node.start()
        self._each(self._prepare, list(self._alive))

    def _gpu_to_break(self, gpus: Iterable[int]) -> int | None:
        """Return one of the GPUs; None if one more failure of any GPU would keep it tainted for too long."""
        whole = [gpu for gpu in gpus if self._setbacks[gpu] < FLAPS - 1]
        if not whole:
            return None
        chosen = self._choose.choice(whole)
        self._setbacks[chosen] += 1
        return chosen

    def _xid(self) -> None:
        gpu = self._gpu_to_break(range(8))
        if gpu is None:
            return
        self._node.machine.set_recovery_action(gpu, 1)
        self._node.machine.raise_xid(gpu, self._choose.choice((31, 48, 79, 94)))
        self._broken.append(lambda: self._node.machine.reset_gpu(gpu))

    def _lose(self) -> None:
        """Let a GPU fall off the bus. A reset restores it after the daemon has noticed the loss."""
        gpu = self._gpu_to_break(index for index in range(8) if index not in PARTITIONED_GPUS)
        if gpu is None:
            return
        self._node.machine.lose_gpu(gpu)
        with contextlib.suppress(TimeoutError):  # the API server may be unreachable
            wait_for(lambda: self._node.is_tainted(self._node.machine.gpu(gpu).uuid), 5.0, 0.01)
        self._broken.append(lambda: self._node.machine.restore_gpu(gpu))

    def _api_outage(self) -> None:
        self._node.server.faults.down = True
        self._broken.append(self._node.server.faults.clear)
