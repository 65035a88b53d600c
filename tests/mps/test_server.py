"""The socket: who may ask, what is answered to nonsense, and the client's side of a host that comes and goes."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dra_driver.errors import PermanentError, RetryableError
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus, MpsMember
from dra_driver.mps import protocol, server
from dra_driver.mps.client import MpsClient
from dra_driver.mps.layout import MpsLayout
from dra_driver.mps.server import Server

SPEC = MpsDaemonSpec("gpu-1", "GPU-1", "gpu", "GPU-1")


class FakeSupervisor:
    """Answers at once, or when it is let."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.let = threading.Event()
        self.let.set()
        self.error: Exception | None = None

    def ensure(self, spec, timeout_s):
        self.calls.append((spec, timeout_s))
        assert self.let.wait(5)
        if self.error is not None:
            raise self.error
        return MpsDaemonStatus(spec.device, "ready", spec, pid=7)

    def stop(self, device, timeout_s, *, gpu_uuid=None, kind=None):
        self.calls.append((device, timeout_s, gpu_uuid, kind))

    def status(self):
        return (MpsDaemonStatus("gpu-1", "ready", SPEC),)


@pytest.fixture
def supervisor():
    return FakeSupervisor()


@pytest.fixture
def layout(tmp_path):
    root = tmp_path / ("a-long-name-" * 12)  # longer than a socket's address
    root.mkdir()
    return MpsLayout(root)


@pytest.fixture
def served(layout, supervisor):
    one = Server(layout.socket, supervisor)
    one.start()
    yield layout
    one.stop()
    assert list(layout.root.iterdir()) == []
    deadline = time.monotonic() + 2
    while left := [thread for thread in threading.enumerate() if thread.name.startswith("mps-")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def connect(layout):
    directory = os.open(layout.root, os.O_PATH)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect(f"/proc/self/fd/{directory}/host.sock")
    os.close(directory)
    return connection


def test_every_verb(served, supervisor):
    client = MpsClient(served)
    client.ping()
    assert client.ensure(SPEC, 3.0) == MpsDaemonStatus("gpu-1", "ready", SPEC, pid=7)
    assert client.status() == supervisor.status()
    client.stop("gpu-1", 4.0)
    client.stop("gpu-2", 5.0, gpu_uuid="GPU-2", kind="gpu")
    assert supervisor.calls == [
        (SPEC, 3.0),
        ("gpu-1", 4.0, None, None),
        ("gpu-2", 5.0, "GPU-2", "gpu"),
    ]


def test_only_the_owner_may_open_the_socket(served):
    assert stat.S_IMODE(served.socket.stat().st_mode) == 0o600


def test_another_user_is_not_answered(served, monkeypatch):
    monkeypatch.setattr(server, "peer_uid", lambda _: 12345)
    with pytest.raises(RetryableError, match=r"before it answered|broke"):
        MpsClient(served).ping()


def test_errors_of_the_supervisor_arrive(served, supervisor):
    supervisor.error = PermanentError("no")
    with pytest.raises(PermanentError, match="no"):
        MpsClient(served).ensure(SPEC)
    supervisor.error = RuntimeError("a bug")
    with pytest.raises(RetryableError, match=r"internal error of the MPS host.*a bug"):
        MpsClient(served).ensure(SPEC)


def test_an_older_host_that_knows_no_daemon_of_several_gpus_is_named(served, supervisor):
    supervisor.error = PermanentError("a spec has no 'others'")
    several = replace(SPEC, others=(MpsMember("gpu-2", "GPU-2"),))
    with pytest.raises(
        PermanentError, match=r"older than the driver .* \(gpu-1, gpu-2\); delete its pod once"
    ):
        MpsClient(served).ensure(several, 5)
    with pytest.raises(PermanentError, match=r"^a spec has no 'others'$"):
        MpsClient(served).ensure(SPEC, 5)


def test_several_requests_on_one_connection(served):
    with connect(served) as connection:
        connection.sendall(protocol.encode_request(protocol.Ping()) * 3)
        stream = connection.makefile("rb")
        assert [protocol.decode_reply(stream.readline()) for _ in range(3)] == [()] * 3
        stream.close()


def test_slow_requests_do_not_hold_up_others(served, supervisor):
    supervisor.let.clear()
    slow = threading.Thread(target=MpsClient(served).ensure, args=(SPEC,))
    slow.start()
    MpsClient(served).ping()
    supervisor.let.set()
    slow.join()


def test_a_message_that_never_ends_is_refused(served):
    with connect(served) as connection:
        connection.sendall(b"x" * (protocol.LARGEST_MESSAGE + 100_000))
        reply = b""
        while not reply.endswith(b"\n"):
            reply += connection.recv(65536)
    with pytest.raises(PermanentError, match="longer than"):
        protocol.decode_reply(reply)
    MpsClient(served).ping()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(st.binary(max_size=40), max_size=5))
