"""daemonset/install.yaml: what depends on each other changes together, and nothing is granted for later."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml
from cel_expr_python import cel

from dra_driver.kubelet.liveness import DIAL_TIMEOUT_S
from tests.fakes.tables import tabled

DAEMONSET = Path(__file__).parents[2] / "daemonset"
Manifest = dict[str, Any]


@functools.cache
def installed() -> list[Manifest]:
    """The objects of daemonset/install.yaml; they are shared, so do not change them."""
    return list(yaml.load_all((DAEMONSET / "install.yaml").read_text(), Loader=yaml.CSafeLoader))


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [entry for entry in manifests if entry["kind"] == kind]


def mounts_of(pod: Manifest) -> dict[str, tuple[str, bool]]:
    """(host path, read only) by the place in the container."""
    (container,) = pod["containers"]
    volumes = {entry["name"]: entry.get("hostPath", {}).get("path", "") for entry in pod["volumes"]}
    return {
        entry["mountPath"]: (volumes[entry["name"]], entry.get("readOnly", False))
        for entry in container["volumeMounts"]
    }


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
    """Assert that this is everything below each path, which begins with a kind and a name."""
    made: dict[str, dict[str, Manifest]] = {}
    for entry in manifests:
        made.setdefault(entry["kind"], {})[entry["metadata"]["name"]] = entry
    assert {path: found(made, path) for path in expected} == expected


def test_probes_ask_services_that_are_there_and_wait_for_a_dial_to_fail() -> None:
    pod = one(installed(), "DaemonSet", "gpu-dra-driver")["spec"]["template"]["spec"]
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
    manifests = installed()
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
    spec = one(installed(), "ValidatingAdmissionPolicy", "gpu-dra-driver-own-node")["spec"]
    texts = [entry["expression"] for entry in spec["validations"]]
    # The others use optional fields; the cluster's tests cover them.
    texts = [text for text in texts if ".?" not in text]
    assert len(texts) == 3
    slices = [{"pool": {"name": pool}, "driver": driver}]
    given = {"request": {"operation": operation}, "variables": {"node": "node-a", "specs": slices}}
    environment = cel.NewEnv(variables=dict.fromkeys(given, cel.Type.DYN))
    verdicts = [environment.compile(text).eval(data=given).plain_value() for text in texts]
    assert set(verdicts) <= {True, False}
    assert all(verdicts) == allowed


def test_mig_classes_come_with_extended_resources_of_their_own() -> None:
    classes = list(yaml.safe_load_all((DAEMONSET / "chart/files/mig-classes.yaml").read_text()))
    made = {entry["metadata"]["name"]: entry["spec"].get("extendedResourceName") for entry in classes}
    assert made["mig-1g.10gb.me.nvidia.com"] == "nvidia.com/mig-1g.10gb.me"
    assert len({name for name in made.values() if name}) == len(made) > 30
