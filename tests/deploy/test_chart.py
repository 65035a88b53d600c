"""The chart: its objects for values and names, and values that are refused or ignored.

Helm renders, so these tests run in `make e2e`, which builds it; they need no cluster.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dra_driver.app.settings import Settings
from dra_driver.cli.validation.rules.classes import standard_classes
from tests.deploy.test_daemonset import DAEMONSET, Manifest, assert_has, mounts_of, of_kind, one

ROOT = DAEMONSET.parent
sys.path.insert(0, str(ROOT / "hack"))
import manifests as hack  # noqa: E402
from localcluster import chart  # noqa: E402

from tests.fakes.tables import read_yaml, tabled  # noqa: E402

pytestmark = pytest.mark.cluster

CHART = DAEMONSET / "chart"
DATA = Path(__file__).with_name("values")
NAME = chart.NAME
VERSION = read_yaml(CHART / "Chart.yaml")["appVersion"]
Values = dict[str, Any]

CHOICES = read_yaml(DATA / "choices.yaml")
VALUES: dict[str, Values] = CHOICES["choices"]
REFUSED = {frozenset(row["pair"]): row["says"] for row in CHOICES["refused"]}


def merged(*parts: Values) -> Values:
    made: Values = {}
    for part in parts:
        for key, value in part.items():
            below = made.get(key)
            made[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return made


def template(values: Values, *arguments: str, **chosen: Any) -> list[Manifest]:
    text = chart.template(values, *arguments, **chosen)
    return [entry for entry in yaml.load_all(text, Loader=yaml.CSafeLoader) if entry]


def refusal(values: Values, *arguments: str, **names: str) -> str:
    """Helm's words for values that it does not take."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        template(values, *arguments, **names)
    return caught.value.stderr


def test_generated_files_of_the_chart_are_up_to_date() -> None:
    """`make manifests` writes it."""
    assert [str(path) for path, text in hack.written() if path.read_text() != text] == []
    assert hack.INSTALL.read_text() == hack.install("", "")


def test_extra_devices_in_the_chart_are_those_that_the_driver_accepts() -> None:
    from dra_driver.app.settings import resolve

    def settings(values: Values) -> Any:
        [container] = one(template(values), "DaemonSet", NAME)["spec"]["template"]["spec"]["containers"]
        given = {entry["name"].lower(): entry["value"] for entry in container["env"] if "value" in entry}
        return resolve(
            {"node_name": "n"} | {name: given.get(name) for name in ("imex_channel", "host_devices")}, None
        )

    for channel in (0, 7, "all"):
        given = {"imex": {"channel": channel}, "hostDevices": ["nvswitch", "gds"]}
        found = settings(given)
        assert (found.imex_channel, found.extra_devices.host_devices) == (channel, ("gds", "nvswitch"))
    for off in ("off", False):
        assert settings({"imex": {"channel": off}}).extra_devices == settings({}).extra_devices


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: "+".join(sorted(pair)))
def test_choices_that_exclude_each_other_are_refused(pair: frozenset[str]) -> None:
    assert REFUSED[pair] in refusal(merged(*(VALUES[name] for name in sorted(pair))))


def test_the_mps_host_is_where_the_driver_is_and_has_its_driver_root() -> None:
    """Earlier bugs: an MPS host that searched for the NVIDIA driver in /, and one on other nodes."""
    chosen = merged(*(VALUES[name] for name in ("mps", "driver-root-operator", "driver-upgrades")))
    driver, mps = (pod["spec"]["template"]["spec"] for pod in of_kind(template(chosen), "DaemonSet"))
    roots = [
        variable["value"]
        for pod in (driver, mps)
        for variable in pod["containers"][0]["env"]
        if variable["name"] == "NVIDIA_DRIVER_ROOT"
    ]
    assert roots == ["/run/nvidia/driver"] * 2
    assert mps["nodeSelector"] == driver["nodeSelector"]


