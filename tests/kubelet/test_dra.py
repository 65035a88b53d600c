"""The DRA service over a real socket."""

import time
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.contextvars import get_contextvars

from dra_driver.errors import ClaimRefusedError
from dra_driver.kubelet.dra import check_claims, claim_fault
from dra_driver.kubelet.pb import dra_v1_pb2, dra_v1beta1_pb2
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.kubelet.support import (
    DRIVER,
    V1,
    FakeClaims,
    Gate,
    call_method,
    channel,
    claim,
    device,
    prepare,
    unprepare,
)

BOTH = pytest.mark.parametrize("api", [dra_v1_pb2, dra_v1beta1_pb2], ids=["v1", "v1beta1"])
GOOD_UID = "0a1b2c3d-1111-2222-3333-444455556666"


@pytest.fixture
def claims():
    return FakeClaims()


@pytest.fixture
def dra(node, claims):
    return node.plugin(claims).sockets.dra


@BOTH
def test_prepare_answers_with_the_devices_of_each_claim(dra, claims, api):
    shown = device("u1", requests=("gpu", "aux"), cdi_ids=("a/b=c", "a/b=d"))
    claims.on_prepare = lambda _: {"u1": Prepared((shown,)), "u2": Prepared(())}
    refs = (claim("u1", "one", "ns1"), claim("u2", "two", "ns2"))
    answer = prepare(dra, *refs, api=api)
    assert claims.requested[0][:2] == ("prepare", refs)
    assert answer == api.NodePrepareResourcesResponse(
        claims={
            "u1": api.NodePrepareResourceResponse(
                devices=[
                    api.Device(
                        request_names=["gpu", "aux"],
                        pool_name="node-1",
                        device_name="gpu-4cf8db2d",
                        cdi_device_ids=["a/b=c", "a/b=d"],
                    )
                ]
            ),
            "u2": api.NodePrepareResourceResponse(),
        }
    )


@BOTH
def test_unprepare_answers_for_each_claim(dra, claims, api):
    claims.on_unprepare = lambda _: {"u1": None, "u2": Failed("GPU is busy")}
    answer = unprepare(dra, claim("u1"), claim("u2", "two"), api=api)
    assert {uid: entry.error for uid, entry in answer.claims.items()} == {"u1": "", "u2": "GPU is busy"}


def test_share_ids_are_answered(dra, claims):
    shares = tuple(device(share_id=share) for share in ("share-a", "share-b", None))
    claims.on_prepare = lambda _: {"uid-1": Prepared(shares)}
    devices = prepare(dra, claim()).claims["uid-1"].devices
    assert [(entry.HasField("share_id"), entry.share_id) for entry in devices] == [
        (True, "share-a"),
        (True, "share-b"),
        (False, ""),
    ]
    assert len(prepare(dra, claim(), api=dra_v1beta1_pb2).claims["uid-1"].devices) == 3


def test_failure_without_a_text_is_not_a_success(dra, claims):
    claims.on_prepare = claims.on_unprepare = lambda _: {"uid-1": Failed("")}
    for call in (prepare, unprepare):
        assert "internal error" in call(dra, claim()).claims["uid-1"].error


def test_service_sees_the_time_the_kubelet_still_waits(dra, claims):
    began = time.monotonic()
    prepare(dra, claim(), timeout=4500)
    unprepare(dra, claim(), timeout=700)
    took_s = time.monotonic() - began
    prepare(dra, claim(), timeout=None)
    remaining = [deadline for _, _, deadline in claims.requested]
    # gRPC rounds long deadlines up
    assert 4499 - took_s < remaining[0] < 4550
    assert 699 - took_s < remaining[1] < 710
    assert remaining[2] > 1e9


