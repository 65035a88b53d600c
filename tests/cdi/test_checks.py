import copy
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.cdi.rules.checks import VERSIONS, faults, minimum_version
from dra_driver.cdi.rules.spec import claim_spec
from tests.cdi.cdi_samples import DRIVER, UID, driver, gpu, mig
from tests.cdi.cdi_schema import SCHEMA

VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def sample() -> dict[str, Any]:
    spec = claim_spec(UID, DRIVER, driver(), [gpu(0), mig()])
    spec["cdiVersion"] = "1.1.0"
    return spec


def at(spec: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        spec = spec[key]
    return spec


GPU_EDITS = ("devices", 0, "containerEdits")
NODE = (*GPU_EDITS, "deviceNodes", 0)
MOUNT = ("containerEdits", "mounts", 0)
A_HOOK = ("containerEdits", "hooks", 0)


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("cdiVersion",), "0.9.0", "cdiVersion: '0.9.0' is not a released version"),
        (("cdiVersion",), "0.3.0", "cdiVersion: 0.3.0 is below 0.7.0, which the fields need"),
        (("kind",), "noslash", "kind: 'noslash' does not have the form vendor/class"),
        (("kind",), "1a/b", "kind: vendor '1a' is not a valid name"),
        (("kind",), "a/" + "b" * 64, f"kind: class {'b' * 64!r} is not a valid name"),
        (("extra",), 1, "spec.extra: unknown field"),
        (("devices",), [], "devices: at least one device is needed"),
        (("devices", 0, "name"), "-a", "devices[0].name: '-a' is not a valid name"),
        (("devices", 0, "name"), f"{UID}-mig-a", f"devices[1].name: '{UID}-mig-a' occurs twice"),
        (GPU_EDITS, {}, "devices[0].containerEdits: must not be empty"),
        (GPU_EDITS, {"env": []}, "devices[0].containerEdits: must not be empty"),
        ((*GPU_EDITS, "gids"), [1], "devices[0].containerEdits.gids: unknown field"),
        (
            (*GPU_EDITS, "additionalGids"),
            [-1],
            "devices[0].containerEdits.additionalGids: must be a list of group numbers",
        ),
        ((*NODE, "path"), "", "devices[0].containerEdits.deviceNodes[0].path: is missing"),
        ((*NODE, "type"), "x", "devices[0].containerEdits.deviceNodes[0].type: 'x' is not one of b, c, u, p"),
        (
            (*NODE, "permissions"),
            "rwx",
            "devices[0].containerEdits.deviceNodes[0].permissions: 'rwx' has letters other than r, w, m",
        ),
        (
            (*NODE, "major"),
            "195",
            "devices[0].containerEdits.deviceNodes[0].major: '195' has the wrong type",
        ),
        (
            (*NODE, "fileMode"),
            True,
            "devices[0].containerEdits.deviceNodes[0].fileMode: True has the wrong type",
        ),
        ((*MOUNT, "hostPath"), "", "containerEdits.mounts[0].hostPath: is missing"),
        ((*MOUNT, "options"), "ro", "containerEdits.mounts[0].options: 'ro' has the wrong type"),
        (
            (*A_HOOK, "hookName"),
            "create",
            "containerEdits.hooks[0].hookName: 'create' is not the name of a hook",
        ),
        ((*A_HOOK, "path"), "hook", "containerEdits.hooks[0].path: 'hook' is not an absolute path"),
        ((*A_HOOK, "timeout"), 0, "containerEdits.hooks[0].timeout: must be positive"),
        (
            ("containerEdits", "env", 0),
            "=x",
            "containerEdits.env[0]: '=x' does not have the form NAME=value",
        ),
        (("annotations",), {"a": 1}, "annotations['a']: key and value must be strings"),
        (
            ("containerEdits", "intelRdt"),
            {"closID": ".."},
            "containerEdits.intelRdt.closID: '..' is not a valid name",
        ),
        (
            ("containerEdits", "netDevices"),
            [{"hostInterfaceName": "a"}],
            "containerEdits.netDevices[0].name: is missing",
        ),
    ],
)
def test_a_broken_rule_is_reported_with_its_path(path: tuple[Any, ...], value: Any, fault: str) -> None:
    spec = sample()
    at(spec, path[:-1])[path[-1]] = value
    assert faults(spec) == [fault]


