"""Whose a process is, by its cgroup."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import StateError
from dra_driver.host.processes import any_runs, gpu_users, is_of_the_host, origin, start_time, users_of
from dra_driver.model.gpu import ProcessOrigin
from tests.fakes.tables import data_of

UID = "0a1b2c3d-06c0-4d70-8a51-e59b25b2c16c"
SYSTEMD = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice"

CGROUPS = data_of(__file__)
HOST, OTHERS = CGROUPS["of the host"], CGROUPS["of others"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(text, True) for text in HOST.values()] + [(text, False) for text in OTHERS.values()],
    ids=[*(f"host, {name}" for name in HOST), *OTHERS],
)
def test_only_services_and_logins_are_the_hosts(tmp_path: Path, text: str, expected: bool) -> None:
    (tmp_path / "4711").mkdir()
    (tmp_path / "4711/cgroup").write_text(f"{text}\n")
    assert is_of_the_host(str(tmp_path), 4711) is expected


def test_process_that_cannot_be_checked_may_be_a_pods(tmp_path: Path) -> None:
    assert not is_of_the_host(str(tmp_path), 4711)
    (tmp_path / "4711").mkdir()
    (tmp_path / "4711/cgroup").write_bytes(b"\xff\x00")
    assert not is_of_the_host(str(tmp_path), 4711)


GONE, OTHER = "11111111-06c0-4d70-8a51-e59b25b2c16c", "22222222-06c0-4d70-8a51-e59b25b2c16c"


def proc(directory: Path, *cgroups: str, namespace: str = "pid:[4026531836]") -> str:
    """The processes of a host; their groups in this order."""
    (directory / "self/ns").mkdir(parents=True)
    (directory / "self/ns/pid").symlink_to(namespace)
    for number, text in enumerate(cgroups, 4711):
        (directory / str(number)).mkdir()
        (directory / f"{number}/cgroup").write_text(f"{text}\n")
    (directory / "1").mkdir()  # a process that exited during the check
    return str(directory)


@pytest.mark.parametrize(
    "text", [OTHERS[name] for name in ("systemd", "cgroupfs", "guaranteed", "version 1")]
)
def test_process_of_a_pod_is_found_by_its_group(tmp_path: Path, text: str) -> None:
    host = proc(tmp_path, "0::/init.scope", text)
    assert any_runs(host, [GONE, UID]) is True
    assert any_runs(host, [GONE]) is False


def test_nothing_is_reported_where_not_all_processes_show_their_pods(tmp_path: Path) -> None:
    assert (
        any_runs(proc(tmp_path / "no host PIDs", OTHERS["systemd"], namespace="pid:[4026532001]"), [GONE])
        is None
    )
    assert any_runs(proc(tmp_path / "no groups", "0::/k8s.io/0123", "0::/"), [GONE]) is None
    assert any_runs(str(tmp_path / "no proc"), [GONE]) is None
    assert any_runs(proc(tmp_path / "no pods", OTHERS["systemd"]), []) is None


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Files and directories that this process cannot open now, because it has too many files open."""
    found: set[str] = set()

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *given: Any, **more: Any) -> Any:
            if str(path) in found:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            return function(path, *given, **more)

        return call

    for module, name in ((builtins, "open"), (io, "open"), (os, "listdir")):
        monkeypatch.setattr(module, name, refusing(getattr(module, name)))
    return found


def test_process_that_cannot_be_read_now_may_be_of_the_pod(tmp_path: Path, unreadable: set[str]) -> None:
    host = proc(tmp_path, OTHERS["systemd"], OTHERS["cgroupfs"])
    assert any_runs(host, [GONE]) is False
    for path in (host, f"{host}/4712/cgroup"):
        unreadable |= {path}
        assert any_runs(host, [GONE]) is None
        unreadable.clear()


def test_process_that_cannot_be_read_now_may_use_the_gpu(tmp_path: Path, unreadable: set[str]) -> None:
    host = proc(tmp_path, "0::/init.scope")
    (tmp_path / "4711/fd").mkdir()
    (tmp_path / "4711/comm").write_text("python3")
    (tmp_path / "4711/stat").write_text("4711 (python3) S" + " 1" * 30)
    assert (gpu_users(host, []), users_of(host, ["/dev/nvidia0"]), start_time(host, 4711)) == ([], [], 1)
    for path in (host, f"{host}/4711/fd"):
        unreadable |= {path}
        for call in (partial(gpu_users, host, []), partial(users_of, host, ["/dev/nvidia0"])):
            with pytest.raises(StateError, match=f"cannot read {path}: Too many open files"):
                call()
        unreadable.clear()
    unreadable |= {f"{host}/4711/stat", f"{host}/4711/cgroup"}
    with pytest.raises(StateError, match="cannot read"):
        start_time(host, 4711)
    assert (is_of_the_host(host, 4711), origin(host, 4711)) == (False, ProcessOrigin("unknown"))