@pytest.mark.parametrize("choice", ["none", *VALUES])
def test_no_pod_shares_more_of_the_host_than_its_work_needs(choice: str) -> None:
    for daemonset in of_kind(template(VALUES.get(choice, {})), "DaemonSet"):
        name, pod = daemonset["metadata"]["name"], daemonset["spec"]["template"]["spec"]
        assert not any(pod.get(key) for key in ("hostNetwork", "hostIPC", "shareProcessNamespace"))
        assert bool(pod.get("hostPID")) == (name.endswith("-mps") or choice != "restricted"), name
        assert pod["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert not any("hostPort" in port for port in container.get("ports", ()))
        assert bool(pod.get("initContainers")) == (choice == "cdi-hook")
        for place, (source, is_read_only) in mounts_of(pod).items():
            assert is_read_only or source not in ("/", "/etc", "/usr", "/run", "/var", "/var/run"), place
            assert not source.endswith(".sock"), place
        # An upgrade of the manifests must not take the driver from a node with claims.
        assert (pod["nodeSelector"] == {"kubernetes.io/os": "linux"}) == (choice != "driver-upgrades")


def test_the_step_that_installs_the_hook_changes_nothing_of_the_driver() -> None:
    (plain,), (made,) = (of_kind(template(values), "DaemonSet") for values in ({}, VALUES["cdi-hook"]))
    assert made["spec"]["template"]["spec"]["containers"] == plain["spec"]["template"]["spec"]["containers"]
    pod = made["spec"]["template"]["spec"]
    env = {entry["name"]: entry.get("value", "") for entry in pod["containers"][0]["env"]}
    settings = Settings(
        node_name="n",
        driver_name=env["DRIVER_NAME"],
        kubelet_plugins_directory_path=env["KUBELET_PLUGINS_DIRECTORY_PATH"],
    )
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "cdi-hook")
    assert volume["hostPath"]["path"] == str(settings.plugin_directory), "the driver looks there"


def test_standard_classes_of_validate_are_those_that_are_shipped() -> None:
    shipped = of_kind(template(ALL), "DeviceClass")
    own = standard_classes("gpu.nvidia.com")
    assert own.keys() <= {entry["metadata"]["name"] for entry in shipped}
    for entry in shipped:
        if entry["metadata"]["name"] in own:
            specs = [one["spec"] for one in (entry, own[entry["metadata"]["name"]])]
            texts = [
                [" ".join(one["cel"]["expression"].split()) for one in spec["selectors"]] for spec in specs
            ]
            assert texts[0] == texts[1]
            assert specs[0].get("config") == specs[1].get("config")


def test_the_mps_host_outlives_updates_and_shows_its_mounts_to_the_host() -> None:
    spec = one(template(VALUES["mps"]), "DaemonSet", f"{NAME}-mps")["spec"]
    assert spec["updateStrategy"] == {"type": "OnDelete"}
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (pod["automountServiceAccountToken"], container["args"]) == (False, ["mps-host"])
    (plugins,) = (mount for mount in container["volumeMounts"] if mount["name"] == "plugins")
    assert plugins["mountPropagation"] == "Bidirectional"
    assert "livenessProbe" not in container


