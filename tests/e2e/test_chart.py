"""The chart on the real cluster, with Helm 3 and 4: it adopts what kubectl and NVIDIA's chart created, is
upgraded, rolled back, renamed and uninstalled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from localcluster import chart as localchart

from tests.e2e.conftest import (
    CDI_DIR,
    DAEMONSET,
    NAMESPACE,
    PLUGIN_DIR,
    ROOT,
    Cluster,
    install,
    uninstall,
    wait_for,
)
from tests.e2e.test_permissions import a_slice, refusal

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

Json = dict[str, Any]

RELEASE = "gpu-dra-driver"
REGISTRY = PLUGIN_DIR.parent.with_name("plugins_registry")
VALUES: Json = {
    "simulator": {"enabled": True},
    "image": {"repository": "localhost/gpu-dra-driver", "tag": "dev", "pullPolicy": "Never"},
}
KINDS = (
    "daemonsets,serviceaccounts,configmaps,clusterroles,clusterrolebindings,networkpolicies,resourcequotas,"
    "deviceclasses,validatingadmissionpolicies,validatingadmissionpolicybindings"
)
GPUS = 8
TAKE_OVER = {
    int(major): tuple(flags.split())
    for major, flags in re.findall(
        r"^# Helm (\d)\nhelm upgrade --install .* (--take-ownership .*)$",
        (ROOT / "daemonset/README.md").read_text(),
        re.MULTILINE,
    )
}
"""By the major version of Helm, as in the manual. Helm replaces existing objects; otherwise it would keep fields that
only they have."""


class Chart:
    """Helm of a major version with the chart of this tree, and the cluster it works on."""

    def __init__(self, cluster: Cluster, major: int) -> None:
        self.cluster = cluster
        self.major = major

    def helm(self, *arguments: str, values: Json | None = None) -> subprocess.CompletedProcess[str]:
        return self.cluster.helm(*arguments, values=values, major=self.major)

    def upgrade(
        self,
        *arguments: str,
        values: Json | None = None,
        name: str = RELEASE,
        chart: str | Path = "daemonset/chart",
    ) -> str:
        """`helm upgrade --install`, seen rolled out; what it printed."""
        done = self.helm(
            *("upgrade", "--install", RELEASE, str(chart), "-n", NAMESPACE, *arguments),
            values=VALUES | (values or {}),
        )
        assert done.returncode == 0, done.stderr
        self.rolled_out(name)
        return done.stdout

    def take_over(self) -> None:
        """Unless an earlier test did."""
        if not self.release_is_there():
            self.upgrade(*TAKE_OVER[self.major])

    def uninstall(self) -> None:
        done = self.helm("uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--cascade", "foreground")
        assert done.returncode == 0, done.stderr
        wait_for("the driver's pods to be gone", lambda: not self.cluster.driver_pods())

    def rolled_out(self, name: str = RELEASE) -> None:
        self.cluster.rolled_out(f"daemonset/{name}")
        wait_for("the driver to have settled", self.cluster.driver_has_settled)

    def variables(self, name: str = RELEASE) -> dict[str, str]:
        """The driver's environment, as the DaemonSet has it."""
        [container] = self.cluster.get("daemonset", name, "-n", NAMESPACE)["spec"]["template"]["spec"][
            "containers"
        ]
        return {variable["name"]: variable.get("value", "") for variable in container["env"]}

    def objects(self) -> list[str]:
        """What is there of any release of this driver, as KIND/NAME."""
        found = self.cluster.kubectl(
            "get",
            KINDS,
            "-A",
            "-l",
            "app.kubernetes.io/part-of=gpu-dra-driver",
            "-o",
            "name",
            "--ignore-not-found",
        )
        return sorted(found.split())

    def release_is_there(self) -> bool:
        return RELEASE in self.helm("list", "-n", NAMESPACE, "-q").stdout.split()