def test_service_sees_that_the_kubelet_took_a_call_back(dra, claims):
    gate = claims.on_prepare = Gate()
    with channel(dra) as opened:
        request = dra_v1_pb2.NodePrepareResourcesRequest
        call = opened.unary_unary(V1 + "NodePrepareResources", request.SerializeToString)
        wire = dra_v1_pb2.Claim(namespace="default", name="one", uid="uid-1")
        requested = call.future(request(claims=[wire]), timeout=30)
        assert gate.entered.wait(PATIENCE_S)
        assert not claims.is_cancelled()
        requested.cancel()
        eventually(claims.is_cancelled)
    gate.opened.set()


def test_late_answer_is_dropped_and_the_retry_can_run_next_to_the_first(dra, claims):
    gate = claims.on_prepare = Gate()

    def is_entered() -> bool:
        """A call may be too late on its way already."""
        with pytest.raises(grpc.RpcError) as caught:
            prepare(dra, claim(), timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return gate.entered.is_set()

    eventually(is_entered)
    claims.on_prepare = lambda _: {"uid-1": Failed("still preparing")}
    assert prepare(dra, claim()).claims["uid-1"].error == "still preparing"
    gate.opened.set()


@BOTH
@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (ClaimRefusedError("GPU gpu-1 is held by default/other"), "GPU gpu-1 is held by default/other"),
        (ValueError("two\nlines"), "internal error: ValueError: two lines"),
        (KeyError("x" * 5000), "…"),
    ],
)
def test_exception_becomes_each_claims_own_error(dra, claims, api, raised, text):
    def fail(_):
        raise raised

    claims.on_prepare = claims.on_unprepare = fail
    for call in (prepare, unprepare):
        entries = call(dra, claim("u1"), claim("u2", "two"), api=api).claims
        assert set(entries) == {"u1", "u2"}
        for entry in entries.values():
            assert text in entry.error
            assert "Exception calling application" not in entry.error
            assert len(entry.error) <= 1024


def test_error_text_with_undecodable_bytes_is_sent_as_a_line(dra, claims):
    claims.on_unprepare = lambda _: {"uid-1": Failed("no file /x/\udcff\n  here")}
    assert unprepare(dra, claim()).claims["uid-1"].error == "no file /x/? here"


@pytest.mark.parametrize("wrong", ["", "../../etc", "a/b", "a\tb", "u" * 200])
def test_bad_uid_is_refused_under_its_own_key_and_others_continue(dra, claims, wrong):
    for call in (prepare, unprepare):
        claims.requested.clear()
        entries = call(dra, claim(wrong), claim("good", "two")).claims
        assert set(entries) == {wrong, "good"}
        assert entries[wrong].error
        assert not entries["good"].error
        assert [ref.uid for ref in claims.requested[0][1]] == ["good"]


def test_empty_request_is_answered_without_the_service(dra, claims):
    assert not prepare(dra).claims
    assert not unprepare(dra).claims
    assert claims.requested == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.text(max_size=12), st.text(max_size=8), st.sampled_from(["u1", "../u", "", "u\0"])))
)
def test_any_names_give_exactly_one_entry_per_uid(dra, names):
    refs = [claim(uid, name, namespace) for namespace, name, uid in names]
    for call in (prepare, unprepare):
        assert set(call(dra, *refs).claims) == {uid for _, _, uid in names}


def test_log_context_is_fresh_for_every_call(dra, claims):
    seen = []

    def look(refs):
        seen.append(get_contextvars())
        return {ref.uid: Prepared(()) for ref in refs}

    claims.on_prepare = claims.on_unprepare = look
    prepare(dra, claim())
    prepare(dra, claim())
    claims.on_unprepare = lambda _: seen.append(get_contextvars()) or {"uid-1": None}
    unprepare(dra, claim())
    methods = [context["method"] for context in seen]
    assert methods == ["NodePrepareResources", "NodePrepareResources", "NodeUnprepareResources"]
    ids = [context["request_id"] for context in seen]
    assert ids == sorted(set(ids))


