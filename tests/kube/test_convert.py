"""Conversion between the versions of the API: lossless, and equal to the playground's API server."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playground.apiserver.convert import decode, encode
from playground.apiserver.resources import BY_PLURAL, RESOURCE_GROUP

from dra_driver.kube.convert import VERSIONS, from_version, to_version

_names = st.text("abcdefghij-", min_size=1, max_size=8)
_quantities = st.sampled_from(["1", "80Gi", "500m", "40960Mi"])
_attributes = st.dictionaries(
    _names,
    st.one_of(
        st.fixed_dictionaries({"string": st.text(max_size=8)}),
        st.fixed_dictionaries({"int": st.integers(-(2**63), 2**63 - 1)}),
        st.fixed_dictionaries({"bool": st.booleans()}),
        st.fixed_dictionaries({"version": st.just("1.2.3")}),
    ),
    max_size=4,
)
_capacity = st.dictionaries(_names, st.fixed_dictionaries({"value": _quantities}), max_size=3)
_devices = st.fixed_dictionaries(
    {"name": _names},
    optional={
        "attributes": _attributes,
        "capacity": _capacity,
        "taints": st.lists(
            st.fixed_dictionaries({"key": _names, "effect": st.just("NoSchedule")}), max_size=2
        ),
        "consumesCounters": st.lists(
            st.fixed_dictionaries({"counterSet": _names, "counters": _capacity}), max_size=2
        ),
        "allowMultipleAllocations": st.booleans(),
        "nodeName": _names,
    },
)
_slices = st.fixed_dictionaries(
    {
        "apiVersion": st.just("resource.k8s.io/v1"),
        "kind": st.just("ResourceSlice"),
        "metadata": st.fixed_dictionaries({"name": _names}),
        "spec": st.fixed_dictionaries(
            {"driver": _names},
            optional={"devices": st.lists(_devices, max_size=3), "perDeviceNodeSelection": st.booleans()},
        ),
    }
)
_subrequest = {"deviceClassName": _names, "allocationMode": st.just("ExactCount"), "count": st.integers(1, 4)}
_requests = st.one_of(
    st.fixed_dictionaries({"name": _names, "exactly": st.fixed_dictionaries(_subrequest)}),
    st.fixed_dictionaries(
        {
            "name": _names,
            "firstAvailable": st.lists(
                st.fixed_dictionaries({"name": _names, **_subrequest}), min_size=1, max_size=2
            ),
        }
    ),
)
_claims = st.fixed_dictionaries(
    {
        "apiVersion": st.just("resource.k8s.io/v1"),
        "kind": st.just("ResourceClaim"),
        "metadata": st.fixed_dictionaries({"name": _names, "uid": _names}),
        "spec": st.fixed_dictionaries(
            {},
            optional={
                "devices": st.fixed_dictionaries(
                    {}, optional={"requests": st.lists(_requests, max_size=3), "config": st.just([])}
                )
            },
        ),
        "status": st.just({"allocation": {"devices": {"results": [{"request": "r"}]}}}),
    }
)


@given(obj=st.one_of(_slices, _claims), version=st.sampled_from(VERSIONS))
def test_object_survives_every_version(obj, version):
    before = copy.deepcopy(obj)
    written = to_version(obj, version)
    assert written["apiVersion"] == f"resource.k8s.io/{version}"
    assert from_version(written) == before
    assert obj == before, "the caller's object was modified"


@given(items=st.lists(_slices, max_size=3), version=st.sampled_from(VERSIONS))
def test_list_survives_every_version(items, version):
    bare = [
        {k: v for k, v in to_version(i, version).items() if k not in ("kind", "apiVersion")} for i in items
    ]
    document = {"kind": "ResourceSliceList", "apiVersion": f"resource.k8s.io/{version}", "items": bare}
    assert from_version(document)["items"] == items


@given(obj=st.one_of(_slices, _claims), version=st.sampled_from(VERSIONS))
def test_both_conversions_agree(obj, version):
    plural = "resourceslices" if obj["kind"] == "ResourceSlice" else "resourceclaims"
    resource = BY_PLURAL[RESOURCE_GROUP, plural]
    assert encode(resource, version, obj) == to_version(obj, version)
    assert decode(resource, version, to_version(obj, version)) == obj


def test_old_slice_has_its_devices_under_basic():
    device = {"name": "gpu-0", "attributes": {"a": {"int": 1}}}
    obj = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "spec": {"devices": [device]}}
    old = [{"name": "gpu-0", "basic": {"attributes": {"a": {"int": 1}}}}]
    assert to_version(obj, "v1beta1")["spec"]["devices"] == old
    assert to_version(obj, "v1beta2")["spec"]["devices"] == [device]


@pytest.mark.parametrize("obj", [{}, {"apiVersion": "v1", "kind": "Node", "spec": {"devices": [1]}}])
def test_other_groups_pass_unchanged(obj):
    assert to_version(obj, "v1beta1") == obj
    assert from_version(obj) == obj


def test_null_lists_are_read_as_empty():
    obj = {"apiVersion": "resource.k8s.io/v1beta1", "kind": "ResourceSlice", "spec": {"devices": None}}
    assert from_version(obj)["spec"]["devices"] == []