@pytest.fixture(scope="module", params=TAKE_OVER, ids="helm {}".format)
def released(request: pytest.FixtureRequest, _cluster: Cluster) -> Iterator[Chart]:
    chart = Chart(_cluster, request.param)
    yield chart
    if chart.release_is_there():
        chart.uninstall()
    install(_cluster, "e2e")
    wait_for("plain devices", lambda: len(_cluster.devices()) == GPUS and _cluster.pool_is_whole())


@pytest.fixture
def chart(released: Chart, cluster: Cluster) -> Iterator[Chart]:
    """With one pod that has a GPU; nothing that happens to the release may disturb it."""
    cluster.start("before")
    before = container_of(cluster, "before")
    yield released
    assert container_of(cluster, "before") == before


def container_of(cluster: Cluster, pod: str) -> tuple[str, int]:
    [status] = cluster.pod(pod)["status"]["containerStatuses"]
    return status["containerID"], status["restartCount"]


def delete(cluster: Cluster, name: str) -> None:
    """A pod and its claim."""
    cluster.kubectl("delete", "pods,resourceclaims", name, "-n", "default", "--timeout=300s")


def test_chart_adopts_objects_applied_by_kubectl(chart: Chart, cluster: Cluster) -> None:
    """As an older release left it: with a variable that the chart does not have, and another update strategy."""
    old = {"name": "driver", "env": [{"name": "HEALTHCHECK_PORT", "value": "51516"}]}
    strategy = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    patch = {"spec": {"updateStrategy": strategy, "template": {"spec": {"containers": [old]}}}}
    cluster.kubectl("patch", DAEMONSET, "-n", NAMESPACE, "-p", json.dumps(patch))
    before = cluster.get(DAEMONSET, "-n", NAMESPACE)["metadata"]["generation"]
    refused = chart.helm("install", RELEASE, "daemonset/chart", "-n", NAMESPACE, values=VALUES)
    assert "cannot be imported into the current release" in refused.stderr
    assert cluster.get(DAEMONSET, "-n", NAMESPACE)["metadata"]["generation"] == before
    there = chart.objects()
    reported = chart.upgrade(*TAKE_OVER[chart.major])
    assert f"--take-ownership {TAKE_OVER[chart.major][1]}" in reported
    assert "on a simulated dgx-h100" in reported
    assert chart.objects() == there, "the same objects"
    assert "HEALTHCHECK_PORT" not in chart.variables()
    spec = cluster.get(DAEMONSET, "-n", NAMESPACE)["spec"]
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxSurge": "10%", "maxUnavailable": 0}
    assert len(cluster.devices()) == GPUS
    cluster.start("after")
    assert len(cluster.seen_by("after")) == 1
    delete(cluster, "after")
    wait_for("its claim to be unprepared", lambda: len(cluster.leftovers()) == 2)


CHOICES: Json = yaml.safe_load((ROOT / "tests/deploy/values/choices.yaml").read_text())["choices"]
DISTRIBUTIONS = {
    file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / "daemonset/values").glob("*.yaml")
}
"""The values of docs/install.md, by the distribution."""
WITHOUT_CRDS = {name: values for name, values in CHOICES.items() if name != "monitoring"}


@pytest.mark.parametrize("name", [*DISTRIBUTIONS, *WITHOUT_CRDS])
def test_objects_of_a_choice_are_accepted_by_the_api_server(name: str, cluster: Cluster) -> None:
    assert {"talos", "microk8s"} <= DISTRIBUTIONS.keys()
    made = localchart.template((DISTRIBUTIONS | WITHOUT_CRDS)[name], name="other", namespace=NAMESPACE)
    # The classes exist already, and belong to the release of the other tests.
    cluster.kubectl("apply", "--dry-run=server", "--force-conflicts", "--server-side", "-f", "-", stdin=made)


