"""Other drivers with our name, instances of this plugin, and what the kubelet said of the registration."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from dra_driver.kubelet import liveness
from dra_driver.kubelet.plugin import KubeletPlugin
from dra_driver.kubelet.registration import _SILENT_LOOKS, RegistrationStatus, SocketWatch
from dra_driver.model.problems import NodeProblem
from tests.fakes.clock import Clock
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.kubelet.support import DRIVER, Node, OtherDriver, get_info, notify


def test_get_info_reports_who_we_are_for_ever(node):
    plugin = node.plugin()
    for _ in range(3):
        info = get_info(plugin.sockets.registrar)
        assert info.type == "DRAPlugin"
        assert info.name == DRIVER
        assert info.endpoint == str(plugin.sockets.dra)
        assert list(info.supported_versions) == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]


def test_status_is_kept_and_reported_once_per_change(node):
    received = []
    plugin = node.plugin(registration_changed=received.append)
    assert plugin.status is None
    with pytest.raises(grpc.RpcError) as caught:
        notify(plugin.sockets.registrar, False, "no room")
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert caught.value.details() == "failed registration process: no room"
    assert plugin.status == RegistrationStatus(False, "no room")
    notify(plugin.sockets.registrar, True)
    notify(plugin.sockets.registrar, True)
    assert plugin.status == RegistrationStatus(True)
    assert received == [RegistrationStatus(False, "no room"), RegistrationStatus(True)]


@pytest.fixture
def other(node: Node) -> Iterator[Callable[..., OtherDriver]]:
    """Start drivers of someone else: where the upstream helper has its sockets, or below another name."""
    with ExitStack() as stack:

        def make(registrar: str = f"{DRIVER}-reg.sock", endpoint: Path | None = None, **more) -> OtherDriver:
            made = OtherDriver(
                node.registry / registrar, endpoint or node.plugins / DRIVER / "dra.sock", **more
            )
            stack.callback(made.stop)
            return made

        yield make


@pytest.fixture
def mute() -> Iterator[Callable[[Path], None]]:
    """Listen on a socket, and never answer."""
    with ExitStack() as stack:

        def listen(path: Path) -> None:
            made = stack.enter_context(socket.socket(socket.AF_UNIX))
            made.bind(str(path))
            made.listen(64)

        yield listen


@pytest.fixture(autouse=True)
def _patient(monkeypatch) -> None:
    monkeypatch.setattr("dra_driver.kubelet.registration._QUERY_S", PATIENCE_S)


def watch(node: Node) -> SocketWatch:
    return SocketWatch(DRIVER, node.registry, node.plugins / DRIVER)


def look(node: Node) -> Sequence[NodeProblem]:
    seen = watch(node)
    seen.look()
    return seen.problems()


def foreign(path: Path) -> NodeProblem:
    return NodeProblem(
        "foreign-driver",
        f"Another DRA driver named {DRIVER} runs on this node, on the socket {path}, so the kubelet may send it claims "
        "that are meant for gpu-dra-driver; find it with `kubectl get pods -A -o wide | grep -i dra`, and uninstall it",
        str(path),
    )


def test_driver_with_our_name_is_a_problem_of_the_plugin(node: Node, other) -> None:
    plugin = node.plugin(settings={"pod_uid": "uid-1"})
    notify(plugin.sockets.registrar, True)
    made = other()
    eventually(lambda: list(plugin.problems()) == [foreign(node.registry / f"{DRIVER}-reg.sock")])
    made.stop()
    eventually(lambda: plugin.problems() == [])


def test_driver_with_our_name_in_another_directory_is_a_problem(node: Node, other) -> None:
    other("dra-0123456789-reg.sock", node.root / "elsewhere/dra.sock")
    assert look(node) == [foreign(node.registry / "dra-0123456789-reg.sock")]


def test_second_installation_of_this_plugin_with_its_own_state_is_a_problem(node: Node) -> None:
    node.plugin(settings={"plugins_dir": node.root / "elsewhere"})
    assert look(node) == [foreign(node.registry / f"{DRIVER}-reg.sock")]


def test_driver_that_lost_its_registration_socket_is_found_by_its_endpoint(node: Node, other) -> None:
    other()
    (node.registry / f"{DRIVER}-reg.sock").unlink()
    assert look(node) == [foreign(node.plugins / DRIVER / "dra.sock")]


def test_rolling_update_of_this_plugin_is_not_a_problem(node: Node) -> None:
    old, new = (node.plugin(settings={"pod_uid": uid}) for uid in ("uid-1", "uid-2"))
    notify(old.sockets.registrar, True)
    notify(new.sockets.registrar, True)
    new.sockets.registrar.unlink()  # its endpoint alone proves whose it is
    assert look(node) == []
    assert old.problems() == []


def test_drivers_with_other_names_and_dead_sockets_are_not_a_problem(
    node: Node, other, mute, monkeypatch
) -> None:
    monkeypatch.setattr("dra_driver.kubelet.registration._QUERY_S", 0.2)
    other("gpu.other.example-reg.sock", node.root / "o/dra.sock", name="gpu.other.example")
    mute(node.registry / "csi.example-reg.sock")
    (node.plugins / DRIVER).mkdir(parents=True)
    for path in (node.registry / f"{DRIVER}-u-reg.sock", node.plugins / DRIVER / "dra-u.sock"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    (node.registry / f"{DRIVER}.txt").write_text("no socket")
    seen = watch(node)
    for _ in range(3):
        seen.look()
    assert seen.problems() == []


def test_socket_that_hangs_longer_than_two_pods_are_side_by_side_is_of_unknown_origin(
    node: Node, mute, monkeypatch
) -> None:
    monkeypatch.setattr("dra_driver.kubelet.registration._QUERY_S", 0.01)
    path = node.registry / f"{DRIVER}-uid-9-reg.sock"
    mute(path)
    seen = watch(node)
    for _ in range(_SILENT_LOOKS - 1):
        seen.look()
        assert seen.problems() == []
    seen.look()
    (problem,) = seen.problems()
    assert (problem.code, problem.subject) == ("foreign-driver", str(path))
    assert (
        f"{path} does not answer, so gpu-dra-driver cannot find out which driver serves {DRIVER} there"
        in problem.text
    )
    path.unlink()
    seen.look()
    assert seen.problems() == []


def test_known_sockets_are_not_queried_again(node: Node, other) -> None:
    made = other("o-reg.sock", node.root / "o/dra.sock", name="gpu.other.example")
    seen = watch(node)
    for _ in range(3):
        seen.look()
    assert made.requested == 1


def test_directory_that_cannot_be_listed_keeps_what_was_known(node: Node, other) -> None:
    other()
    seen = watch(node)
    seen.look()
    node.registry.rename(node.root / "away")
    node.registry.symlink_to(node.registry)
    seen.look()
    assert seen.problems() == [foreign(node.registry / f"{DRIVER}-reg.sock")]


def test_mistake_in_the_check_of_others_does_not_end_the_watch_of_our_own_sockets(
    node: Node, monkeypatch
) -> None:
    def fail(_self) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(SocketWatch, "look", fail)
    fatal: list[Exception] = []
    plugin = node.plugin(plugin_died=fatal.append)
    time.sleep(0.1)  # a few checks
    plugin.sockets.registrar.unlink()
    eventually(lambda: "was removed" in str(fatal))


def not_registered(plugin: KubeletPlugin) -> list[str]:
    return [problem.text for problem in plugin.problems() if problem.code == "not-registered"]


def test_plugin_that_no_kubelet_registers_is_a_problem_after_half_a_minute(node: Node, monkeypatch) -> None:
    plugin = node.plugin(settings={"guard_s": 60.0})
    clock = Clock(plugin._started_at)
    monkeypatch.setattr("dra_driver.kubelet.plugin.time", SimpleNamespace(monotonic=clock))
    clock.pause(29)
    assert plugin.problems() == []
    clock.pause(2)
    (text,) = not_registered(plugin)
    assert text == (
        f"The kubelet has still not registered the plugin after 31 s; check that {node.registry} is the registry "
        f"directory of a running kubelet: `journalctl -u kubelet | grep -i {DRIVER}` on the node shows what the "
        "kubelet does"
    )
    notify(plugin.sockets.registrar, True)
    assert plugin.problems() == []


def test_plugin_that_the_kubelet_refused_is_a_problem_until_it_is_registered(node: Node) -> None:
    plugin = node.plugin()
    with pytest.raises(grpc.RpcError):
        notify(plugin.sockets.registrar, False, "no version is known")
    assert "refused to register the plugin: no version is known; " in not_registered(plugin)[0]
    notify(plugin.sockets.registrar, True)
    assert plugin.problems() == []


def test_registration_socket_that_was_removed_is_a_problem(node: Node) -> None:
    plugin = node.plugin(settings={"guard_s": 60.0})
    notify(plugin.sockets.registrar, True)
    plugin.sockets.registrar.unlink()
    assert not_registered(plugin) == [
        f"The kubelet cannot reach the plugin: the registration socket {plugin.sockets.registrar} was removed"
    ]
    plugin.stop()
    assert plugin.problems() == []


def test_socket_that_stops_answering_is_a_problem_and_needs_no_probe(node: Node, monkeypatch) -> None:
    monkeypatch.setattr("dra_driver.kubelet.plugin._DIAL_EVERY_S", 0.02)
    monkeypatch.setattr("dra_driver.kubelet.plugin._UNREACHABLE_FOR_S", 0.1)
    monkeypatch.setattr(liveness, "DIAL_TIMEOUT_S", 0.2)
    plugin = node.plugin()
    notify(plugin.sockets.registrar, True)
    answers = threading.Event()
    plugin.liveness._dial = lambda: None if answers.is_set() else "the DRA socket does not answer"
    eventually(lambda: "The kubelet cannot reach the plugin: the DRA socket" in str(not_registered(plugin)))
    answers.set()
    eventually(lambda: plugin.problems() == [])


def test_instance_is_recognised_on_both_sockets_without_the_kubelet_noticing(node: Node) -> None:
    plugin = node.plugin()
    assert get_info(plugin.sockets.dra) == get_info(plugin.sockets.registrar)
