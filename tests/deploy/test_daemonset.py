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

from dra_driver.app.settings import resolve
from dra_driver.kubelet.liveness import DIAL_TIMEOUT_S
from tests.fakes.tables import tabled

DAEMONSET = Path(__file__).parents[2] / "daemonset"
CACHED = Path.home() / ".cache/gpu-dra-driver/cluster/bin"
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


def found(within: Any, path: str) -> list[Any]:
    """All that is below a path: keys, `*` for every entry, or the name of an entry of a list."""
    values = [within]
    for key in path.split():
        below: list[Any] = []
        for value in values:
            if key == "*":
                below += value.values() if isinstance(value, dict) else value
            elif isinstance(value, list):
                below += [entry for entry in value if entry["name"] == key]
            elif key in value:
                below.append(value[key])
        values = below
    return values


def assert_has(manifests: list[Manifest], expected: dict[str, list[Any]]) -> None:
    """Whether this is all that is below each path, which begins with a kind and a name."""
    made: dict[str, dict[str, Manifest]] = {}
    for entry in manifests:
        made.setdefault(entry["kind"], {})[entry["metadata"]["name"]] = entry
    assert {path: found(made, path) for path in expected} == expected


@pytest.mark.parametrize(
    "folder", ["", "base", *(f"overlays/{path.name}" for path in (DAEMONSET / "overlays").iterdir())]
)
def test_every_folder_is_rendered(folder: str) -> None:
    assert rendered(DAEMONSET / folder)


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
    assert all(probes[name]["timeoutSeconds"] > DIAL_TIMEOUT_S for name in ("startup", "liveness"))
    assert probes["liveness"]["periodSeconds"] > DIAL_TIMEOUT_S, (
        "or checks would follow one another without a pause"
    )
    assert probes["liveness"]["failureThreshold"] >= 3


def test_the_role_and_the_policy_name_the_same_driver() -> None:
    manifests = rendered(DAEMONSET)
    rules = one(manifests, "ClusterRole", "gpu-dra-driver")["rules"]
    named = {rule["resources"][0]: rule["resourceNames"] for rule in rules if "resourceNames" in rule}
    spec = one(manifests, "ValidatingAdmissionPolicy", "gpu-dra-driver-own-node")["spec"]
    (driver,) = named.pop("resourceclaims/driver")
    assert named == {}
    assert any(f'spec.driver == "{driver}"' in entry["expression"] for entry in spec["validations"])


@tabled("operation", "pool", "driver", "allowed")
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


def test_configuration_of_the_component_for_shares_is_valid() -> None:
    path = DAEMONSET / "components/shares/config.yaml"
    assert len(resolve({"node_name": "node"}, path).sharing.entries) == 1


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


def test_no_other_component_chooses_nodes_by_a_label(tmp_path: Path) -> None:
    """An upgrade of the manifests must not take the driver from a node with claims."""
    others = {path.name for path in (DAEMONSET / "components").iterdir()} - {"driver-upgrades", "simulator"}
    for name in sorted(others):
        for entry in with_components(tmp_path / name, name):
            if entry["kind"] == "DaemonSet":
                assert entry["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}