def test_an_upgrade_with_a_typo_changes_nothing_and_a_good_one_can_be_rolled_back(
    chart: Chart, cluster: Cluster
) -> None:
    chart.take_over()
    before = chart.helm("history", RELEASE, "-n", NAMESPACE, "-o", "json").stdout
    wrong = VALUES | {"kubeletPlugin": {"tolerationz": []}}
    done = chart.helm("upgrade", RELEASE, "daemonset/chart", "-n", NAMESPACE, values=wrong)
    assert done.returncode
    assert "additional properties 'tolerationz' not allowed" in done.stderr
    assert chart.helm("history", RELEASE, "-n", NAMESPACE, "-o", "json").stdout == before
    [taken] = cluster.allocated("before")
    uuids = [device["attributes"]["uuid"]["string"] for device in cluster.devices()]
    free = next(uuid for uuid in uuids if uuid != taken)
    sharing = {"sharing": [{"selector": {"uuids": [free]}, "mode": "shares", "shares": 2}]}
    chart.upgrade(values=sharing)
    wait_for(
        "a device with shares",
        lambda: sum(bool(device.get("allowMultipleAllocations")) for device in cluster.devices()) == 1,
    )
    assert "deviceclass.resource.k8s.io/shares.gpu.nvidia.com" in chart.objects()
    cluster.start("shared", device_class="shares.gpu.nvidia.com")
    delete(cluster, "shared")
    done = chart.helm("rollback", RELEASE, "-n", NAMESPACE)
    assert done.returncode == 0, done.stderr
    chart.rolled_out()
    wait_for(
        "devices without shares",
        lambda: not any("allowMultipleAllocations" in one for one in cluster.devices()),
    )
    assert not [name for name in chart.objects() if "config" in name or "shares" in name]


def test_a_release_gets_another_name_under_a_running_pod(chart: Chart, cluster: Cluster) -> None:
    """Helm deletes the old DaemonSet at once: one release unprepares the claims of the other."""
    chart.take_over()
    cluster.start("earlier")
    published = len(cluster.devices())
    chart.upgrade(values={"fullnameOverride": "graphics", "nameOverride": "cards"}, name="graphics")
    names = [name.rpartition("/")[2] for name in chart.objects()]
    assert not [name for name in names if name.startswith(RELEASE)]
    assert {"graphics", "graphics-own-node", "graphics-own-devices", "gpu.nvidia.com"} <= set(names)
    assert len(cluster.devices()) == published
    account = cluster.get("daemonset", "graphics", "-n", NAMESPACE)["spec"]["template"]["spec"][
        "serviceAccountName"
    ]
    [pod] = cluster.staying_pods("node")
    token = cluster.token_of(pod["metadata"]["name"], account)
    foreign = a_slice("v1", "of-another-node", pool="another", where={"nodeName": "another"})
    refused = refusal(cluster, token, foreign)
    assert "may not modify" in refused, "the policy knows the driver by its new name"
    delete(cluster, "earlier")
    wait_for("its claim to be unprepared", lambda: len(cluster.leftovers()) == 2)
    chart.upgrade()


def test_uninstalling_leaves_nothing(released: Chart, cluster: Cluster) -> None:
    """Neither objects nor sockets nor specs, and the kubelet takes the slices away."""
    released.take_over()
    cluster.start("last")
    delete(cluster, "last")
    wait_for("its claim to be unprepared", lambda: not cluster.leftovers())
    released.uninstall()
    assert released.objects() == []
    sockets = [*REGISTRY.glob("gpu.nvidia.com*"), *PLUGIN_DIR.glob("*.sock")]
    assert sockets == []
    assert not [*CDI_DIR.glob("*gpu.nvidia.com*")]
    wait_for("the kubelet to take the slices away", lambda: not cluster.slices())
    released.upgrade()
    wait_for("the devices to be back", lambda: len(cluster.devices()) == GPUS and cluster.pool_is_whole())


@pytest.fixture
def microk8s() -> Iterator[Json]:
    """The values of MicroK8s, and the kubelet's directory also where MicroK8s has it."""
    there = Path(DISTRIBUTIONS["microk8s"]["kubeletDirectory"])
    there.mkdir(parents=True)
    subprocess.run(["mount", "--rbind", str(PLUGIN_DIR.parents[1]), str(there)], check=True)
    yield DISTRIBUTIONS["microk8s"]
    subprocess.run(["umount", "--recursive", "--lazy", str(there)], check=True)
    with suppress(OSError):  # up to a directory that holds more
        for folder in (there, *there.parents):
            folder.rmdir()


