import grpc
import pytest

from dra_driver.kubelet.registration import RegistrationStatus
from tests.kubelet.support import DRIVER, get_info, notify


def test_get_info_tells_who_we_are_for_ever(node):
    plugin = node.plugin()
    for _ in range(3):
        info = get_info(plugin.sockets.registrar, timeout=1)
        assert info.type == "DRAPlugin"
        assert info.name == DRIVER
        assert info.endpoint == str(plugin.sockets.dra)
        assert list(info.supported_versions) == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]


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
