"""Control daemons started, found running, stopped; and every fault that the host can meet."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dra_driver.base.atomic import write_atomically
from dra_driver.errors import FatalError, PermanentError, RetryableError
from dra_driver.host.driver_programs import InstalledPrograms
from dra_driver.host.rooted_tree import text_of
from dra_driver.inventory.detachment import LOCK_FILE, Detachments
from dra_driver.model.driver_files import DriverPrograms
from dra_driver.mps_host import daemon_control
from dra_driver.mps_host import daemon_processes as processes
from dra_driver.mps_host.daemon_compute_mode import EXCLUSIVE_PROCESS, ComputeMode
from dra_driver.mps_host.daemon_control import BusyError, DaemonControl
from dra_driver.mps_host.daemon_mounts import KernelMounter, is_tmpfs
from dra_driver.mps_host.host_files import WANTED_FILE, MpsHostFiles
from tests.fakes.mps_behaviour import FAULT, IGNORES_LIMITS, NEVER_READY, SLOW_CUDA, fails_to_start
from tests.fakes.preparing import in_threads
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.mps_host.conftest import NO_LABELS, RETRIED_LATER, Host

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="mounts and other users need root")


def holding_client(host):
    """A client that runs until its process group is killed."""
    return subprocess.Popen(
        [host.machine.host_root / "usr/bin/mps-client", "--hold"],
        env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": host.pipe()},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def test_a_daemon_is_ready_with_its_limits_and_gone_without_trace(host):
    supervisor = host.supervisor(probe=60)
    spec = host.spec(default_active_thread_percentage=50, default_memory_limit_mib=4096)
    status = supervisor.ensure(spec, PATIENCE_S)
    assert (status.device, status.state, status.spec, status.problem) == ("gpu-2", "ready", spec, None)
    assert Path(status.directory) == host.layout.directory("gpu-2")
    assert [process.pid for process in host.daemons()] == [status.pid]
    assert host.compute_mode() == EXCLUSIVE_PROCESS
    assert is_tmpfs(Path(host.layout.directories("gpu-2").shm)) is IS_ROOT
    ask = host.control().query
    assert ask("get_default_active_thread_percentage") == ["50.0"]
    assert ask("get_default_device_pinned_mem_limit 0") == ["4G"]
    assert supervisor.status() == (status,)

    supervisor.stop("gpu-2", PATIENCE_S)
    assert supervisor.status() == ()
    assert host.daemons() == ()
    assert host.compute_mode() == 0
    assert host.left() == []


@needs_root
def test_the_daemon_sees_its_own_shared_memory_only(host):
    supervisor = host.supervisor()
    supervisor.ensure(host.spec(2), PATIENCE_S)
    second = supervisor.ensure(host.spec(3), PATIENCE_S)
    mounts = Path(f"/proc/{second.pid}/mountinfo").read_text()
    assert f"{host.layout.root}/" not in mounts
    Path(host.layout.directories("gpu-3").shm, "mark").touch()
    assert Path(f"/proc/{second.pid}/root/dev/shm/mark").exists()
    assert not Path("/dev/shm/mark").exists()


def test_missing_privileges_are_reported_once(host, logs, monkeypatch):
    monkeypatch.setattr(KernelMounter, "mount", refuse_mount)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    daemon_control._log_one_user.cache_clear()
    supervisor = host.supervisor()
    for index in (2, 3):
        spec = host.spec(index, multi_user=True)
        status = supervisor.ensure(spec, PATIENCE_S)
        assert (status.state, status.spec) == ("ready", spec)
        assert b"-multiuser-server" not in Path(f"/proc/{status.pid}/cmdline").read_bytes().split(b"\0")
        assert not is_tmpfs(Path(host.layout.directories(f"gpu-{index}").shm))
    events = [line["event"] for line in logs]
    assert (events.count("mps_plain_shm"), events.count("mps_serves_one_user")) == (1, 1)
    for index in (2, 3):
        supervisor.stop(f"gpu-{index}", PATIENCE_S)
    host.assert_nothing_left()


def refuse_mount(mounter, path):
    raise RetryableError(f"cannot mount a tmpfs on {path}")


def test_a_device_of_the_same_name_and_another_uuid_replaces_an_unused_one(host):
    supervisor = host.supervisor()
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    other = replace(host.spec(3), device="gpu-2")
    client = holding_client(host)
    eventually(lambda: '"clients":1' in text_of(host.layout.status("gpu-2")))
    with pytest.raises(PermanentError, match="uuid"):
        supervisor.ensure(other, PATIENCE_S)
    os.killpg(client.pid, signal.SIGTERM)
    client.communicate(timeout=PATIENCE_S)
    eventually(lambda: '"clients":0' in text_of(host.layout.status("gpu-2")))
    second = supervisor.ensure(other, PATIENCE_S)
    assert (second.spec, second.pid == first.pid) == (other, False)
    assert (host.compute_mode(2), host.compute_mode(3)) == (0, EXCLUSIVE_PROCESS)
    supervisor.stop("gpu-2", PATIENCE_S)
    assert host.compute_mode(3) == 0


def test_a_mig_device_has_a_daemon_and_no_compute_mode(host):
    gpu = host.machine.gpu(0)
    uuid = gpu.mig_devices[0][1].uuid
    spec = replace(host.spec(0), device="gpu-0-mig", uuid=uuid, kind="mig")
    supervisor = host.supervisor()
    assert supervisor.ensure(spec, PATIENCE_S).state == "ready"
    assert host.compute_mode(0) == 0
    supervisor.stop("gpu-0-mig", PATIENCE_S)
    assert host.left() == []


def test_a_compute_mode_that_someone_changed_in_between_stays(host):
    supervisor = host.supervisor()
    supervisor.ensure(host.spec(), PATIENCE_S)
    host.machine.set_compute_mode(host.machine.gpu(2).uuid, 2)
    supervisor.stop("gpu-2", PATIENCE_S)
    assert host.compute_mode() == 2
    host.machine.set_compute_mode(host.machine.gpu(2).uuid, 0)


def test_pipe_directory_that_is_too_long_for_a_socket_is_refused_before_anything_starts(machine, top):
    """By the plugin, and by the host if an older plugin wants it."""
    host = Host(top / ("k" * 80), machine)
    supervisor = host.supervisor()
    try:
        for device in ("gpu-2", "gpu-2-mig-1g10gb-19-0"):
            spec = replace(host.spec(), device=device)
            refusal = r"no MPS daemon can run for .* bytes, but NVIDIA's program accepts at most 106; .* bytes? shorter"
            with pytest.raises(PermanentError, match=refusal):
                supervisor.ensure(spec, PATIENCE_S)
            write_atomically(host.layout.wanted(device), WANTED_FILE.write(spec))
            eventually(lambda name=device: '"failed"' in text_of(host.layout.status(name)))
            assert re.search(refusal, MpsHostFiles(host.layout).statuses()[0].problem)
            supervisor.stop(device, PATIENCE_S)
            assert not host.layout.directory(device).exists()
    finally:
        host.close()


# --- faults --------------------------------------------------------------------------------------


def test_no_control_program_is_a_clear_error(host):
    supervisor = host.supervisor(
        programs=lambda: DriverPrograms("/driver-root", {}, "/usr/bin"), **RETRIED_LATER
    )
    with pytest.raises(
        RetryableError, match="nvidia-cuda-mps-control is not below the driver root /driver-root"
    ):
        supervisor.ensure(host.spec(), PATIENCE_S)
    host.assert_nothing_left()


THREADS, MEMORY = {"default_active_thread_percentage": 50}, {"default_memory_limit_mib": 64}


@pytest.mark.parametrize(
    ("rules", "timings", "settings", "error", "text"),
    [
        (NEVER_READY, {"start": 3.0}, {}, RetryableError, r"was not ready after \d\.\d s .*Starting control"),
        (
            SLOW_CUDA, {"start": 1.0}, {}, RetryableError,
            r"was not ready after \d\.\d s \(it has not created its socket; from R580 on it initialises CUDA "
            r".*persistence",
        ),
        (
            {"silent": True}, {"start": 6.0, "answer": 0.2, "patience": 0.2}, {}, RetryableError,
            "send 'get_default_active_thread_percentage' to the MPS daemon: .*does not answer",
        ),
        (
            fails_to_start("the driver is too old"), {}, {}, RetryableError,
            "stopped during its start.*the driver is too old",
        ),
        (IGNORES_LIMITS, {}, THREADS, RetryableError, r"did not apply 'set_.*_percentage 50'.*100\.0"),
        (IGNORES_LIMITS, {}, MEMORY, RetryableError, "did not apply 'set_.*_pinned_mem_limit 0 64M'"),
    ],
    ids=["never ready", "slow CUDA", "silent", "ends at once", "ignores threads", "ignores memory"],
)  # fmt: skip
def test_a_daemon_that_does_not_become_as_it_should_is_undone(host, rules, timings, settings, error, text):
    host.behave(**rules)
    supervisor = host.supervisor(**timings)
    with pytest.raises(error, match=text):
        supervisor.ensure(host.spec(**settings), PATIENCE_S)
    host.assert_stops_without_a_trace(supervisor)
    assert supervisor.status() == ()
    supervisor.close()
    host.behave()
    assert host.supervisor().ensure(host.spec(**settings), PATIENCE_S).state == "ready"


def test_daemon_that_ends_while_it_starts_is_refused_with_status_and_output(host):
    host.behave(**fails_to_start("CUDA driver version is insufficient"))
    supervisor = host.supervisor()
    with pytest.raises(RetryableError) as refused:
        supervisor.ensure(host.spec(multi_user=True), PATIENCE_S)
    text = re.sub(r"\[[^]]*\]", "[…]", str(refused.value))
    assert text == (
        f"the MPS daemon of gpu-2 ({host.spec().uuid}) stopped during its start with exit code 1; host.out: […] "
        "Starting control daemon | […] CUDA driver version is insufficient"
    )


@needs_root
def test_option_that_the_program_does_not_know_is_named_with_the_branch_that_does(host):
    host.machine.load_driver("550.1")
    supervisor = host.supervisor()
    with pytest.raises(
        RetryableError,
        match=r"with exit code 1; host\.out: Cannot find MPS control daemon process; it was started with "
        "-multiuser-server, which needs NVIDIA driver R555 or newer$",
    ):
        supervisor.ensure(host.spec(multi_user=True), PATIENCE_S)


def test_daemon_that_dies_is_reported_with_its_exit_status(host, logs):
    supervisor = host.supervisor()
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: supervisor.status()[0].state == "ready" and supervisor.status()[0].pid != first.pid)
    [died] = [line["problem"] for line in logs if line["event"] == "mps_daemon_died"]
    assert died.partition(";")[0] == "the control daemon stopped with signal 9, SIGKILL"


@pytest.mark.parametrize("branch", [470, 535])
def test_a_daemon_of_an_older_driver_is_ready_without_a_pid_file(host, branch):
    host.machine.load_driver(f"{branch}.1")
    supervisor = host.supervisor()
    assert supervisor.ensure(host.spec(default_active_thread_percentage=25), PATIENCE_S).state == "ready"
    assert not list(Path(host.pipe()).glob("*.pid"))
    host.assert_stops_without_a_trace(supervisor)


def test_a_memory_limit_is_refused_when_the_driver_is_too_old_for_it(host):
    host.machine.load_driver("470.256.02")
    supervisor = host.supervisor(**RETRIED_LATER)
    with pytest.raises(RetryableError, match='returns Unknown command "set_default_device_pinned_mem_limit"'):
        supervisor.ensure(host.spec(default_memory_limit_mib=64), PATIENCE_S)
    host.assert_nothing_left()


def test_a_tmpfs_that_cannot_be_mounted_is_a_clear_error(host):
    class NoMounts(KernelMounter):
        def _mount(self, *_):
            import ctypes

            ctypes.set_errno(1)
            return -1

    supervisor = host.supervisor(mounter=NoMounts(host.layout.root, NO_LABELS), **RETRIED_LATER)
    with pytest.raises(
        RetryableError, match=r"cannot mount a tmpfs .*Operation not permitted.*--allow-plain-shm"
    ):
        supervisor.ensure(host.spec(), PATIENCE_S)
    host.assert_nothing_left()


def test_a_start_leaves_nothing_when_no_thread_can_enter_a_mount_namespace(host, threads_that_start):
    class WithoutTmpfs(KernelMounter):
        def mount(self, path):
            """That would need root."""

    supervisor = host.supervisor(mounter=WithoutTmpfs(host.layout.root, NO_LABELS), **RETRIED_LATER)
    threads_that_start("mps-namespace", 0)
    with pytest.raises(RetryableError, match="cannot enter a mount namespace: can't start new thread"):
        supervisor.ensure(host.spec(), PATIENCE_S)
    host.assert_nothing_left()


def test_a_stale_pipe_directory_is_cleaned(host):
    pipe = Path(host.pipe())
    pipe.mkdir(parents=True)
    (pipe / "nvidia-cuda-mps-control.pid").write_text("1")
    (pipe / "control").touch()
    (pipe / "simulated").mkdir()
    assert host.supervisor().ensure(host.spec(), PATIENCE_S).state == "ready"


def test_a_dead_daemon_is_started_again_when_a_thread_can_start_again(host, logs, threads_that_start):
    supervisor = host.supervisor()
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    threads_that_start("mps-gpu-2", 0)
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: any(line["event"] == "mps_check_delayed" for line in logs))
    threads_that_start("mps-gpu-2", 1)
    eventually(lambda: supervisor.status()[0].state == "ready" and supervisor.status()[0].pid != first.pid)


def test_servers_that_outlive_their_daemon_are_ended_before_the_next_one(host):
    server = host.machine.host_root / "usr/bin/nvidia-cuda-mps-server"
    usual = server.read_bytes()
    server.write_bytes(b"#!/bin/sh\nwhile :; do sleep 1; done\n")
    supervisor = host.supervisor(probe=60)
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    host.control().query("start_server -uid 0")
    eventually(lambda: len(host.daemons()) >= 2)
    server.write_bytes(usual)
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: supervisor.status()[0].state == "ready" and supervisor.status()[0].pid != first.pid)
    assert [process.pid for process in host.daemons()] == [supervisor.status()[0].pid]


def test_a_daemon_that_cannot_be_started_again_is_tried_with_backoff_and_reported(host):
    supervisor = host.supervisor()
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    host.behave(**fails_to_start("Xid 79"))
    os.kill(first.pid, signal.SIGKILL)
    failed = eventually(lambda: next((s for s in supervisor.status() if "Xid 79" in (s.problem or "")), None))
    assert failed.state in ("failed", "starting")
    with pytest.raises(RetryableError, match="Xid 79"):
        supervisor.ensure(host.spec(), 3)
    assert host.compute_mode() == EXCLUSIVE_PROCESS, "other claims may still hold it"
    host.behave()
    eventually(lambda: supervisor.status()[0].state == "ready")
    assert supervisor.status()[0].problem is None


def test_fault_and_clients_are_seen(host, logs):
    supervisor = host.supervisor()
    supervisor.ensure(host.spec(), PATIENCE_S)
    client = holding_client(host)
    eventually(lambda: supervisor.status()[0].clients == 1)
    host.behave(**FAULT)
    eventually(lambda: supervisor.status()[0].state == "fault")
    assert "state FAULT" in supervisor.status()[0].problem
    eventually(lambda: supervisor.ensure(host.spec(), PATIENCE_S).state == "fault")
    assert [line["event"] for line in logs].count("mps_fault") == 1
    host.behave()
    eventually(lambda: supervisor.status()[0].state == "ready")
    os.killpg(client.pid, signal.SIGTERM)
    client.communicate(timeout=PATIENCE_S)
    eventually(lambda: supervisor.status()[0].clients == 0)


def test_a_daemon_that_hangs_is_reported_and_not_killed(host):
    supervisor = host.supervisor(answer=1.0)
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    os.kill(first.pid, signal.SIGSTOP)
    eventually(lambda: supervisor.status()[0].state == "fault")
    assert "does not answer" in supervisor.status()[0].problem
    os.kill(first.pid, signal.SIGCONT)
    eventually(lambda: supervisor.status()[0].state == "ready")
    assert supervisor.status()[0].pid == first.pid


def test_a_daemon_that_hangs_is_stopped_all_the_same(host):
    supervisor = host.supervisor(patience=0.2, probe=60)
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    os.kill(first.pid, signal.SIGSTOP)
    host.assert_stops_without_a_trace(supervisor)


def test_a_lost_gpu_does_not_hold_up_the_stop(host):
    supervisor = host.supervisor()
    supervisor.ensure(host.spec(4), PATIENCE_S)
    host.machine.lose_gpu(4)
    try:
        supervisor.stop("gpu-4", PATIENCE_S)
        assert host.left() == []
    finally:
        host.machine.restore_gpu(4)
        host.machine.set_compute_mode(host.machine.gpu(4).uuid, 0)


# --- host processes come and go ------------------------------------------------------------------


def test_a_daemon_whose_record_was_lost_is_found_by_its_pipe_directory(host, logs):
    old = host.supervisor()
    first = old.ensure(host.group_spec(), PATIENCE_S)
    old.close()
    host.layout.record("gpu-2").write_text("{")
    new = host.supervisor()
    assert "mps_record_unreadable" in [line["event"] for line in logs]
    assert new.ensure(first.spec, PATIENCE_S).pid == first.pid
    host.assert_stops_without_a_trace(new)


@pytest.mark.parametrize("kept", ["both", "wanted", "status"])
@pytest.mark.parametrize("lost", [lambda path: path.unlink(), lambda path: path.write_text("{")])
def test_a_stop_without_a_record_puts_every_gpu_back_too(host, lost, kept):
    old = host.supervisor()
    old.ensure(host.group_spec(), PATIENCE_S)
    old.close()
    lost(host.layout.record("gpu-2"))
    if kept == "wanted":
        host.layout.status("gpu-2").unlink()
    if kept == "status":
        host.layout.wanted("gpu-2").unlink()
    new = host.supervisor()
    host.assert_stops_without_a_trace(new)


def test_a_stop_of_what_left_no_trace_changes_no_compute_mode(host):
    uuid = host.machine.gpu(2).uuid
    host.machine.set_compute_mode(uuid, EXCLUSIVE_PROCESS)
    supervisor = host.supervisor()
    supervisor.stop("gpu-2", PATIENCE_S)
    assert (host.compute_mode(), host.left()) == (EXCLUSIVE_PROCESS, [])


# --- the GPU stays exclusive ---------------------------------------------------------------------


@pytest.mark.parametrize("by", ["the watch", "the next host"])
def test_a_reset_gpu_is_made_exclusive_again(host, logs, by):
    supervisor = host.supervisor(probe=0.1 if by == "the watch" else 60)
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    if by == "the next host":
        supervisor.close()
    host.machine.set_compute_mode(first.spec.uuid, 0)
    if by == "the next host":
        supervisor = host.supervisor(probe=60)
    eventually(lambda: host.compute_mode() == EXCLUSIVE_PROCESS)
    eventually(lambda: supervisor.status()[0].state == "ready")
    assert supervisor.status()[0].pid == first.pid
    host.assert_stops_without_a_trace(supervisor)


def test_a_compute_mode_that_cannot_be_read_ends_no_daemon(host, logs):
    class Failing:
        failing = False

        def get(self, gpu_uuid):
            if self.failing:
                raise RetryableError("it hangs")
            return host.tools.compute_mode.get(gpu_uuid)

        def set(self, gpu_uuid, mode):
            host.tools.compute_mode.set(gpu_uuid, mode)

    mode = Failing()
    supervisor = host.supervisor(compute_mode=mode)
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    mode.failing = True
    eventually(lambda: "compute_mode_not_set" in [line["event"] for line in logs])
    assert supervisor.ensure(host.spec(), PATIENCE_S).pid == first.pid
    assert (supervisor.status()[0].state, supervisor.status()[0].pid) == ("ready", first.pid)
    mode.failing = False
    host.assert_stops_without_a_trace(supervisor)


def test_no_nvidia_smi_runs_while_the_driver_is_detached(host, logs):
    detachments = Detachments(host.layout.root, "boot-1")
    requested, open_while_run = [], []
    programs = InstalledPrograms(str(host.machine.host_root), host.layout.libraries, 0o755)

    def find():
        open_while_run.append(detachments.is_nvml_open())
        return programs()

    def using_nvml():
        requested.append(detachments.problem())
        return detachments.using_nvml()

    supervisor = host.supervisor(compute_mode=ComputeMode(find, using_nvml))
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    detachments.begin(3600)
    eventually(lambda: requested[-1] is not None and not detachments.is_nvml_open())
    host.machine.set_compute_mode(first.spec.uuid, 0)
    runs, requested[:] = len(open_while_run), []
    eventually(lambda: len(requested) > 2)
    assert (len(open_while_run), host.compute_mode()) == (runs, 0)
    with pytest.raises(RetryableError, match="NVML is closed until"):
        supervisor.ensure(host.spec(3), PATIENCE_S)
    supervisor.stop("gpu-3", PATIENCE_S)
    assert "compute_mode_not_set" not in [line["event"] for line in logs]
    detachments.end()
    eventually(lambda: host.compute_mode() == EXCLUSIVE_PROCESS)
    assert set(open_while_run) == {True}, "whoever detaches waits for it"
    detachments.begin(3600)
    with pytest.raises(RetryableError, match="NVML is closed until"):
        supervisor.stop("gpu-2", PATIENCE_S)
    assert (processes.users_of(host.pipe()), host.compute_mode()) == ((), EXCLUSIVE_PROCESS)
    detachments.end()
    eventually(lambda: host.compute_mode() == 0)
    eventually(lambda: supervisor.status() == ())
    for name in (LOCK_FILE, "detach.lock"):
        (host.layout.root / name).unlink()
    assert host.left() == []
    host.assert_nothing_left()


def test_a_gpu_without_exclusive_mode_is_reported_once_and_left_alone(host, logs):
    with host.machine._change() as state:
        state.gpus[2].virtualization = 2
    try:
        supervisor = host.supervisor(probe=0.02, exclusive=0.02)
        status = supervisor.ensure(host.spec(), PATIENCE_S)
        assert (status.state, status.not_exclusive) == ("ready", (host.spec().uuid,))
        eventually(lambda: supervisor.status()[0].clients is not None)
        supervisor.stop("gpu-2", PATIENCE_S)
    finally:
        with host.machine._change() as state:
            state.gpus[2].virtualization = 0
    assert [line["event"] for line in logs].count("compute_mode_not_supported") == 1
    host.assert_nothing_left()


@needs_root
@pytest.mark.parametrize("multi_user", [False, True])
def test_users_of_a_daemon_are_known_when_it_serves_one_at_a_time(host, tmp_path, multi_user):
    supervisor = host.supervisor(probe=0.02)
    supervisor.ensure(host.spec(multi_user=multi_user), PATIENCE_S)
    elsewhere = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    inside = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": f"{host.pipe()}/../pipe"}
    pods = [
        subprocess.Popen(["sleep", "60"], env=environment, user=user)
        for user, environment in ((1000, inside), (2000, inside), (2000, inside), (3000, elsewhere))
    ]
    try:
        wanted = () if multi_user else (1000, 2000)
        eventually(lambda: supervisor.status()[0].users == wanted and supervisor.status()[0].clients == 0)
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    eventually(lambda: supervisor.status()[0].users == ())


# --- who reaches what ----------------------------------------------------------------------------


@needs_root
def test_a_server_of_another_user_reaches_its_directories_and_nothing_else(host):
    host.layout.root.parent.chmod(0o755)
    host.supervisor().ensure(host.spec(), PATIENCE_S)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in host.layout.root.iterdir()}
    assert stat.S_IMODE(host.layout.root.stat().st_mode) == 0o711
    assert {modes[host.layout.record("gpu-2")], modes[host.layout.lock]} == {0o600}
    assert (modes[host.layout.directory("gpu-2")], modes[host.layout.libraries]) == (0o711, 0o755)

    def reaches(*command):
        return subprocess.run(command, user=65534, group=65534, extra_groups=[], check=False).returncode == 0

    directories = host.layout.directories("gpu-2")
    libraries = list(host.layout.libraries.iterdir())
    for path in (directories.pipe, directories.log, directories.shm, host.layout.libraries, *libraries[:1]):
        assert reaches("test", "-x" if Path(path).is_dir() else "-L", path), path
    for closed in (host.layout.root, host.layout.lock, host.layout.record("gpu-2")):
        assert not reaches("test", "-r", closed), closed


def test_after_a_reboot_everything_is_made_again(host):
    old = host.supervisor()
    first = old.ensure(host.spec(default_memory_limit_mib=2048), PATIENCE_S)
    old.close()
    os.kill(first.pid, signal.SIGKILL)
    host.tools.mounter.unmount(Path(host.layout.directories("gpu-2").shm))
    host.machine.set_compute_mode(first.spec.uuid, 0)
    new = host.supervisor()
    eventually(lambda: new.status()[0].state == "ready")
    assert host.compute_mode() == EXCLUSIVE_PROCESS
    assert is_tmpfs(Path(host.layout.directories("gpu-2").shm)) is IS_ROOT
    host.assert_stops_without_a_trace(new)


def test_only_one_host_a_directory(host):
    host.supervisor()
    with pytest.raises(FatalError, match="another MPS host already serves"):
        host.supervisor()


def test_a_host_that_ends_leaves_a_start_in_progress_to_the_next(host):
    host.behave(sleep_s=1.0)
    old = host.supervisor()
    with ThreadPoolExecutor(1) as caller:
        requested = caller.submit(old.ensure, host.spec(), PATIENCE_S)
        eventually(lambda: len(host.daemons()) == 1)
        [daemon] = host.daemons()
        old.close()
        host.supervisor()
        assert requested.result().pid == daemon.pid


def test_devices_start_at_the_same_time(host, monkeypatch):
    together, start = threading.Barrier(4, timeout=PATIENCE_S), DaemonControl.start
    monkeypatch.setattr(DaemonControl, "start", lambda control: (together.wait(), start(control))[1])
    supervisor = host.supervisor()
    in_threads(*(partial(supervisor.ensure, host.spec(index), PATIENCE_S) for index in (2, 3, 4, 5)))
    assert [status.state for status in supervisor.status()] == ["ready"] * 4


def spawn_sleep():
    """A process without the environment of a daemon, as each has until the kernel has loaded its program."""
    return processes.spawn(["/bin/sleep", "600"], {}, Path(os.devnull))


def test_daemon_whose_program_is_still_being_loaded_is_stopped(host, monkeypatch):
    started = []
    monkeypatch.setattr(DaemonControl, "start", lambda _: started.append(spawn_sleep()) or started[-1])
    host.supervisor()
    plugin = MpsHostFiles(host.layout)
    with pytest.raises(RetryableError, match="did not start"):
        plugin.ensure(host.spec(), 0.1)
    eventually(lambda: started)
    plugin.stop("gpu-2", PATIENCE_S)
    assert not processes.is_alive(started[0])
    host.assert_nothing_left()


def test_many_cycles_leave_nothing(host, monkeypatch):
    """Without programs, which would take minutes: files, threads, descriptors and objects."""
    monkeypatch.setattr(processes, "users_of", lambda _: ())
    monkeypatch.setattr("dra_driver.mps_host.host_files.is_control_daemon", lambda *_: True)

    def start(control):
        Path(control.directories.pipe, "control").touch()
        return spawn_sleep()

    monkeypatch.setattr(DaemonControl, "start", start)
    monkeypatch.setattr(DaemonControl, "query_once", lambda *_, timeout_s: ["100.0"])

    class Quick:
        def get(self, _):
            return None

    monkeypatch.setattr(KernelMounter, "mount", refuse_mount)
    supervisor = host.supervisor(compute_mode=Quick())
    supervisor.ensure(host.spec(), PATIENCE_S)
    supervisor.stop("gpu-2", PATIENCE_S)
    threads = set(threading.enumerate())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        supervisor.ensure(host.spec(), PATIENCE_S)
        supervisor.stop("gpu-2", PATIENCE_S)
    eventually(lambda: set(threading.enumerate()) <= threads)
    eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)
    assert (host.left(), supervisor.status()) == ([], ())


class Beats(threading.Event):
    """Records how long the host waits between its checks, and wakes it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: set[float | None] = set()

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.add(timeout)
        return super().wait(0.005)


