"""Every component is restarted in turn while pods come and go; afterwards the node is as new."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import urllib3

from tests.e2e.conftest import NAMESPACE, SIMULATOR_DIR, SLOW_S, Cluster, Json, pods_of, wait_for
from tests.e2e.test_pods import BURST

pytestmark = pytest.mark.cluster

WORKERS = 4
GPUS = 8
# The scheduler retries a pod after five minutes if it missed, in an outage, that a device became free.
SETTLE_S = 600.0

PODS = "/api/v1/namespaces/default/pods"


class Load:
    """Threads that each create a pod, wait until it runs, delete it, and start over; any attempt may fail."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.ran = 0
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(WORKERS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(SETTLE_S)

    def wait_for_more(self, pods: int = 2 * WORKERS) -> None:
        """Wait until this many more pods have run."""
        wanted = self.ran + pods
        wait_for(f"{pods} more pods to run under load", lambda: self.ran >= wanted, SETTLE_S)

    def _work(self, worker: int) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            name = f"load-{worker}-{number}"
            self._until(lambda name=name: self._answered("POST", PODS, (201, 409), pods_of("burst", name)[0]))
            # A pod whose container was being created when its runtime stopped may fail, because the container
            # may not be created again.
            self._until(lambda name=name: self._phase(name) in ("Running", "Failed"))
            if self._phase(name) == "Running":
                with self._lock:
                    self.ran += 1
            self._until(
                lambda name=name: self._answered("DELETE", f"{PODS}/{name}", (200, 202, 404)), always=True
            )

    def _until(self, done: Callable[[], bool], *, always: bool = False) -> bool:
        """Retries until it works, or until the load ends; `always` continues for some time even then."""
        deadline = time.monotonic() + SETTLE_S
        while not done():
            if (self._stop.is_set() and not always) or time.monotonic() > deadline:
                return False
            self._stop.wait(0.2)
            if self._stop.is_set():
                time.sleep(0.2)
        return True

    def _phase(self, name: str) -> str:
        found = self._ask("GET", f"{PODS}/{name}")
        return json.loads(found[1])["status"].get("phase", "") if found and found[0] == 200 else ""

    def _answered(self, method: str, path: str, well: tuple[int, ...], body: Json | None = None) -> bool:
        found = self._ask(method, path, body)
        return found is not None and found[0] in well

    def _ask(self, method: str, path: str, body: Json | None = None) -> tuple[int, bytes] | None:
        """What the API server answers; None if it does not, as it may not while it restarts."""
        try:
            return self._cluster.request(method, path, body)
        except urllib3.exceptions.HTTPError:
            return None


def state(cluster: Cluster) -> Json:
    """Return everything that claims may leave on the node and in the API server; a pool's generation may
    increase.
    """
    machine = json.loads((SIMULATOR_DIR / "machine.json").read_text())
    return {
        "files of claims": cluster.leftovers(),
        "devices": cluster.devices(),
        "owners": [entry["metadata"]["ownerReferences"] for entry in cluster.slices()],
        "slices": len(cluster.slices()),
        "MIG instances": [len(gpu.get("instances") or []) for gpu in machine["gpus"]],
        "MIG modes": [gpu.get("mig_mode") for gpu in machine["gpus"]],
    }


def kill_driver(cluster: Cluster) -> None:
    """Its pod is deleted without grace, as by a node that is in trouble."""
    cluster.kubectl("delete", "pod", "-n", NAMESPACE, "--all", "--grace-period=0", "--force")


@pytest.fixture
def mended(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster whose components all run again afterwards, whatever the test stopped."""
    yield cluster
    for row in cluster.local.state():
        if not row.healthy:
            cluster.local.start(row.name)
    wait_for("the cluster to be healthy", cluster.local.is_up)


@pytest.mark.timeout(7200)
def test_restart_of_every_component_under_load_loses_nothing(mended: Cluster) -> None:
    """Pods start after each restart, pods that ran during all of them were not touched, and nothing remains."""
    mended.apply([BURST])
    wait_for("the driver to have settled", mended.driver_has_settled)
    before = state(mended)
    assert len(before["devices"]) >= GPUS
    mended.apply(pods_of("burst", "witness"))
    mended.wait_running("witness")
    seen = mended.seen_by("witness")
    with Load(mended) as load:
        load.wait_for_more()
        for component in mended.local.COMPONENTS:
            print(f"restart of {component}, {load.ran} pods ran", flush=True)
            mended.local.restart(component)
            load.wait_for_more()
        for name, action in (("rollout", Cluster.roll_out), ("killed driver", kill_driver)):
            print(f"{name}, {load.ran} pods ran", flush=True)
            action(mended)
            load.wait_for_more()
        for component in ("kube-apiserver", "etcd"):
            print(f"{component} away for a while, {load.ran} pods ran", flush=True)
            mended.local.stop(component)
            time.sleep(20)
            mended.local.start(component)
            load.wait_for_more()
    [container] = mended.pod("witness")["status"]["containerStatuses"]
    assert container["restartCount"] == 0
    assert mended.seen_by("witness") == seen
    mended.kubectl("delete", "pods", "--all", f"--timeout={SLOW_S:.0f}s")
    wait_for("the driver to be ready", mended.driver_is_ready)
    wait_for("no claim to be left", lambda: not mended.get("resourceclaims")["items"])
    wait_for("the node to be as before", lambda: state(mended) == before, SETTLE_S, every_s=1.0)
