"""The simulated MPS programs, run as the host and as containers run them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.mps_behaviour import misbehave
from tests.fakes.tables import tabled
from tests.fakes.waiting import eventually

SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)] or ["sh"]
PATH = f"{Path(sys.executable).resolve().parent}:{os.environ['PATH']}"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="multi-user mode needs root")


class Mps:
    """A pipe directory on a machine, with at most one daemon."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.root = root
        self.pipe, self.log = directory / "pipe", directory / "log"
        for path in (self.pipe, self.log):
            path.mkdir(parents=True)
        self.daemon: subprocess.Popen[str] | None = None

    def _environment(self, **more: str) -> dict[str, str]:
        return {
            "PATH": PATH,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
            **more,
        }

    def start(self, uuid: str, *flags: str) -> subprocess.Popen[str]:
        control = self.root / "usr/bin/nvidia-cuda-mps-control"
        environment = self._environment(CUDA_VISIBLE_DEVICES=uuid)
        daemon = subprocess.Popen(
            [control, "-f", *flags],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.daemon = self.daemon or daemon
        return daemon

    def ready(self, uuid: str, *flags: str) -> None:
        self.start(uuid, *flags)
        deadline = time.monotonic() + 90
        while not (self.pipe / "nvidia-cuda-mps-control.pid").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def ask(self, *commands: str) -> subprocess.CompletedProcess[str]:
        control = self.root / "usr/bin/nvidia-cuda-mps-control"
        text = "".join(f"{command}\n" for command in commands)
        return subprocess.run(
            [control],
            input=text,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )

    def client(
        self, *arguments: str, shell: str = "sh", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [shell, "sh"] if shell == "busybox" else [shell]
        return subprocess.run(
            [*command, self.root / "usr/bin/mps-client", *arguments],
            env=self._environment(**environment), capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip

    def held_client(self) -> subprocess.Popen[str]:
        """A connected client that stays, in a process group of its own."""
        held = subprocess.Popen(
            [self.root / "usr/bin/mps-client", "--hold"],
            env=self._environment(), stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert held.stdout.readline() == "mps=connected\n"
        return held

    def end(self) -> None:
        if self.daemon is not None:
            daemon, self.daemon = self.daemon, None
            daemon.terminate()
            try:
                daemon.communicate(timeout=90)
            finally:
                daemon.kill()  # nothing is left of a test that fails


@pytest.fixture
def mps(make, tmp_path):
    machine = make("h100-mig-static")
    misbehave(machine.host_root, start_delay_ms=0)
    one = Mps(machine.host_root, tmp_path / "mps")
    one.machine = machine
    one.uuid = machine.gpu(2).uuid
    yield one
    one.end()


def test_without_a_daemon_nobody_answers(mps):
    done = mps.ask("get_server_list")
    assert (done.returncode, done.stdout) == (1, "Cannot find MPS control daemon process\n")


def test_a_second_daemon_on_a_pipe_directory_is_refused(mps):
    mps.ready(mps.uuid)
    second = mps.start(mps.uuid)
    assert second.communicate(timeout=90)[0] == "An instance of this daemon is already running\n"
    assert second.returncode == 1


def test_commands_and_their_refusals(mps):
    mps.ready(mps.uuid, "-multiuser-server")
    number = mps.pipe / "nvidia-cuda-mps-control.pid"
    eventually(number.read_text)  # the file is there a moment before its content
    assert int(number.read_text()) == mps.daemon.pid
    lines = mps.ask(
        "frobnicate",
        "set_default_device_pinned_mem_limit 0 4096",
        "set_default_device_pinned_mem_limit 0 4K",
        "set_default_active_thread_percentage 101",
        "set_default_active_thread_percentage",
        "get_server_status 1",
        "get_default_active_thread_percentage",
        "set_default_device_pinned_mem_limit 0 2G",
        "get_default_device_pinned_mem_limit 0",
    ).stdout.splitlines()
    assert lines == [
        'Unknown command "frobnicate"',
        "100.0",
        "Invalid arguments: set_default_active_thread_percentage",
        "Server 1 not found",
        "100.0",
        "2G",
    ]


def test_defaults_hold_for_later_servers_and_are_lost_on_quit(mps):
    mps.ready(mps.uuid, "-multiuser-server")
    mps.ask("start_server -uid 0")
    server = mps.ask("get_server_list").stdout.strip()
    assert mps.ask(f"get_server_status {server}").stdout == "ACTIVE\n"
    mps.ask("set_default_active_thread_percentage 40")
    assert "active_thread_percentage=100\n" in mps.client().stdout
    mps.ask("quit")
    assert mps.daemon.wait(90) == 0
    assert list(mps.pipe.glob("*.pid")) == []
    mps.daemon.communicate()
    mps.daemon = None
    mps.ready(mps.uuid, "-multiuser-server")
    assert mps.ask("get_default_active_thread_percentage").stdout == "100.0\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_client_gets_the_tighter_limit(mps, shell):
    mps.ready(mps.uuid, "-multiuser-server")
    mps.ask("set_default_active_thread_percentage 40", "set_default_device_pinned_mem_limit 0 4G")
    wide = mps.client(
        shell=shell, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="90", CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=8G"
    )
    assert wide.stdout.splitlines() == [
        "mps=connected",
        f"device={mps.uuid}",
        "active_thread_percentage=40",
        "pinned_device_mem_limit_mib=4096",
    ]
    tight = mps.client(
        shell=shell,
        CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="10",
        CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=f"{mps.uuid}=512M,GPU-other=1M",
    )
    assert tight.stdout.splitlines()[2:] == [
        "active_thread_percentage=10",
        "pinned_device_mem_limit_mib=512",
        "ignored_mem_limit=GPU-other",
    ]
    assert mps.ask(f"get_client_list {mps.ask('get_server_list').stdout.strip()}").stdout == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_a_client_without_mps_says_so(mps, shell):
    done = mps.client(shell=shell)
    assert (done.returncode, done.stdout.splitlines()[0]) == (3, "mps=none")


def test_one_user_at_a_time_unless_multi_user(mps):
    mps.ready(mps.uuid)
    mps.ask("start_server -uid 0")
    first = mps.ask("get_server_list").stdout
    mps.ask("start_server -uid 1000")
    assert mps.ask("get_server_list").stdout not in ("", first), "the old server had no client"


def test_unknown_device_of_a_branch_before_r580_fails_when_a_server_starts(mps):
    mps.machine.load_driver("575.1")
    mps.ready("GPU-none", "-multiuser-server")
    done = mps.client()
    assert (done.returncode, done.stdout.splitlines()[0]) == (4, "mps=refused")
    assert "GPU-none" in (mps.log / "server.log").read_text()


def remove_libcuda(machine) -> None:
    [library] = machine.host_root.rglob("libcuda.so.1")
    library.unlink()


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda machine: misbehave(machine.host_root, cuda_error=802), 34),
        (remove_libcuda, 244),
        (lambda machine: machine.unload_driver(), 100),
        (lambda machine: machine.remove_gpu(2), 100),
    ],
    ids=["fault", "no library", "no driver", "no GPU"],
)
def test_control_daemon_from_r580_on_ends_silently_with_the_error_of_cuda(mps, spoil, code):
    spoil(mps.machine)
    daemon = mps.start(mps.uuid, "-multiuser-server")
    assert (daemon.communicate(timeout=90)[0], daemon.returncode) == ("", code)
    assert list(mps.pipe.iterdir()) == []


def test_dying(mps):
    misbehave(mps.root, start_delay_ms=0, die_after_s=0.05)
    mps.ready(mps.uuid, "-multiuser-server")
    assert mps.daemon.wait(90) == 1
    assert (mps.pipe / "control").exists(), "a crash leaves its pipe directory as it was"
    mps.daemon.communicate()
    mps.daemon = None
    assert mps.ask("get_server_list").returncode == 1


def of_branch(machine, branch: int) -> Path:
    """The machine's control program, as the driver branch has it."""
    machine.load_driver(f"{branch}.1")
    return machine.host_root / "usr/bin/nvidia-cuda-mps-control"


@pytest.mark.parametrize("branch", [470, 535, 550])
@pytest.mark.parametrize("options", [["-f", "-multiuser-server"], ["-f", "-M"], ["-f", "-f"], ["-v"], ["-x"]])
def test_options_end_the_program_when_it_is_older_than_r555(mps, branch: int, options: list[str]) -> None:
    done = subprocess.run(
        [of_branch(mps.machine, branch), *options], env=mps._environment(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"Cannot find MPS control daemon process\n")


@pytest.mark.parametrize("options", [["-f", "-M"], ["-f", "-multiuser-server", "-x"], ["-v"]])
def test_unknown_options_are_answered_with_help_from_r555_on(mps, options: list[str]) -> None:
    done = subprocess.run(
        [of_branch(mps.machine, 555), *options], env=mps._environment(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout.split(b"\n")[0]) == (
        1,
        b"CUDA MPS Control for Linux/Unix (simulated).",
    )


@tabled("branch", "lines")
def test_commands_are_those_of_the_branch(mps, branch: int, lines: list[str]) -> None:
    of_branch(mps.machine, branch)
    mps.start(mps.uuid)
    eventually((mps.pipe / "control").exists)
    commands = (
        "set_default_device_pinned_mem_limit 0 1G",
        "get_server_status 1",
        "set_default_active_thread_percentage 50",
    )
    eventually(lambda: mps.ask(*commands).stdout.splitlines() == lines)


def test_one_client_too_many_is_refused(mps):
    control = mps.root / "usr/bin/nvidia-cuda-mps-control"
    text = control.read_text()
    assert '"most_clients": 48' in text
    control.write_text(text.replace('"most_clients": 48', '"most_clients": 1'))
    mps.ready(mps.uuid, "-multiuser-server")
    held = mps.held_client()
    done = mps.client()
    assert (done.returncode, done.stdout.splitlines()) == (
        4,
        ["mps=refused", "reason=CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"],
    )
    os.killpg(held.pid, signal.SIGTERM)
    held.communicate(timeout=90)
    control.write_text(text)
    assert mps.client().returncode == 0