def test_nonsense_never_stops_the_host(served, chunks):
    with connect(served) as connection:
        for chunk in chunks:
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    MpsClient(served).ping()


class Exhausted:
    """A listening socket that has no descriptor left for the first connections."""

    def __init__(self, listener, times):
        self._listener = listener
        self.left = times

    def accept(self):
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()


def test_host_without_descriptors_answers_when_it_has_some_again(layout, supervisor, monkeypatch):
    accept, listeners = Server._accept, []
    monkeypatch.setattr(server, "_ACCEPT_AGAIN_S", 0.01)
    monkeypatch.setattr(
        Server,
        "_accept",
        lambda self, listener: accept(self, listeners.append(Exhausted(listener, 3)) or listeners[0]),
    )
    one = Server(layout.socket, supervisor)
    one.start()
    MpsClient(layout).ping()
    assert listeners[0].left == 0
    one.stop()


def test_host_without_threads_refuses_one_and_serves_the_next(served, monkeypatch):
    with monkeypatch.context() as patched:
        started = threading.Thread.start
        refused = []

        def start(self):
            if self.name == "mps-connection" and not refused:
                refused.append(self)
                raise RuntimeError("can't start new thread")
            started(self)

        patched.setattr(threading.Thread, "start", start)
        MpsClient(served).ping()  # which asks again
    assert refused


def test_host_that_cannot_start_the_thread_that_accepts_stops_all_the_same(
    layout, supervisor, threads_that_start
):
    threads_that_start("mps-accept", 0)
    one = Server(layout.socket, supervisor)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        one.start()
    one.stop()
    assert not layout.socket.exists()


def test_no_host_is_a_clear_error(layout):
    began = time.monotonic()
    with pytest.raises(RetryableError, match=r"no MPS host answers .*DaemonSet gpu-dra-driver-mps.*mps-host"):
        MpsClient(layout, connect_s=0.1).ensure(SPEC)
    assert time.monotonic() - began < 15


def test_a_host_that_comes_late_is_waited_for(layout, supervisor):
    one = Server(layout.socket, supervisor)
    timer = threading.Timer(0.15, one.start)
    timer.start()
    assert MpsClient(layout).ensure(SPEC).pid == 7
    timer.join()
    one.stop()


def test_a_dead_hosts_socket_is_replaced(layout, supervisor):
    with socket.socket(socket.AF_UNIX) as dead:
        directory = os.open(layout.root, os.O_PATH)
        dead.bind(f"/proc/self/fd/{directory}/host.sock")
        os.close(directory)
    one = Server(layout.socket, supervisor)
    one.start()
    MpsClient(layout).ping()
    one.stop()


@pytest.mark.parametrize("last_words", [b"", b'{"broken'], ids=["stopped", "killed"])
def test_a_request_whose_host_ends_is_repeated_to_the_next_host(layout, supervisor, last_words):
    directory = os.open(layout.root, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(f"/proc/self/fd/{directory}/host.sock")
        dying.listen()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(MpsClient(layout).ensure, SPEC)
            connection, _ = dying.accept()
            connection.sendall(last_words)
            if last_words:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            time.sleep(0.1)  # its socket still takes a connection or two
            dying.close()
            time.sleep(1.2)  # longer than a host that was never there is waited for
            one = Server(layout.socket, supervisor)
            one.start()
            try:
                assert asked.result(20).pid == 7
            finally:
                one.stop()
    os.close(directory)


def test_a_host_that_does_not_answer_in_time(served, supervisor, monkeypatch):
    monkeypatch.setattr("dra_driver.mps.client._MARGIN_S", 0.1)
    supervisor.let.clear()
    with pytest.raises(RetryableError, match=r"did not answer within 0\.1 s"):
        MpsClient(served).ensure(SPEC, 0.1)
    supervisor.let.set()
