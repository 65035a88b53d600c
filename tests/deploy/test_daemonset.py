"""The manifests of daemonset/: what depends on each other changes together, and nothing is granted for later."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel

from dra_driver.kubelet.liveness import DIAL_PAUSE_S, DIAL_TIMEOUT_S, DIALS

DAEMONSET = Path(__file__).parents[2] / "daemonset"
CACHED = Path.home() / ".cache/gpu-dra-driver/cluster/bin"
ROOTS = {"operator": "/run/nvidia/driver", "gke": "/home/kubernetes/bin/nvidia"}

Manifest = dict[str, Any]


def kubectl() -> str:
    cached = next(iter(sorted(CACHED.glob("*/kubectl"))), None)
    program = shutil.which("kubectl") or (str(cached) if cached else None)
    if program is None:
        pytest.skip("kubectl is not there to render manifests")
    return program


def rendered(folder: Path) -> list[Manifest]:
    text = _kept(folder) if folder.is_relative_to(DAEMONSET) else _kustomized(folder)
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def _kustomized(folder: Path) -> str:
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@functools.cache
def _kept(folder: Path) -> str:
    """Of the repository, in which no test writes."""
    return _kustomized(folder)


def with_components(tmp_path: Path, *components: str) -> list[Manifest]:
    shutil.copytree(DAEMONSET, tmp_path / "daemonset")
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    places = [f"../daemonset/components/{name}" for name in components]
    text = yaml.safe_dump({"resources": ["../daemonset"], "components": places})
    (overlay / "kustomization.yaml").write_text(text)
    return rendered(overlay)


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    found = [entry for entry in manifests if (entry["kind"], entry["metadata"]["name"]) == (kind, name)]
    assert len(found) == 1
    return found[0]


def mounted(daemonset: Manifest) -> tuple[dict[str, str], dict[str, tuple[str, str, bool]]]:
    """The environment, and (place in the container, place on the host, read only) by volume."""
    pod = daemonset["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    volumes = {entry["name"]: entry.get("hostPath", {}).get("path", "") for entry in pod["volumes"]}
    mounts = {
        entry["name"]: (entry["mountPath"], volumes[entry["name"]], entry.get("readOnly", False))
        for entry in container["volumeMounts"]
    }
    assert set(mounts) == set(volumes)
    return env, mounts


def host_path_of(path: str, mounts: dict[str, tuple[str, str, bool]]) -> str:
    """What the container sees at a path, as a host path."""
    for place, source, _ in sorted(mounts.values(), reverse=True):
        if path == place or path.startswith(place.rstrip("/") + "/"):
            return source.rstrip("/") + path[len(place) :] or "/"
    raise AssertionError(f"{path} is not mounted")


@pytest.mark.parametrize(
    "folder", ["", "base", *(f"overlays/{path.name}" for path in (DAEMONSET / "overlays").iterdir())]
)
def test_every_folder_is_rendered(folder: str) -> None:
    assert rendered(DAEMONSET / folder)


@pytest.mark.parametrize("where", ROOTS)
@pytest.mark.parametrize("mps", [False, True])
def test_the_driver_root_is_changed_as_a_whole(where: str, mps: bool, tmp_path: Path) -> None:
    components = (*(["mps"] if mps else []), f"driver-root-{where}")
    manifests = with_components(tmp_path, *components)
    names = ["gpu-dra-driver", *(["gpu-dra-driver-mps"] if mps else [])]
    assert [entry["metadata"]["name"] for entry in manifests if entry["kind"] == "DaemonSet"] == names
    for name in names:
        env, mounts = mounted(one(manifests, "DaemonSet", name))
        assert env["NVIDIA_DRIVER_ROOT"] == ROOTS[where]
        inside = env["DRIVER_ROOT_CTR_PATH"].replace("$(NVIDIA_DRIVER_ROOT)", ROOTS[where])
        assert host_path_of(inside, mounts) == ROOTS[where]
        # A mount of the root itself would go on showing a root that was replaced.
        assert mounts["driver-root"][1] == (
            str(Path(ROOTS[where]).parent) if name == "gpu-dra-driver" else "/"
        )
    env, mounts = mounted(one(manifests, "DaemonSet", "gpu-dra-driver"))
    assert mounts["host-root"] == (env["HOST_ROOT"], "/", True)


def test_the_driver_root_of_the_base_agrees_with_its_mount() -> None:
    env, mounts = mounted(one(rendered(DAEMONSET), "DaemonSet", "gpu-dra-driver"))
    assert env["NVIDIA_DRIVER_ROOT"] == "/"
    assert host_path_of(env["DRIVER_ROOT_CTR_PATH"], mounts) == "/"
    assert mounts["driver-root"][2]


def test_a_stop_leaves_time_for_a_call_in_flight() -> None:
    pod = one(rendered(DAEMONSET), "DaemonSet", "gpu-dra-driver")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 60


def test_probes_ask_services_that_are_there_and_wait_for_a_dial_to_fail() -> None:
    pod = one(rendered(DAEMONSET), "DaemonSet", "gpu-dra-driver")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    (port,) = {probe["httpGet"]["port"] for probe in probes.values()}
    assert [f":{one['containerPort']}" for one in container["ports"] if one["name"] == port] == [
        env["HTTP_ENDPOINT"]
    ]
    assert "HEALTHCHECK_PORT" not in env, "one port less that others can reach"
    assert {name: probe["httpGet"]["path"] for name, probe in probes.items()} == {
        "startup": "/startupz",
        "readiness": "/readyz",
        "liveness": "/healthz",
    }
    slowest = DIALS * DIAL_TIMEOUT_S + (DIALS - 1) * DIAL_PAUSE_S
    assert all(probes[name]["timeoutSeconds"] > slowest for name in ("startup", "liveness"))
    assert probes["liveness"]["periodSeconds"] > slowest, "or checks would follow one another without a pause"
    assert probes["liveness"]["failureThreshold"] >= 3


def test_the_role_and_the_policy_name_the_same_driver() -> None:
    manifests = rendered(DAEMONSET)
    rules = one(manifests, "ClusterRole", "gpu-dra-driver")["rules"]
    named = {rule["resources"][0]: rule["resourceNames"] for rule in rules if "resourceNames" in rule}
    spec = one(manifests, "ValidatingAdmissionPolicy", "gpu-dra-driver-own-node")["spec"]
    (driver,) = named.pop("resourceclaims/driver")
    assert named == {}
    assert any(f'spec.driver == "{driver}"' in entry["expression"] for entry in spec["validations"])


@pytest.mark.parametrize(
    ("operation", "pool", "driver", "allowed"),
    [
        ("CREATE", "node-a", "gpu.nvidia.com", True),
        ("UPDATE", "other", "gpu.nvidia.com", False),
        ("CREATE", "other", "gpu.nvidia.com", False),
        ("DELETE", "other", "gpu.nvidia.com", True),
        ("DELETE", "node-a", "nic.example.com", False),
    ],
)
def test_a_stray_slice_of_the_own_node_can_only_be_removed(
    operation: str, pool: str, driver: str, allowed: bool
) -> None:
    spec = one(rendered(DAEMONSET), "ValidatingAdmissionPolicy", "gpu-dra-driver-own-node")["spec"]
    texts = [entry["expression"] for entry in spec["validations"]]
    # The others ask for optional fields; the cluster's tests have them.
    texts = [text for text in texts if ".?" not in text]
    assert len(texts) == 3
    slices = [{"pool": {"name": pool}, "driver": driver}]
    given = {"request": {"operation": operation}, "variables": {"node": "node-a", "specs": slices}}
    environment = cel.NewEnv(variables=dict.fromkeys(given, cel.Type.DYN))
    verdicts = [environment.compile(text).eval(data=given).plain_value() for text in texts]
    assert set(verdicts) <= {True, False}
    assert all(verdicts) == allowed


def test_mig_on_demand_is_switched_on_with_what_it_needs(tmp_path: Path) -> None:
    daemonset = one(with_components(tmp_path, "dynamic-mig"), "DaemonSet", "gpu-dra-driver")
    env, mounts = mounted(daemonset)
    assert env["DYNAMIC_MIG"] == "true"
    assert host_path_of("/dev/nvidia-caps", mounts) == "/dev/nvidia-caps"
    pod = daemonset["spec"]["template"]["spec"]
    assert pod["hostPID"]
    security = pod["containers"][0]["securityContext"]
    assert security["privileged"]
    assert "runAsUser" not in security


def policies_of(manifests: list[Manifest], daemonset: str) -> dict[str, Manifest]:
    """The network policies that select the pods of a DaemonSet, by name."""
    labels = one(manifests, "DaemonSet", daemonset)["spec"]["template"]["metadata"]["labels"]
    return {
        entry["metadata"]["name"]: entry["spec"]
        for entry in manifests
        if entry["kind"] == "NetworkPolicy"
        and entry["metadata"]["namespace"] == "gpu-dra-driver"
        and entry["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    }


def test_only_monitoring_reaches_the_pods_over_the_network(tmp_path: Path) -> None:
    manifests = with_components(tmp_path, "mps", "network-policy")
    driver, mps = (policies_of(manifests, name) for name in ("gpu-dra-driver", "gpu-dra-driver-mps"))
    assert [spec["policyTypes"] for spec in (*driver.values(), *mps.values())] == [["Ingress"]] * 3
    assert not any("egress" in spec for spec in driver.values()), "the API server is asked"
    assert [spec.get("ingress", []) for spec in mps.values()] == [[]]
    [rule] = [rule for spec in driver.values() for rule in spec.get("ingress", [])]
    [container] = one(manifests, "DaemonSet", "gpu-dra-driver")["spec"]["template"]["spec"]["containers"]
    assert [port["port"] for port in rule["ports"]] == [port["name"] for port in container["ports"]]
    [monitoring] = rule["from"]
    assert monitoring == {
        "namespaceSelector": {
            "matchExpressions": [
                {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["monitoring"]}
            ]
        }
    }


def test_the_manuals_patch_chooses_other_namespaces(tmp_path: Path) -> None:
    manual = (DAEMONSET / "README.md").read_text().partition("## Network policy")[2]
    text = manual.partition("```yaml\n")[2].partition("```")[0]
    shutil.copytree(DAEMONSET, tmp_path / "gpu-dra-driver/daemonset")
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(f"resources: [../gpu-dra-driver/daemonset]\n{text}")
    [rule] = policies_of(rendered(overlay), "gpu-dra-driver")["gpu-dra-driver-metrics"]["ingress"]
    [monitoring] = rule["from"]
    assert monitoring == {
        "namespaceSelector": {"matchLabels": {"network.openshift.io/policy-group": "monitoring"}}
    }


def test_mig_classes_come_with_extended_resources_of_their_own(tmp_path: Path) -> None:
    classes = [entry for entry in with_components(tmp_path, "mig-classes") if entry["kind"] == "DeviceClass"]
    made = {
        entry["metadata"]["name"]: entry["spec"].get("extendedResourceName")
        for entry in classes
        if entry["metadata"]["name"].startswith("mig-")
    }
    assert made["mig-1g.10gb.me.nvidia.com"] == "nvidia.com/mig-1g.10gb.me"
    assert len({name for name in made.values() if name}) == len(made) > 30
    assert len(classes) > len(made)


def test_nodes_are_chosen_by_the_label_that_the_driver_manager_flips(tmp_path: Path) -> None:
    manifests = with_components(tmp_path, "mps", "driver-root-operator", "driver-upgrades")
    for name in ("gpu-dra-driver", "gpu-dra-driver-mps"):
        pod = one(manifests, "DaemonSet", name)["spec"]["template"]["spec"]
        assert pod["nodeSelector"] == {
            "kubernetes.io/os": "linux",
            "nvidia.com/gpu.deploy.dra-driver": "true",
        }


def test_no_other_component_chooses_nodes_by_a_label(tmp_path: Path) -> None:
    """An upgrade of the manifests must not take the driver from a node with claims."""
    others = {path.name for path in (DAEMONSET / "components").iterdir()} - {"driver-upgrades", "simulator"}
    for name in sorted(others):
        for entry in with_components(tmp_path / name, name):
            if entry["kind"] == "DaemonSet":
                assert entry["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}
