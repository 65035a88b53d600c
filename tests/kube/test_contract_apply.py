"""Server-side apply of claim states as the driver relies on it; runs against the playground and a real server."""

from __future__ import annotations

import pytest

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.claim_status_client import APPLY_PATCH
from tests.kube.support import DRIVER, allocated_claim

_PLACE = {"driver": DRIVER, "pool": "n", "device": "gpu-0"}


class Claim:
    """A claim with one device, to which managers apply entries."""

    def __init__(self, api, namespace):
        self.api = api
        stored = allocated_claim(api, namespace, [_PLACE])
        self.metadata = stored["metadata"]
        self.where = {"namespace": namespace, "name": self.metadata["name"], "action": "test"}

    def apply(self, manager, *entries, uid=None, force=True):
        """The devices of the status after that."""
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": self.metadata["name"], "uid": uid or self.metadata["uid"]},
            "status": {"devices": list(entries)},
        }
        query = {"force": "true"} if force else {}
        stored = self.api.call(
            "PATCH",
            "resourceclaims",
            subresource="status",
            query=query | ({"fieldManager": manager} if manager else {}),
            body=body,
            content_type=APPLY_PATCH,
            **self.where,
        )
        return stored["status"].get("devices") or []


@pytest.fixture
def claim(target):
    claim = Claim(target.api, target.namespace)
    yield claim
    target.api.call("DELETE", "resourceclaims", **claim.where)


def condition(kind="Ready", **fields):
    moment = "2026-08-07T12:00:00Z"
    given = {"type": kind, "status": "True", "reason": "Up", "message": "", "lastTransitionTime": moment}
    return given | fields


def entry(*kinds, **fields):
    return _PLACE | {"conditions": [condition(kind) for kind in kinds]} | fields


def types(devices):
    return [[condition["type"] for condition in device["conditions"]] for device in devices]


def test_each_manager_owns_its_own_conditions(claim):
    claim.apply("one", entry("Ready", data={"a": 1}))
    assert types(claim.apply("two", entry("Linked"))) == [["Ready", "Linked"]]
    (left,) = claim.apply("one")
    assert types([left]) == [["Linked"]]
    assert "data" not in left
    assert claim.apply("two") == []


def test_fields_of_other_owners_change_only_with_force(claim):
    claim.apply("one", entry("Ready", data={"a": 1}))
    with pytest.raises(ApiRejectedError, match='conflict with "one"') as caught:
        claim.apply("two", entry("Ready", data={"a": 2}), force=False)
    assert caught.value.status == 409
    assert claim.apply("two", entry("Ready", data={"a": 2}))[0]["data"] == {"a": 2}
    assert claim.apply("one")[0]["data"] == {"a": 2}


def test_equal_values_have_two_owners(claim):
    claim.apply("one", entry("Ready"))
    claim.apply("two", entry("Ready"), force=False)
    assert types(claim.apply("one")) == [["Ready"]]
    assert claim.apply("two") == []


@pytest.mark.parametrize(
    ("manager", "applied", "uid", "field"),
    [
        ("", entry("Ready"), None, "fieldManager"),
        ("one", entry("Ready"), "another", "metadata.uid"),
        ("one", entry("Ready") | {"device": "gpu-1"}, None, "must be an allocated device"),
        ("one", entry(*(f"C{n}" for n in range(9))), None, "conditions: Too many"),
        ("one", entry(data=["x"]), None, "must be a valid JSON object"),
        ("one", entry(data={"x": "y" * 10240}), None, "data: Too long"),
        ("one", _PLACE | {"conditions": [condition(reason="not camel")]}, None, "reason"),
        ("one", _PLACE | {"conditions": [condition(reason="")]}, None, "reason"),
        ("one", _PLACE | {"conditions": [condition(status="Maybe")]}, None, "status"),
    ],
)
def test_invalid_patch_is_refused(claim, manager, applied, uid, field):
    with pytest.raises(ApiRejectedError, match=field) as caught:
        claim.apply(manager, applied, uid=uid)
    assert caught.value.status == 422


@pytest.mark.parametrize(("namespace", "about"), [("default", "kube-system"), ("kube-system", "")])
def test_an_event_lives_with_what_it_is_about(target, namespace, about):
    event = {"metadata": {"generateName": "x."}, "involvedObject": {"kind": "Pod", "namespace": about}}
    path = f"/api/v1/namespaces/{namespace}/events"
    with pytest.raises(ApiRejectedError, match="does not match event") as caught:
        target.api.request("POST", path, action="test", body=event)
    assert caught.value.status == 422
