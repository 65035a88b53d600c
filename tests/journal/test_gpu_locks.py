import errno
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path

import pytest

from dra_driver.base import bounded_program
from dra_driver.errors import RetryableError, StateError
from dra_driver.journal.locks import GpuLocks
from tests.fakes.directories import names
from tests.fakes.preparing import in_threads
from tests.fakes.waiting import PATIENCE_S, eventually

A, B, C = "GPU-a", "GPU-b", "GPU-c"
HOLDER = """
import sys
from pathlib import Path
from dra_driver.journal.locks import GpuLocks
locks = GpuLocks(Path(sys.argv[1]))
with locks.hold(sys.argv[2:], 5):
    print("held", flush=True)
    sys.stdin.readline()
"""
STARTS_A_PROGRAM = """
import socket, sys
from pathlib import Path
from dra_driver.base.bounded_program import run_program
from dra_driver.journal.locks import GpuLocks
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[2])
server.listen()
with GpuLocks(Path(sys.argv[1])).hold(["GPU-a"], 5):
    run_program(["/bin/sh", "-c", "echo $$ >$0; exec sleep 600", sys.argv[3]], {}, timeout_s=600, slot="test")
"""


@pytest.fixture
def locks(tmp_path: Path) -> GpuLocks:
    made = GpuLocks(tmp_path / "locks")
    made.open()
    return made


def descriptors() -> int:
    return len(names(Path("/proc/self/fd")))


def can_hold(locks: GpuLocks, *uuids: str) -> bool:
    try:
        with locks.hold(uuids, 0.02):
            return True
    except RetryableError:
        return False


def test_lock_excludes_other_threads_of_the_same_gpu_only(locks: GpuLocks) -> None:
    with locks.hold([A, B], 1):
        assert [can_hold(locks, uuid) for uuid in (A, B, C)] == [False, False, True]
    assert can_hold(locks, A, B, C)


def test_lock_excludes_another_process_and_ends_with_it(locks: GpuLocks, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "locks"), A]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert (can_hold(locks, A), can_hold(locks, B)) == (False, True)
        process.kill()
        process.wait()
        with locks.hold([A], 2):
            pass


def test_lock_lasts_until_the_program_of_a_killed_process_has_ended(locks: GpuLocks, tmp_path: Path) -> None:
    """nvidia-smi takes effect even if the plugin that started it is killed. The next plugin must not change the
    GPU before that. Nothing else of the killed process remains.
    """
    socket_path, pid_file = tmp_path / "socket", tmp_path / "pid"
    command = [
        sys.executable,
        "-c",
        STARTS_A_PROGRAM,
        str(tmp_path / "locks"),
        str(socket_path),
        str(pid_file),
    ]
    with subprocess.Popen(command) as process:
        pid = int(eventually(lambda: pid_file.exists() and pid_file.read_text()))
        process.kill()
        process.wait()
    assert (can_hold(locks, A), can_hold(locks, B)) == (False, True)
    assert (locks.is_held(A), locks.is_held(B)) == (True, False)
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(socket_path))
    os.kill(pid, signal.SIGKILL)
    with locks.hold([A], 20):
        pass
    assert not locks.is_held(A)