def test_every_fault_is_reported_at_once() -> None:
    spec = sample()
    spec["kind"] = ""
    spec["devices"][0]["containerEdits"]["env"] = ["x"]
    spec["more"] = None
    assert len(faults(spec)) == 3


def test_what_is_no_object_is_refused() -> None:
    assert faults([]) == ["spec: must be an object"]
    assert faults({"cdiVersion": "0.3.0", "kind": "a/b", "devices": [1], "containerEdits": []}) == [
        "devices[0]: must be an object",
        "containerEdits: must be an object",
    ]


@pytest.mark.parametrize(
    ("change", "version"),
    [
        ({}, "0.3.0"),
        ({"mounts": [{"hostPath": "/a", "containerPath": "/a", "type": "bind"}]}, "0.4.0"),
        ({"deviceNodes": [{"path": "/dev/a", "hostPath": "/dev/b"}]}, "0.5.0"),
        ({"additionalGids": [1]}, "0.7.0"),
        ({"intelRdt": {"closID": "a"}}, "0.7.0"),
        ({"intelRdt": {"schemata": ["a"]}}, "1.1.0"),
        ({"netDevices": [{"hostInterfaceName": "a", "name": "b"}]}, "1.1.0"),
    ],
)
def test_the_version_is_the_lowest_with_all_fields(change: dict[str, Any], version: str) -> None:
    spec = {"kind": "a/b", "devices": [{"name": "a", "containerEdits": {"env": ["A=b"], **change}}]}
    assert minimum_version(spec) == version
    common = {"kind": "a/b", "containerEdits": change, "devices": [{"name": "a", "containerEdits": {}}]}
    assert minimum_version(common) == version


def test_names_and_annotations_raise_the_version() -> None:
    device = {"name": "0a", "containerEdits": {"env": ["A=b"]}}
    assert minimum_version({"kind": "a/b", "devices": [device]}) == "0.5.0"
    assert minimum_version({"kind": "a/b.c", "devices": [device]}) == "0.6.0"
    assert minimum_version({"kind": "a.x/b", "devices": [device | {"annotations": {"a": "b"}}]}) == "0.6.0"


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2**33), st.text(max_size=5), st.just({}), st.just([]),
    st.sampled_from(["c", "rwm", "/a", "A=b", "createContainer", "0.5.0", ["A=b"], {"a": "b"}, [1], [{}]]),
)  # fmt: skip
PATHS = [
    ("cdiVersion",), ("kind",), ("annotations",), ("devices",), ("containerEdits",), ("surprise",),
    ("devices", 0, "name"), ("devices", 0, "annotations"), GPU_EDITS, ("devices", 1),
    *((*GPU_EDITS, key) for key in ("env", "deviceNodes", "mounts", "hooks", "additionalGids", "intelRdt", "x")),
    *((*NODE, key) for key in ("path", "hostPath", "type", "major", "fileMode", "permissions", "uid", "y")),
    *((*MOUNT, key) for key in ("hostPath", "containerPath", "type", "options")),
    *((*A_HOOK, key) for key in ("hookName", "path", "args", "env", "timeout")),
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(path=st.sampled_from(PATHS), value=VALUES)
def test_nothing_passes_that_the_published_schema_refuses(path: tuple[Any, ...], value: Any) -> None:
    spec = sample()
    at(spec, path[:-1])[path[-1]] = value
    found = faults(spec)
    if not VALIDATOR.is_valid(spec):
        assert found
    assert all("\n" not in fault for fault in found)


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(VALUES, lambda inner: st.dictionaries(st.sampled_from(list(SCHEMA["properties"])), inner))
)
def test_any_value_is_judged_without_an_exception(value: Any) -> None:
    untouched = copy.deepcopy(value)
    faults(value)
    assert value == untouched


def test_every_version_from_the_lowest_on_is_accepted() -> None:
    spec = sample()
    lowest = VERSIONS.index(minimum_version(spec))
    for version in VERSIONS[lowest:]:
        assert faults(spec | {"cdiVersion": version}) == []
