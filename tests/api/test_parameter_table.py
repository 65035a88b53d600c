"""The decoder and `validate` judge the table alike; tests/e2e/test_parameters_policy.py adds the policy."""

from __future__ import annotations

import re

import pytest

from dra_driver.api.config import DeviceType
from dra_driver.api.resolve import config_for_result, decode
from dra_driver.cli.validation.rules.manifests import object_faults
from dra_driver.errors import InvalidConfigError
from dra_driver.model.claim import DeviceConfig, DeviceResult
from tests.api.parameter_table import CLAIMS, PARAMETERS, Claim, Parameters

DRIVER = "gpu.nvidia.com"


def by_name(case: Parameters | Claim) -> str:
    return case.name


@pytest.mark.parametrize("case", PARAMETERS, ids=by_name)
def test_the_decoder(case: Parameters) -> None:
    faults: tuple[str, ...] = ()
    try:
        decode(case.value)
    except InvalidConfigError as error:
        faults = error.faults
    assert faults == case.faults


@pytest.mark.parametrize("case", PARAMETERS, ids=by_name)
def test_validate(case: Parameters) -> None:
    request = {"name": "a", "exactly": {"deviceClassName": "gpu.nvidia.com", "adminAccess": True}}
    config = [{"opaque": {"driver": "nic.example.com", "parameters": {}}}]
    config.append({"opaque": {"driver": DRIVER, "parameters": case.value}})
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "c"},
        "spec": {"devices": {"requests": [request], "config": config}},
    }
    whole = any(fault.startswith("the parameters ") for fault in case.faults)
    path = "spec.devices.config[1].opaque.parameters" + (": " if whole else ".")
    found = [
        re.sub("(unknown field); .*", r"\1", fault) for fault in object_faults(claim, DRIVER)
    ]  # without what may be meant
    assert found == [f"{path}{fault}" for fault in case.faults]


@pytest.mark.parametrize("case", CLAIMS, ids=by_name)
def test_validate_looks_whether_parameters_fit_the_class(case: Claim) -> None:
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "c"},
        "spec": {"devices": case.devices},
    }
    expected = [f"spec.devices.{fault}" for fault in case.faults]
    assert object_faults(claim, DRIVER) == expected


@pytest.mark.parametrize("case", CLAIMS, ids=by_name)
def test_prepare_refuses_what_does_not_fit(case: Claim) -> None:
    request, device_type = case.device
    result = DeviceResult(
        request=request, driver=DRIVER, pool="a", device="gpu-1", admin_access=case.admin_access
    )
    configs = [
        DeviceConfig(
            source="FromClaim",
            requests=tuple(entry["requests"]),
            driver=entry["opaque"]["driver"],
            parameters=entry["opaque"]["parameters"],
        )
        for entry in case.devices["config"]
    ]
    kind: DeviceType = device_type
    if case.prepare is None:
        config_for_result(result, configs, DRIVER, kind)
    else:
        with pytest.raises(InvalidConfigError, match=case.prepare):
            config_for_result(result, configs, DRIVER, kind)
    # Whatever the policy refuses, a Prepare would have refused.
    assert bool(case.prepare) or not case.faults
    assert bool(case.why_later) == (case.prepare is not None and not case.faults)
