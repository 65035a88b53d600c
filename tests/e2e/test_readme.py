"""The commands of docs/install.md, upgrade.md and migration.md, exactly as printed.

These machines have no Docker daemon and no registry, so `docker` is a program that calls buildah: it builds on the base
of `make image` instead of `debian:trixie-slim`, saves, and "pushes" to the node. The node has no GPU, so the chart gets
the value for a simulated machine where the page offers it. Everything else is what a reader runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import image
import pytest
from localcluster.layout import Layout

import dra_driver
from tests.e2e.conftest import (
    DAEMONSET,
    NAMESPACE,
    PLUGIN_DIR,
    ROOT,
    Cluster,
    claim,
    container,
    install,
    uninstall,
    wait_for,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

_DOCKER = """#!{python}
import pathlib, sys
sys.path.insert(0, "{hack}")
import image, localcluster
command, *words = sys.argv[1:]
if command == "build":
    *options, folder = words
    image.build(*options, folder=pathlib.Path(folder))
elif command in ("push", "save"):
    [name] = words
    archive = pathlib.Path("{archive}")
    image.save(name, archive)
    if command == "push":
        localcluster.load_image(archive)
    else:
        sys.stdout.buffer.write(archive.read_bytes())
else:
    sys.exit(f"docker {{command}} is not known here")
"""
"""Buildah with the base from Debian's packages, and the cluster instead of a registry."""


REGISTRY = "registry.example.com/gpu"
NO_REGISTRY = "One GPU node, ten minutes, no registry"
DEVICE_PLUGIN = {
    "apiVersion": "apps/v1",
    "kind": "DaemonSet",
    "metadata": {"name": "nvidia-device-plugin-daemonset", "namespace": "kube-system"},
    "spec": {
        "selector": {"matchLabels": {"name": "device-plugin"}},
        "template": {
            "metadata": {"labels": {"name": "device-plugin"}},
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "containers": [container("plugin", command="exec sleep 2147483647")],
            },
        },
    },
}
"""A minimal DaemonSet of NVIDIA's device plugin."""


@pytest.fixture
def reader(cluster: Cluster, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What a reader's shell has; afterwards the cluster has the driver of the other tests again."""
    programs = tmp_path / "bin"
    programs.mkdir()
    text = _DOCKER.format(python=sys.executable, hack=ROOT / "hack", archive=tmp_path / "image.tar")
    (programs / "docker").write_text(text)
    (programs / "docker").chmod(0o755)
    (programs / "helm").symlink_to(cluster.local.helm())
    yield with_kubectl(cluster, programs) | {"NODE": cluster.node}
    cluster.kubectl("label", "node", cluster.node, "nvidia.com/gpu.present-")
    cluster.kubectl("delete", "-f", "examples/one-gpu", "--ignore-not-found", "--timeout=300s")
    install(cluster)


def with_kubectl(cluster: Cluster, programs: Path) -> dict[str, str]:
    """The environment of a shell with kubectl, ctr and these programs."""
    for name in ("kubectl", "ctr"):
        (programs / name).symlink_to(cluster.local.program(name))
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "KUBECONFIG": str(cluster.local.kubeconfig()),
        "CONTAINERD_ADDRESS": str(Layout.from_environment().containerd_socket),
        "REGISTRY": REGISTRY,
    }


def checkout(folder: Path) -> Path:
    clone = folder / "gpu-dra-driver"
    left_out = shutil.ignore_patterns(".venv", ".git", "build", "dist", ".*_cache")
    shutil.copytree(ROOT, clone, symlinks=True, ignore=left_out)
    return clone


