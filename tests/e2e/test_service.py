"""A Job gets a GPU for maintenance by a claim, resets it, and the next pod gets the GPU, on a real Kubernetes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.conftest import SIMULATOR_DIR, SLOW_S, Cluster, Json, claim_and_pod, objects_of, wait_for
from tests.e2e.test_health import device, metric, only, taints

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

# A GPU that goes bad again and again is held back, so each test that lets one go bad has a GPU of its own.
REFUSED, OVERDUE, OTHER = 0, 1, 3
BAD = {"quiet": 4, "killed": 7}
NAMESPACE = "gpu-service"
SETTINGS = SIMULATOR_DIR / "root/var/lib/nvidia-simulator"
AT_WORK, GO = SETTINGS / "at-work", SETTINGS / "go"


def service(uuid: str, command: str | None = None, **parameters: str) -> list[Json]:
    """The example for this GPU. On a simulated machine a reset is a file of the host, and the container has its folder.
    With a `command` the container runs that."""
    documents = objects_of("reset-gpu")
    template, job = documents[1:]
    devices = template["spec"]["spec"]["devices"]
    expression = f'device.attributes["gpu.nvidia.com"].uuid == "{uuid}"'
    devices["requests"][0]["exactly"]["selectors"] = [{"cel": {"expression": expression}}]
    devices["config"][0]["opaque"]["parameters"] |= parameters
    pod = job["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = 1
    pod["volumes"] = [{"name": "machine", "hostPath": {"path": str(SETTINGS), "type": "Directory"}}]
    [container] = pod["containers"]
    container["volumeMounts"] = [{"name": "machine", "mountPath": "/var/lib/nvidia-simulator"}]
    if command is not None:
        container["command"][-1] = command.format(container["command"][-1])
    return documents


GATED = "cd /var/lib/nvidia-simulator && touch at-work && while [ ! -e go ]; do sleep 0.2; done && {}"
"""It resets the GPU when the test lets it."""


@pytest.fixture
def serviced(cluster: Cluster) -> Iterator[Callable[[list[Json]], None]]:
    """Apply a service; afterwards it is gone, and all GPUs are published."""
    wait_for("eight devices", lambda: len(cluster.devices()) == 8)
    cluster.make_namespace(NAMESPACE, objects_of("reset-gpu")[0]["metadata"]["labels"])
    yield lambda documents: cluster.apply(documents[1:])
    for file in (AT_WORK, GO):
        file.unlink(missing_ok=True)
    cluster.kubectl("delete", "job,pod", "--all", "-n", NAMESPACE, "--timeout=300s")
    cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=300s")
    wait_for("all devices to be published", lambda: len(cluster.devices()) == 8)


def uuid_of(cluster: Cluster, index: int) -> str:
    return device(cluster, index)["attributes"]["uuid"]["string"]


def published(cluster: Cluster) -> set[int]:
    return {one["attributes"]["index"]["int"] for one in cluster.devices()}


def claims(cluster: Cluster) -> list[str]:
    return [one["metadata"]["name"] for one in cluster.get("resourceclaims", "-n", NAMESPACE)["items"]]


def messages(cluster: Cluster, reason: str, namespace: str = NAMESPACE) -> list[str]:
    """The messages of all events with this reason, on claims and pods."""
    found = cluster.get("events", "-n", namespace)["items"]
    return [event["message"] for event in found if event["reason"] == reason]


def state(cluster: Cluster) -> list[str]:
    """The states of the GPUs in maintenance, by the metric."""
    found = metric(cluster, "nvidia_dra_maintenance_gpus")
    return [labels.partition('state="')[2].partition('"')[0] for labels, number in found.items() if number]


def resets(uuid: str) -> int:
    machine = json.loads((SIMULATOR_DIR / "machine.json").read_text())
    return next(gpu.get("resets", 0) for gpu in machine["gpus"] if gpu["uuid"] == uuid)


def kill_plugin(cluster: Cluster) -> None:
    """SIGKILL to the plugin's process; the kubelet starts the container again."""
    [pod] = cluster.staying_pods("node")
    uid, before = pod["metadata"]["uid"], _restarts(pod)
    for file in Path("/proc").glob("[0-9]*/cgroup"):
        with suppress(OSError):
            is_ours = uid in file.read_text().replace("_", "-")
            if is_ours and b"gpu-dra-driver\0run" in (file.parent / "cmdline").read_bytes():
                os.kill(int(file.parent.name), signal.SIGKILL)
    wait_for(
        "the plugin to be started again",
        lambda: [_restarts(one) for one in cluster.staying_pods("node")] == [before + 1],
    )
    wait_for("the driver to be ready", cluster.driver_is_ready)


