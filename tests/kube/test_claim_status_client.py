"""The state of a claim's devices as users read it; runs against the playground and a real server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import structlog
from playground.apiserver import PlaygroundApiServer

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.claim_status_client import ClaimStatusClient
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.client import ApiClient
from dra_driver.model.claim import ClaimRef, DeviceFacts, DeviceStatus, MpsFacts
from dra_driver.model.problems import EventObject
from tests.fakes.tables import data_of
from tests.kube.support import DRIVER, allocated_claim, write_claim_status

_SHARE = "5f0d4f1c-0000-4000-8000-000000000000"
_OTHER = "nic.example.com"
_START = datetime(2026, 8, 7, 12, tzinfo=UTC)
_MIG = DeviceFacts(
    type="mig",
    uuid="MIG-1",
    product_name="NVIDIA H100 80GB HBM3",
    pci_bus_id="0000:1b:00.0",
    parent_uuid="GPU-1",
    gpu_instance_id=0,
    compute_instance_id=0,
    profile="1g.10gb",
    mps=MpsFacts(50, 1024),
    driver_version="580.65.6",
)


def ready(device="gpu-0", *, message="", share_id=None, facts=DeviceFacts()):  # noqa: B008  frozen
    return DeviceStatus("n", device, True, "Prepared", message, share_id, facts)


def failed(device="gpu-0", message="fell off the bus"):
    return DeviceStatus("n", device, False, "GPULost", message)


class Meddler(ApiClient):
    """Does something to the cluster just before a status is written."""

    def __init__(self, client: ApiClient) -> None:
        super().__init__(client.endpoint, timeout_s=client.timeout_s)
        self.meddle = []

    def call(self, method, plural, **options):
        if method == "PATCH" and self.meddle:
            self.meddle.pop()()
        return super().call(method, plural, **options)


class Case:
    """A claim with two devices of ours, one of them shared, and one of another driver."""

    def __init__(self, target) -> None:
        self.api = Meddler(target.api)
        self.seconds = 0
        self.node = target.node
        self.ref = self.allocate(target.namespace)
        self.status = self.client()

    def allocate(self, namespace, name="", *, pods=False):
        results = [
            {"driver": DRIVER, "pool": "n", "device": "gpu-0"},
            {"driver": DRIVER, "pool": "n", "device": "gpu-1", "shareID": _SHARE},
            {"driver": _OTHER, "pool": "n", "device": "nic-0"},
        ]
        metadata = allocated_claim(self.api, namespace, results, node=self.node, name=name, pods=pods)[
            "metadata"
        ]
        return ClaimRef(namespace, metadata["name"], metadata["uid"])

    def client(self, driver=DRIVER, node=None):
        return ClaimStatusClient(
            self.api, driver, node or self.node, now=lambda: _START + timedelta(seconds=self.seconds)
        )

    def read(self):
        return ClaimClient(self.api).find(self.ref)

    def devices(self):
        return {entry["device"]: entry for entry in (self.read().get("status") or {}).get("devices") or ()}

    def since(self, device="gpu-0"):
        return self.devices()[device]["conditions"][0]["lastTransitionTime"]

    def delete(self):
        where = {"namespace": self.ref.namespace, "name": self.ref.name}
        self.api.call("DELETE", "resourceclaims", action="test", **where)

    def deallocate(self):
        claim = self.read()
        claim["status"] = {}
        return write_claim_status(self.api, claim)


@pytest.fixture
def case(target):
    case = Case(target)
    yield case
    try:
        case.delete()
    except ApiRejectedError as error:
        if error.status != 404:
            raise


def test_entries_say_what_a_device_is_and_how_it_is(case):
    assert case.status.write(case.ref, [ready(facts=_MIG), failed("gpu-9"), ready("gpu-1", share_id=_SHARE)])
    assert case.devices() == data_of(__file__)["entries"]


def test_entries_of_other_drivers_and_their_conditions_stay(case):
    other = case.client(_OTHER)
    theirs = DeviceStatus("n", "nic-0", True, "Up", "link is up")
    assert other.write(case.ref, [theirs])
    before = case.devices()["nic-0"]
    assert case.status.write(case.ref, [ready()])
    assert case.devices().keys() == {"gpu-0", "nic-0"}
    assert case.status.write(case.ref, [])
    assert case.devices() == {"nic-0": before}


def test_nothing_is_written_where_the_status_says_so_already(case):
    assert case.status.write(case.ref, [ready(facts=_MIG)])
    version = case.read()["metadata"]["resourceVersion"]
    case.seconds = 60
    assert not case.status.write(case.ref, [ready(facts=_MIG)])
    assert not case.client().write(case.ref, [ready(facts=_MIG)])
    assert case.read()["metadata"]["resourceVersion"] == version


def test_the_time_of_the_last_transition_moves_with_the_status_only(case):
    case.status.write(case.ref, [ready()])
    case.seconds = 10
    assert case.client().write(case.ref, [ready(message="new words", facts=_MIG)])
    assert case.since() == "2026-08-07T12:00:00Z"
    case.seconds = 20
    assert case.status.write(case.ref, [failed()])
    assert case.since() == "2026-08-07T12:00:20Z"
    case.seconds = 30
    assert case.status.write(case.ref, [ready()])
    assert case.since() == "2026-08-07T12:00:30Z"


def take_away(case, how):
    if how == "deallocated":
        case.deallocate()
    else:
        case.delete()
    if how == "replaced":
        case.allocate(case.ref.namespace, case.ref.name)


@pytest.mark.parametrize("how", ["gone", "replaced", "deallocated"])
@pytest.mark.parametrize("when", ["before", "between read and write", "after it was read for the first time"])
def test_a_claim_that_is_not_ours_any_more_is_left_alone(case, how, when):
    if when == "between read and write":
        case.api.meddle.append(lambda: take_away(case, how))
    else:
        take_away(case, how)
    assert not case.status.write(case.ref, [ready()], is_first=when.endswith("first time"))
    assert case.api.meddle == []
    if how != "gone":
        assert case.devices() == {}
    assert case.status.pods_of(case.ref) == () or how == "deallocated"


def test_a_claim_that_was_read_just_before_is_not_read_again(server, single):
    status, ref = single
    before = len(server.requests)
    assert status.write(ref, [ready()], is_first=True)
    assert [request.method for request in server.requests[before:]] == ["PATCH"]
    assert not status.write(ref, [ready()])


def test_of_a_claim_that_was_read_before_only_what_is_allocated_is_written(case):
    assert case.status.write(case.ref, [ready(), ready("gpu-of-before")], is_first=True)
    assert case.devices().keys() == {"gpu-0"}


def test_another_driver_that_writes_at_the_same_time_is_not_a_conflict(case):
    other = case.client(_OTHER)
    theirs = DeviceStatus("n", "nic-0", True, "Up", "link is up")
    case.api.meddle.append(lambda: other.write(case.ref, [theirs]))
    assert case.status.write(case.ref, [ready()])
    assert case.devices().keys() == {"gpu-0", "nic-0"}


def test_entries_that_another_tool_wrote_for_us_are_taken_over(case):
    claim = case.read()
    condition = {"type": "Ready", "status": "False", "reason": "X", "message": ""}
    condition["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    entry = {"driver": DRIVER, "pool": "n", "device": "gpu-0", "conditions": [condition], "data": {"a": 1}}
    claim["status"]["devices"] = [entry]
    write_claim_status(case.api, claim)
    assert case.status.write(case.ref, [ready(facts=_MIG)])
    assert case.since() == "2026-08-07T12:00:00Z"
    assert case.devices()["gpu-0"]["data"]["uuid"] == "MIG-1"


def test_a_late_word_of_another_node_takes_nothing_away(case):
    case.status.write(case.ref, [ready()])
    assert case.client(node="a-node-that-had-the-claim-before").write(case.ref, [])
    assert case.devices().keys() == {"gpu-0"}


def test_values_beyond_the_limits_are_truncated_or_omitted(case):
    node = "n" * 253
    status = case.client(node=node)
    assert status.write(case.ref, [ready(message="m" * 5000, facts=DeviceFacts(uuid="u" * 11000))])
    entry = case.devices()["gpu-0"]
    assert len(entry["conditions"][0]["message"]) == 1024
    assert "data" not in entry
    case.client(node=f"{node[:-1]}x").write(case.ref, [])
    assert case.devices().keys() == {"gpu-0"}


@pytest.fixture
def single(server, connect):
    """A claim on one API server of the playground, and the writer for it."""
    api = connect(server)
    results = [{"driver": DRIVER, "pool": "n", "device": "gpu-0"}]
    metadata = allocated_claim(api, "default", results, node="node-a")["metadata"]
    return ClaimStatusClient(api, DRIVER, "node-a"), ClaimRef("default", metadata["name"], metadata["uid"])


def test_pods_are_those_for_which_the_claim_is_reserved(single):
    status, ref = single
    expected = [EventObject("Pod", f"pod-{n}", f"uid-{n}", ref.namespace) for n in (1, 2)]
    assert status.pods_of(ref) == tuple(expected)
    assert status.pods_of(ClaimRef(ref.namespace, ref.name, "another")) == ()


def test_a_conflict_is_retried(server, single):
    status, ref = single
    server.faults.fail(2, 409, reason="Conflict", path="/status", method="PATCH")
    assert status.write(ref, [ready()])


@pytest.mark.parametrize(("code", "tries"), [(409, 4), (422, 2), (403, 1)])
def test_a_refusal_is_raised_when_the_claim_is_as_it_was(server, single, code, tries):
    status, ref = single
    server.faults.fail(9, code, path="/status", method="PATCH")
    with pytest.raises(ApiRejectedError, match=f"write the status of claim default/{ref.name}") as caught:
        status.write(ref, [ready()])
    assert caught.value.status == code
    assert len([r for r in server.requests if r.method == "PATCH"]) == tries


def test_a_server_that_drops_the_entries_is_reported_once_an_hour(connect):
    with PlaygroundApiServer(gates={"DRAResourceClaimDeviceStatus": False}) as server:
        api = connect(server)
        results = [{"driver": DRIVER, "pool": "n", "device": "gpu-0"}]
        metadata = allocated_claim(api, "default", results)["metadata"]
        ref = ClaimRef("default", metadata["name"], metadata["uid"])
        moment = [0.0]
        status = ClaimStatusClient(api, DRIVER, "node-a", clock=lambda: moment[0])
        with structlog.testing.capture_logs() as lines:
            wrote = []
            for passed in (0.0, 3599.0, 3600.0):
                moment[0] = passed
                wrote.append(status.write(ref, [ready()]))
        assert wrote == [True, False, True]
        assert [line["event"] for line in lines] == ["claim_status_dropped"] * 2
        assert "DRAResourceClaimDeviceStatus" in lines[0]["remedy"]
