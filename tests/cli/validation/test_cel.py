"""CEL of selectors on a device: functions of Kubernetes, faults in words, and what is not judged."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dra_driver.cli.validation.documents import Document, read_documents
from dra_driver.cli.validation.manifest_check import check_documents
from dra_driver.cli.validation.rules import cel, classes
from dra_driver.cli.validation.rules.cel import NotJudgedError, SelectorError, view
from dra_driver.cli.validation.rules.selectors import NOT_INSTALLED, compiled
from dra_driver.errors import InvalidConfigError
from dra_driver.slices.rules.build import build_pool
from tests.fakes.samples import DRIVER, MIXED, NODE, h100, inventory
from tests.fakes.slices import machine_fit
from tests.fakes.tables import tabled

ROOT = Path(__file__).parents[3]
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


@tabled("expression", "expected", more=[(" && ".join(["true"] * 1000), True)])
def test_a_selector_matches_as_in_kubernetes(expression: str, expected: bool) -> None:
    assert compiled(expression).matches(DEVICE) is expected


@tabled("expression", "fault")
def test_an_evaluation_that_ends_in_an_error_is_reported_and_is_not_false(
    expression: str, fault: str
) -> None:
    with pytest.raises(SelectorError, match=re.escape(fault)):
        compiled(expression).matches(DEVICE)


@tabled("expression", "fault", more=[("[" + "1," * 9000 + "1].all(x, x == 1)", "is longer than 10240 bytes")])
def test_compile_error_is_reported_with_its_position(expression: str, fault: str) -> None:
    with pytest.raises(InvalidConfigError, match=re.escape(fault)) as caught:
        compiled(expression)
    assert "\n" not in str(caught.value)


@tabled(
    "expression",
    "reason",
    more=[
        (
            "(" * 500 + "true" + ")" * 500,
            "cannot compile the selector: Expression recursion limit exceeded. limit: 32",
        ),
        ("true ? true : " * 500 + "true", "cannot compile the selector: "),
    ],
)
def test_selector_that_only_the_api_server_can_evaluate_is_not_judged(expression: str, reason: str) -> None:
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
@tabled("expression")
def test_a_selector_of_a_user_is_not_judged_without_the_package(expression: str) -> None:
    with pytest.raises(NotJudgedError, match=re.escape(NOT_INSTALLED)):
        compiled(expression)


def test_classes_of_the_driver_choose_the_same_devices_without_the_package() -> None:
    shareable = {"attributes": {"shareable": {"bool": True}}, "allowMultipleAllocations": True}
    devices = [*build_pool(MIXED, NODE).slices[0].devices, {"name": "bare"}, {"name": "shared", **shareable}]
    views = [view(driver, device) for device in devices for driver in (DRIVER, "gpu.example.com")]
    shipped = [
        entry
        for file in ("install.yaml", "chart/files/mig-classes.yaml")
        for entry in yaml.safe_load_all((ROOT / "daemonset" / file).read_text())
        if entry["kind"] == "DeviceClass"
    ]  # fmt: skip
    for entry in (*shipped, *classes.standard_classes(DRIVER).values()):
        (selector,) = entry["spec"]["selectors"]
        text = selector["cel"]["expression"]
        meaning = classes.standard_selector(text)
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


@pytest.mark.usefixtures("without_cel")
def test_a_claim_without_a_selector_is_judged_without_the_package() -> None:
    documents = [claim(), claim("device.driver =="), claim(class_name="mig-1g.5gb.nvidia.com")]
    whole, selecting, absent = check_documents(documents, DRIVER, [machine_fit(MIXED)])
    assert (whole.verdict, len(whole.devices)) == ("OK", 1)
    assert (selecting.verdict, selecting.faults, selecting.notes) == (
        *("not judged", []),
        [f"its selectors are not judged: {NOT_INSTALLED}"],
    )
    assert absent.verdict == "FAULT"
    assert absent.faults[0].endswith("0 of class mig-1g.5gb.nvidia.com")


def test_the_example_of_selectors_compares_versions_and_fits() -> None:
    documents = list(read_documents([str(ROOT / "examples/selectors")]))
    template, _ = check_documents(documents, DRIVER, [machine_fit(inventory(h100(0)))])
    assert (template.verdict, template.hints, len(template.devices)) == ("OK", [], 1)