def _restarts(pod: Json) -> int:
    return pod["status"]["containerStatuses"][0]["restartCount"]


@pytest.mark.parametrize("how", BAD)
def test_job_resets_a_gpu_that_needs_it_and_the_next_pod_gets_the_gpu(
    cluster: Cluster, serviced: Callable[[list[Json]], None], how: str
) -> None:
    """The GPU is in use at first. `killed`: the plugin is killed in each state."""
    index, step = BAD[how], kill_plugin if how == "killed" else lambda _: None
    uuid, everything = uuid_of(cluster, index), published(cluster)
    before = resets(uuid)
    cluster.start("user", selector=only(index))
    cluster.start("neighbour", selector=only(OTHER))
    cluster.simulate("recovery-action", str(index), "1")
    cluster.simulate("xid", str(index), "95")
    wait_for("the taint", lambda: taints(cluster, index))
    cluster.apply(claim_and_pod("next", selector=only(index)))
    cluster.wait_unschedulable("next")

    serviced(service(uuid, GATED))
    wait_for("the GPU to be withdrawn", lambda: published(cluster) == everything - {index})
    wait_for(
        "the claim that is waited for",
        lambda: any("default/user" in text for text in messages(cluster, "PrepareFailed")),
    )
    step(cluster)
    assert state(cluster) == ["waiting"]
    assert published(cluster) == everything - {index}

    cluster.kubectl("delete", "pod/user", "resourceclaim/user", "-n", "default", "--timeout=300s")
    wait_for("the Job to be at work", AT_WORK.exists)
    [claim] = claims(cluster)
    step(cluster)
    assert state(cluster) == ["active"]
    assert published(cluster) == everything - {index}
    cluster.apply(claim_and_pod("later", selector=only(OTHER + 2)))
    wait_for(
        "a Prepare to be refused",
        lambda: any(f"{NAMESPACE}/{claim}" in text for text in messages(cluster, "PrepareFailed", "default")),
    )
    assert cluster.pod("neighbour")["status"]["phase"] == "Running"

    GO.touch()
    cluster.kubectl("wait", "--for=condition=complete", "job/reset-gpu", "-n", NAMESPACE, "--timeout=300s")
    step(cluster)
    wait_for(
        "the GPU to be published without a taint",
        lambda: index in published(cluster) and not taints(cluster, index),
    )
    assert resets(uuid) == before + 1
    wait_for("the event of the end", lambda: messages(cluster, "MaintenanceEnded"))
    assert messages(cluster, "MaintenanceStarted")
    cluster.wait_running("next", "later", timeout_s=SLOW_S)
    assert (state(cluster), cluster.seen_by("next")) == ([], [uuid])


def test_service_with_refuse_names_the_claim_that_uses_the_gpu_and_leaves_it_published(
    cluster: Cluster, serviced: Callable[[list[Json]], None]
) -> None:
    cluster.start("user", selector=only(REFUSED))
    everything = published(cluster)
    serviced(service(uuid_of(cluster, REFUSED), GATED, policy="Refuse"))
    wait_for(
        "the refusal", lambda: any("default/user" in text for text in messages(cluster, "PrepareFailed"))
    )
    wait_for("the GPU to be published", lambda: published(cluster) == everything)
    assert cluster.pod("user")["status"]["phase"] == "Running"
    assert not AT_WORK.exists()


def test_service_beyond_its_timeout_is_overdue_and_only_its_gpu_stays_withdrawn(
    cluster: Cluster, serviced: Callable[[list[Json]], None]
) -> None:
    everything = published(cluster)
    serviced(service(uuid_of(cluster, OVERDUE), GATED, timeout="20s"))
    wait_for("the Job to be at work", AT_WORK.exists)
    wait_for("the metric", lambda: state(cluster) == ["overdue"])
    wait_for("an event", lambda: messages(cluster, "MaintenanceOverdue"))
    assert published(cluster) == everything - {OVERDUE}
    cluster.apply(claim_and_pod("other", selector=only(OTHER)))
    cluster.wait_running("other", timeout_s=SLOW_S)
    assert state(cluster) == ["overdue"]
    GO.touch()
    wait_for("the GPU to be published", lambda: published(cluster) == everything)
    wait_for("no maintenance", lambda: not state(cluster))
