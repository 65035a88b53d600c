"""The simulated MPS programs, as the MPS host and containers run them. What NVIDIA's own control program does is in
tests/mps_host/test_real_programs.py."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dra_driver.simulator import Machine
from tests.fakes.waiting import PATIENCE_S, eventually

SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)] or ["sh"]
PATH = f"{Path(sys.executable).resolve().parent}:{os.environ['PATH']}"


class Mps:
    """A pipe directory on a machine, with at most one daemon."""

    def __init__(self, machine: Machine, pipe: Path) -> None:
        self.bin, self.pipe, self.uuid = machine.host_root / "usr/bin", pipe, machine.gpu(2).uuid
        pipe.mkdir()
        self.variables = {
            "PATH": PATH,
            "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
            "CUDA_VISIBLE_DEVICES": self.uuid,
        }
        self.daemon: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        control = self.bin / "nvidia-cuda-mps-control"
        self.daemon = subprocess.Popen([control, "-f", *options], env=self.variables)
        eventually((self.pipe / "nvidia-cuda-mps-control.pid").exists)

    def run(self, *command: str | Path, text: str = "", **more: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            command,
            input=text,
            env=self.variables | more,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stdout.splitlines()

    def ask(self, *commands: str) -> tuple[int, list[str]]:
        return self.run(self.bin / "nvidia-cuda-mps-control", text="".join(f"{one}\n" for one in commands))


@pytest.fixture
def mps(make: Callable[..., Machine], tmp_path: Path) -> Iterator[Mps]:
    one = Mps(make("h100-mig-static"), tmp_path / "pipe")
    yield one
    if one.daemon is not None:
        one.daemon.terminate()
        one.daemon.wait(PATIENCE_S)


def test_daemon_keeps_limits_and_answers_until_it_quits(mps: Mps) -> None:
    assert mps.ask("get_server_list") == (1, ["Cannot find MPS control daemon process"])
    mps.start("-multiuser-server")
    assert mps.ask(
        "frobnicate",
        "get_default_active_thread_percentage",
        "set_default_active_thread_percentage 40",
        "set_default_device_pinned_mem_limit 0 1536M",
        "get_default_device_pinned_mem_limit 0",
        "get_default_device_pinned_mem_limit 1",
        "get_server_list",
    ) == (0, ['Unknown command "frobnicate"', "100.0", "40.0", "1G"])
    assert mps.ask("quit") == (0, [])
    assert mps.daemon is not None
    assert mps.daemon.wait(PATIENCE_S) == 0
    assert not (mps.pipe / "nvidia-cuda-mps-control.pid").exists()


@pytest.mark.parametrize("shell", SHELLS)
def test_client_prints_its_limits_and_is_listed_while_it_is_connected(mps: Mps, shell: str) -> None:
    client = [*([shell] if shell == "busybox" else []), "sh" if shell == "busybox" else shell]
    program = mps.bin / "mps-client"
    assert mps.run(*client, program)[1][0] == "mps=none"
    mps.start()
    assert mps.run(*client, program, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=8G") == (
        0,
        ["mps=connected", f"device={mps.uuid}", "active_thread_percentage=", "pinned_device_mem_limit=0=8G"],
    )
    held = subprocess.Popen([*client, program, "--hold"], env=mps.variables, start_new_session=True)
    server = eventually(lambda: mps.ask("get_server_list")[1])
    eventually(lambda: mps.ask(f"get_client_list {server[0]}")[1])
    os.killpg(held.pid, signal.SIGTERM)
    held.wait(PATIENCE_S)
    eventually(lambda: not mps.ask(f"get_client_list {server[0]}")[1])