def names_of(manifests: list[Manifest]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for entry in manifests:
        names.setdefault(entry["kind"], []).append(entry["metadata"]["name"])
    return names


ALL = merged(
    *(VALUES[name] for name in VALUES if not {name} & {"restricted", "simulator", "driver-root-operator"})
)


@tabled("release", "values", "expected")
def test_a_renamed_release_hangs_together(release: str, values: Values, expected: str) -> None:
    """No name is over 63 characters, account and policies are each other's, the classes keep their names."""
    arguments = ("--api-versions", "security.openshift.io/v1")
    manifests = template(merged(ALL, values), *arguments, name=release, namespace="elsewhere")
    names = names_of(manifests)
    assert expected in names["DaemonSet"]
    assert max(len(name) for of_kind in names.values() for name in of_kind) <= 63
    assert not [
        (kind, name) for kind, of_kind in names.items() for name in set(of_kind) if of_kind.count(name) > 1
    ]
    plain = names_of(template(ALL, *arguments))
    assert names["DeviceClass"] == plain["DeviceClass"]
    assert {kind: len(of_kind) for kind, of_kind in names.items()} == {
        kind: len(of_kind) for kind, of_kind in plain.items()
    }
    assert {entry["metadata"].get("namespace", "elsewhere") for entry in manifests} == {"elsewhere"}
    pod = one(manifests, "DaemonSet", expected)["spec"]["template"]["spec"]
    account = pod["serviceAccountName"]
    assert account in names["ServiceAccount"]
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        for entry in manifests:
            if entry["kind"] == kind:
                subjects = [(subject["name"], subject["namespace"]) for subject in entry["subjects"]]
                assert (account, "elsewhere") in subjects
    bound = {
        entry["spec"]["policyName"]
        for entry in manifests
        if entry["kind"] == "ValidatingAdmissionPolicyBinding"
    }
    assert bound == set(names["ValidatingAdmissionPolicy"])
    for entry in manifests:
        labels = entry["metadata"].get("labels", {})
        assert all(len(value) <= 63 for value in labels.values()), labels
        if entry["kind"] == "DaemonSet":
            spec = entry["spec"]
            assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
            assert [
                volume["configMap"]["name"]
                for volume in spec["template"]["spec"]["volumes"]
                if volume["name"] == "config"
            ] in ([], [name for name in names["ConfigMap"] if name.endswith("-config")])


INCUMBENT = CHART / "files/no-meaning.yaml"


def unused_values() -> Values:
    """Values of NVIDIA's chart, with their defaults there, that have no meaning here."""
    unused: Values = {}
    for entry in read_yaml(INCUMBENT):
        value = entry["default"]
        for key in reversed(entry["path"].split(".")):
            value = {key: value}
        unused = merged(unused, value)
    return unused


def incumbents_defaults() -> Values:
    """The values file of NVIDIA's chart 0.4 with every key that it has, as an operator copies it."""
    return merged(unused_values(), read_yaml(DATA / "incumbents-values.yaml"))


@pytest.mark.parametrize("case", read_yaml(DATA / "rendered.yaml"), ids=lambda case: case["what"])
def test_values_make_what_they_promise(case: dict[str, Any]) -> None:
    values = case.get("values", {})
    made = template(incumbents_defaults() if values == "NVIDIA's" else values, *case.get("arguments", ()))
    assert_has(made, json.loads(json.dumps(case["has"]).replace("VERSION", VERSION)))


DEFAULTS: Values = read_yaml(CHART / "values.yaml")
EVERYTHING = merged(
    ALL,
    VALUES["imex"],
    {"networkPolicies": {"egress": {"enabled": True}}, "caBundle": {"configMap": "proxy-ca"}},
)
"""With these no value is without effect because something is off."""
NOTHING = frozenset(json.loads((CHART / "files/defaults.json").read_text())["nothing"])
HELMS = (3, 4)


def paths(values: Values, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def with_value(path: tuple[str, ...], value: Any) -> Values:
    """Return EVERYTHING with another value at a path, replaced instead of merged."""
    values = copy.deepcopy(EVERYTHING)
    section = values
    for key in path[:-1]:
        section = section.setdefault(key, {})
    section[path[-1]] = value
    return values


NULL_IS_THE_DEFAULT = [
    path
    for path in paths(DEFAULTS)
    if not {".".join(path[:end]) for end in range(1, len(path) + 1)} & NOTHING
]


@pytest.mark.parametrize("path", NULL_IS_THE_DEFAULT, ids=".".join)
def test_null_means_the_default(path: tuple[str, ...]) -> None:
    """rendered.yaml has the others, for which null means nothing."""
    default = functools.reduce(lambda section, key: section[key], path, DEFAULTS)
    made = [rendered_or_refused(with_value(path, value)) for value in (None, default)]
    assert made[0] == made[1]


def rendered_or_refused(values: Values) -> list[Manifest] | str:
    return _rendered_or_refused(json.dumps(values, sort_keys=True))


@functools.cache
def _rendered_or_refused(values: str) -> list[Manifest] | str:
    try:
        return template(json.loads(values))
    except subprocess.CalledProcessError as refused:
        return str(refused.stderr)


def all_null(values: Values, above: tuple[str, ...] = ()) -> Values:
    """Null for every leaf, but for those where null is another choice than the default."""
    return {
        key: all_null(value, (*above, key)) if isinstance(value, dict) and value else None
        for key, value in values.items()
        if ".".join((*above, key)) not in NOTHING
    }


@pytest.mark.parametrize("major", HELMS)
def test_values_that_are_all_null_are_the_defaults(major: int) -> None:
    """Including values of NVIDIA's chart that have no meaning here and are not in values.yaml, and unknown
    ones.
    """
    nulls = merged(all_null(DEFAULTS), all_null(unused_values()), {"global": None})
    assert template(nulls, major=major) == template({})
    assert template(dict.fromkeys(DEFAULTS), major=major) == template({})
    added = {"kubeletPlugin": {"nodeSelector": {"pool": None}, "updateStrategy": {"rollingUpdate": None}}}
    assert template(merged(added, {"featureGates": {"DynamicMIG": None}}), major=major) == template({})


def chart_of_values(place: Path, values: Values) -> Path:
    """The chart as `helm upgrade --reuse-values` renders it: with the defaults of the release that is there."""
    shutil.copytree(CHART, place)
    (place / "values.yaml").write_text(json.dumps(values))
    return place


@pytest.mark.parametrize("major", HELMS)
def test_values_of_an_older_release_are_completed_when_they_are_reused(major: int, tmp_path: Path) -> None:
    ever: Values = {}
    for path in NOTHING:
        *above, last = path.split(".")
        section = functools.reduce(lambda section, key: section[key], above, DEFAULTS)
        within = functools.reduce(lambda section, key: section.setdefault(key, {}), above, ever)
        within[last] = section[last]
    older = chart_of_values(tmp_path / "chart", ever)
    assert template({}, chart=older, major=major) == template({})
    assert template(EVERYTHING, chart=older, major=major) == template(EVERYTHING)


def test_every_template_completes_the_values_first() -> None:
    """Which one Helm renders first is Helm's choice."""
    for file in (CHART / "templates").iterdir():
        assert file.name == "_helpers.tpl" or file.read_text().startswith(
            '{{- include "gpu-dra-driver.complete" . '
        )


def without_nulls(values: Values) -> Values:
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }


RELEASES = read_yaml(DATA / "incumbents-releases.yaml")


@pytest.mark.parametrize("major", HELMS)
@pytest.mark.parametrize("release", RELEASES)
def test_the_values_of_each_release_of_nvidias_chart_install_this_driver(
    release: str, major: int, tmp_path: Path, notes: Callable[..., str]
) -> None:
    """As a file, and as the values of the release that is there, which `helm upgrade --reuse-values` takes."""
    values = without_nulls(merged(unused_values(), RELEASES["0.5"], RELEASES[release]))
    assert "is the image of NVIDIA's driver" in refusal(values, major=major)
    ours = {"image": {"repository": "registry.example.com/gpu-dra-driver"}}
    made = template(merged(values, ours), major=major)
    assert one(made, "DaemonSet", NAME)
    reused = chart_of_values(tmp_path / "chart", values)
    assert names_of(template(ours, chart=reused, major=major)) == names_of(made)
    assert "kubeletPlugin.affinity" not in notes(merged(values, ours))
    dropped = merged(
        values, ours, {"kubeletPlugin": {"affinity": None, "tolerations": None, "gpuNodesOnly": False}}
    )
    pod = one(template(dropped, major=major), "DaemonSet", NAME)["spec"]["template"]["spec"]
    assert "affinity" not in pod, "null is Helm's way to drop a default"
    assert pod["tolerations"] == [{"operator": "Exists", "effect": "NoExecute"}]


@pytest.fixture(scope="module")
def chart_with_notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with what `helm install` prints as an object, since `helm template` prints objects only."""
    place = tmp_path_factory.mktemp("chart") / "chart"
    shutil.copytree(CHART, place)
    text = (place / "templates/NOTES.txt").read_text()
    made = f'{{{{ define "notes" }}}}{text}{{{{ end }}}}notes: {{{{ include "notes" . | toJson }}}}\n'
    (place / "templates/notes.yaml").write_text(made)
    return place


@pytest.fixture
def notes(chart_with_notes: Path) -> Callable[..., str]:
    """The output at the end of `helm install`, on an empty cluster."""

    def printed(values: Values, *arguments: str) -> str:
        only = ("--show-only", "templates/notes.yaml", *arguments)
        text = chart.template(values, *only, chart=chart_with_notes)
        return str(yaml.safe_load(text)["notes"])

    return printed


def test_the_notes_mention_values_without_meaning_and_of_no_others(notes: Callable[..., str]) -> None:
    text = notes({})
    assert "These values are ignored" not in text
    assert text.count("\n  kubectl ") == 4
    text = notes(incumbents_defaults())
    reported = text.partition("These values are ignored:\n")[2].splitlines()
    assert [line.partition(":")[0] for line in reported] == [
        "- gpuResourcesEnabledOverride",
        "- resources.computeDomains.enabled",
        "- webhook.enabled",
        "- webhook.replicas",
    ]
    assert all(len(line.partition(": ")[2]) > 10 for line in reported)
    assert "has no maxSurge: an update stops the plugin on all nodes at once." in text
    assert "with MIG devices on demand, with the MPS host" in text


@tabled("rolling", "said")
def test_notes_say_on_how_many_nodes_an_update_stops_the_plugin(
    notes: Callable[..., str], rolling: Values | None, said: str | None
) -> None:
    text = notes({"kubeletPlugin": {"updateStrategy": {"rollingUpdate": rolling}}})
    assert ("an update stops the plugin" in text) == (said is not None)
    assert said is None or said in text


def test_notes_say_once_that_noexecute_also_evicts_agents(notes: Callable[..., str]) -> None:
    taints = {"gpu-lost": "NoExecute", "xid": "NoExecute"}
    assert notes({"health": {"taints": taints}}).count("also evicts monitoring agents") == 1
    assert "also evicts" not in notes({"health": {"taints": dict.fromkeys(taints, "NoSchedule")}})


def test_notes_name_each_feature_that_a_gate_turns_on(notes: Callable[..., str]) -> None:
    gates = {
        "DynamicMIG": "with MIG devices on demand",
        "PassthroughSupport": "with GPUs for virtual machines",
    }
    for gate, said in ({**gates, "MPSSupport": "with the MPS host"}).items():
        assert (said in notes({"featureGates": {gate: True}}), said in notes({})) == (True, False)


def test_the_notes_report_what_to_mind_on_a_first_install(notes: Callable[..., str]) -> None:
    text = notes({})
    assert f"kubectl label namespace {NAME} pod-security.kubernetes.io/enforce=privileged" in text
    assert f"push the image of version {VERSION}, and set image.repository" in text
    assert "set image.repository" not in notes({"image": {"repository": "registry.example.com/gpu"}})
    assert "image.tag" not in notes({"image": {"tag": VERSION}})
    assert f"this chart needs the image of gpu-dra-driver {VERSION}" in notes({"image": {"tag": "v25.3.2"}})
    assert "nothing can scrape the metrics" in notes({"kubeletPlugin": {"networkPolicy": {"enabled": True}}})


def test_the_defaults_of_nvidias_chart_are_nothing_to_report(notes: Callable[..., str]) -> None:
    assert "These values are ignored" not in notes(unused_values())


@pytest.mark.parametrize("case", read_yaml(DATA / "refused-values.yaml"))
def test_bad_values_are_refused_with_the_path_or_a_sentence(case: dict[str, Any]) -> None:
    text = refusal(case["values"])
    assert case["says"] in text, text
    faults = [line for line in text.splitlines() if line.startswith("- at") or "execution error" in line]
    assert len(faults) == 1, text


def test_a_server_that_is_too_old_is_refused() -> None:
    assert ">=1.34.0-0 which is incompatible with Kubernetes v1.33.4" in refusal(
        {}, "--kube-version", "1.33.4"
    )


def test_the_default_namespace_is_refused_unless_it_is_wanted() -> None:
    assert "in the namespace default" in refusal({}, namespace="default")
    assert template({"allowDefaultNamespace": True}, namespace="default")


@pytest.mark.parametrize("case", read_yaml(DATA / "driver-roots.yaml"))
def test_the_driver_root_and_its_mount_agree(case: dict[str, Any]) -> None:
    root, manifests = case["root"], template(merged(case["values"], VALUES["mps"]))
    for name in (NAME, f"{NAME}-mps"):
        pod = one(manifests, "DaemonSet", name)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
        volumes = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
        (place,) = (
            mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "driver-root"
        )
        inside = env["DRIVER_ROOT_CTR_PATH"].replace("$(NVIDIA_DRIVER_ROOT)", env["NVIDIA_DRIVER_ROOT"])
        assert env["NVIDIA_DRIVER_ROOT"] == root
        on_host = volumes["driver-root"].rstrip("/") + inside.rstrip("/").removeprefix(place)
        assert (on_host or "/") == root
        if name == NAME:
            assert volumes["driver-root"] == case["mounted"]
        for mount in container["volumeMounts"]:
            assert not hides_the_image(mount["mountPath"]), mount


IMAGE_NEEDS = tuple(map(Path, ("/bin", "/etc", "/lib", "/lib64", "/opt/gpu-dra-driver", "/sbin", "/usr")))


def hides_the_image(place: str) -> bool:
    """Whether a mount there takes away what the image of daemonset/Dockerfile needs."""
    own = Path(place).is_relative_to("/etc/gpu-dra-driver") or Path(place) == Path("/etc/gpu-dra-driver-ca")
    return not own and any(
        Path(place).is_relative_to(needed) or needed.is_relative_to(place) for needed in IMAGE_NEEDS
    )


@pytest.mark.parametrize("choice", VALUES)
def test_no_mount_hides_what_the_image_needs(choice: str) -> None:
    for daemonset in of_kind(template(VALUES[choice]), "DaemonSet"):
        assert not list(filter(hides_the_image, mounts_of(daemonset["spec"]["template"]["spec"])))


def test_every_driver_root_of_the_docs_is_tried() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", DAEMONSET / "README.md"]
    text = "\n".join(page.read_text() for page in pages)
    named = set(re.findall(r"nvidiaDriverRoot(?:=|: )(/[\w/.-]*)", text))
    tried = {case["root"] for case in read_yaml(DATA / "driver-roots.yaml")}
    assert {"/usr/local", "/run/nvidia/driver"} <= named
    assert named <= tried


def test_only_nodes_with_a_label_of_gpu_nodes_are_chosen() -> None:
    manifests = template({"mps": {"enabled": True}})
    for name in (NAME, f"{NAME}-mps"):
        pod = one(manifests, "DaemonSet", name)["spec"]["template"]["spec"]
        required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        keys = [term["matchExpressions"][0]["key"] for term in required["nodeSelectorTerms"]]
        assert len(set(keys)) == len(keys) == 10
        assert {"nvidia.com/gpu.present", "cloud.google.com/gke-accelerator"} <= set(keys)
        assert "kubernetes.io/arch" not in json.dumps(pod), "every architecture"


def test_the_configuration_file_is_one_that_the_driver_takes(tmp_path: Path) -> None:
    from dra_driver.app.settings import resolve

    values = {
        "sharing": [{"selector": {"devices": "mig"}, "mode": "off"}, {"mode": "memory", "enforce": "mps"}],
        "health": {"ignoredXids": [94], "taints": {"gpu-lost": "NoExecute"}},
        "dynamicMig": {"enabled": True, "gpus": {"productName": "NVIDIA H100*"}},
        "migLayouts": {"layout": "all-balanced", "fromLabel": True},
        "config": {"kubeAPIQPS": 7.5, "logFormat": "console"},
    }
    manifests = template(values)
    file = tmp_path / "config.yaml"
    file.write_text(one(manifests, "ConfigMap", f"{NAME}-config")["data"]["config.yaml"])
    settings = resolve({"node_name": "n"}, file)
    assert (settings.kube_api_qps, settings.log_format) == (7.5, "console")
    assert settings.ignored_xids == {94}
    assert settings.dynamic_mig
    assert (settings.mig_layouts.name, settings.mig_layouts.from_label) == ("all-balanced", True)
    rules = one(manifests, "ClusterRole", NAME)["rules"]
    assert [rule["verbs"] for rule in rules if rule["resources"] == ["nodes"]] == [["get"], ["list", "watch"]]
    assert len(settings.sharing.entries) == 2
    before = one(manifests, "DaemonSet", NAME)["spec"]["template"]["metadata"]["annotations"]
    other = template(merged(values, {"config": {"logFormat": "json"}}))
    after = one(other, "DaemonSet", NAME)["spec"]["template"]["metadata"]["annotations"]
    assert before != after, "a change rolls the DaemonSet"


def test_alerts_of_a_renamed_release_name_its_objects() -> None:
    values = merged(VALUES["monitoring"], VALUES["mps"], {"fullnameOverride": "other", "nameOverride": "drv"})
    manifests = template(values, name="r", namespace="elsewhere")
    text = json.dumps(one(manifests, "PrometheusRule", "other"))
    assert "kubectl -n elsewhere" in text
    assert "-n gpu-dra-driver " not in text
    assert "ds/other-mps" in text


def test_values_say_what_counts_as_idle_and_for_how_long() -> None:
    idle = {"prometheusRule": {"enabled": True, "idle": {"below": 0.25, "for": "2h"}}}
    spec = one(template({"monitoring": idle}), "PrometheusRule", NAME)["spec"]
    (rule,) = (rule for rule in spec["groups"][0]["rules"] if rule.get("alert") == "GpuDraHeldIdle")
    assert (rule["expr"].split(") < ")[-1].strip(), rule["for"]) == ("0.25", "2h")
    assert "/idle/for" in refusal({"monitoring": {"prometheusRule": {"idle": {"for": "soon"}}}}).replace(
        ".", "/"
    )


def test_links_to_the_docs_begin_with_the_address_that_is_wanted() -> None:
    address = "https://git.example.com/gpus/"
    manifests = template(merged(VALUES["monitoring"], {"monitoring": {"docsURL": address}}))
    for group in one(manifests, "PrometheusRule", NAME)["spec"]["groups"]:
        for rule in group["rules"]:
            assert "record" in rule or rule["annotations"]["runbook_url"].startswith(f"{address}docs/")
    board = json.loads(one(manifests, "ConfigMap", f"{NAME}-dashboard")["data"]["gpu-dra-driver.json"])
    (variable,) = (entry for entry in board["templating"]["list"] if entry["name"] == "docs")
    assert variable["query"] == variable["current"]["value"] == address
    assert "docsURL" in refusal(merged(VALUES["monitoring"], {"monitoring": {"docsURL": "git.example.com"}}))


def test_helm_knows_the_flags_that_the_manual_and_the_notes_print() -> None:
    """Helm 4 does not replace on the server's side, which is its default."""
    import localcluster

    manual, notes = (DAEMONSET / "README.md").read_text(), (CHART / "templates/NOTES.txt").read_text()
    printed = re.findall(r"^# Helm (\d)\nhelm (upgrade --install .*)$", manual, re.M)
    assert [int(major) for major, _ in printed] == [*HELMS]
    for major, command in printed:
        known = subprocess.run(
            [str(localcluster.helm(int(major))), *command.split(), "--help"], capture_output=True, check=False
        )
        assert known.returncode == 0, known.stderr
        replacing = command.partition("--take-ownership ")[2]
        assert f'"{replacing}"' in notes
        assert ("--server-side=false" in replacing) == (major == "4")


def test_helm_finds_nothing_to_say_against_the_chart() -> None:
    import localcluster

    done = subprocess.run(
        [str(localcluster.helm()), "lint", "--strict", str(CHART)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