def test_host_without_daemons_checks_less_often(host):
    beats = Beats()
    one, spec = host.supervisor(closing=beats, look=3.0, idle=7.0), host.spec()
    eventually(lambda: 7.0 in beats.seconds)
    one.ensure(spec)
    beats.seconds.clear()
    eventually(lambda: 3.0 in beats.seconds)
    assert 7.0 not in beats.seconds
    one.stop(spec.device)
    eventually(lambda: 7.0 in beats.seconds)


def test_daemon_is_started_once_for_many_callers(host):
    supervisor = host.supervisor()
    started = in_threads(*[partial(supervisor.ensure, host.spec(), PATIENCE_S)] * 8)
    assert len({status.pid for status in started}) == 1


def test_a_daemon_of_another_uuid_is_kept_when_no_one_can_say_whether_it_is_used(host):
    supervisor = host.supervisor(probe=60, answer=1.0)
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    assert first.clients is None
    with pytest.raises(PermanentError, match="uuid: "):
        supervisor.ensure(replace(host.spec(3), device="gpu-2"), PATIENCE_S)
    assert supervisor.status()[0].pid == first.pid
    assert processes.identify(first.pid) is not None


# --- talk with a daemon that talks with somebody else -------------------------------------------


def held(host):
    """A program that occupies the daemon until its input ends."""
    control = host.machine.host_root / "usr/bin/nvidia-cuda-mps-control"
    environment = {**host.tools.programs().environment(), **host.control()._variables}
    one = subprocess.Popen(
        [control], env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    one.stdin.write("get_server_list\n")
    one.stdin.flush()
    time.sleep(2.0)  # a question of ours now would take its place, and a busy machine starts programs slowly
    eventually(lambda: is_busy(host) and is_busy(host))  # once may be a program of ours that started slowly
    return one


def is_busy(host):
    try:
        host.control().query_once("get_server_list", timeout_s=PATIENCE_S)
    except BusyError:
        return True
    return False


def test_daemon_that_talks_with_another_program_is_ready_and_queried_again_later(host):
    supervisor = host.supervisor(probe=60, answer=1.0)
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    other = held(host)
    try:
        with pytest.raises(
            RetryableError, match=r"it was busy with another program|Cannot send command|does not answer"
        ):
            supervisor._daemons["gpu-2"]._control.query_servers()
        supervisor._daemons["gpu-2"].probe()
        assert (supervisor.status()[0].state, supervisor.status()[0].pid) == ("ready", first.pid)
    finally:
        other.communicate()
    eventually(lambda: supervisor._daemons["gpu-2"].probe() or supervisor.status()[0].clients == 0)


@pytest.mark.parametrize("way", ["by the same host", "by the next host"])
def test_daemon_that_a_wrapper_starts_slowly_is_ended_while_it_starts(host, tmp_path, way):
    """Such as a version manager's or a distribution's: until it runs NVIDIA's program, the command line is its own."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text("#!/usr/bin/env -S python3 -I -S -B -u\nimport time\ntime.sleep(600)\n")
    program.chmod(0o755)
    installed = host.tools.programs()
    slow = replace(installed, paths={**installed.paths, "nvidia-cuda-mps-control": str(program)})
    host.tools = replace(host.tools, programs=lambda: slow)
    first = host.supervisor()
    with pytest.raises(RetryableError, match="did not start"):
        first.ensure(host.spec(), 0.1)
    [found] = eventually(host.daemons)
    if way == "by the next host":
        first.close()
        host.supervisor()
    MpsHostFiles(host.layout).stop("gpu-2", PATIENCE_S)
    assert not processes.is_alive(found)
    host.assert_nothing_left()