def test_block_ends_with_a_program_that_cannot_be_killed(
    locks: GpuLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[subprocess.Popen[str]] = []
    monkeypatch.setattr(bounded_program, "_AFTER_KILL_S", 0.05)
    monkeypatch.setattr(bounded_program, "_kill", children.append)

    def work() -> None:
        with locks.hold([A], 1):
            bounded_program.run_program(["sleep", "600"], dict(os.environ), timeout_s=0.1, slot="GPU-a")

    with ThreadPoolExecutor() as threads:
        working = threads.submit(work)
        child = eventually(lambda: children and children[0])
        assert (can_hold(locks, A), locks.is_held(A)) == (False, True)
        assert not working.done()
        child.kill()
        assert isinstance(working.exception(20), TimeoutError)
    assert can_hold(locks, A)


def test_program_has_the_locks_of_all_blocks_around_it_and_no_other_descriptor(locks: GpuLocks) -> None:
    def descriptors_of_a_program() -> set[str]:
        script = "for one in /proc/$$/fd/*; do readlink $one; done"
        return set(
            bounded_program.run_program(["/bin/sh", "-c", script], {}, timeout_s=20, slot="test")[1].split()
        )

    bare = {line for line in descriptors_of_a_program() if not line.startswith("pipe:")}
    with locks.hold([A], 1), locks.hold([B], 1):
        context = copy_context()
        found = {line for line in descriptors_of_a_program() if not line.startswith("pipe:")}
    assert sorted(Path(line).name for line in found - bare) == ["GPU-a.lock", "GPU-b.lock"]
    after = {line for line in context.run(descriptors_of_a_program) if not line.startswith("pipe:")}
    assert after == bare, "a thread that was left behind does not pass on descriptors that others have now"


def test_busy_gpu_is_named_after_the_timeout(locks: GpuLocks) -> None:
    with locks.hold([B], 1):
        started = time.monotonic()
        with pytest.raises(RetryableError) as caught, locks.hold([A, B], 0.05):
            pass
        assert 0.04 < time.monotonic() - started < PATIENCE_S
    assert str(caught.value) == (
        "another process of gpu-dra-driver still works on GPU GPU-b; if this lasts, drain and reboot the node"
    )
    assert can_hold(locks, A, B)


@pytest.mark.parametrize(("uuids", "timeout_s"), [([A], -1), ([A, A], 1), ([], 0)])
def test_free_locks_are_had(locks: GpuLocks, tmp_path: Path, uuids: list[str], timeout_s: float) -> None:
    """When the time is over already, for a GPU that is named twice, and for none."""
    with locks.hold(uuids, timeout_s):
        assert names(tmp_path / "locks") == [f"{uuid}.lock" for uuid in set(uuids)]


def test_lock_is_released_when_the_work_fails(locks: GpuLocks) -> None:
    with pytest.raises(ZeroDivisionError), locks.hold([A, B], 1):
        raise ZeroDivisionError
    assert can_hold(locks, A, B)


def test_name_of_a_lock_file_stays_in_the_directory(locks: GpuLocks, tmp_path: Path) -> None:
    with locks.hold(["../../etc/x", "GPU-ä"], 1):
        assert names(tmp_path / "locks") == ["GPU-_.lock", "______etc_x.lock"]


def test_order_of_the_gpus_never_leads_to_a_deadlock(locks: GpuLocks, tmp_path: Path) -> None:
    second = GpuLocks(tmp_path / "locks")
    inside: dict[str, int] = dict.fromkeys((A, B, C), 0)
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(15):
            wanted = rng.sample([A, B, C], rng.randint(1, 3))
            with (locks if seed % 2 else second).hold(wanted, 10):
                for uuid in wanted:
                    inside[uuid] += 1
                    if inside[uuid] != 1:
                        wrong.append(uuid)
                for uuid in wanted:
                    inside[uuid] -= 1

    assert in_threads(*(partial(work, seed) for seed in range(6))) == [None] * 6
    assert wrong == []


def test_descriptors_do_not_leak_over_a_thousand_acquisitions(locks: GpuLocks, tmp_path: Path) -> None:
    with locks.hold([A, B], 1):
        pass
    before = descriptors()
    for number in range(1000):
        if number % 10 == 0:
            with locks.hold([A], 1), pytest.raises(RetryableError), locks.hold([A, B], 0):
                pass
        with locks.hold([A, B], 1):
            pass
    assert descriptors() == before
    assert names(tmp_path / "locks") == ["GPU-a.lock", "GPU-b.lock"]


def test_missing_directory_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StateError) as caught, GpuLocks(tmp_path / "gone").hold([A], 1):
        pass
    assert str(caught.value) == (
        f"cannot open the lock file {tmp_path / 'gone' / 'GPU-a.lock'}: the directory does not exist; "
        "create it or check the mount"
    )


def test_file_system_without_locks_is_one_sentence(
    locks: GpuLocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    before = descriptors()
    with pytest.raises(StateError) as caught, locks.hold([A], 1):
        pass
    assert str(caught.value) == f"cannot lock {tmp_path / 'locks' / 'GPU-a.lock'}: No locks available"
    assert descriptors() == before
