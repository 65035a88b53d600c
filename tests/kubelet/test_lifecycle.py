"""Start, stop and death of the plugin at its sockets."""

import socket
import threading
import time
from pathlib import Path

import grpc
import pytest

from dra_driver.errors import FatalError, InvalidConfigError, StateError
from dra_driver.kubelet.grpc_server import SocketServer
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.kubelet.support import DRIVER, FakeClaims, Gate, channel, claim, get_info, prepare


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def dead_socket(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


def test_started_plugin_has_its_two_sockets_and_nothing_else(node):
    node.plugin()
    assert node.files() == [f"plugins/{DRIVER}/dra.sock", f"registry/{DRIVER}-reg.sock"]
    assert (node.plugins / DRIVER).stat().st_mode & 0o777 == 0o750


def test_stop_leaves_no_socket_and_can_be_repeated(node):
    plugin = node.plugin(settings={"health_address": "127.0.0.1:0"})
    plugin.stop()
    plugin.stop()
    assert node.files() == []
    assert not [thread.name for thread in threading.enumerate() if thread.name == "socket-guard"]


def test_stop_before_start_does_nothing(node):
    plugin = node.plugin(start=False)
    plugin.stop()
    assert node.files() == []


def test_stale_sockets_are_replaced_and_those_of_others_left_alone(node):
    other = node.registry / "other.example.com-reg.sock"
    sibling = node.registry / f"{DRIVER}-some-pod-reg.sock"
    for path in (other, sibling, node.registry / f"{DRIVER}-reg.sock", node.plugins / DRIVER / "dra.sock"):
        dead_socket(path)
    plugin = node.plugin()
    assert get_info(plugin.sockets.registrar).name == DRIVER
    plugin.stop()
    assert node.files() == [f"registry/{DRIVER}-some-pod-reg.sock", "registry/other.example.com-reg.sock"]


def test_socket_appears_only_when_it_answers(node):
    """From the first moment that the registration socket is there, everything behind it works."""
    plugin = node.plugin(start=False)
    seen = []

    def kubelet():
        while not plugin.sockets.registrar.exists():
            pass
        info = get_info(plugin.sockets.registrar)
        seen.append(prepare(plugin.sockets.dra.__class__(info.endpoint), claim()))

    watcher = threading.Thread(target=kubelet)
    watcher.start()
    plugin.start()
    watcher.join(PATIENCE_S)
    assert seen[0].claims["uid-1"].devices


@pytest.mark.parametrize("which", ["dra", "registrar"])
def test_plain_file_in_the_way_is_refused_and_kept_and_the_rest_torn_down(node, which):
    plugin = node.plugin(start=False, settings={"health_address": "127.0.0.1:0"})
    path = getattr(plugin.sockets, which)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("precious")
    with pytest.raises(StateError, match=f"{path} exists and is not a socket"):
        plugin.start()
    assert node.files() == [str(path.relative_to(node.root))]
    assert path.read_text() == "precious"


def test_missing_registry_directory_is_named(node):
    node.registry.rmdir()
    with pytest.raises(
        InvalidConfigError, match=f"{node.registry} does not exist.*--kubelet-registrar-directory-path"
    ):
        node.plugin()
    assert node.files() == []


def test_second_instance_on_the_same_paths_is_refused_and_the_first_serves_on(node):
    first = node.plugin()
    with pytest.raises(StateError, match="another process listens"):
        node.plugin()
    assert prepare(first.sockets.dra, claim()).claims
    assert get_info(first.sockets.registrar).name == DRIVER


@pytest.mark.parametrize("name", ["d" * 120, "a%20b c?#é"], ids=["just enough room", "odd characters"])
def test_socket_is_served_in_a_directory_with_just_enough_room_or_odd_characters(short_dir, name):
    directory = short_dir / name[: 107 - len("/dra.sock") - len(str(short_dir)) - 1]
    directory.mkdir()
    server = SocketServer({"test": directory / "dra.sock"}, {})
    server.start()
    assert names(directory) == ["dra.sock"]
    server.stop(0)
    assert names(directory) == []


def test_path_too_long_to_bind_leaves_nothing(short_dir):
    directory = short_dir / ("d" * 100)
    directory.mkdir()
    server = SocketServer({"test": directory / "dra.sock"}, {})
    with pytest.raises(StateError, match="cannot listen on"):
        server.start()
    server.stop(0)
    assert names(directory) == []


def test_stop_lets_calls_in_flight_finish_and_takes_no_new_ones(node):
    claims = FakeClaims()
    gate = claims.on_prepare = Gate()
    plugin = node.plugin(claims)
    answers = []
    with channel(plugin.sockets.dra):
        caller = threading.Thread(target=lambda: answers.append(prepare(plugin.sockets.dra, claim())))
        caller.start()
        assert gate.entered.wait(PATIENCE_S)
        stopper = threading.Thread(target=plugin.stop)
        stopper.start()
        eventually(lambda: _refused(plugin.sockets.dra))
        assert stopper.is_alive()
        gate.opened.set()
        caller.join(PATIENCE_S)
        stopper.join(PATIENCE_S)
    assert answers[0].claims["uid-1"].devices
    assert node.files() == []


def _refused(path):
    try:
        prepare(path, timeout=0.2)
    except grpc.RpcError:
        return True
    return False


def test_stop_is_bounded_when_a_call_hangs(node, monkeypatch):
    monkeypatch.setattr("dra_driver.kubelet.grpc_server._AFTER_GRACE_S", 0.05)
    claims = FakeClaims()
    gate = claims.on_prepare = Gate()
    plugin = node.plugin(claims)
    errors = []

    def call():
        try:
            prepare(plugin.sockets.dra, claim())
        except grpc.RpcError as error:
            errors.append(error.code())

    caller = threading.Thread(target=call)
    caller.start()
    assert gate.entered.wait(PATIENCE_S)
    started = time.monotonic()
    plugin.stop(0.1)
    assert time.monotonic() - started < PATIENCE_S
    caller.join(PATIENCE_S)
    assert len(errors) == 1
    assert node.files() == []
    gate.opened.set()


@pytest.mark.parametrize("which", ["dra", "registrar"])
def test_removed_socket_is_fatal_once(node, which):
    received = []
    plugin = node.plugin(plugin_died=received.append)
    getattr(plugin.sockets, which).unlink()
    (error,) = eventually(lambda: received)
    assert isinstance(error, FatalError)
    assert str(getattr(plugin.sockets, which)) in str(error)
    assert "was removed" in str(error)
    plugin.stop()
    assert len(received) == 1
    assert node.files() == []


def test_socket_taken_over_is_fatal_and_stop_leaves_it_to_its_new_owner(node):
    received = []
    plugin = node.plugin(plugin_died=received.append)
    path = plugin.sockets.registrar
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(f"{path}.new")
        owner.listen()
        Path(f"{path}.new").rename(path)
        assert "taken over" in str(eventually(lambda: received)[0])
        plugin.stop()
        assert path.exists()
    assert node.files() == [f"registry/{path.name}"]


def test_fatal_callback_may_stop_the_plugin(node):
    stopped = threading.Event()

    def on_fatal(_):
        plugin.stop()
        stopped.set()

    plugin = node.plugin(plugin_died=on_fatal)
    plugin.sockets.dra.unlink()
    assert stopped.wait(PATIENCE_S)
    assert node.files() == []


def test_many_calls_leave_no_thread_socket_or_descriptor(node):
    plugin = node.plugin(FakeClaims())
    prepare(plugin.sockets.dra, claim())
    before = len(names("/proc/self/fd"))
    for _ in range(50):
        prepare(plugin.sockets.dra, claim())
    eventually(lambda: len(names("/proc/self/fd")) <= before + 2)
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "dra"])
