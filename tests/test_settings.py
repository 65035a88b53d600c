from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dra_driver.app.config_file import read_document
from dra_driver.app.settings import Settings, config_values, resolve
from dra_driver.errors import InvalidConfigError
from dra_driver.model.gpu import Gpu
from tests.fakes.tables import read_yaml

GPU = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
FAULTS = Path(__file__).with_name("config_faults.yaml")
TABLES = read_yaml(Path(__file__).with_name("settings.yaml"))


@pytest.fixture
def write(tmp_path: Path):
    def make(text: str | bytes) -> Path:
        path = tmp_path / "config.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return make


def refusal(path: Path) -> InvalidConfigError:
    with pytest.raises(InvalidConfigError) as caught:
        config_values(read_document(path), path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_defaults_apply_when_only_the_node_is_given() -> None:
    assert resolve({"node_name": "node-a"}, None) == Settings("node-a")


def test_flag_beats_file_and_file_beats_default(write) -> None:
    path = write("nodeName: from-file\ndriverName: x.example\nlogLevel: debug\nhealthcheckPort: 51515\n")
    given = {"node_name": "from-flag", "driver_name": None, "log_level": None, "healthcheck_port": -1}
    assert resolve(given, path) == Settings(
        "from-flag", driver_name="x.example", log_level="debug", healthcheck_port=-1
    )


def test_flag_that_is_empty_but_given_beats_the_file(write) -> None:
    path = write("nodeName: n\nhttpEndpoint: ':8080'\nkubeAPIQPS: 5\n")
    settings = resolve({"http_endpoint": "", "kube_api_qps": 0}, path)
    assert (settings.http_endpoint, settings.kube_api_qps) == ("", 0)


@pytest.mark.parametrize("given", [{}, {"node_name": None}, {"node_name": ""}])
def test_missing_node_name_is_reported_with_the_remedy(given: dict) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        resolve(given, None)
    assert str(caught.value) == (
        "the node's name is missing; set --node-name or NODE_NAME (in a pod: fieldRef spec.nodeName)"
    )


def test_file_can_set_every_setting_and_nothing_else(write) -> None:
    values = {
        "nodeName": "n", "driverName": "d.example", "cdiRoot": "/a", "nvidiaDriverRoot": "/b",
        "containerDriverRoot": "/c", "hostRoot": "/r", "nvidiaCDIHookPath": "/d", "kubeletRegistrarDirectoryPath": "/e",
        "kubeletPluginsDirectoryPath": "/f", "podUID": "u", "kubeconfig": "/g", "kubeAPIQPS": 2.5, "kubeAPIBurst": 3,
        "httpEndpoint": ":1", "metricsPath": "/m", "usageMetrics": False, "devCharLinks": False, "healthcheckPort": 4,
        "simulate": "s", "simulatorDir": "/h",
        "logLevel": "error", "logFormat": "console",
    }  # fmt: skip
    path = write("\n".join(f"{key}: {value!r}" for key, value in values.items()))
    assert resolve({}, path) == Settings(
        "n", "d.example", "/a", "/b", "/c", "/r", "/d", "/e", "/f", "u", "/g", 2.5, 3,
        ":1", "/m", False, False, 4, "s", "/h",
        "error", "console",
    )  # fmt: skip


def test_sockets_and_records_lie_below_the_drivers_directory() -> None:
    settings = Settings("n", driver_name="x.example", kubelet_plugins_directory_path="/p")
    assert settings.plugin_directory == Path("/p/x.example")


def test_every_fault_is_listed_with_its_path(write) -> None:
    error = refusal(
        write("nodename: x\nlogLevel: loud\nhealthcheckPort: '80'\ncdiRoot: etc/cdi\nkubeAPIBurst: 0\n")
    )
    assert sorted(fault.partition(":")[0] for fault in error.faults) == [
        "cdiRoot", "healthcheckPort", "kubeAPIBurst", "logLevel", "nodename",
    ]  # fmt: skip
    assert all(fault in str(error) for fault in error.faults)


def test_each_fault_is_named_with_its_path(write, is_golden) -> None:
    golden = read_yaml(FAULTS)
    found = {}
    for text in golden:
        with pytest.raises(InvalidConfigError) as caught:
            resolve({"node_name": "n"}, write(text))
        [found[text]] = caught.value.faults
    head = FAULTS.read_text().partition("\n")[0]
    rows = (f"{json.dumps(text)}:\n  {json.dumps(fault)}\n" for text, fault in found.items())
    is_golden(FAULTS, "\n".join([head, "".join(rows)]))


@pytest.mark.parametrize("text", ["", "---\n", "# nothing\n", "{}", "nodeName: null\n"])
def test_empty_file_sets_nothing(write, text: str) -> None:
    assert config_values(read_document(write(text)), write(text)) == {}


@pytest.mark.parametrize(
    "text",
    ["a: [", "a: b: c", "\tx: 1", "!!python/object:os.system {}", b"\xff\xfe\x00", "a: \0", "a: !!bool x"],
)
def test_file_that_is_not_yaml_is_refused(write, text: str | bytes) -> None:
    wrong = "is not a text file in UTF-8" if isinstance(text, bytes) else "is not valid YAML: "
    assert wrong in str(refusal(write(text)))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[" * 5000, "is nested too deeply"),
        ("#" * (1 << 20) + "\n", "is larger than 1 MiB; is it the right file?"),
    ],
    ids=["deep", "large"],
)
def test_file_that_is_another_one_is_refused(write, content: str, why: str) -> None:
    path = write(content)
    assert str(refusal(path)) == f"configuration file {path} {why}"


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert str(refusal(tmp_path / "gone.yaml")) == (
        f"cannot read the configuration file {tmp_path / 'gone.yaml'}: No such file or directory"
    )
    assert str(refusal(tmp_path)).endswith(": Is a directory")


