"""What goes over the socket: every value there and back, and nothing else."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import DraDriverError, NotSupportedError, PermanentError, RetryableError
from dra_driver.model.mps import MPS_STATES, MpsDaemonSpec, MpsDaemonStatus, MpsMember
from dra_driver.mps import protocol
from dra_driver.mps.protocol import Ensure, Ping, ProtocolError, Status, Stop, encode_spec

SPEC = MpsDaemonSpec("gpu-1", "GPU-1", "gpu", "GPU-1", default_memory_limit_mib=64)

texts = st.text(max_size=20)
specs = st.builds(
    MpsDaemonSpec,
    texts, texts, st.sampled_from(["gpu", "mig"]), texts, st.booleans(),
    st.none() | st.integers(), st.none() | st.integers(),
    st.lists(st.builds(MpsMember, texts, texts, st.none() | st.integers()), max_size=2).map(tuple),
)  # fmt: skip
statuses = st.builds(
    MpsDaemonStatus,
    texts, st.sampled_from(MPS_STATES), specs, st.none() | st.integers(), st.floats(0, 1e11),
    st.none() | st.integers(), st.none() | texts,
)  # fmt: skip
timeouts = st.floats(0.001, protocol.LONGEST_TIMEOUT_S)
requests = (
    st.just(Ping())
    | st.just(Status())
    | st.builds(Ensure, specs, timeouts)
    | st.builds(Stop, texts, timeouts, st.none() | texts, st.none() | st.sampled_from(["gpu", "mig"]))
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(requests)
def test_requests_there_and_back(request):
    line = protocol.encode_request(request)
    assert line.count(b"\n") == 1
    assert protocol.decode_request(line[:-1]) == request


@given(st.lists(statuses, max_size=4).map(tuple))
def test_replies_there_and_back(reply):
    assert protocol.decode_reply(protocol.encode_reply(reply)) == reply


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_anything_is_a_protocol_error(line):
    with pytest.raises(ProtocolError):
        protocol.decode_request(line)
    with pytest.raises(ProtocolError):
        protocol.decode_reply(line)


@given(
    requests.filter(lambda request: isinstance(request, Ensure)),
    st.lists(st.sampled_from(["v", "verb", "spec", "timeout_s", "device", "extra"]), min_size=1),
    json_values,
)
def test_a_changed_request_is_decoded_or_refused(request, path, value):
    body = json.loads(protocol.encode_request(request))
    for key in path:
        body[key] = value
    with suppress(ProtocolError):
        assert isinstance(protocol.decode_request(json.dumps(body).encode()), Ensure | Stop | Ping | Status)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"v": 2}, "version 2, this side speaks 1: update the DaemonSets"),
        ({"v": True}, "version True"),
        ({"verb": "explode"}, "unknown verb 'explode'; known are ping, status, ensure and stop"),
        ({"extra": 1}, "the verb ensure has no 'extra'"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
        ({"timeout_s": True}, "timeout_s must be float or int, not bool"),
        ({"timeout_s": 10**400}, "timeout_s must be above 0 and at most 600"),
        ({"spec": {**encode_spec(SPEC), "kind": "tpu"}}, "spec.kind is 'tpu'"),
        ({"spec": {**encode_spec(SPEC), "multi_user": 1}}, "multi_user must be bool, not int"),
        ({"spec": {**encode_spec(SPEC), "default_memory_limit_mib": 1.5}}, "must be int or null, not float"),
        ({"spec": {}}, "kind is missing"),
        ({"spec": None}, "spec must be dict"),
        ({"spec": {**encode_spec(SPEC), "others": None}}, "others must be list, not NoneType"),
        ({"spec": {**encode_spec(SPEC), "others": [1]}}, "a member of others must be a JSON object"),
        ({"spec": {**encode_spec(SPEC), "others": [{}]}}, "device is missing"),
    ],
)
def test_the_fault_is_named(changes, text):
    body = {"v": 1, "verb": "ensure", "spec": encode_spec(SPEC), "timeout_s": 5, **changes}
    with pytest.raises(ProtocolError, match=text):
        protocol.decode_request(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "tpu"}, "kind is 'tpu'; it must be gpu or mig"),
        ({"kind": None}, "kind must be str, not NoneType"),
        ({"gpu_uuid": None}, "gpu_uuid must be str, not NoneType"),
        ({"uuid": "GPU-1"}, "the verb stop has no 'uuid'"),
    ],
)
def test_what_a_stop_may_leave_out_is_checked_where_it_stands(changes, text):
    body = {"v": 1, "verb": "stop", "device": "gpu-1", "timeout_s": 5}
    assert protocol.decode_request(json.dumps(body).encode()) == Stop("gpu-1", 5.0)
    with pytest.raises(ProtocolError, match=text):
        protocol.decode_request(json.dumps({**body, **changes}).encode())


def test_a_host_of_an_older_release_can_read_what_serves_one_device():
    body = json.loads(protocol.encode_request(Ensure(SPEC, 5)))
    assert sorted(body["spec"]) == [
        "default_active_thread_percentage", "default_memory_limit_mib", "device", "gpu_uuid", "kind",
        "multi_user", "uuid",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [RetryableError, PermanentError, NotSupportedError])
def test_errors_keep_their_kind_and_become_one_line(kind):
    with pytest.raises(kind, match="two lines") as caught:
        protocol.decode_reply(protocol.encode_error(kind("two\nlines")))
    assert type(caught.value) is kind
    assert isinstance(caught.value, DraDriverError)


def test_a_message_has_a_largest_size():
    many = (MpsDaemonStatus("gpu-1", "ready", SPEC, problem="x" * 8000),) * 40
    with pytest.raises(ProtocolError, match="larger than"):
        protocol.encode_reply(many)


def test_differences_name_both_sides():
    other = replace(SPEC, multi_user=True, default_memory_limit_mib=None)
    assert SPEC.differences(other) == (
        "multi_user: false, not true",
        "default_memory_limit_mib: 64, not not set",
    )
    assert SPEC.differences(SPEC) == ()
