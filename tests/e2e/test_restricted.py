"""The unprivileged driver works, and needs every permission that it still has."""

from __future__ import annotations

import copy
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import cdi_hook
import pytest

from tests.deploy.test_daemonset import installed as manifests_installed
from tests.deploy.test_daemonset import of_kind
from tests.e2e.conftest import (
    NAMESPACE,
    PLUGIN_DIR,
    SIMULATOR_DIR,
    SLOW_S,
    Cluster,
    claim_and_pod,
    container,
    gpu_config,
    installed,
    pod,
    rendered,
    wait_for,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

Json = dict[str, Any]

GPUS = 8
MACHINE = SIMULATOR_DIR / "restricted"
CAP_SYS_ADMIN = 21
HOST_NODE = Path("/dev/gpu-dra-driver-e2e")
NVIDIA_MAJOR = 195
"""The major number of GPU nodes; without NVIDIA's module the kernel has no driver for it."""
RUNTIME_CLASS = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "nvidia"},
    "handler": "runc",
}
LONG_SLICES = gpu_config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})


@pytest.fixture(scope="module")
def _restricted(_cluster: Cluster) -> Iterator[Cluster]:
    """The driver without privileges; afterwards the plain one again."""
    # The host's kernel creates device nodes, and the simulated kernel runs in the driver's process.
    shutil.rmtree(MACHINE, ignore_errors=True)
    _cluster.simulate("create", "dgx-h100", "--device-nodes", "described", directory=MACHINE)
    cdi_hook.put_cdi_hook(MACHINE / "root")
    # The simulated machine has no real device, so the plain runtime replaces NVIDIA's.
    _cluster.apply([RUNTIME_CLASS])
    with installed(_cluster, "e2e-restricted", lambda: len(_cluster.devices()) > GPUS) as cluster:
        yield cluster
    _cluster.kubectl("delete", "runtimeclass", "nvidia", "--ignore-not-found")
    # All writers there have exited: `install` waits for this.
    shutil.rmtree(MACHINE)


@pytest.fixture
def restricted(_restricted: Cluster, cluster: Cluster) -> Cluster:
    return cluster


def process_of(pod: Json) -> Path:
    """The directory in /proc of the daemon of a pod: the first of its processes, as it may run others."""
    wanted = f"POD_UID={pod['metadata']['uid']}".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (directory / "environ").read_bytes().split(b"\0"):
                found.append(directory)
    assert found, f"pod {pod['metadata']['name']} has no process"
    return min(found, key=lambda directory: int(directory.name))