def test_programs_that_keep_a_gpu_open(tmp_path: Path) -> None:
    """Monitoring agents count. Workloads of claims, this driver, and what runs on every node do not."""
    host = proc(tmp_path, *["0::/system.slice/x.service"] * 6, OTHERS["cgroupfs"], "0::/")
    rows = [
        (4711, "nv-hostengine", "nv-hostengine\0-n", ["/dev/nvidiactl", "/dev/nvidia0"]),
        (4712, "nvidia-persiste", "nvidia-persistenced", ["/dev/nvidiactl"]),
        (4713, "python3", "/usr/bin/python3\0/usr/local/bin/gpu-dra-driver\0run", ["/dev/nvidiactl"]),
        (4714, "python3", "python3\0-m\0dra_driver.cli.main\0run", ["/dev/nvidia7"]),
        (4715, "bash", "bash", ["/dev/null", "/dev/nvidia-uvm", "/home/nvidia0"]),
        (4716, "", "", ["/dev/nvidia3"]),
        (4717, "train", "train", ["/dev/nvidia0"]),
        (4718, "of-a-machine", "x", ["/machine/root/dev/nvidia0"]),
    ]
    for pid, name, command, files in rows:
        (tmp_path / f"{pid}/comm").write_text(f"{name}\n")
        (tmp_path / f"{pid}/cmdline").write_text(command)
        (tmp_path / f"{pid}/fd").mkdir()
        for number, file in enumerate(files):
            (tmp_path / f"{pid}/fd/{number}").symlink_to(file)
    first, last = (
        ["nv-hostengine (process 4711)", "a program (process 4716)"],
        ["of-a-machine (process 4718)"],
    )
    assert gpu_users(host, [UID]) == [*first, *last]
    assert gpu_users(host, [GONE]) == [*first, "train (process 4717)", *last]
    assert gpu_users(host, [UID], "/machine/root") == ["of-a-machine (process 4718)"]
    (tmp_path / "self/cmdline").write_text("x")
    assert gpu_users(host, [UID], "/machine/root") == [], "it named the program that asks"
    assert gpu_users(proc(tmp_path / "no host PIDs", namespace="pid:[4026532001]"), []) is None
    assert gpu_users(str(tmp_path / "no proc"), []) is None


@pytest.mark.parametrize(
    ("state", "flags", "pending", "is_there"),
    [
        pytest.param("S", 0x400, 0x100, True, id="sleeps, and will see the signal"),
        pytest.param("D", 0x400, 0x4002, True, id="waits for the disk"),
        pytest.param("D", 0x400, 0x4100, False, id="hangs in the kernel, and was killed"),
        pytest.param("D", 0x404, 0, False, id="hangs while it exits"),
        pytest.param("Z", 0x404, 0, False, id="other threads hang"),
    ],
)
def test_killed_process_that_hangs_in_the_kernel_has_ended(
    state: str, flags: int, pending: int, is_there: bool, tmp_path: Path
) -> None:
    (tmp_path / "4711").mkdir()
    (tmp_path / "4711/stat").write_text(f"4711 (a) b) {state} 1 1 1 0 -1 {flags} {'0 ' * 12}77 0 0")
    (tmp_path / "4711/status").write_text(f"Name:\ta\nSigPnd:\t{pending:016x}\nShdPnd:\t0\n")
    assert start_time(str(tmp_path), 4711) == (77 if is_there else None)


ZEROS = "0" * 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, "container") for name, text in OTHERS.items() if name in ("systemd", "cgroupfs", "static")),
        (HOST["display server"], "host"),
        (f"0::/system.slice/docker-{ZEROS}.scope", "container"),
        (f"0::/docker/{ZEROS}", "container"),
        (f"4:devices:/system.slice/x.service\n3:cpu:/docker/{ZEROS}", "container"),
        (f"0::/{SYSTEMD}/cri-containerd-{ZEROS}.scope (deleted)", "unknown"),
        ("0::/system.slice/train.service (deleted)", "unknown"),
        ("0::/", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_process_is_of_a_container_of_the_host_or_of_unknown_origin(
    tmp_path: Path, text: str, expected: str
) -> None:
    assert origin(str(tmp_path), 4711) == ProcessOrigin()
    (tmp_path / "4711").mkdir()
    (tmp_path / "4711/cgroup").write_text(f"{text}\n")
    found = origin(str(tmp_path), 4711)
    assert found == ProcessOrigin(expected, UID if "pod" in text and "deleted" not in text else None)


def test_everyone_who_has_a_node_open_is_named_also_what_always_runs(tmp_path: Path) -> None:
    host = proc(tmp_path, "0::/system.slice/a.service", "0::/b", "0::/c", "0::/d", "0::/e", "0::/f")
    programs = {
        4711: ("nvidia-persiste", "/dev/nvidia1 (deleted)"),
        4712: ("qemu-system-x86", "/run/somewhere/dev/vfio/23"),
        4713: ("python3", "/dev/nvidia11"),
        4714: ("", "/dev/vfio/23"),
        4715: ("dcgm-exporter", "/dev/nvidia1"),
        4716: ("python3", "/dev/nvidia1"),
    }
    for pid, (name, file) in programs.items():
        (tmp_path / f"{pid}/comm").write_text(f"{name}\n")
        (tmp_path / f"{pid}/fd").mkdir()
        (tmp_path / f"{pid}/fd/3").symlink_to(file)
    (tmp_path / "4716/cmdline").write_text("/usr/bin/python3\0/usr/local/bin/gpu-dra-driver\0run\0")
    persistenced, *others = users_of(host, ["/dev/nvidia1"]) or ()
    assert persistenced == "nvidia-persiste (process 4711)"
    assert others == ["dcgm-exporter (process 4715)", "python3 (process 4716)"]
    assert users_of(host, ["/dev/nvidia1"], others_only=True) == ["dcgm-exporter (process 4715)"]
    assert users_of(host, ["/dev/vfio/23", "/dev/vfio/devices/vfio0"]) == [
        "qemu-system-x86 (process 4712)",
        "a program (process 4714)",
    ]
    assert users_of(host, ["/dev/nvidia3"]) == users_of(host, []) == []
    assert users_of(proc(tmp_path / "container", namespace="pid:[4026532000]"), ["/dev/nvidia1"]) is None