WRONG = TABLES["wrong"] | {"node_name": [*TABLES["wrong"]["node_name"], "a" * 254]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_every_flag_has_its_range_and_form(name: str, value: object) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        resolve({"node_name": "node-a", name: value}, None)
    assert str(caught.value).startswith(f"--{name.replace('_', '-')} {value!r}: expected ")
    assert "\n" not in str(caught.value)


def test_no_setting_is_forgotten() -> None:
    assert {entry.name for entry in fields(Settings)} == WRONG.keys() | TABLES["free"].keys()


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        resolve({"node_name": "Bad_Name", "cdi_root": "x"}, None)
    assert len(caught.value.faults) == 2


def test_faults_of_the_command_line_are_reported_with_those_of_the_file(write) -> None:
    path = write("nodeName: Bad_Name\nlogLevel: loud\n")
    with pytest.raises(InvalidConfigError) as caught:
        resolve({"faults": {"port": "--port 'x': expected a number"}, "cdi_root": "x"}, path)
    name = "nodeName: expected a DNS name of at most 253 lower-case letters, digits, dots and dashes"
    others = ("--port 'x': expected a number", "--cdi-root 'x': expected an absolute path")
    level = "logLevel: expected 'debug', 'info', 'warning' or 'error'"
    assert caught.value.faults == (name, level, *others)
    assert str(caught.value) == f"configuration file {path}: {'; '.join(caught.value.faults)}"


@pytest.mark.parametrize(
    ("file", "is_reported"), [("", True), ("logLevel: loud", True), ("nodeName: 5", False), ("a: [", False)]
)
def test_name_of_the_node_is_missing_only_where_nothing_may_have_it(
    write, file: str, is_reported: bool
) -> None:
    for given in ({}, {"faults": {"node_name": "told"}}):
        with pytest.raises(InvalidConfigError) as caught:
            resolve({**given, "cdi_root": "x"}, write(file))
        assert ("the node's name is missing" in str(caught.value)) == (is_reported and not given)


def test_an_empty_path_is_none() -> None:
    given = {"node_name": "node-a", "host_root": "", "nvidia_cdi_hook_path": ""}
    assert resolve(given, None) == Settings(host_root="", nvidia_cdi_hook_path="", node_name="node-a")


@pytest.mark.parametrize("case", TABLES["cases"], ids=str)
def test_file_and_flags_make_the_settings(write, case: dict[str, Any]) -> None:
    found = resolve({"node_name": "n", **case.get("flags", {})}, write(case.get("file", "")))
    assert {name: plain(getattr(found, name)) for name in case["has"]} == case["has"]


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_driver_name_must_be_one_that_cdi_takes_where_metadata_is_wanted() -> None:
    with pytest.raises(InvalidConfigError, match="begins with a letter"):
        resolve({"node_name": "n", "driver_name": "0.example.com", "device_metadata": "both"}, None)


def test_section_of_mig_chooses_gpus(write) -> None:
    path = write(
        f"dynamicMig:\n  enabled: true\n  gpus:\n    productName: '*H100*'\n    uuids: [{GPU}]\n"
        "    pciBusIDs: ['00000000:1B:00.0']\n"
    )
    chosen = resolve({"node_name": "n"}, path).dynamic_mig_gpus
    assert chosen.matches_gpu(Gpu(GPU, product_name="NVIDIA H100 NVL", pci_bus_id="0000:1b:00.0"))
    assert not chosen.matches_gpu(Gpu(GPU, product_name="NVIDIA A100", pci_bus_id="0000:1b:00.0"))
    assert not chosen.matches_gpu(Gpu(GPU, product_name="NVIDIA H100 NVL", pci_bus_id="0000:1c:00.0"))
    assert Settings("n").dynamic_mig_gpus.matches_gpu(Gpu(GPU)), "all of them unless told"
