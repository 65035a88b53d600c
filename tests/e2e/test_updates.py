"""Updates that go wrong, that change what is published, and that a kubelet's restart comes into."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import (
    DAEMONSET,
    NAMESPACE,
    SLOW_S,
    WORKLOAD,
    Cluster,
    Json,
    container,
    pods_of,
    wait_for,
)
from tests.e2e.test_pods import BURST, metrics_of_kubelet
from tests.e2e.test_slices import versions
from tests.fakes.json_stream import json_documents

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

REGISTRY = Path("/var/lib/kubelet/plugins_registry")


def start_pods(cluster: Cluster, *names: str) -> None:
    """One after the other; each of them runs and has its GPU."""
    for name in names:
        cluster.apply(pods_of("burst", name, image=WORKLOAD))
        cluster.wait_running(name, timeout_s=SLOW_S)
        assert len(cluster.seen_by(name)) == 1


def change(cluster: Cluster, **container: Any) -> None:
    """Roll out another version: the driver's container with these fields."""
    patch = {"spec": {"template": {"spec": {"containers": [{"name": "driver", **container}]}}}}
    cluster.kubectl("patch", DAEMONSET, "-n", NAMESPACE, "-p", json.dumps(patch))


def said(cluster: Cluster) -> list[tuple[str, Json, list[str]]]:
    """The name and state of each pod of the driver, and what it logged of its readiness and of the hand-over."""

    def logged(name: str) -> list[str]:
        lines = cluster.kubectl("logs", name, "-n", NAMESPACE, "-c", "driver").splitlines()
        return [line for line in lines if re.search("ready|stands_by|handed_over|plugin_registered", line)]

    return [
        (pod["metadata"]["name"], state_of(pod), logged(pod["metadata"]["name"]))
        for pod in cluster.driver_pods()
    ]


def rolled_out(cluster: Cluster) -> None:
    cluster.rolled_out()
    wait_for("one ready pod of the driver", lambda: len(staying(cluster)) == 1 and cluster.driver_is_ready())


def staying(cluster: Cluster) -> list[Json]:
    return cluster.staying_pods("node")


def state_of(pod: Json) -> Json:
    """Return the state of its only container; empty before the kubelet has reported it."""
    statuses = pod["status"].get("containerStatuses", [])
    return statuses[0] if statuses else {"state": {}, "lastState": {}, "restartCount": 0}


def runs(pod: Json) -> bool:
    return "running" in state_of(pod)["state"]


def crashed(pod: Json) -> bool:
    return state_of(pod)["restartCount"] > 0


def is_unregistered(pod: Json) -> bool:
    """Its own socket exists, but in a directory that the kubelet does not read."""
    return runs(pod) and state_of(pod).get("started", False)


