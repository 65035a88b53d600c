"""kill -9 of the host or the plugin after every step of a start and of a stop; the next one reaches the same
state.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from dra_driver.mps_host import daemon as daemon_module
from dra_driver.mps_host import host_files, host_supervisor
from dra_driver.mps_host.daemon_compute_mode import EXCLUSIVE_PROCESS, ComputeMode
from dra_driver.mps_host.daemon_control import DaemonControl
from dra_driver.mps_host.daemon_mounts import KernelMounter, is_tmpfs
from dra_driver.mps_host.host_files import DaemonRecords, MpsHostFiles
from tests.fakes.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting is one of the steps and needs root")

STEPS = [
    (DaemonRecords, "save"),
    (DaemonRecords, "forget"),
    (KernelMounter, "mount"),
    (KernelMounter, "unmount"),
    (ComputeMode, "set"),
    (DaemonControl, "start"),
    (DaemonControl, "_pass"),
    (DaemonControl, "stop_processes"),
    (daemon_module, "_clear_directory"),
    (daemon_module, "remove_directory"),
    (host_supervisor, "write_atomically"),
    (host_supervisor, "remove_file"),
]


class Countdown:
    """Kills this process after this many steps. Parallel steps run one after the other here, so that each
    kill is deterministic.
    """

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.armed = False
        self.done: list[str] = []
        self._turn = threading.RLock()
        for owner, name in STEPS:
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, step):
        def counted(*arguments, **named):
            with self._turn:
                result = step(*arguments, **named)
                self.done.append(step.__name__)
                if self.armed:
                    self.left -= 1
                    if self.left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                return result

        return counted

    def wait_for(self, step, times):
        """The caller of a start or stop continues before its last step is done."""
        eventually(lambda: self.done.count(step) >= times)


def killed_after(steps, host, body):
    """Whether a host process that runs `body` was killed before it was done."""
    child = os.fork()
    if child == 0:
        try:
            one = host.supervisor(probe=60, tick=60, patience=PATIENCE_S)
            eventually(host.layout.alive.exists)  # the only tick, which may write a status, is over
            body(one, Countdown(steps))
            os._exit(0)
        except BaseException:
            os._exit(9)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def start(supervisor, spec, countdown):
    countdown.armed = True
    supervisor.ensure(spec, PATIENCE_S)
    countdown.wait_for("write_atomically", 1)


def start_and_stop(supervisor, spec, countdown):
    supervisor.ensure(spec, PATIENCE_S)
    countdown.wait_for("write_atomically", 1)
    countdown.armed = True
    supervisor.stop(spec.device, PATIENCE_S)
    countdown.wait_for("remove_file", 1)


LAST = 10
"""The number of steps of a start, and of a stop, of a daemon with three GPUs."""


@pytest.mark.parametrize("steps", range(1, LAST + 2))
def test_a_start_that_was_cut_off_is_completed(host, steps):
    spec = host.group_spec(default_active_thread_percentage=50)
    was_killed = killed_after(steps, host, lambda one, countdown: start(one, spec, countdown))
    assert was_killed == (steps <= LAST), "the steps of a start changed; so must the range above"
    new = host.supervisor()
    status = new.ensure(spec, PATIENCE_S)
    assert status.state == "ready"
    assert [process.pid for process in host.daemons()] == [status.pid]
    assert host.modes() == [EXCLUSIVE_PROCESS] * 3
    assert is_tmpfs(Path(host.layout.directories("gpu-2").shm))
    # The supervisor may be writing a status right now.
    eventually(lambda: host.left() == ["gpu-2", "gpu-2.json", "gpu-2.json"])
    host.assert_stops_without_a_trace(new)


@pytest.mark.parametrize("steps", range(1, LAST + 2))
def test_a_stop_that_was_cut_off_is_completed(host, steps):
    spec = host.group_spec()
    was_killed = killed_after(steps, host, lambda one, countdown: start_and_stop(one, spec, countdown))
    assert was_killed == (steps <= LAST), "the steps of a stop changed; so must the range above"
    host.supervisor()
    eventually(lambda: host.left() == [])
    host.assert_nothing_left()


@pytest.mark.parametrize("steps", [2, 6, 8])
def test_a_start_that_was_cut_off_can_be_stopped(host, steps):
    spec = host.group_spec()
    assert killed_after(steps, host, lambda one, countdown: start(one, spec, countdown))
    host.assert_stops_without_a_trace(host.supervisor(tick=60))


class Killed(BaseException):
    """The plugin was killed."""


def dies_after(owner, step, monkeypatch, call):
    """Have the plugin die right after it has done this in its files."""
    done = getattr(owner, step)

    def do(*arguments, **named):
        done(*arguments, **named)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, do)
        with pytest.raises(Killed):
            call()


@pytest.mark.parametrize("then", ["start", "stop"])
def test_start_of_a_plugin_that_died_is_completed_or_undone(host, monkeypatch, then):
    supervisor, spec = host.supervisor(), host.spec()
    plugin, successor = MpsHostFiles(host.layout), MpsHostFiles(host.layout)
    dies_after(plugin._wanted, "write", monkeypatch, lambda: plugin.ensure(spec, PATIENCE_S))
    if then == "start":
        assert successor.ensure(spec, PATIENCE_S).state == "ready"
        assert len(supervisor.status()) == 1
    else:
        eventually(lambda: host.layout.has_traces("gpu-2"))  # otherwise the stop does not wait for the start
    host.assert_stops_without_a_trace(successor)


@pytest.mark.parametrize("then", ["start", "stop", "nothing"])
@pytest.mark.parametrize("step", ["remove_file", "sync_removals"])
def test_stop_of_a_plugin_that_died_is_completed_and_the_device_free(host, monkeypatch, step, then):
    host.supervisor()
    spec, plugin, successor = host.spec(), MpsHostFiles(host.layout), MpsHostFiles(host.layout)
    plugin.ensure(spec, PATIENCE_S)
    dies_after(host_files, step, monkeypatch, lambda: plugin.stop("gpu-2", PATIENCE_S))
    if then == "start":
        assert successor.ensure(spec, PATIENCE_S).state == "ready"
    if then != "nothing":
        successor.stop("gpu-2", PATIENCE_S)
    eventually(lambda: not host.layout.has_traces("gpu-2"))
    host.assert_nothing_left()


def test_stop_of_a_plugin_that_died_while_no_host_ran_is_done_by_the_next_host(host, monkeypatch):
    first = host.supervisor()
    plugin = MpsHostFiles(host.layout)
    plugin.ensure(host.spec(), PATIENCE_S)
    first.close()
    dies_after(host_files, "remove_file", monkeypatch, lambda: plugin.stop("gpu-2", PATIENCE_S))
    host.supervisor()
    eventually(lambda: not host.layout.has_traces("gpu-2"))
    host.assert_nothing_left()