def shell(folder: Path, environment: dict[str, str]) -> Callable[[str], str]:
    """Run commands there as a reader does, up to the first that fails; what they print comes back."""

    def run(commands: str) -> str:
        done = subprocess.run(
            ["bash", "-eu", "-c", commands],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


def test_steps_to_install_work_as_printed(cluster: Cluster, reader: dict[str, str], tmp_path: Path) -> None:
    run = shell(checkout(tmp_path), reader)

    def is_installed() -> None:
        installed = cluster.get(DAEMONSET, "-n", NAMESPACE)["spec"]["template"]["spec"]["containers"][0]
        assert installed["image"] == f"{REGISTRY}/gpu-dra-driver:{dra_driver.__version__}"
        # Not Never, as in the other tests: the kubelet finds the image under exactly the manifests' name.
        assert installed["imagePullPolicy"] == "IfNotPresent"
        wait_for(
            "the driver of the manual",
            lambda: len(cluster.staying_pods("node")) == 1 and cluster.driver_is_ready(),
        )
        said = cluster.kubectl("exec", DAEMONSET, "-n", NAMESPACE, "--", "gpu-dra-driver", "--version")
        assert said == f"gpu-dra-driver {dra_driver.__version__}\n"
        # The node of the tests has no GPU, and its pool shows this.
        wait_for("the pool without devices", lambda: cluster.devices() == [])

    [build] = printed_blocks("docs/install.md", "Build the image")
    [label] = printed_blocks("docs/install.md", "Label the GPU nodes")
    with_helm, on_a_simulated_machine = printed_blocks("docs/install.md", "Install the chart")
    look, examine = printed_blocks("docs/install.md", "Check it")
    _, _, run_pod, delete_pod, _ = printed_blocks("docs/install.md", NO_REGISTRY)
    [without_helm] = printed_blocks("daemonset/README.md", "Without Helm")

    answers: list[str] = []

    def finds_no_fault() -> bool:
        done = subprocess.run(
            ["bash", "-eu", "-c", examine], env=reader, capture_output=True, text=True, check=False
        )
        answers.append(done.stdout + done.stderr)
        return done.returncode == 0 and " 0 FAIL" in done.stdout

    run(build)
    run(label)
    uninstall(cluster, "--ignore-not-found")
    run(with_helm)
    is_installed()
    run(on_a_simulated_machine)
    wait_for("the devices of the simulated machine", lambda: len(cluster.devices()) == 8)
    assert "gpu.nvidia.com" in run(look)
    # A check that takes more than seconds is one that fails, as it may on a machine under load.
    with suppress(AssertionError):
        wait_for("a doctor that finds no fault", finds_no_fault, 60, every_s=1.0)
    assert " 0 FAIL" in answers[-1], answers[-1]
    run(run_pod)
    assert len(cluster.seen_by("one-gpu")) == 1
    run(delete_pod)
    run("helm uninstall gpu-dra-driver --namespace gpu-dra-driver --wait")
    wait_for("the driver's pods to be gone", lambda: not cluster.driver_pods())
    run(without_helm)
    is_installed()


def test_node_without_a_registry_gets_a_pod_with_a_gpu_and_is_clean_afterwards(
    cluster: Cluster, reader: dict[str, str], tmp_path: Path
) -> None:
    run = shell(checkout(tmp_path), reader)
    build, install_it, run_pod, delete_pod, clean = printed_blocks("docs/install.md", NO_REGISTRY)
    without_gpu = "--set simulator.enabled=true"
    assert f"add `{without_gpu}`" in section("docs/install.md", NO_REGISTRY)
    claims, delete, remove_state = printed_blocks("docs/upgrade.md", "Uninstall")
    uninstall(cluster, "--ignore-not-found")

    run(build)
    run(install_it.replace("helm install ", f"helm install {without_gpu} "))
    [container] = cluster.get(DAEMONSET, "-n", NAMESPACE)["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"gpu-dra-driver:{dra_driver.__version__}"
    assert container["imagePullPolicy"] == "Never"
    [gpu] = re.findall(r"^GPU \d+: .* \(UUID: (GPU-[0-9a-f-]+)\)$", run(run_pod), re.MULTILINE)
    [claim_of_pod] = cluster.claims_of("one-gpu")
    assert cluster.allocated(claim_of_pod) == [gpu]

    run(delete_pod)
    wait_for("the claim to be deleted", lambda: run(claims) == "")
    run(delete)
    run(remove_state)
    run(clean)
    assert cluster.leftovers() == []
    assert not PLUGIN_DIR.exists()
    assert "nvidia.com/gpu.present" not in cluster.get("node", cluster.node)["metadata"]["labels"]
    assert "gpu.nvidia.com" not in cluster.kubectl("get", "resourceslices,deviceclasses", "-o", "name")


def printed_blocks(page: str, heading: str) -> list[str]:
    """The shell blocks of a section of a page."""
    blocks = re.findall(r" *```bash\n(.*?\n) *```", section(page, heading), re.DOTALL)
    return [textwrap.dedent(block) for block in blocks]


def section(page: str, heading: str) -> str:
    return (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.fixture
def administrator(cluster: Cluster, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A shell with the released image in the registry and a device plugin on the node; all as before afterwards."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "helm").symlink_to(cluster.local.helm())
    environment = with_kubectl(cluster, programs) | {"NODE": cluster.node}
    name = f"{REGISTRY}/gpu-dra-driver:{dra_driver.__version__}"
    shell(tmp_path, environment)(f"ctr -n k8s.io images tag --force {image.IMAGE} {name}")
    cluster.apply([DEVICE_PLUGIN])
    cluster.kubectl("label", "node", cluster.node, "nvidia.com/gpu.present=true", "--overwrite")
    yield environment
    cluster.kubectl("uncordon", cluster.node)
    cluster.kubectl("label", "node", cluster.node, "gpus-by-", "nvidia.com/gpu.present-")
    cluster.kubectl(
        "delete", "daemonset", "nvidia-device-plugin-daemonset", "-n", "kube-system", "--timeout=300s"
    )
    install(cluster)


def test_manual_moves_a_node_there_and_back_and_uninstalls_without_a_trace(
    cluster: Cluster, administrator: dict[str, str], tmp_path: Path
) -> None:
    run = shell(checkout(tmp_path), administrator)

    def runs_on_node() -> set[str]:
        """Return which of the two serves the node's GPUs, according to the pods that are not being deleted."""
        pods = cluster.get("pods", "-A")["items"]
        kinds = {"nvidia-device-plugin-daemonset": "plugin", "gpu-dra-driver": "driver"}
        return {
            kinds[owner["name"]]
            for pod in pods
            for owner in pod["metadata"].get("ownerReferences", [])
            if owner["name"] in kinds
        }

    exclude, restrict, move = printed_blocks("docs/migration.md", "From NVIDIA's device plugin")
    [upgrade, replace_mps_host] = printed_blocks("docs/upgrade.md", "Upgrade")
    [claims, delete, remove_state] = printed_blocks("docs/upgrade.md", "Uninstall")

    cluster.start("left")
    cluster.apply([claim("waits")])
    assert run(claims) == "default/left\n"
    cluster.kubectl("delete", "pod/left", "resourceclaim/left", "resourceclaim/waits", "--timeout=300s")
    wait_for("the claim to end", lambda: not cluster.leftovers())
    assert run(claims) == ""

    uninstall(cluster)
    # The node is the device plugin's until it has the label, then the driver's, and the device plugin's again.
    run(exclude)
    run(restrict)
    wait_for("the device plugin alone", lambda: runs_on_node() == {"plugin"})
    run(move)
    wait_for("the driver alone", lambda: runs_on_node() == {"driver"})
    assert not cluster.get("node", cluster.node)["spec"].get("unschedulable")
    run(upgrade)
    run(replace_mps_host)
    run("kubectl label node $NODE gpus-by-")
    wait_for("the device plugin again", lambda: runs_on_node() == {"plugin"})

    run("kubectl label node $NODE gpus-by=dra")
    wait_for("the driver again", lambda: runs_on_node() == {"driver"})
    run(delete)
    assert remove_state == f"rm -rf {PLUGIN_DIR}\n"
    left = [file for file in PLUGIN_DIR.rglob("*") if file.is_socket()]
    assert left + list(PLUGIN_DIR.parent.with_name("plugins_registry").glob("gpu.nvidia.com*")) == []
    assert cluster.leftovers() == []
    run(remove_state)
    kinds = "namespaces,clusterroles,clusterrolebindings,deviceclasses,resourceslices"
    kinds += ",validatingadmissionpolicies,validatingadmissionpolicybindings"
    names = cluster.kubectl("get", kinds, "-o", "name").split()
    assert [name for name in names if "gpu-dra-driver" in name or "nvidia" in name] == []
