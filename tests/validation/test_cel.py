"""CEL of selectors on a device: functions of Kubernetes, faults in words, and what is not judged."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dra_driver.errors import InvalidConfigError
from dra_driver.model.inventory import Inventory
from dra_driver.slices.rules.build import build_pool
from dra_driver.validation.documents import Document, read_documents
from dra_driver.validation.machine_fit import MachineFit
from dra_driver.validation.manifest_check import check_documents
from dra_driver.validation.rules import cel, standard_classes
from dra_driver.validation.rules.selection import NotJudgedError, SelectorError, view
from dra_driver.validation.rules.selectors import NOT_INSTALLED, compiled
from tests.fakes.samples import DRIVER, MIXED, NODE, h100

ROOT = Path(__file__).parents[2]
DEVICE = view(
    DRIVER,
    {
        "name": "gpu-1",
        "attributes": {
            "type": {"string": "gpu"},
            "productName": {"string": "NVIDIA H100 80GB HBM3"},
            "cudaComputeCapability": {"version": "9.0.0"},
            "driverVersion": {"version": "580.95.5+build"},
            "index": {"int": 2},
            "migCapable": {"bool": True},
            "other.io/text": {"string": "a && b"},
        },
        "capacity": {"memory": {"value": "81559Mi"}, "multiprocessors": {"value": "132"}},
    },
)
A, C = f'device.attributes["{DRIVER}"]', f'device.capacity["{DRIVER}"]'


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (f"device.driver=='{DRIVER}'&&{A}.index==2", True),
        (f"{A}.index == 'x'", False),
        ("device.attributes['other.io'].text == 'a && b'", True),
        (f'{C}.memory.isLessThan(quantity("81559Mi"))', False),
        (f'{C}.memory == quantity("83516416Ki")', True),
        (f'{C}.memory.sub(quantity("559Mi")) == quantity("81000Mi")', True),
        (f'{C}.multiprocessors.add(1).asApproximateFloat() > 132', True),
        (f'{C}.multiprocessors.asInteger() == 132 && sign({C}.multiprocessors) == 1', True),
        (f'{A}.cudaComputeCapability.compareTo(semver("9.0.0-rc.1")) > 0', True),
        (f'{A}.driverVersion.major() == 580 && {A}.driverVersion.patch() == 5', True),
        (f'{A}.driverVersion == semver("580.95.5")', True),
        (f'{A}.cudaComputeCapability == semver("v9", true)', True),
        (f'{A}.cudaComputeCapability == "9.0.0"', False),
        ('"x" in device.attributes["nobody.example.com"]', False),
        ('"nic.example.com" in device.attributes && device.attributes["nic.example.com"].x == 1', False),
        (f'{A}.?profile.orValue("none") == "none"', True),
        (f'{A}[?"type"].hasValue() && !{A}.?nope.hasValue()', True),
        (f'cel.bind(a, {A}, a.type == "gpu" && a.migCapable)', True),
        (f'false && {A}.nope', False),
        (f'{A}.nope == 1 || {A}.index == 2', True),
        ('isQuantity("3Gi") && !isQuantity("three") && isSemver("1.2.3") && !isSemver("1.2")', True),
        ("!device.allowMultipleAllocations", True),
        (" && ".join(["true"] * 1000), True),
        # A pattern of RE2; Python's own would try this for ever.
        (f"'{'a' * 64}!'.matches('(a+)+$')", False),
    ],
)  # fmt: skip
def test_a_selector_matches_as_in_kubernetes(expression: str, expected: bool) -> None:
    assert compiled(expression).matches(DEVICE) is expected


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        (f'{A}.nope == "x"', "no such key: nope"),
        (f'{A}.index == 2 && {A}.index', "No matching overloads found : _&&_"),
        (f'{A}.cudaComputeCapability.isGreaterThan(semver("8.9"))', "'8.9' is no semantic version such as 9.0.0"),
        (f'{C}.memory.compareTo({A}.driverVersion) == 0', "No matching overloads found"),
        (f'{A}.index / 0 == 1', "divide by zero"),
        (f'{A}.productName', "the expression is a string, not a bool"),
        (f'{A}.productName.matches("(")', "invalid regular expression: missing ): ("),
    ],
)  # fmt: skip
def test_an_evaluation_that_ends_in_an_error_is_told_and_is_not_false(expression: str, fault: str) -> None:
    with pytest.raises(SelectorError, match=re.escape(fault)):
        compiled(expression).matches(DEVICE)


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ('devices.driver == "x"', "does not compile: undeclared reference to 'devices.driver' at character 8"),
        ('device.atributes["a"].b', "'device.atributes' at character 7; there are device.driver, device.attributes,"),
        ('device.driver == "x" &&\n  y', "does not compile: undeclared reference to 'y' in line 2 at character 3"),
        ('device.driver = "x"', "Syntax error: token recognition error at: '= ' at character 15; Syntax error: "),
        ('device.driver == "x" &&', "Syntax error: mismatched input '<EOF>' at character 24"),
        (f'{C}.memory > quantity("1Gi")', "'_>_' applied to '(kubernetes.Quantity, kubernetes.Quantity)' at character"),
        (f'{A}.cudaComputeCapability.isGreaterThan("8.9.0")', "'isGreaterThan' applied to '(dyn, string)'"),
        ("1 + 1", "does not compile: it must evaluate to bool, not int"),
        ("", "Syntax error"),
        ("[" + "1," * 9000 + "1].all(x, x == 1)", "is longer than 10240 bytes"),
    ],
)  # fmt: skip
def test_what_does_not_compile_is_told_with_its_position(expression: str, fault: str) -> None:
    with pytest.raises(InvalidConfigError, match=re.escape(fault)) as caught:
        compiled(expression)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (
            "(" * 500 + "true" + ")" * 500,
            "it cannot be compiled here: Expression recursion limit exceeded. limit: 32",
        ),
        ("true ? true : " * 500 + "true", "it cannot be compiled here: "),
        ('ip("10.0.0.1").isLoopback()', "it uses ip(), which only the API server knows"),
        ("[1, 2].sum() == 3", "it uses sum(), "),
        ("[1, 2].indexOf(2) == 1", "it uses indexOf(), "),
        (f'{A}.productName.find("H[0-9]+") == "H100"', "it uses find(), "),
        (f'{A}.type.includes("gpu")', "it uses includes(), "),
    ],
)
def test_what_only_the_api_server_knows_is_not_judged(expression: str, reason: str) -> None:
    with pytest.raises(NotJudgedError, match=re.escape(reason)):
        compiled(expression)


# --- without cel-expr-python, as in the image ---------------------------------------------------


@pytest.fixture
def without_cel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    for function in (cel._environment, compiled):
        function.cache_clear()
    yield
    for function in (cel._environment, compiled):
        function.cache_clear()


@pytest.mark.usefixtures("without_cel")
@pytest.mark.parametrize(
    "expression",
    [
        'device.driver == "x"',
        "device.driver ==",
        f'device.driver == "{DRIVER}" && "type" in {A} && {A}.type == "gpu" || true',
    ],
)
def test_a_selector_of_a_user_is_not_judged_without_the_package(expression: str) -> None:
    with pytest.raises(NotJudgedError, match=re.escape(NOT_INSTALLED)):
        compiled(expression)


def test_classes_of_the_driver_choose_the_same_devices_without_the_package() -> None:
    shareable = {"attributes": {"shareable": {"bool": True}}, "allowMultipleAllocations": True}
    devices = [*build_pool(MIXED, NODE).slices[0].devices, {"name": "bare"}, {"name": "shared", **shareable}]
    views = [view(driver, device) for device in devices for driver in (DRIVER, "gpu.example.com")]
    shipped = [
        entry
        for file in ("base/device-classes", "components/shares/device-class", "components/mig-classes/device-classes")
        for entry in yaml.safe_load_all((ROOT / f"daemonset/{file}.yaml").read_text())
    ]  # fmt: skip
    for entry in shipped:
        (selector,) = entry["spec"]["selectors"]
        text = selector["cel"]["expression"]
        meaning = standard_classes.standard_selector(text)
        assert meaning is not None, entry["metadata"]["name"]
        assert [meaning(one) for one in views] == [compiled(text).matches(one) for one in views]


def claim(*selectors: str, class_name: str = "gpu.nvidia.com") -> Document:
    exactly = {
        "deviceClassName": class_name, "selectors": [{"cel": {"expression": one}} for one in selectors]
    }  # fmt: skip
    content = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "claim"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    }
    return Document("claim.yaml", 1, content)


def machine(inventory: Inventory = MIXED) -> MachineFit:
    pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    devices = list(build_pool(inventory, NODE).slices[0].devices)
    return MachineFit(
        "m", DRIVER, [{"spec": {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": devices}}]
    )


@pytest.mark.usefixtures("without_cel")
def test_a_claim_without_a_selector_is_judged_without_the_package() -> None:
    documents = [claim(), claim("device.driver =="), claim(class_name="mig-1g.5gb.nvidia.com")]
    whole, selecting, absent = check_documents(documents, DRIVER, [machine()])
    assert (whole.verdict, len(whole.devices)) == ("OK", 1)
    assert (selecting.verdict, selecting.faults, selecting.notes) == (
        *("not judged", []),
        [f"its selectors are not judged: {NOT_INSTALLED}"],
    )
    assert absent.verdict == "FAULT"
    assert absent.faults[0].endswith("0 of class mig-1g.5gb.nvidia.com")


def test_the_example_of_selectors_compares_versions_and_fits() -> None:
    documents = list(read_documents([str(ROOT / "examples/selectors")]))
    template, _ = check_documents(documents, DRIVER, [machine(Inventory(MIXED.versions, (h100(0),)))])
    assert (template.verdict, template.hints, len(template.devices)) == ("OK", [], 1)
