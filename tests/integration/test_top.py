"""`top` on healthy and failing nodes, into a pipe and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import termios
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import forked_commands
import pytest
import yaml

from dra_driver.app.settings import resolve
from dra_driver.base.file_lock import UseMark
from dra_driver.cli.machine import CommandMachine
from dra_driver.cli.node import NodeSnapshot
from dra_driver.cli.rules.node_view import NodeView
from dra_driver.cli.state_on_disk import plugin_problems
from dra_driver.errors import NvmlUnavailableError, StateError
from dra_driver.health.store import KeptHealth, encode
from dra_driver.journal.records import RecordStore
from dra_driver.model.claim import AllocatedClaim, ClaimRef, HeldDevice
from dra_driver.model.gpu import Gpu
from dra_driver.model.health import HealthState, HealthTarget, Reason, Severity
from dra_driver.model.ids import gpu_device_names
from dra_driver.model.inventory import DriverVersions, Inventory
from dra_driver.model.problems import NodeProblem, ProblemCode
from dra_driver.model.record import ClaimRecord
from dra_driver.nvml import calls
from dra_driver.reporting.http import HttpEndpoint, json_page
from dra_driver.reporting.node_problems import Reported
from dra_driver.reporting.node_problems import encode as encode_problems
from dra_driver.simulator import Machine, create_machine
from tests.cli.test_tables import on_terminal
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.integration.conftest import DRIVER, Node
from tests.integration.test_mig_commands import files
from tests.integration.test_process import call, environment

Json = dict[str, Any]
NOW = datetime(2026, 1, 5, 9, 30, tzinfo=UTC)
START = int(NOW.timestamp())


# --- a node at work -----------------------------------------------------------------------------


def options(node: Node) -> list[str]:
    return [*node.machine_flags, "--cdi-root", node.settings.cdi_root, "--node-name", "node-a"]


def test_top_of_a_driver_at_work(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.reporting.receipts._WRITE_S", 3600.0)  # only once
    names = [device["name"] for device in node.devices()]
    node.prepare(node.allocated_by_hand("training", names[2], names[3]))
    node.machine.set_remapped_rows(3, pending=True)
    node.machine.raise_xid(3, 79)
    health = node.plugin_dir / "health.json"
    eventually(lambda: health.exists() and {"row-remap", "xid"} <= {reason["key"] for reason in kept(health)})
    node.machine.hold_gpu(2, 4711, "python")
    eventually((node.plugin_dir / "receipts.json").exists)
    before = files(node.plugin_dir) | files(node.cdi)
    done = call("top", *options(node))
    assert (done.returncode, done.stderr) == (0, "")
    sections = {part.split()[0]: part.splitlines()[1:] for part in done.stdout.split("\n\n")}
    gpus = {line.split()[1]: line.split() for line in sections["#"]}
    assert list(gpus) == names
    assert [gpus[name][0] for name in names] == [str(index) for index in range(len(names))]
    assert gpus[names[2]][-3:] == ["ok", "default/training", "pod-of-training"]
    assert "512/81559" in gpus[names[2]]
    assert gpus[names[3]][-3:] == ["UNHEALTHY", "default/training", "pod-of-training"]
    assert [[*line.split()[:2], line.split()[3]] for line in sections["CLAIM"]] == [
        ["default/training", "pod-of-training", names[2]],
        ["default/training", "pod-of-training", names[3]],
    ]
    assert sections["CLAIM"][1].endswith("  UNHEALTHY")
    assert [line.split()[:4] for line in sections["HEALTH"] if line.startswith("gpu")] == [
        [names[3], "UNHEALTHY", "xid", "79"],
        [names[3], "DEGRADED", "row-remap", "pending"],
    ]
    assert [line.split() for line in sections["POD"]] == [["-", "512", "40", names[2], "4711", "python"]]
    node.machine.hold_gpu(5, 4712, "stray")  # which no claim has
    (stray,) = (
        line for line in call("top", *options(node)).stdout.splitlines() if line.startswith("NO CLAIM")
    )
    assert stray.split() == ["NO", "CLAIM", "512", "40", names[5], "4712", "stray"]
    worst = call("top", "--sort", "health", *options(node)).stdout.splitlines()
    assert names[3] in worst[3]
    as_json = json.loads(call("top", "-o", "json", *options(node)).stdout)
    assert yaml.safe_load(call("top", "-o", "yaml", *options(node)).stdout).keys() == as_json.keys()
    assert as_json["holdings"][1]["trouble"] == "unhealthy"
    assert as_json["holdings"][1]["pods"] == ["pod-of-training"]
    assert as_json["gpus"][2]["load"]["power_limit_w"] == 700.0
    assert files(node.plugin_dir) | files(node.cdi) == before


def kept(file: Path) -> list[Json]:
    return [reason for state in json.loads(file.read_text())["states"] for reason in state.get("reasons", ())]


# --- a terminal ---------------------------------------------------------------------------------


class Terminal:
    """`top` on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (30, 100))
        self.before = termios.tcgetattr(self.slave)
        self.process = forked_commands.start(
            ["top", "--interval", "0.2", *arguments],
            self.slave,
            self.slave,
            self.slave,
            env=environment(TERM="xterm"),
            new_session=True,
        )
        self.seen = b""

    def read_until(self, text: bytes) -> None:
        while text not in self.seen:
            self.seen += os.read(self.master, 4096)

    def close(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)
        os.close(self.master)
        os.close(self.slave)


