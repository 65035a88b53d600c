"""One daemon of several GPUs: started, kept, taken down and recovered as one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from dra_driver.errors import NotSupportedError, PermanentError, RetryableError
from dra_driver.mps_host.daemon_compute_mode import EXCLUSIVE_PROCESS
from dra_driver.mps_host.daemon_control import DaemonControl
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.mps_host.conftest import GROUP, RETRIED_LATER, Host

PROHIBITED = 2


class Modes:
    """The compute modes of a host. A GPU in `silent` does not answer, one in `without` has no mode; `slow_s` is what
    each answer takes.
    """

    def __init__(self, host: Host) -> None:
        self.silent: set[str] = set()
        self.without: set[str] = set()
        self.slow_s = 0.0
        self.together: threading.Barrier | None = None
        self._real = host.tools.compute_mode

    def get(self, gpu_uuid: str) -> int | None:
        self._wait(gpu_uuid)
        return self._real.get(gpu_uuid)

    def set(self, gpu_uuid: str, mode: int) -> None:
        self._wait(gpu_uuid)
        self._real.set(gpu_uuid, mode)

    def _wait(self, gpu_uuid: str) -> None:
        if gpu_uuid in self.silent:
            raise RetryableError(f"nvidia-smi does not answer for {gpu_uuid}")
        if gpu_uuid in self.without:
            raise NotSupportedError(f"{gpu_uuid} has no compute mode")
        time.sleep(self.slow_s)
        if self.together is not None:
            self.together.wait(PATIENCE_S)


def test_daemon_serves_all_gpus_with_their_limits_by_number(host: Host) -> None:
    spec = host.group_spec(limits=(4096, None, 1024))
    status = host.supervisor().ensure(spec, PATIENCE_S)
    assert (status.state, status.spec) == ("ready", spec)
    assert [process.pid for process in host.daemons()] == [status.pid]
    assert host.modes() == [EXCLUSIVE_PROCESS] * 3
    visible = ",".join(host.machine.gpu(index).uuid for index in GROUP)
    assert host.client()[:2] == ["mps=connected", f"device={visible}"]
    requested = [f"get_default_device_pinned_mem_limit {number}" for number in range(3)]
    assert [host.control().query(one) for one in requested] == [["4G"], [], ["1G"]]


def test_each_gpu_gets_its_own_earlier_mode_back(host: Host) -> None:
    host.machine.set_compute_mode(host.machine.gpu(3).uuid, PROHIBITED)
    host.machine.set_compute_mode(host.machine.gpu(4).uuid, EXCLUSIVE_PROCESS)
    supervisor = host.supervisor()
    supervisor.ensure(host.group_spec(), PATIENCE_S)
    assert host.modes() == [EXCLUSIVE_PROCESS] * 3
    supervisor.stop("gpu-2", PATIENCE_S)
    assert (host.left(), host.modes()) == ([], [0, PROHIBITED, EXCLUSIVE_PROCESS])


def test_silent_gpu_keeps_no_other_from_being_restored(host: Host) -> None:
    mode = Modes(host)
    supervisor = host.supervisor(compute_mode=mode)
    supervisor.ensure(host.group_spec(), PATIENCE_S)
    silent = host.machine.gpu(GROUP[1]).uuid
    mode.silent.add(silent)
    with pytest.raises(RetryableError, match=f"nvidia-smi does not answer for {silent}"):
        supervisor.stop("gpu-2", PATIENCE_S)
    assert host.modes() == [0, EXCLUSIVE_PROCESS, 0]
    [status] = supervisor.status()
    assert (status.state, status.problem) == ("failed", f"nvidia-smi does not answer for {silent}")
    mode.silent.clear()
    eventually(lambda: host.left() == [])
    host.assert_nothing_left()


def test_compute_mode_that_stays_although_nvidia_smi_reports_success_is_put_back_later(host: Host) -> None:
    supervisor = host.supervisor()
    supervisor.ensure(host.group_spec(), PATIENCE_S)
    stuck = host.machine.gpu(GROUP[1]).uuid
    host.machine.set_fault("nvidia-smi", code="no-effect", gpu=stuck)
    with pytest.raises(RetryableError, match=f"the compute mode of {stuck} is still EXCLUSIVE_PROCESS"):
        supervisor.stop("gpu-2", PATIENCE_S)
    assert host.modes() == [0, EXCLUSIVE_PROCESS, 0]
    host.machine.clear_faults()
    eventually(lambda: host.left() == [])
    host.assert_nothing_left()


def test_daemon_does_not_start_on_a_gpu_whose_compute_mode_nvidia_smi_did_not_change(host: Host) -> None:
    supervisor = host.supervisor()
    stuck = host.machine.gpu(GROUP[1]).uuid
    host.machine.set_fault("nvidia-smi", code="no-effect", gpu=stuck)
    text = f"nvidia-smi reported success, but the compute mode of {stuck} is still DEFAULT"
    with pytest.raises(RetryableError, match=text):
        supervisor.ensure(host.group_spec(), PATIENCE_S)
    assert host.daemons() == ()
    host.machine.clear_faults()
    eventually(lambda: [one.state for one in supervisor.status()] == ["ready"])
    assert host.modes() == [EXCLUSIVE_PROCESS] * 3


@pytest.mark.parametrize("modes", [3, 1])
def test_daemon_does_not_start_with_a_part_of_its_gpus(host: Host, modes: int) -> None:
    mode = Modes(host)
    uuids = [host.machine.gpu(one).uuid for one in GROUP]
    mode.without.update(uuids[modes:])
    supervisor = host.supervisor(compute_mode=mode)
    host.machine.lose_gpu(uuids[0])
    for _ in range(2):
        with pytest.raises(RetryableError, match=f"nvidia-smi does not find {uuids[0]}; check"):
            supervisor.ensure(host.group_spec(), PATIENCE_S)
        assert host.daemons() == ()
    host.machine.restore_gpu(uuids[0])
    eventually(lambda: [one.state for one in supervisor.status()] == ["ready"])
    assert host.modes()[:modes] == [EXCLUSIVE_PROCESS] * modes


def test_silent_gpu_keeps_no_other_from_being_exclusive_again(host: Host) -> None:
    mode = Modes(host)
    supervisor = host.supervisor(compute_mode=mode)
    supervisor.ensure(host.group_spec(), PATIENCE_S)
    mode.silent.add(host.machine.gpu(GROUP[1]).uuid)
    for one in GROUP:
        host.machine.set_compute_mode(host.machine.gpu(one).uuid, 0)
    assert supervisor.ensure(host.group_spec(), PATIENCE_S).state == "ready"
    eventually(lambda: host.modes() == [EXCLUSIVE_PROCESS, 0, EXCLUSIVE_PROCESS])
    assert supervisor.status()[0].state == "ready"


def test_all_gpus_are_read_and_set_at_the_same_time(host: Host) -> None:
    mode = Modes(host)
    mode.together = threading.Barrier(len(GROUP))
    supervisor = host.supervisor(compute_mode=mode, probe=60)
    supervisor.ensure(host.group_spec(), PATIENCE_S)
    assert host.modes() == [EXCLUSIVE_PROCESS] * 3
    host.assert_stops_without_a_trace(supervisor)


def test_all_gpus_are_taken_and_given_back_when_not_all_threads_start(
    host: Host, threads_that_start: Callable[[str, int], None]
) -> None:
    supervisor = host.supervisor(probe=60)
    threads_that_start("side-by-side", 1)
    assert supervisor.ensure(host.group_spec(), PATIENCE_S).state == "ready"
    assert host.modes() == [EXCLUSIVE_PROCESS] * 3
    host.assert_stops_without_a_trace(supervisor)


def test_the_compute_modes_are_blamed_when_they_leave_no_time_for_a_start(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(control: DaemonControl) -> None:
        raise AssertionError(f"{control.spec.device} is started")

    monkeypatch.setattr(DaemonControl, "start", start)
    mode = Modes(host)
    mode.slow_s = 0.3
    supervisor = host.supervisor(compute_mode=mode, start=0.5, **RETRIED_LATER)
    with pytest.raises(RetryableError) as refused:
        supervisor.ensure(host.group_spec(), PATIENCE_S)
    said = str(refused.value)
    assert (
        "the MPS daemon of gpu-2 was not started in time: reading and setting the compute modes of 3 GPUs took"
        in said
    )
    assert "enable persistence mode on the node" in said
    host.assert_nothing_left()


def test_two_daemons_never_have_the_same_gpu(host: Host) -> None:
    supervisor = host.supervisor(probe=60)
    group = supervisor.ensure(host.group_spec(), PATIENCE_S)
    with pytest.raises(RetryableError, match="has the MPS daemon of gpu-2, gpu-3, gpu-4, which must stop"):
        supervisor.ensure(host.spec(3), PATIENCE_S)
    with pytest.raises(PermanentError, match="others: gpu-3, gpu-4, not none"):
        supervisor.ensure(host.spec(2), PATIENCE_S)
    supervisor.stop("gpu-3", PATIENCE_S)
    assert (supervisor.status(), host.modes()) == ((group,), [EXCLUSIVE_PROCESS] * 3)
    supervisor.stop("gpu-2", PATIENCE_S)
    supervisor.ensure(host.spec(3), PATIENCE_S)
    with pytest.raises(RetryableError, match="has the MPS daemon of gpu-3, which must stop"):
        supervisor.ensure(host.group_spec(), PATIENCE_S)
    supervisor.stop("gpu-3", PATIENCE_S)
    assert supervisor.ensure(host.group_spec(), PATIENCE_S).state == "ready", "it is tried again at once"
    host.assert_stops_without_a_trace(supervisor)