def test_the_kernel_grants_it_nothing(restricted: Cluster) -> None:
    """No capability and no way to one, filtered system calls, and a root file system that is read-only."""
    [driver] = restricted.staying_pods("node")
    process = process_of(driver)
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    sets = {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    assert sets == dict.fromkeys(sets, 0)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert status["NSpid"].split()[1:] == ["1"], "the first process of a namespace of its own"
    mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    [root] = [mount for mount in mounts if mount[4] == "/"]
    assert "ro" in root[5].split(",")
    host_directories = {mount[4] for mount in mounts if mount[3].startswith(("/var/lib/gpu-dra", "/run"))}
    assert str(PLUGIN_DIR) in host_directories
    assert str(PLUGIN_DIR.parent) not in host_directories


def test_claims_of_every_kind_are_prepared_and_undone(restricted: Cluster) -> None:
    """A GPU, time slices, a MIG device on demand and MPS: what is the driver's own needs no capability."""
    restricted.apply(
        claim_and_pod("whole")
        + claim_and_pod("turns", parameters=LONG_SLICES)
        + claim_and_pod("slice", "mig-1g.10gb.nvidia.com")
        + claim_and_pod(
            "together", "mps.gpu.nvidia.com", command="nvidia-smi -L; mps-client; exec sleep 3600"
        )
    )
    names = ("whole", "turns", "slice", "together")
    restricted.wait_running(*names, timeout_s=SLOW_S)
    seen = {name: restricted.seen_by(name) for name in names}
    assert all(len(uuids) == 1 for uuids in seen.values())
    assert seen["slice"][0].startswith("MIG-")
    interval = MACHINE / "root/var/lib/nvidia-simulator/timeslice" / seen["turns"][0]
    assert interval.read_text().strip() == "3"
    wait_for("the MPS client to be connected", lambda: "mps=connected" in restricted.logs("together"))
    restricted.kubectl("delete", "pod", *names)
    wait_for("the claims to be unprepared", lambda: not restricted.leftovers())
    wait_for("the time slice to be as before", lambda: interval.read_text().strip() in ("", "0"))
    wait_for(
        "the MIG device to be destroyed",
        lambda: (
            not any(gpu["instances"] for gpu in json.loads((MACHINE / "machine.json").read_text())["gpus"])
        ),
    )


WITHOUT: dict[str, tuple[str, str]] = {
    "plugins-registry": ("terminated", "kubelet registry directory /var/lib/kubelet/plugins_registry"),
    "plugins": ("terminated", "cannot create the plugin directory /var/lib/kubelet/plugins/"),
    "cdi": ("terminated", "cannot create the directory /var/run/cdi"),
    "api-token": ("terminated", "/token cannot be read: No such file or directory"),
    "driver-root": (
        "gpu-dra-driver inspect",
        "neither the PCI bus nor NVML (libnvidia-ml.so.1) shows a usable GPU",
    ),
    "tmp": ("gpu-dra-driver inspect --simulate l40s-8", "No usable temporary directory"),
}
"""By volume: how the daemon exits without it, or which command reports what is missing, and the text."""


def without(pod: Json, volume: str) -> Json:
    """A pod without a volume and without what restarts it, under a driver's name of its own."""
    made = copy.deepcopy(pod)
    spec = made["spec"]
    [container] = spec["containers"]
    container["volumeMounts"] = [one for one in container["volumeMounts"] if one["name"] != volume]
    spec["volumes"] = [one for one in spec["volumes"] if one["name"] != volume]
    made["metadata"]["name"] = f"without-{volume}"
    return json.loads(json.dumps(made).replace("gpu.nvidia.com", driver_name(volume)))


def driver_name(volume: str) -> str:
    return f"{volume}.e2e.example.com"


@pytest.fixture
def as_installed(cluster: Cluster) -> Iterator[Json]:
    """A pod of `daemonset/install.yaml`, with the simulated driver root as the host's; nothing of it stays."""
    [daemonset] = copy.deepcopy(of_kind(manifests_installed(), "DaemonSet"))
    spec = daemonset["spec"]["template"]["spec"]
    [container] = spec["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        del container[probe]
    container |= {"image": "localhost/gpu-dra-driver:dev", "imagePullPolicy": "Never"}
    root = str(SIMULATOR_DIR / "root")
    for variable in container["env"]:
        if variable["name"] == "NVIDIA_DRIVER_ROOT":
            variable["value"] = root
    for volume in spec["volumes"]:
        if volume["name"] == "driver-root":
            volume["hostPath"]["path"] = root
    del spec["affinity"]  # the node of the tests has no label
    spec |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    metadata = {"namespace": NAMESPACE, "labels": {"test": "mounts"}}
    yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    cluster.kubectl("delete", "pods", "-n", NAMESPACE, "-l", "test=mounts", "--timeout=300s")
    for volume in ("nothing", *WITHOUT):
        shutil.rmtree(PLUGIN_DIR.parent / driver_name(volume), ignore_errors=True)
        for socket in PLUGIN_DIR.parent.with_name("plugins_registry").glob(f"{driver_name(volume)}*"):
            socket.unlink(missing_ok=True)


def assert_golden(cluster: Cluster, volume: str, command: str, words: str) -> bool:
    """Whether the daemon exited with this text, or a command in its pod prints it."""
    name = f"without-{volume}"
    if command == "terminated":
        statuses = cluster.pod(name, NAMESPACE)["status"].get("containerStatuses", [])
        ended = any("terminated" in status["state"] for status in statuses)
        return ended and words in cluster.logs(name, NAMESPACE)
    run = ("--", "sh", "-c", f"{command} 2>&1 || true")
    return words in cluster.kubectl("exec", name, "-n", NAMESPACE, *run, check=False)


def test_each_mount_is_needed(cluster: Cluster, as_installed: Json) -> None:
    """The daemon of `daemonset/install.yaml` runs; without any one of its mounts it does not, or a command does not."""
    assert {one["name"] for one in as_installed["spec"]["volumes"]} == {*WITHOUT, "dev"}, "dev is below"
    pods = [without(as_installed, volume) for volume in ("nothing", *WITHOUT)]
    cluster.apply(pods)
    for volume, (command, words) in WITHOUT.items():
        wait_for(
            f"{words!r} without {volume}",
            partial(assert_golden, cluster, volume, command, words),
            every_s=1.0,
        )
        if command != "terminated":
            assert not assert_golden(cluster, "nothing", command, words)
    # The kubelet detects new plugins periodically.
    wait_for(
        "the daemon that has everything to be registered",
        lambda: "plugin_registered" in cluster.logs("without-nothing", NAMESPACE),
    )


def opener(name: str, security: Json, **more: Any) -> Json:
    return container(name, command="exec sleep 3600", securityContext=security, **more)


DEV = {"volumeMounts": [{"name": "dev", "mountPath": "/dev", "mountPropagation": "HostToContainer"}]}
OPENERS = pod(
    "openers",
    opener("as-installed", {"privileged": True}, **DEV),
    opener("without-mount", {"privileged": True, "capabilities": {"drop": ["ALL"]}}),
    opener("without-privileges", {"capabilities": {"add": ["ALL"]}}, **DEV),
    volumes=[{"name": "dev", "hostPath": {"path": "/dev"}}],
)


def test_nodes_of_gpus_that_come_later_are_opened_with_privileges_only(cluster: Cluster) -> None:
    """Neither the mount nor all capabilities are enough: the device cgroup allows only privileged containers
    to open the host's devices.
    """
    cluster.apply([OPENERS])
    cluster.wait_running("openers")
    HOST_NODE.unlink(missing_ok=True)  # a killed run may have left it
    os.mknod(HOST_NODE, stat.S_IFCHR | 0o666, os.makedev(NVIDIA_MAJOR, 0))
    try:

        def opened(container: str) -> str:
            read = ("--", "sh", "-c", f"cat {HOST_NODE} 2>&1 || true")
            return cluster.kubectl("exec", "openers", "-c", container, *read)

        # The kernel searched for the driver of the device, which this machine does not have.
        assert "No such device or address" in opened("as-installed")
        assert "No such file or directory" in opened("without-mount")
        assert "Operation not permitted" in opened("without-privileges")
    finally:
        HOST_NODE.unlink()
    # A privileged container has its capabilities whatever the manifest drops.
    read = ("--", "grep", "CapEff", "/proc/self/status")
    effective = cluster.kubectl("exec", "openers", "-c", "without-mount", *read).split()[1]
    assert int(effective, 16) >> CAP_SYS_ADMIN & 1


def test_the_mps_host_may_not_mount_for_the_node_without_privileges(cluster: Cluster) -> None:
    """Its tmpfs has to reach the host, which the API server allows to privileged containers only."""
    made = rendered(cluster, "e2e-sharing")
    [daemonset] = [text for text in made.split("---\n") if "mountPropagation: Bidirectional" in text]
    assert daemonset.count("privileged: true") == 1
    daemonset = daemonset.replace("name: gpu-dra-driver-mps\n", "name: dry-run\n")

    def refusal(manifest: str) -> str:
        command = [str(cluster.local.kubectl()), "--kubeconfig", str(cluster.local.kubeconfig())]
        command += ["create", "--dry-run=server", "-f", "-"]
        return subprocess.run(command, input=manifest, capture_output=True, text=True, check=False).stderr

    assert not refusal(daemonset)
    unprivileged = daemonset.replace("privileged: true", "privileged: false")
    assert "available only to privileged containers" in refusal(unprivileged)