def test_release_with_another_name_serves_pods_in_the_directories_of_microk8s(
    released: Chart, cluster: Cluster, microk8s: Json
) -> None:
    """Sockets and MPS pipes have long paths there."""
    released.take_over()
    other = "gpu.example.com"
    values = VALUES | microk8s | {"driverName": other, "cdiDirectory": "/etc/cdi", "mps": {"enabled": True}}
    done = released.helm("upgrade", RELEASE, "daemonset/chart", "-n", NAMESPACE, values=values)
    assert done.returncode == 0, done.stderr
    try:
        cluster.rolled_out()
        wait_for(
            "the devices of the other name",
            lambda: {one["spec"]["driver"] for one in cluster.slices()} == {other},
        )
        for device_class in ("gpu.nvidia.com", "mps.gpu.nvidia.com"):
            cluster.start("renamed", device_class=device_class)
            assert len(cluster.seen_by("renamed")) == 1
            assert list(Path("/etc/cdi").glob(f"k8s.{other}-*"))
            delete(cluster, "renamed")
        wait_for("no CDI spec to be left", lambda: not list(Path("/etc/cdi").glob(f"k8s.{other}-*")))
        text = cluster.kubectl(
            "exec", DAEMONSET, "-n", NAMESPACE, "--", "gpu-dra-driver", "doctor", check=False
        )
        assert " 0 FAIL" in text, text
    finally:
        released.uninstall()
        wait_for("the kubelet to take the slices away", lambda: not cluster.slices())
        shutil.rmtree(PLUGIN_DIR.with_name(other), ignore_errors=True)
        released.upgrade()
    wait_for("the devices to be back", lambda: len(cluster.devices()) == GPUS and cluster.pool_is_whole())


def test_chart_takes_over_from_nvidias_chart(released: Chart, cluster: Cluster, tmp_path: Path) -> None:
    """As docs/migration.md prints it. NVIDIA's images are not here, so no program of its chart runs."""
    if released.release_is_there():
        released.uninstall()
    else:
        uninstall(cluster, "--ignore-not-found")
    page = (ROOT / "docs/migration.md").read_text().partition("\n### With Helm\n")[2]
    install_ours, end_theirs = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)[:2]
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "helm").symlink_to(cluster.local.helm(released.major))
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "KUBECONFIG": str(cluster.local.kubeconfig()),
        "REGISTRY": "localhost",
    }

    def run(commands: str) -> None:
        ours = "image.tag=dev,image.pullPolicy=Never,simulator.enabled=true,kubeletPlugin.affinity=null,"
        ours += "allowOtherDriver=true"
        commands = commands.replace("image.tag=", ours).replace("values.yaml", str(tmp_path / "values.yaml"))
        done = subprocess.run(
            ["bash", "-eu", "-c", commands],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
        released.rolled_out()

    theirs = "nvidia-dra-driver-gpu"
    chart = cluster.local.compute_domains_chart()
    values = {"gpuResourcesEnabledOverride": True, "logVerbosity": "6", "webhook": {"enabled": False}}
    done = released.helm(*("install", theirs, str(chart), "-n", theirs, "--create-namespace"), values=values)
    assert done.returncode == 0, done.stderr
    cluster.kubectl("label", "node", cluster.node, "gpus-by=dra", "--overwrite")
    try:
        run(install_ours)
        assert released.variables()["LOG_LEVEL"] == "debug", "their values"
        cluster.start("moved")
        run(end_theirs)
        assert "deviceclass.resource.k8s.io/gpu.nvidia.com" in released.objects()
        assert len(cluster.seen_by("moved")) == 1
        cluster.start("after")
        delete(cluster, "after")
        delete(cluster, "moved")
    finally:
        cluster.kubectl("label", "node", cluster.node, "gpus-by-")
        released.helm("uninstall", theirs, "-n", theirs)
        for what in (("-f", str(chart / "crds")), ("namespace", theirs)):
            cluster.kubectl("delete", *what, "--ignore-not-found", "--timeout=300s")
