"""Small parts: limits as the control program shows them, programs and their libraries, mounts, records."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from dra_driver import errors
from dra_driver.errors import PermanentError, StateError
from dra_driver.model.driver_files import DriverPrograms
from dra_driver.model.mps import MpsDaemonSpec, MpsDirectories
from dra_driver.mps_host import daemon_processes as processes
from dra_driver.mps_host.daemon_compute_mode import EXCLUSIVE_PROCESS, ComputeMode
from dra_driver.mps_host.daemon_control import bound_logs, is_answer, limit_commands, log_tail, status_text
from dra_driver.mps_host.daemon_mounts import KernelMounter, SelinuxLabels, is_tmpfs
from dra_driver.mps_host.daemon_processes import ProcessId
from dra_driver.mps_host.host_files import DaemonRecord, DaemonRecords, MpsLayout, mps_layout
from tests.fakes.tables import read_yaml
from tests.fakes.waiting import eventually

SPEC = MpsDaemonSpec("gpu-1", "GPU-1", "gpu", "GPU-1")
TABLES = read_yaml(Path(__file__).with_name("tables.yaml"))


@pytest.mark.parametrize(("wanted", "text", "equal"), TABLES["answers"])
def test_answers_are_compared_by_value(wanted, text, equal):
    assert is_answer(wanted, text) is equal


def test_only_limits_that_are_set_are_sent():
    assert limit_commands(SPEC) == ()


def test_paths_lie_below_the_plugins_directory():
    layout = mps_layout(Path("/p/gpu.nvidia.com"))
    assert layout.directories("gpu-1").pipe == "/p/gpu.nvidia.com/mps/gpu-1/pipe"
    assert layout.record("gpu-1") == Path("/p/gpu.nvidia.com/mps/gpu-1.json")
    mig = "gpu-06e38c7d-mig-1g10gb-me-20-1"
    assert layout.directories(mig) == MpsDirectories(
        *(f"/p/gpu.nvidia.com/mps/gpu_3pvws44x/{part}" for part in ("pipe", "log", "shm"))
    )
    assert layout.record(mig) == Path(f"/p/gpu.nvidia.com/mps/{mig}.json")
    for name in ("", "..", "a/b", "A", "x" * 64, "host.sock"):
        with pytest.raises(PermanentError, match="not a device name"):
            layout.directory(name)


MICROK8S = Path("/var/snap/microk8s/common/var/lib/kubelet/plugins/gpu.nvidia.com")
LONGEST_NAME = "gpu-" + "a" * 59


def test_every_device_has_its_own_directory_below_the_longest_kubelet_root():
    layout = mps_layout(MICROK8S)
    names = [f"gpu-{gpu:08x}" for gpu in range(8)]
    names += [
        f"{gpu}-mig-{slot}g-{profile}-{slot}" for gpu in names for slot in range(8) for profile in range(20)
    ]
    names += [LONGEST_NAME]
    for name in names:
        layout.refuse_long_path(name)
    assert len({layout.directory(name) for name in names}) == len(names)
    assert not {layout.directory(name).name for name in names[8:]} & {*names}


def test_path_that_is_too_long_for_a_socket_is_refused_with_its_length_and_the_limit():
    layout = MpsLayout(Path("/" + "r" * 74))
    layout.refuse_long_path("gpu-12")
    with pytest.raises(PermanentError) as refused:
        layout.refuse_long_path("gpu-1234")
    path = f"{layout.root}/gpu-1234/pipe/control_privileged"
    assert len(path) == 108
    assert str(refused.value) == (
        f"no MPS daemon can run for gpu-1234: the path of its socket {path} has 108 bytes, but NVIDIA's program "
        "accepts at most 106; use a kubelet plugins directory whose path is 2 bytes shorter"
    )


# --- programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "printed", "code", "expected"),
    [(call, *row) for call in ("read", "set") for row in TABLES[f"modes {call}"]],
)
def test_compute_mode_is_read_from_the_output_of_nvidia_smi(tmp_path, call, printed, code, expected):
    program = tmp_path / "nvidia-smi"
    answer = f"cat <<'END'\n{printed}\nEND\nexit {code}\n"
    if call == "set":
        answer = f'case "$*" in *query*) echo Exclusive_Process; exit;; esac\n{answer}'
    program.write_text(f"#!/bin/sh\n{answer}")
    program.chmod(0o755)
    mode = ComputeMode(lambda: DriverPrograms("/", {"nvidia-smi": str(program)}, os.environ["PATH"]))
    ask = mode.get if call == "read" else partial(mode.set, mode=EXCLUSIVE_PROCESS)
    if not isinstance(expected, str):
        assert ask("GPU-1") == expected
        return
    kind, _, text = expected.partition(": ")
    with pytest.raises(getattr(errors, kind), match=text):
        ask("GPU-1")


# --- processes -----------------------------------------------------------------------------------


def test_a_process_is_known_by_its_start_time():
    own = processes.identify(os.getpid())
    assert own is not None
    assert processes.is_alive(own)
    assert not processes.is_alive(ProcessId(own.pid, own.start_time + 1))
    assert processes.identify(2**22 + 1) is None


def test_process_that_cannot_be_read_now_counts_as_running(monkeypatch):
    own = processes.identify(os.getpid())

    def refuse(path, *_given):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(processes, "open", refuse, raising=False)
    assert processes.is_alive(own)
    for call in (
        partial(processes.users_of, "/pipe"),
        partial(processes.is_control_daemon, own, "/pipe"),
        partial(processes.wait_gone, [own], 0.0),
    ):
        with pytest.raises(StateError, match=r"cannot read /proc/.*: Too many open files"):
            call()
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(StateError, match="cannot read /proc: Too many open files"):
        processes.users_of("/pipe")


@pytest.mark.parametrize("refused", ["stat", "pidfd"])
def test_process_that_may_be_another_one_gets_no_signal(monkeypatch, refused):
    def refuse(*_given):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stranger:
        own = processes.identify(stranger.pid)
        earlier = ProcessId(own.pid, own.start_time - 1)  # it had the PID before
        before = len([*Path("/proc/self/fd").iterdir()])
        with monkeypatch.context() as patch:
            if refused == "stat":
                patch.setattr(processes, "open", refuse, raising=False)
            else:
                patch.setattr(os, "pidfd_open", refuse)
            with pytest.raises(StateError, match=f"cannot read /proc/{own.pid}.*: Too many open files"):
                processes.send_signal(earlier, signal.SIGKILL)
            with pytest.raises(StateError):
                processes.end([earlier], 60.0)
        processes.send_signal(earlier, signal.SIGKILL)
        assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert stranger.returncode == 0, "it ended by itself"


def test_a_process_is_not_gone_while_a_thread_of_it_is_left():
    """Its first thread is a zombie; a killed process looks like this until the kernel has released the GPU."""
    script = "import ctypes, os, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); "
    script += "print(flush=True); ctypes.CDLL(None).syscall({'x86_64': 60}.get(os.uname().machine, 93), 0)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            stat = Path(f"/proc/{child.pid}/stat")
            eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
            assert processes.identify(child.pid) is not None
        finally:
            child.kill()
    assert processes.identify(child.pid) is None


def test_a_zombie_is_gone():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.identify(child.pid) is None
    child.wait()


@pytest.mark.parametrize(("script", "text"), [("exit 1", "exit code 1"), ("kill -9 $$", "signal 9, SIGKILL")])
def test_child_that_ends_leaves_its_status_to_the_first_who_takes_it(script, text):
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", script], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert [status_text(processes.reap(pid)) for _ in range(2)] == [text, "an unknown exit status"]


@pytest.mark.parametrize(("error", "text"), TABLES["CUDA errors"])
def test_exit_code_of_a_daemon_that_cuda_keeps_from_starting_names_the_error(error, text):
    assert status_text(error % 256) == text


def test_child_that_runs_has_no_status():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert processes.reap(child.pid) is None


def test_a_process_that_ignores_term_is_killed():
    child = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo; while :; do sleep 0.01; done"], stdout=subprocess.PIPE
    )
    child.stdout.readline()
    identity = processes.identify(child.pid)
    processes.end([identity], 0.1)
    eventually(lambda: not processes.is_alive(identity))
    child.communicate()


# --- mounts, logs, records -----------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_mounting_twice_and_unmounting_twice(tmp_path):
    mounter = KernelMounter(tmp_path, SelinuxLabels(enabled=False))
    shm = tmp_path / "shm"
    shm.mkdir()
    for _ in range(2):
        mounter.mount(shm)
    assert is_tmpfs(shm)
    half = os.sysconf("SC_PHYS_PAGES") // 2
    assert os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize == half * os.sysconf("SC_PAGE_SIZE")
    for _ in range(2):
        mounter.unmount(shm)
    assert not is_tmpfs(shm)


_QUESTION = tuple(
    f"[2026-11-27 04:42:31.798 Control  6833] {text}"
    for text in ("Accepting connection...", "NEW UI", "Cmd:get_server_list", "7140", "100.0", "UI closed")
)


def test_the_end_of_a_log_is_one_line(tmp_path):
    directories = MpsLayout(tmp_path).directories("gpu-1")
    assert log_tail(directories) == ""
    log = Path(directories.log)
    log.mkdir(parents=True)
    (log / "control.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    assert log_tail(directories) == "control.log: line 996 | line 997 | line 998 | line 999"
    questions = "".join(f"{line}\n" for line in _QUESTION * 50)
    (log / "control.log").write_text(f"[1 Control 2] the reason 7\n{questions}")
    assert log_tail(directories) == "control.log: [1 Control 2] the reason 7"


def test_log_that_has_grown_too_large_keeps_its_end_and_what_is_appended_later(tmp_path):
    directories = MpsLayout(tmp_path).directories("gpu-1")
    log = Path(directories.log)
    log.mkdir(parents=True)
    lines = [f"line {number:09}" for number in range(400_000)]
    (log / "server.log").write_text("".join(f"{line}\n" for line in lines))
    (log / "control.log").write_text("small\n")
    outside = tmp_path / "outside"
    outside.write_bytes(b"x" * (5 << 20))
    (log / "link.log").symlink_to(outside)
    with (log / "server.log").open("a") as daemon:
        bound_logs(directories)
        daemon.write("later\n")
    kept = (log / "server.log").read_text().splitlines()
    assert kept == [*lines[-len(kept) + 1 :], "later"]
    assert (1 << 20) - 100 < (log / "server.log").stat().st_size <= (1 << 20) + 6
    assert ((log / "control.log").read_text(), outside.stat().st_size) == ("small\n", 5 << 20)


def test_log_with_a_hole_is_left_alone(tmp_path):
    """A program that does not append continues at its old position."""
    directories = MpsLayout(tmp_path).directories("gpu-1")
    log = Path(directories.log)
    log.mkdir(parents=True)
    with (log / "server.log").open("wb") as file:
        file.seek(5 << 20)
        file.write(b"end\n")
    bound_logs(directories)
    assert (log / "server.log").stat().st_size == (5 << 20) + 4


def test_records_there_and_back(tmp_path):
    records = DaemonRecords(MpsLayout(tmp_path))
    full = DaemonRecord(SPEC, {"GPU-1": 0})
    records.save(full)
    assert DaemonRecords(MpsLayout(tmp_path)).all() == {"gpu-1": full}
    bare = DaemonRecord(SPEC)
    records.save(bare)
    assert DaemonRecords(MpsLayout(tmp_path)).all() == {"gpu-1": bare}
    (tmp_path / "gpu-1.json.unreadable-1").touch()
    records.forget("gpu-1")
    records.forget("gpu-1")
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-1.json.unreadable-1"], "a person looks at it"


def test_records_are_written_and_removed_for_good(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
    )
    records = DaemonRecords(MpsLayout(tmp_path))
    records.save(DaemonRecord(SPEC))
    assert [name.endswith(".tmp") for name in synced] == [True, False]
    assert synced[1] == tmp_path.name
    synced.clear()
    records.forget("gpu-1")
    assert synced == [tmp_path.name]