def test_requests_are_logged_at_debug_and_failures_at_error(dra, claims, quiet_logs):
    uid = "uid-of-this-test"  # a call that an earlier test left may still log
    claims.on_prepare = lambda _: {uid: Failed("no such device")}
    prepare(dra, claim(uid))

    def logged() -> list[Any]:
        lines = [line for line in quiet_logs if uid in repr(line)]
        return lines if lines and lines[-1]["event"] == "rpc_answered" else []

    lines = eventually(logged)
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("rpc_received", "debug"),
        ("claim_failed", "error"),
        ("rpc_answered", "debug"),
    ]
    assert f'uid: "{uid}"' in repr(lines[0]["request"])
    assert lines[1]["claim_uid"] == uid
    assert lines[1]["error"] == "no such device"


@tabled("authority")
def test_odd_authority_is_accepted(dra, authority):
    assert prepare(dra, claim(), options=[("grpc.default_authority", authority)]).claims["uid-1"].devices


def test_unknown_method_is_unimplemented(dra):
    with pytest.raises(grpc.RpcError) as caught:
        call_method(dra, V1 + "NodeDance", dra_v1_pb2.Claim(), dra_v1_pb2.Claim)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_garbage_on_the_wire_fails_that_call_only(dra):
    with channel(dra) as opened:
        call = opened.unary_unary(V1 + "NodePrepareResources")
        with pytest.raises(grpc.RpcError):
            call(b"\xff\xff\xff", timeout=PATIENCE_S)
    assert prepare(dra, claim()).claims


def test_old_kubelet_gets_the_same_devices_over_v1beta1(node, kubelets):
    claims = FakeClaims()
    claims.on_prepare = lambda _: {"uid-1": Prepared((device(share_id="share-a"),))}
    node.plugin(claims)
    old, new = kubelets(dra_apis=("v1beta1.DRAPlugin",)), kubelets()
    old.wait_registered(DRIVER)
    new.wait_registered(DRIVER)
    assert old.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(),))}
    assert new.prepare(DRIVER, [claim()]) == {"uid-1": Prepared((device(share_id="share-a"),))}
    assert old.unprepare(DRIVER, [claim()]) == new.unprepare(DRIVER, [claim()]) == {"uid-1": None}


@pytest.mark.parametrize("uid", [GOOD_UID, "uid-1", "a", "0123456789abcdef" * 2, "A_b.c", "u" * 128])
def test_uids_of_every_kind_are_accepted(uid):
    assert claim_fault(claim(uid)) is None


@tabled("uid")
def test_unsafe_uid_gets_one_printable_sentence(uid):
    fault = claim_fault(claim(uid))
    assert fault
    assert fault.isprintable()
    assert len(fault) < 300


@pytest.mark.parametrize("name", ["", "a/b", "..", "a..b", "A", "a_b", "n" * 254, "a\n", ".a", "a."])
def test_name_must_be_a_subdomain(name):
    assert "claim name" in claim_fault(claim(name=name))


@pytest.mark.parametrize("namespace", ["", "a/b", "..", "a.b", "A", "n" * 64, "a\n"])
def test_namespace_must_be_a_label(namespace):
    assert "claim namespace" in claim_fault(claim(namespace=namespace))


def test_longest_names_are_accepted():
    assert claim_fault(ClaimRef("n" * 63, ".".join(["n" * 62] * 4), GOOD_UID)) is None


def test_claim_named_twice_alike_counts_once():
    assert check_claims([claim("u1"), claim("u2"), claim("u1")]) == ([claim("u1"), claim("u2")], {})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_uid_with_two_names_is_refused(order):
    refs = [claim("u1", name="a"), claim("u1", name="b")]
    accepted, refused = check_claims([refs[order[0]], refs[order[1]], claim("u2")])
    assert accepted == [claim("u2")]
    assert "twice" in refused["u1"]


def test_uid_with_one_bad_name_is_refused_whatever_the_order():
    for refs in ([claim("u1"), claim("u1", name="a/b")], [claim("u1", name="a/b"), claim("u1")]):
        accepted, refused = check_claims(refs)
        assert (accepted, list(refused)) == ([], ["u1"])