@pytest.fixture
def updating(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with a claim template; afterwards it has the version of before, whatever the test rolled out."""
    rolled_out(cluster)
    template = cluster.get(DAEMONSET, "-n", NAMESPACE)["spec"]["template"]
    cluster.apply([BURST])
    yield cluster
    back = [
        {"op": "replace", "path": "/spec/template", "value": template},
        {"op": "replace", "path": "/spec/minReadySeconds", "value": 0},
    ]
    cluster.kubectl("patch", DAEMONSET, "-n", NAMESPACE, "--type=json", "-p", json.dumps(back))
    rolled_out(cluster)


@pytest.mark.parametrize(
    ("broken", "is_there"),
    [
        pytest.param({"command": ["sleep", "3600"]}, runs, id="hangs"),
        pytest.param({"args": ["run", "--no-such-flag"]}, crashed, id="crashes"),
        pytest.param(
            {"env": [{"name": "KUBELET_REGISTRAR_DIRECTORY_PATH", "value": "/tmp"}]},
            is_unregistered,
            id="is never registered",
        ),
    ],
)
def test_a_version_that_never_registers_changes_nothing(
    updating: Cluster, broken: Json, is_there: Callable[[Json], bool]
) -> None:
    """The old one serves all the time, the slices are not touched, and the update can be undone."""
    [old] = staying(updating)
    published = versions(updating)
    start_pods(updating, "before")
    change(updating, **broken)
    wait_for(
        "the broken version to be there",
        lambda: any(
            is_there(pod) for pod in staying(updating) if pod["metadata"]["uid"] != old["metadata"]["uid"]
        ),
    )
    start_pods(updating, "during-1", "during-2", "during-3")
    updating.kubectl("delete", "pod", "before")
    wait_for("its claim to be unprepared", lambda: len(updating.leftovers()) == 6)
    assert versions(updating) == published
    updating.kubectl("rollout", "undo", DAEMONSET, "-n", NAMESPACE)
    rolled_out(updating)
    start_pods(updating, "after")
    assert versions(updating) == published
    [left] = staying(updating)
    assert left["metadata"]["uid"] == old["metadata"]["uid"], "the one that served all the time"
    assert state_of(left)["restartCount"] == 0


@contextmanager
def watched(cluster: Cluster, file: Path) -> Iterator[Callable[[], list[Json]]]:
    """The changes of slices from now on, each with its `type` and `object`."""
    local = cluster.local
    command = [str(local.kubectl()), "--kubeconfig", str(local.kubeconfig()), "get", "resourceslices"]
    command += ["--watch-only", "--output-watch-events", "-o", "json"]
    with file.open("wb") as output:
        process = subprocess.Popen(command, stdout=output)

    def changes() -> list[Json]:
        found: list[Json] = []
        with suppress(json.JSONDecodeError):  # half of the last one is written
            found.extend(json_documents(file.read_text()))
        return found

    try:
        # The watch is open when it reports a change by another writer.
        mark = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": "mark"},
            "spec": {
                "driver": "e2e.example.com",
                "nodeName": cluster.node,
                "pool": {"name": "mark", "generation": 1, "resourceSliceCount": 1},
            },
        }

        def reported() -> bool:
            cluster.kubectl("delete", "resourceslice", "mark", "--ignore-not-found")
            cluster.apply([mark])
            return bool(changes())

        wait_for("the watch of slices", reported)
        cluster.kubectl("delete", "resourceslice", "mark")
        yield lambda: [one for one in changes() if one["object"]["spec"]["driver"] == "gpu.nvidia.com"]
    finally:
        process.kill()
        process.wait()


def is_shared(entry: Json) -> bool:
    """Whether a slice has the content of the version that shares devices."""
    return all(device.get("allowMultipleAllocations", False) for device in entry["spec"]["devices"])


def test_a_version_that_publishes_other_content_takes_over_once(updating: Cluster, tmp_path: Path) -> None:
    """While both run, even before the new one is ready, the slices are those of the new one and remain so."""
    slices = len(updating.slices())
    assert not any(is_shared(entry) for entry in updating.slices())
    start_pods(updating, "before")
    # Never ready, so that the old one is not stopped.
    probe = {"exec": {"command": ["false"]}, "httpGet": None}
    with watched(updating, tmp_path / "forth") as changes:
        change(updating, env=[{"name": "CONSUMABLE_SHARES", "value": "4"}], readinessProbe=probe)
        wait_for("the new content", lambda: all(is_shared(entry) for entry in updating.slices()))
        assert len(staying(updating)) == 2
        start_pods(updating, "during-1", "during-2", "during-3")
        assert len(staying(updating)) == 2
        made = changes()
    assert [one["type"] for one in made] == ["MODIFIED"] * slices, "each slice is written once"
    assert all(is_shared(one["object"]) for one in made)
    settled = versions(updating)
    # The scheduler allocates a device again after it is no longer shared, even if claims still have parts of
    # it.
    updating.kubectl("delete", "pod", "during-1", "during-2", "during-3")
    wait_for("the shared devices to be free", lambda: len(updating.leftovers()) == 2)

    with watched(updating, tmp_path / "back") as changes:
        updating.kubectl("rollout", "undo", DAEMONSET, "-n", NAMESPACE)
        wait_for("the old content", lambda: not any(is_shared(entry) for entry in updating.slices()))
        rolled_out(updating)
        start_pods(updating, "after")
        made = changes()
    assert [one["type"] for one in made] == ["MODIFIED"] * slices
    assert versions(updating).keys() == settled.keys()


STREAM = 48


def failed_operations(cluster: Cluster) -> float:
    """How many Prepares and Unprepares of pods have failed, as the kubelet counts them."""
    text = metrics_of_kubelet(cluster)
    pattern = r'^dra_operations_duration_seconds_count\{[^}]*is_error="true"[^}]*\} (\S+)'
    return sum(map(float, re.findall(pattern, text, re.MULTILINE)))


def test_no_call_fails_in_an_update_under_a_stream_of_pods(updating: Cluster) -> None:
    """Eight pods at a time, each of which ends at once and makes room for the next one."""
    [made] = pods_of("burst", "stream", image=WORKLOAD)
    made["spec"]["containers"] = [container("main", "gpu", command="nvidia-smi -L")]
    counts = {"completions": STREAM, "parallelism": 8, "backoffLimit": 0}
    job: Json = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "stream", "namespace": "default"},
    }
    job["spec"] = {**counts, "template": {"spec": made["spec"]}}

    def ended() -> int:
        status = updating.get("job", "stream", "-n", "default").get("status", {})
        assert "failed" not in status, updating.kubectl("describe", "job", "stream", "-n", "default")
        return int(status.get("succeeded", 0))

    failed = failed_operations(updating)
    updating.apply([job])
    try:
        wait_for("the first pods to have ended", lambda: ended() >= 8)
        updating.roll_out()
        before = ended()
        print(f"{before} of {STREAM} pods had ended after the update")
        assert before < STREAM, "the stream of pods ended before the update"
        wait_for("all pods to have ended", lambda: ended() == STREAM)
        wait_for("all claims to be unprepared", lambda: not updating.leftovers())
    finally:
        updating.kubectl("delete", "job", "stream", "-n", "default", "--timeout=300s")
    assert failed_operations(updating) == failed
    assert "dra_operations_duration_seconds_count{" in metrics_of_kubelet(updating)


def test_restarts_of_the_kubelet_in_the_middle_of_an_update(updating: Cluster) -> None:
    """It finds the instances that are there, before the new one is registered and while both are."""
    devices, slices = updating.devices(), len(updating.slices())
    start_pods(updating, "before")
    # Both are there until we have seen it, as on a node whose new version takes long to come up.
    both = json.dumps({"spec": {"minReadySeconds": 3600}})
    updating.kubectl("patch", DAEMONSET, "-n", NAMESPACE, "-p", both)
    updating.kubectl("rollout", "restart", DAEMONSET, "-n", NAMESPACE)
    wait_for("the new version's pod", lambda: len(staying(updating)) == 2)
    new = staying(updating)[1]["metadata"]["uid"]
    updating.local.restart("kubelet")
    start_pods(updating, "during-1")

    def new_is_ready() -> bool:
        """The old one may be gone: a restarted kubelet may report its pod as not ready until the next probe, and then
        the DaemonSet deletes it."""
        found = [pod["metadata"]["uid"] for pod in staying(updating)]
        return new in found and updating.driver_is_ready()

    wait_for(
        "the new version, and the old one if it stays, to be ready", new_is_ready, seen=lambda: said(updating)
    )
    updating.local.restart("kubelet")
    start_pods(updating, "during-2", "during-3")
    updating.kubectl("patch", DAEMONSET, "-n", NAMESPACE, "-p", json.dumps({"spec": {"minReadySeconds": 0}}))
    rolled_out(updating)
    start_pods(updating, "after")
    assert state_of(updating.pod("before"))["restartCount"] == 0
    wait_for("the old one to have ended", updating.driver_has_settled)
    assert (updating.devices(), len(updating.slices())) == (devices, slices)
    [left] = staying(updating)
    sockets = [file.name for file in REGISTRY.glob("gpu.nvidia.com-*")]
    assert sockets == [f"gpu.nvidia.com-{left['metadata']['uid']}-reg.sock"]