@pytest.mark.parametrize("end", ["q", "SIGINT", "SIGTERM"])
def test_terminal_is_drawn_again_and_left_as_it_was(end: str, tmp_path: Path) -> None:
    nothing = ["--kubelet-plugins-directory-path", str(tmp_path), "--cdi-root", str(tmp_path / "cdi")]
    terminal = Terminal("--simulate", "t4-4", *nothing)
    try:
        terminal.read_until(b"HEALTH")
        terminal.read_until(b"q quits")
        assert b"\x1b[?1049h" in terminal.seen
        for key, said in ((b"h", b"sort by health"), (b"/t4\r", b"/t4  Esc")):
            terminal.seen = b""
            os.write(terminal.master, key)
            terminal.read_until(said)
        terminal.seen = b""
        terminal.read_until(b"\x1b[1mHEALTH\x1b[0m")
        if end == "q":
            os.write(terminal.master, b"q")
        else:
            os.kill(terminal.process.pid, signal.Signals[end])
        terminal.read_until(b"\x1b[?1049l")
        terminal.process.join(PATIENCE_S)
        assert terminal.process.exitcode == 0
        assert b"Traceback" not in terminal.seen
        assert termios.tcgetattr(terminal.slave) == terminal.before
    finally:
        terminal.close()


@tabled("arguments", "more", "is_coloured")
def test_colour(arguments: list[str], more: dict[str, str], is_coloured: bool, tmp_path: Path) -> None:
    """tests/cli/test_widths.py has NO_COLOR and dumb terminals."""
    nothing = ["--kubelet-plugins-directory-path", str(tmp_path), "--cdi-root", str(tmp_path / "cdi")]
    shown = on_terminal(
        80, "top", "--once", "--simulate", "t4-4", *nothing, *arguments, **{"TERM": "xterm", **more}
    )
    assert ("\x1b[" in "".join(shown)) == is_coloured


# --- trouble ------------------------------------------------------------------------------------


