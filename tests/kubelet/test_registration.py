import grpc
import pytest

from dra_driver.errors import InvalidConfigError
from dra_driver.kubelet.registration import RegistrationStatus, supported_versions
from tests.kubelet.support import DRIVER, eventually, get_info, notify


def test_get_info_tells_who_we_are_for_ever(node):
    plugin = node.plugin()
    for _ in range(3):
        info = get_info(plugin.sockets.registrar, timeout=1)
        assert info.type == "DRAPlugin"
        assert info.name == DRIVER
        assert info.endpoint == str(plugin.sockets.dra)
        assert list(info.supported_versions) == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]


@pytest.mark.parametrize(
    ("v1", "v1beta1", "health", "versions"),
    [
        (True, False, False, ["v1.DRAPlugin"]),
        (False, True, False, ["v1beta1.DRAPlugin"]),
        (
            True,
            True,
            True,
            ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"],
        ),
    ],
)
def test_versions_come_in_the_order_of_preference(v1, v1beta1, health, versions):
    assert list(supported_versions(v1=v1, v1beta1=v1beta1, device_health=health)) == versions


def test_no_dra_api_at_all_is_refused_at_once(node):
    with pytest.raises(InvalidConfigError, match="no supported DRA gRPC API"):
        node.plugin(settings={"serve_v1": False, "serve_v1beta1": False}, start=False)


def test_status_is_kept_and_told_once_per_change(node):
    heard = []
    plugin = node.plugin(on_status=heard.append)
    assert plugin.status is None
    with pytest.raises(grpc.RpcError) as caught:
        notify(plugin.sockets.registrar, False, "no room")
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert caught.value.details() == "failed registration process: no room"
    assert plugin.status == RegistrationStatus(False, "no room")
    notify(plugin.sockets.registrar, True)
    notify(plugin.sockets.registrar, True)
    assert plugin.status == RegistrationStatus(True)
    assert heard == [RegistrationStatus(False, "no room"), RegistrationStatus(True)]


def test_callback_that_raises_does_not_fail_the_registration(node, quiet_logs):
    def fail(_):
        raise ValueError("oops")

    plugin = node.plugin(on_status=fail)
    notify(plugin.sockets.registrar, True)
    assert plugin.status == RegistrationStatus(True)
    assert eventually(
        lambda: [line for line in quiet_logs if line["event"] == "registration_callback_failed"]
    )


def test_errors_can_be_injected_into_both_calls(node):
    plugin = node.plugin()
    plugin.registrar.get_info_error = "not now"
    plugin.registrar.notify_error = "not this"
    for call, text in (
        (lambda: get_info(plugin.sockets.registrar), "not now"),
        (lambda: notify(plugin.sockets.registrar, True), "not this"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNKNOWN, text)
    assert plugin.status is None
