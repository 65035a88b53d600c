"""One daemon of several GPUs: started, kept, taken down and recovered as one."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.errors import PermanentError, RetryableError
from dra_driver.model.mps import MpsDaemonSpec, MpsMember
from dra_driver.mps import daemon_processes as processes
from dra_driver.mps.client import MpsClient, NoMpsHostError
from dra_driver.mps.compute_mode import EXCLUSIVE_PROCESS
from dra_driver.mps.limit_commands import check_spec
from tests.mps.conftest import Host
from tests.mps.test_crash_matrix import killed_after, start, start_and_stop

PROHIBITED = 2
GPUS = (2, 3, 4)


def spec_of(
    host: Host, *, limits: tuple[int | None, ...] = (None, None, None), **changes: object
) -> MpsDaemonSpec:
    """The daemon of GPUs 2 to 4, in this order."""
    first, *others = (
        MpsMember(f"gpu-{index}", host.machine.gpu(index).uuid, limit)
        for index, limit in zip(GPUS, limits, strict=True)
    )
    spec = MpsDaemonSpec(first.device, first.gpu_uuid, "gpu", first.gpu_uuid, others=tuple(others))
    return replace(spec, default_memory_limit_mib=limits[0], **changes)


class Modes:
    """The compute modes of a host. A GPU in `silent` does not answer; `slow_s` is what each answer takes."""

    def __init__(self, host: Host) -> None:
        self.silent: set[str] = set()
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
        time.sleep(self.slow_s)
        if self.together is not None:
            self.together.wait(5)


def modes(host: Host) -> list[int]:
    return [host.compute_mode(index) for index in GPUS]


def processes_of(host: Host) -> tuple[processes.ProcessId, ...]:
    return tuple(user for index in GPUS for user in processes.users_of(host.pipe(f"gpu-{index}")))


def assert_nothing_left(host: Host) -> None:
    assert (host.left(), processes_of(host), modes(host)) == ([], (), [0, 0, 0])


def client(host: Host, **environment: str) -> list[str]:
    done = subprocess.run(
        [host.machine.host_root / "usr/bin/mps-client"],
        env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": host.pipe(), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.splitlines()


def test_one_daemon_serves_all_gpus_with_their_limits_by_number(host: Host) -> None:
    spec = spec_of(host, limits=(4096, None, 1024))
    status = host.supervisor().ensure(spec, 10)
    assert (status.state, status.spec) == ("ready", spec)
    assert [process.pid for process in processes_of(host)] == [status.pid]
    assert modes(host) == [EXCLUSIVE_PROCESS] * 3
    assert client(host, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="1=512M,2=2048M") == [
        "mps=connected",
        f"device={','.join(host.machine.gpu(index).uuid for index in GPUS)}",
        "active_thread_percentage=100",
        "pinned_device_mem_limit_mib=4096,512,1024",
    ]


def test_each_gpu_gets_its_own_former_mode_back(host: Host) -> None:
    host.machine.set_compute_mode(host.machine.gpu(3).uuid, PROHIBITED)
    host.machine.set_compute_mode(host.machine.gpu(4).uuid, EXCLUSIVE_PROCESS)
    supervisor = host.supervisor()
    supervisor.ensure(spec_of(host), 10)
    assert modes(host) == [EXCLUSIVE_PROCESS] * 3
    supervisor.stop("gpu-2", 10)
    assert (host.left(), modes(host)) == ([], [0, PROHIBITED, EXCLUSIVE_PROCESS])


def test_a_start_that_fails_leaves_nothing(host: Host) -> None:
    host.behave(fail_to_start="no")
    with pytest.raises(RetryableError):
        host.supervisor().ensure(spec_of(host), 10)
    assert_nothing_left(host)


@pytest.mark.parametrize("index", GPUS)
def test_one_gpu_that_does_not_answer_keeps_no_other_from_being_put_back(
    host: Host, index: int, eventually: Callable
) -> None:
    mode = Modes(host)
    supervisor = host.supervisor(compute_mode=mode)
    supervisor.ensure(spec_of(host), 10)
    silent = host.machine.gpu(index).uuid
    mode.silent.add(silent)
    supervisor.stop("gpu-2", 10)
    assert modes(host) == [EXCLUSIVE_PROCESS if one == index else 0 for one in GPUS]
    [status] = supervisor.status()
    assert (status.state, status.problem) == ("failed", f"nvidia-smi does not answer for {silent}")
    mode.silent.clear()
    eventually(lambda: host.left() == [])
    assert_nothing_left(host)


@pytest.mark.parametrize("index", GPUS)
def test_one_gpu_that_does_not_answer_keeps_no_other_from_being_exclusive_again(
    host: Host, index: int
) -> None:
    mode = Modes(host)
    supervisor = host.supervisor(compute_mode=mode, probe=60)
    supervisor.ensure(spec_of(host), 10)
    silent = host.machine.gpu(index).uuid
    mode.silent.add(silent)
    for one in GPUS:
        host.machine.set_compute_mode(host.machine.gpu(one).uuid, 0)
    with pytest.raises(RetryableError, match=f"does not answer for {silent}"):
        supervisor.ensure(spec_of(host), 10)
    assert modes(host) == [0 if one == index else EXCLUSIVE_PROCESS for one in GPUS]


def test_all_gpus_are_read_and_set_at_the_same_time(host: Host) -> None:
    mode = Modes(host)
    mode.together = threading.Barrier(len(GPUS))
    supervisor = host.supervisor(compute_mode=mode, probe=60)
    supervisor.ensure(spec_of(host), 10)
    assert modes(host) == [EXCLUSIVE_PROCESS] * 3
    supervisor.stop("gpu-2", 10)
    assert_nothing_left(host)


@pytest.mark.parametrize("started", [0, 1])
def test_all_gpus_are_taken_and_given_back_when_not_all_threads_start(
    host: Host, threads_that_start: Callable[[str, int], None], started: int
) -> None:
    supervisor = host.supervisor(probe=60)
    threads_that_start("side-by-side", started)
    assert supervisor.ensure(spec_of(host), 10).state == "ready"
    assert modes(host) == [EXCLUSIVE_PROCESS] * 3
    supervisor.stop("gpu-2", 10)
    assert_nothing_left(host)


def test_the_compute_modes_are_blamed_when_they_leave_no_time_for_a_start(host: Host) -> None:
    class Control:
        def __init__(self) -> None:
            self.starts = 0

        def __getattr__(self, name: str) -> object:
            return getattr(host.tools.control, name)

        def start(self, *arguments: object) -> object:
            self.starts += 1
            return host.tools.control.start(*arguments)

    mode, control = Modes(host), Control()
    mode.slow_s = 0.3
    supervisor = host.supervisor(compute_mode=mode, control=control)
    with pytest.raises(RetryableError) as refused:
        supervisor.ensure(spec_of(host), 0.5)
    said = str(refused.value)
    assert (
        "no time is left to start the MPS daemon of gpu-2: reading and setting the compute modes of 3 GPUs took"
        in said
    )
    assert "switch on persistence mode on the node" in said
    assert control.starts == 0
    assert_nothing_left(host)


def test_a_gpu_that_was_reset_is_made_exclusive_again(host: Host, eventually: Callable) -> None:
    host.supervisor().ensure(spec_of(host), 10)
    host.machine.set_compute_mode(host.machine.gpu(4).uuid, 0)
    eventually(lambda: modes(host) == [EXCLUSIVE_PROCESS] * 3)


def test_a_daemon_that_died_is_started_again_for_all(host: Host, eventually: Callable) -> None:
    supervisor = host.supervisor()
    first = supervisor.ensure(spec_of(host, limits=(None, 2048, None)), 10)
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: supervisor.status()[0].state == "ready" and supervisor.status()[0].pid != first.pid)
    assert client(host)[-1] == "pinned_device_mem_limit_mib=none,2048,none"


def test_two_daemons_never_have_the_same_gpu(host: Host) -> None:
    supervisor = host.supervisor(probe=60)
    group = supervisor.ensure(spec_of(host), 10)
    with pytest.raises(RetryableError, match="has the MPS daemon of gpu-2, gpu-3, gpu-4, which has to stop"):
        supervisor.ensure(host.spec(3), 10)
    with pytest.raises(PermanentError, match="others: gpu-3, gpu-4, not none"):
        supervisor.ensure(host.spec(2), 10)
    supervisor.stop("gpu-3", 10, gpu_uuid=host.machine.gpu(3).uuid, kind="gpu")
    assert (supervisor.status(), modes(host)) == ((group,), [EXCLUSIVE_PROCESS] * 3)
    supervisor.stop("gpu-2", 10)
    supervisor.ensure(host.spec(3), 10)
    with pytest.raises(RetryableError, match="has the MPS daemon of gpu-3, which has to stop"):
        supervisor.ensure(spec_of(host), 10)
    supervisor.stop("gpu-3", 10)
    assert_nothing_left(host)


def test_the_next_host_takes_it_over(host: Host) -> None:
    first = host.supervisor()
    status = first.ensure(spec_of(host), 10)
    first.close()
    second = host.supervisor()
    assert second.ensure(spec_of(host), 10).pid == status.pid
    second.stop("gpu-2", 10)
    assert_nothing_left(host)


def test_it_is_made_again_when_the_node_has_rebooted(host: Host, eventually: Callable) -> None:
    first = host.supervisor(boot_id="one")
    pid = first.ensure(spec_of(host), 10).pid
    first.close()
    processes.end(processes_of(host), 2.0)
    for index in GPUS:
        host.machine.set_compute_mode(host.machine.gpu(index).uuid, 0)
    second = host.supervisor(boot_id="two")
    eventually(lambda: second.status()[0].state == "ready")
    assert (second.status()[0].pid != pid, modes(host)) == (True, [EXCLUSIVE_PROCESS] * 3)
    second.stop("gpu-2", 10)
    assert_nothing_left(host)


@pytest.mark.parametrize("lost", [Path.unlink, lambda path: path.write_text("{")])
def test_every_gpu_is_put_back_when_the_record_was_lost(host: Host, lost: Callable[[Path], object]) -> None:
    """As the plugin does it: the first device stops the daemon, the others tell their GPUs."""
    first = host.supervisor()
    spec = first.ensure(spec_of(host), 10).spec
    first.close()
    lost(host.layout.record("gpu-2"))
    second = host.supervisor()
    for device, uuid in zip(spec.devices, spec.gpu_uuids, strict=True):
        second.stop(device, 10, gpu_uuid=uuid, kind="gpu")
    assert_nothing_left(host)


def test_every_gpu_is_put_back_when_an_ensure_found_no_record(host: Host) -> None:
    first = host.supervisor()
    spec = first.ensure(spec_of(host), 10).spec
    first.close()
    host.layout.record("gpu-2").unlink()
    second = host.supervisor()
    second.ensure(spec, 10)
    second.stop("gpu-2", 10)
    assert_nothing_left(host)


def test_the_next_host_stops_it_when_none_runs(host: Host, eventually: Callable) -> None:
    first = host.supervisor()
    spec = first.ensure(spec_of(host), 10).spec
    first.close()
    with pytest.raises(NoMpsHostError):
        MpsClient(host.layout, connect_s=0.0).stop("gpu-2", 1, gpu_uuid=spec.gpu_uuid, kind="gpu")
    host.supervisor()
    eventually(lambda: host.left() == [])
    assert_nothing_left(host)


def test_what_cannot_be_is_refused(host: Host) -> None:
    spec = spec_of(host, limits=(None, 0, None))
    with pytest.raises(PermanentError, match="the memory limit is 0 MiB"):
        check_spec(spec)
    with pytest.raises(PermanentError, match="it has a device twice"):
        check_spec(replace(spec, others=(MpsMember("gpu-9", spec.gpu_uuid),)))
    with pytest.raises(PermanentError, match="'x' is not the UUID of a GPU"):
        check_spec(replace(spec, others=(MpsMember("gpu-9", "x"),)))
    mig = replace(spec, kind="mig", uuid="MIG-1", others=(MpsMember("gpu-9", "GPU-9"),))
    with pytest.raises(PermanentError, match="a daemon of a MIG device serves that alone"):
        check_spec(mig)


# --- kill -9 of the host ---------------------------------------------------------------------------

root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting is one of the steps and needs root")


@root
@pytest.mark.parametrize("steps", range(1, 14))
def test_a_start_that_was_cut_off_is_completed(host: Host, steps: int) -> None:
    spec = spec_of(host, default_active_thread_percentage=50)
    was_killed = killed_after(steps, host, lambda one, countdown: start(one, spec, countdown))
    assert was_killed == (steps <= 11), "the steps of a start changed; so must the range above"
    new = host.supervisor()
    status = new.ensure(spec, 10)
    assert [process.pid for process in processes_of(host)] == [status.pid]
    assert modes(host) == [EXCLUSIVE_PROCESS] * 3
    assert host.left() == ["gpu-2", "gpu-2.json", "gpu-3", "gpu-4"]
    new.stop("gpu-2", 10)
    assert_nothing_left(host)


@root
@pytest.mark.parametrize("steps", range(1, 15))
def test_a_stop_that_was_cut_off_is_completed(host: Host, steps: int, eventually: Callable) -> None:
    spec = spec_of(host)
    was_killed = killed_after(steps, host, lambda one, countdown: start_and_stop(one, spec, countdown))
    assert was_killed == (steps <= 13), "the steps of a stop changed; so must the range above"
    host.supervisor()
    eventually(lambda: host.left() == [])
    assert_nothing_left(host)


@root
@pytest.mark.parametrize("steps", [2, 5, 6, 8])
def test_a_start_that_was_cut_off_can_be_stopped(host: Host, steps: int) -> None:
    assert killed_after(steps, host, lambda one, countdown: start(one, spec_of(host), countdown))
    host.supervisor(tick=60).stop("gpu-2", 10)
    assert_nothing_left(host)