def test_without_a_driver_the_records_are_shown_with_the_reason(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    (plugins / DRIVER / "claims").mkdir(parents=True)
    (plugins / DRIVER / "claims/uid-1.json").write_text("{broken")
    health = plugins / DRIVER / "health.json"
    health.write_text("[]")
    before = files(tmp_path)
    arguments = [
        "top", "--nvidia-driver-root", str(tmp_path), "--container-driver-root", str(tmp_path / "none"),
        "--kubelet-plugins-directory-path", str(plugins), "--cdi-root", str(tmp_path / "cdi"),
    ]  # fmt: skip
    done = call(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    notes = " ".join(done.stdout[done.stdout.index("note: ") :].split())
    problems = " ".join(done.stdout[: done.stdout.index("HEALTH")].split())
    assert "PROBLEM: gpu-dra-driver is not running on this node" in problems
    assert "libnvidia-ml.so.1 is not below the driver root" in problems
    assert "\nHEALTH\nHealth unknown: gpu-dra-driver is not running on this node.\n" in done.stdout
    assert "uid-1.json cannot be read" in notes
    assert "health.json cannot be read: not a JSON object" in notes
    assert "\nno GPU was found\n" in done.stdout
    assert files(tmp_path) == before
    health.unlink()
    os.mkfifo(health)
    assert "cannot read the saved health" in " ".join(call(*arguments).stdout.split())


@tabled("arguments", "code", "said")
def test_wrong_usage_is_reported_without_a_traceback(arguments: list[str], code: int, said: str) -> None:
    done = call("top", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def machine(memory_path: Path) -> Machine:
    return create_machine("hgx-h100-4", memory_path / "machine", device_nodes="described")


Look = Callable[[], NodeSnapshot]


@pytest.fixture
def look(machine: Machine, memory_path: Path) -> Iterator[Look]:
    """Return a function that reads the machine at a fixed time."""
    with ExitStack() as stack:

        def make() -> NodeSnapshot:
            given = {
                "simulate": "hgx-h100-4", "simulator_dir": str(memory_path / "machine"), "node_name": "node-a",
                "kubelet_plugins_directory_path": str(memory_path), "cdi_root": str(memory_path / "cdi"),
            }  # fmt: skip
            made = NodeSnapshot(CommandMachine(resolve(given, None)), lambda: NOW)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def plugin_lives(memory_path: Path) -> Iterator[None]:
    """A plugin that is running, and has not answered yet."""
    lock = memory_path / DRIVER / "worker.lock"
    lock.parent.mkdir()
    lock.touch()
    mark = UseMark(lock)
    mark.hold()
    yield
    mark.release()


def write_health(
    machine: Machine, *states: HealthState, boot: str = "", known: Collection[str] | None = None
) -> None:
    gpus = [gpu.uuid for gpu in machine.current().present] if known is None else known
    kept = KeptHealth(boot or machine.current().boot_id, "580", states, tuple(gpus))
    (machine.directory.parent / DRIVER).mkdir(exist_ok=True)
    (machine.directory.parent / DRIVER / "health.json").write_bytes(encode(kept))


def reason(key: str, value: str, severity: Severity, source: Any = "event", age_s: int = 10) -> Reason:
    return Reason(key, value, severity, START - 90, START - age_s, "text", source)


def reported(view: NodeView) -> list[tuple[str, str, str, float | None]]:
    return [(entry.subject, entry.severity, entry.reason, entry.since_s) for entry in view.health]


def test_saved_health_and_faults_that_nvml_shows_now_are_put_together(
    machine: Machine, look: Look, plugin_lives: None
) -> None:
    uuids = [gpu.uuid for gpu in machine.current().present]
    names = list(gpu_device_names(uuids).values())
    pending = reason("row-remap", "pending", Severity.DEGRADED, "poll")
    write_health(
        machine,
        HealthState(HealthTarget(uuids[0]), (pending, reason("xid", "48", Severity.UNHEALTHY))),
        HealthState(HealthTarget(uuids[1], 7, 0), (reason("xid", "43", Severity.DEGRADED),)),
        HealthState(HealthTarget(uuids[3]), (reason("gpu-lost", "", Severity.LOST, "poll"),)),
        HealthState(HealthTarget("GPU-pulled"), (reason("gpu-lost", "", Severity.LOST, "poll"),)),
    )
    machine.set_gpu(2, slowdown=0x40)
    machine.set_mig_mode(1, on=True)
    machine.create_mig(1, "1g.10gb", 0)
    machine.create_mig(1, "1g.10gb", 1)
    boot = machine.current().boot_id
    records = RecordStore(machine.directory.parent / DRIVER / "claims")
    records.open(boot)
    for start in (0, 1):
        held = HeldDevice(f"{names[1]}-mig-1g10gb-19-{start}", "mig", f"MIG-{start}", uuids[1])
        claim = AllocatedClaim(ClaimRef("ml", f"claim-{start}", f"uid-{start}"), ())
        records.save(ClaimRecord(claim, "prepared", boot, (held,), ()))
    at = look()
    view = at.view(20)
    assert reported(view) == [
        (names[0], "unhealthy", "xid 48", 90.0),
        (names[0], "degraded", "row-remap pending", 90.0),
        (f"{names[1]} GI 7 CI 0", "degraded", "xid 43", 90.0),
        (names[2], "information", "slowdown thermal", None),
        (names[3], "lost", "gpu-lost", 90.0),
        ("gpu-pulled", "lost", "gpu-lost", 90.0),
    ]
    assert [gpu.health for gpu in view.gpus] == ["unhealthy", "degraded", "information", "lost", "lost"]
    assert [entry.devices for entry in view.health if entry.devices] == [(f"{names[1]}-mig-1g10gb-19-0",)]
    assert (view.unwatched, {entry.saved_s for entry in view.health}) == (None, {None})
    # Only the claim whose instance it is has the trouble.
    assert [held.trouble for held in view.holdings] == ["degraded", None]
    assert [gpu.mode for gpu in view.gpus] == ["off", "on", "off", "off", None]
    write_health(machine, HealthState(HealthTarget(uuids[0]), (pending,)), boot="boot-0")
    view = at.view(20)
    assert reported(view) == [(names[2], "information", "slowdown thermal", None)]
    assert [gpu.health for gpu in view.gpus] == ["unknown"] * 4
    assert view.unwatched == "gpu-dra-driver has not saved it in this boot"
    assert any("from before the last boot" in note for note in view.notes)


def test_health_is_unknown_while_the_plugin_does_not_run(machine: Machine, look: Look) -> None:
    first, second, *_ = (gpu.uuid for gpu in machine.current().present)
    lost = reason("gpu-lost", "", Severity.LOST, "poll")
    at = look()
    view = at.view(20)
    assert (reported(view), [gpu.health for gpu in view.gpus]) == ([], ["unknown"] * 4)
    assert view.unwatched == "gpu-dra-driver is not running on this node"
    write_health(machine, HealthState(HealthTarget(first), (lost,)))
    os.utime(machine.directory.parent / DRIVER / "health.json", (START - 300, START - 300))
    machine.set_recovery_action(1, 1)
    view = at.view(20)
    assert [gpu.health for gpu in view.gpus] == ["unknown", "unhealthy", "unknown", "unknown"]
    assert [(entry.subject[4:], entry.reason, entry.since_s, entry.saved_s) for entry in view.health] == [
        (first[4:12], "gpu-lost", 90.0, 300.0),
        (second[4:12], "recovery-action reset", None, None),
    ]


def test_health_of_a_gpu_that_the_plugin_does_not_know_is_unknown(
    machine: Machine, look: Look, plugin_lives: None
) -> None:
    first, second, third, _ = (gpu.uuid for gpu in machine.current().present)
    ill = HealthState(HealthTarget(second), (reason("xid", "95", Severity.UNHEALTHY, age_s=3600),))
    mild = HealthState(HealthTarget(first), (reason("xid", "63", Severity.INFORMATION),))
    at = look()
    assert at.view(20).unwatched == "gpu-dra-driver has not saved it in this boot"
    write_health(machine, mild, ill, known=[third])
    health = {gpu.uuid: gpu.health for gpu in at.view(20).gpus}
    assert [health.pop(uuid) for uuid in (first, second, third)] == ["unknown", "unhealthy", "ok"]
    assert set(health.values()) == {"unknown"}


@pytest.mark.parametrize("function", ["nvmlDeviceGetTemperature*", "nvmlDeviceGetP2PStatus"])
def test_gpu_that_hangs_hides_no_other(
    machine: Machine, look: Look, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.setattr(calls, "ANSWERS_WITHIN_S", 0.5)
    silent = machine.current().present[1].uuid
    machine.set_fault(function, delay_s=60, gpu=1)
    at = look()
    for _ in range(2):
        view = at.view(20)
        assert nvml_problems(view) == []
        assert [gpu.uuid for gpu in view.gpus if gpu.load is None] == [silent]
    machine.clear_faults()


def test_a_gpu_that_nvml_does_not_show_is_lost_when_the_nvidia_driver_is_bound_to_it(
    machine: Machine, look: Look, plugin_lives: None
) -> None:
    gone = machine.gpu(1)

    def seen() -> list[tuple[str, str, str | None, str]]:
        return [(gpu.name, gpu.uuid, gpu.pci_bus_id, gpu.health) for gpu in look().view(20).gpus][1:2]

    name = f"gpu-{gone.uuid[4:12]}"
    assert [health for *_, health in seen()] == ["unknown"]
    machine.lose_gpu(1)
    assert seen() == [(name, gone.uuid, gone.bus_id, "lost")]
    information = machine.host_root / f"proc/driver/nvidia/gpus/{gone.bus_id}/information"
    text = information.read_text()
    information.write_text(text.replace(gone.uuid, "GPU-????????-????-????-????-????????????"))
    assert seen() == [(gone.bus_id, "", gone.bus_id, "unhealthy")]
    lost = HealthState(
        HealthTarget(gone.uuid), (reason("gpu-lost", "", Severity.LOST),), pci_bus_id=gone.bus_id
    )
    write_health(machine, lost)
    assert seen() == [(name, gone.uuid, gone.bus_id, "lost")]


def test_top_releases_nvml_while_the_driver_is_detached(look: Look) -> None:
    at = look()
    at.machine.settings.plugin_directory.mkdir()
    assert len(at.view(20).gpus) == 4
    made = at.machine.detachments.begin(3600)
    assert f"closed until {made.until}" in str(nvml_problems(at.view(20)))
    assert not at.nvml.session.is_open
    at.machine.detachments.end()
    assert len(at.view(20).gpus) == 4


def test_gpu_that_is_lost_and_comes_back(machine: Machine, look: Look) -> None:
    at = look()
    assert len(at.view(20).gpus) == 4
    machine.lose_gpu(2)
    view = at.view(20)
    assert [gpu.health for gpu in view.gpus] == ["unknown", "unknown", "lost", "unknown"]
    assert any("does not answer" in note for note in view.notes)
    machine.reset_gpu(2)
    machine.restore_gpu(2)
    at.view(20)
    view = at.view(20)
    assert ([gpu.health for gpu in view.gpus], view.notes) == (["unknown"] * 4, ())
    machine.unload_driver()
    view = at.view(20)
    assert (view.gpus, view.nvidia_version) == ((), None)
    assert "kernel driver is not loaded" in str(nvml_problems(view))
    machine.load_driver()
    assert len(at.view(20).gpus) == 4


def nvml_problems(view: NodeView) -> list[str]:
    return [problem.text for problem in view.problems if problem.problem == "nvml-unavailable"]


class OddNvml:
    """NVML that hangs until it is released, or fails as configured."""

    def __init__(self, error: Exception | None = None) -> None:
        self.session = self
        self.release = threading.Event()
        self.error = error
        self.reopened = 0
        self.closed = 0

    def reopen(self) -> None:
        self.reopened += 1
        if self.error is not None:
            raise self.error
        assert self.release.wait(PATIENCE_S)

    def close(self) -> None:
        self.closed += 1

    def nvml_fingerprint(self) -> tuple[Hashable, ...]:
        return ()

    def read_inventory(self) -> Inventory:
        return Inventory(DriverVersions("580.95.05", (13, 0)))

    def of_each(self, gpus: Sequence[Gpu], read: Callable[[Gpu], object]) -> Mapping[str, Future[object]]:
        assert not gpus
        return {}


def test_nvml_that_hangs_is_not_waited_for(look: Look) -> None:
    nvml = OddNvml()
    at = look()
    at.nvml = nvml
    for _ in range(3):
        view = at.view(0.01)
        assert nvml_problems(view) == ["NVML has not answered for more than 0.01 s"]
    at.close()
    assert (nvml.reopened, nvml.closed) == (1, 0)
    nvml.release.set()
    view = at.view(20)
    assert (view.nvidia_version, view.cuda_version, nvml_problems(view)) == ("580.95.05", "13.0", [])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NvmlUnavailableError("no library here"), "no library here"),
        (ZeroDivisionError("odd"), "NVML failed unexpectedly: ZeroDivisionError('odd')"),
    ],
)
def test_nvml_that_fails_costs_only_its_part(
    error: Exception, said: str, machine: Machine, look: Look
) -> None:
    write_health(machine, HealthState(HealthTarget("GPU-1"), (reason("xid", "79", Severity.LOST),)))
    nvml = OddNvml(error)
    at = look()
    at.nvml = nvml
    for _ in range(2):
        view = at.view(20)
        assert nvml_problems(view) == [said]
        assert reported(view) == [("gpu-1", "lost", "xid 79", 90.0)]
    assert nvml.reopened == 2


def test_daemons_that_may_not_be_read_cost_only_their_part(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise StateError(f"cannot open the lock file {path}: permission was denied")

    monkeypatch.setattr("dra_driver.mps_host.host_files.is_locked", refuse)
    at = look()
    at.nvml = OddNvml(NvmlUnavailableError("no driver"))
    view = at.view(20)
    [no_daemons] = view.notes
    assert nvml_problems(view) == ["no driver"]
    assert no_daemons.startswith("MPS daemons are not shown: cannot open the lock file")


def test_problems_of_the_plugin_come_from_the_plugin_then_from_its_file(tmp_path: Path) -> None:
    def problem(code: ProblemCode) -> NodeProblem:
        return NodeProblem(code, f"{code} here", since=7)

    (tmp_path / "problems.json").write_bytes(encode_problems(Reported((problem("disk-not-writable"),)), 9))
    (tmp_path / "worker.lock").touch()
    page = json_page(lambda: encode_problems(Reported((problem("foreign-driver"),)), 9))
    endpoint = HttpEndpoint("localhost:0", {"/problems": page})
    endpoint.start()
    address = f"localhost:{endpoint.port}"
    mark = UseMark(tmp_path / "worker.lock")
    mark.hold()
    try:
        assert plugin_problems(tmp_path, address).problems == (problem("foreign-driver"),)
        assert plugin_problems(tmp_path, "").problems == (problem("disk-not-writable"),)
    finally:
        mark.release()
        endpoint.stop()
    assert [one.code for one in plugin_problems(tmp_path, address).problems] == ["plugin-not-running"]
    (tmp_path / "problems.json").write_text("{")
    assert [one.code for one in plugin_problems(tmp_path, address).problems] == ["check-failed"]


def test_first_picture_on_a_terminal_does_not_wait_for_nvml_that_hangs(tmp_path: Path) -> None:
    machine = create_machine("t4-4", tmp_path / "machine")
    machine.set_fault("nvmlDeviceGetPciInfo*", delay_s=600)
    options = ["--simulate", "t4-4", "--simulator-dir", str(tmp_path / "machine")]
    terminal = Terminal(
        *options, "--kubelet-plugins-directory-path", str(tmp_path), "--cdi-root", str(tmp_path)
    )
    try:
        terminal.read_until(b"PROBLEM: NVML has not answered for more than 0.3 s")
        terminal.read_until(b"Health unknown: gpu-dra-driver is not running on this node.")
    finally:
        terminal.close()


def test_record_that_nvml_does_not_know_is_shown(node: Node) -> None:
    """The claim of a GPU that is lost: who is on it stays known."""
    names = [device["name"] for device in node.devices()]
    node.prepare(node.allocated_by_hand("training", names[1]))
    node.driver.stop() if node.driver is not None else None
    node.machine.lose_gpu(1)
    found: Mapping[str, Any] = json.loads(call("top", "-o", "json", *options(node)).stdout)
    assert [gpu["name"] for gpu in found["gpus"]] == names
    assert found["gpus"][1]["load"] is None
    assert found["gpus"][1]["health"] in ("unknown", "lost")
    assert [held["device"] for held in found["holdings"]] == [names[1]]
