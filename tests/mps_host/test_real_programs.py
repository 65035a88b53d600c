"""The MPS host with NVIDIA's own control program of each branch, on a machine without a GPU: no server can start there,
all else can."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from debian_programs import Programs

from dra_driver.errors import PermanentError, RetryableError
from dra_driver.host.driver_programs import InstalledPrograms
from dra_driver.model.driver_files import CONTROL_PROGRAM, FindPrograms
from dra_driver.model.mps import MpsDaemonSpec, MpsDirectories, MpsMember
from dra_driver.mps_host import daemon_control
from dra_driver.mps_host import daemon_processes as processes
from dra_driver.mps_host.daemon_control import BusyError, DaemonControl
from dra_driver.mps_host.daemon_processes import ProcessId
from dra_driver.mps_host.host_files import LONGEST_SOCKET, LONGEST_SOCKET_NAME
from dra_driver.mps_host.host_supervisor import Supervisor
from dra_driver.simulator import Machine, create_machine
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.mps_host.conftest import RETRIED_LATER, MpsHost

UUIDS = [f"GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16{number}" for number in range(3)]
SPEC = MpsDaemonSpec("gpu-1", UUIDS[1], "gpu", UUIDS[1])
THREADS = "get_default_active_thread_percentage"
MEMORY = "get_default_device_pinned_mem_limit"


def ask(host: MpsHost, *questions: str, device: str = "gpu-1") -> list[str]:
    return host.control(device).query(*questions, timeout_s=20.0)


def unprobed(host: MpsHost) -> Supervisor:
    """A supervisor without probes: a real daemon serves one program at a time, and drops the answers to
    others.
    """
    return host.supervisor(probe=3600.0)


def only_process(host: MpsHost, supervisor: Supervisor, device: str = "gpu-1") -> ProcessId:
    """The one process of the daemon, as /proc and the supervisor agree on it."""
    [process] = processes.users_of(host.pipe(device))
    [status] = [status for status in supervisor.status() if status.device == device]
    assert (status.state, status.pid, status.problem) == ("ready", process.pid, None)
    assert processes.is_control_daemon(process, host.pipe(device))
    return process


def test_a_daemon_is_ready_and_stops_without_a_trace(real_host: MpsHost, nvidia: Programs) -> None:
    supervisor = unprobed(real_host)
    supervisor.ensure(SPEC, PATIENCE_S)
    process = only_process(real_host, supervisor)
    numbers = Path(real_host.pipe("gpu-1"), "nvidia-cuda-mps-control.pid")
    if nvidia.branch in ("R470", "R535"):
        assert not numbers.exists(), "so readiness cannot be told by it alone"
    else:
        assert numbers.read_text().strip() == str(process.pid)
    assert ask(real_host, THREADS) == ["100.0"]
    supervisor.stop("gpu-1", PATIENCE_S)
    assert (processes.identify(process.pid), supervisor.status(), real_host.left()) == (None, (), [])
    with pytest.raises(RetryableError, match="Cannot find MPS control daemon process"):
        ask(real_host, THREADS)


@pytest.fixture
def simulated(nvidia: Programs, tmp_path: Path) -> Machine:
    """A machine with the same NVIDIA driver, which is not loaded, as it is not for the real programs."""
    machine = create_machine("h100-mig-static", tmp_path / "machine", device_nodes="described")
    machine.load_driver(nvidia.version)
    machine.unload_driver()
    return machine


def started(programs: FindPrograms, pipe: Path) -> tuple[int | None, set[str]]:
    """Start a control daemon on a pipe directory, and stop it; return its exit code if it exited before it
    listened, and the names of its sockets.
    """
    log = pipe.parent / "log"
    for directory in (pipe, log):
        directory.mkdir(parents=True)
    process = DaemonControl(programs, SPEC, MpsDirectories(str(pipe), str(log), "")).start()
    made = [pipe / name for name in ("control", LONGEST_SOCKET_NAME)]
    eventually(lambda: all(path.exists() for path in made) or not processes.is_alive(process))
    code = processes.reap(process.pid)
    sockets = {path.name for path in pipe.iterdir() if path.is_socket()}
    processes.end([process], 5.0)
    return code, sockets


@pytest.mark.parametrize("length", [LONGEST_SOCKET, LONGEST_SOCKET + 1])
def test_control_daemon_starts_or_ends_by_the_length_of_its_sockets_as_the_simulated_one(
    real_host: MpsHost, simulated: Machine, top: Path, nvidia: Programs, length: int
) -> None:
    """From R580 on, the real program exits earlier, because it has no GPU here."""
    found = []
    for name, programs in (
        ("real", real_host.tools.programs),
        ("simulated", InstalledPrograms(str(simulated.host_root), top / "lib", 0o755)),
    ):
        rest = length - len(f"{top}/{name}//{LONGEST_SOCKET_NAME}")
        found.append(started(programs, top / name / ("p" * rest)))
    real, stand_in = found
    assert real == stand_in
    if int(nvidia.branch[1:]) < 580:
        is_short = length == LONGEST_SOCKET
        assert real == ((None, {"control", LONGEST_SOCKET_NAME}) if is_short else (1, set()))


MICROK8S = "/var/snap/microk8s/common/var/lib/kubelet/plugins/gpu.nvidia.com"


def test_mig_device_has_a_daemon_below_the_longest_kubelet_root(nvidia: Programs, top: Path) -> None:
    host = MpsHost(top / ("k" * (len(MICROK8S) - len(f"{top}/"))), nvidia.root)
    spec = MpsDaemonSpec("gpu-4cf8db2d-mig-1g10gb-me-20-1", UUIDS[1].replace("GPU", "MIG"), "mig", UUIDS[1])
    supervisor = unprobed(host)
    try:
        supervisor.ensure(spec, PATIENCE_S)
        only_process(host, supervisor, spec.device)
        supervisor.stop(spec.device, PATIENCE_S)
        assert host.left() == []
    finally:
        host.close()


def test_limits_are_those_of_the_daemon_for_each_gpu(real_host: MpsHost, nvidia: Programs) -> None:
    supervisor = real_host.supervisor(probe=3600.0, **RETRIED_LATER)
    wanted = replace(
        SPEC,
        default_active_thread_percentage=25,
        default_memory_limit_mib=512,
        others=(MpsMember("gpu-2", UUIDS[2], 40779),),
    )
    if nvidia.branch == "R470":
        with pytest.raises(RetryableError, match='Unknown command "set_default_device_pinned_mem_limit"'):
            supervisor.ensure(wanted, PATIENCE_S)
        assert (processes.users_of(real_host.pipe("gpu-1")), real_host.left()) == ((), [])
        supervisor.stop("gpu-1", PATIENCE_S)
        wanted = replace(wanted, default_memory_limit_mib=None, others=())
    supervisor.ensure(wanted, PATIENCE_S)
    only_process(real_host, supervisor)
    assert ask(real_host, THREADS) == ["25.0"]
    if nvidia.branch != "R470":
        assert [ask(real_host, f"{MEMORY} {number}") for number in (0, 1)] == [["512M"], ["39G"]]
    with pytest.raises(PermanentError, match="default_active_thread_percentage: 25, not 50"):
        supervisor.ensure(replace(wanted, default_active_thread_percentage=50), PATIENCE_S)


def test_output_of_a_running_daemon_is_bounded(real_host: MpsHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question adds some lines."""
    monkeypatch.setattr(daemon_control, "_LARGEST_LOG", 16 << 10)
    monkeypatch.setattr(daemon_control, "_KEPT_OF_LOG", 4 << 10)
    supervisor = unprobed(real_host)
    supervisor.ensure(SPEC, PATIENCE_S)
    process = only_process(real_host, supervisor)
    output = Path(real_host.directories("gpu-1").log, "host.out")
    sizes = []
    for _ in range(60):
        ask(real_host, *["get_server_list"] * 10)
        supervisor._daemons["gpu-1"].probe()
        sizes.append(output.stat().st_size)
    assert max(sizes) < 20 << 10
    assert sum(later < before for before, later in itertools.pairwise(sizes)) >= 2
    eventually(lambda: output.read_text().rstrip().endswith("UI closed"))  # its log follows a moment later
    assert only_process(real_host, supervisor) == process


def test_the_probe_copes_with_a_server_that_cannot_start(real_host: MpsHost) -> None:
    """As if the GPU were gone: the server exits, and the daemon keeps running."""
    supervisor = unprobed(real_host)
    supervisor.ensure(SPEC, PATIENCE_S)
    process = only_process(real_host, supervisor)
    ask(real_host, f"start_server -uid {os.geteuid()}")
    output = Path(real_host.layout.directories("gpu-1").log, "host.out")
    eventually(lambda: "exited with status 1" in output.read_text())
    assert "no CUDA-capable device is detected" in output.read_text()
    assert ask(real_host, "get_server_list") == []
    supervisor._daemons["gpu-1"].probe()
    assert only_process(real_host, supervisor) == process
    assert supervisor.status()[0].clients == 0


def test_a_server_that_ended_while_it_was_queried_is_not_a_problem(
    real_host: MpsHost, nvidia: Programs
) -> None:
    """The answers of a probe between the list of servers and the queries about each."""
    supervisor = unprobed(real_host)
    supervisor.ensure(SPEC, PATIENCE_S)
    gone = os.getpid()
    unknown = 'Unknown command "get_server_status"'
    has_no_status = nvidia.branch in ("R470", "R535")
    assert ask(real_host, f"get_server_status {gone}") == [
        unknown if has_no_status else f"Server {gone} not found"
    ]
    assert ask(real_host, f"get_client_list {gone}") == [f"Server {gone} not found"]


def test_the_next_host_takes_the_daemon_over(real_host: MpsHost, logs: list) -> None:
    first = unprobed(real_host)
    first.ensure(replace(SPEC, default_active_thread_percentage=25), PATIENCE_S)
    process = only_process(real_host, first)
    first.close()
    second = unprobed(real_host)
    eventually(lambda: "mps_daemon_adopted" in [line["event"] for line in logs])
    assert only_process(real_host, second) == process
    assert [line["event"] for line in logs if line["event"].startswith("mps_daemon_")] == [
        "mps_daemon_started",
        "mps_daemon_adopted",
    ]
    assert ask(real_host, THREADS) == ["25.0"]
    second.stop("gpu-1", PATIENCE_S)
    assert (processes.identify(process.pid), real_host.left()) == (None, [])


def test_a_daemon_that_no_record_names_is_taken_over(real_host: MpsHost) -> None:
    """The host died after it had started the daemon and before it wrote that down."""
    first = unprobed(real_host)
    first.ensure(SPEC, PATIENCE_S)
    process = only_process(real_host, first)
    first.close()
    record = real_host.layout.record("gpu-1")
    record.unlink()
    second = unprobed(real_host)
    second.ensure(SPEC, PATIENCE_S)
    assert only_process(real_host, second) == process


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "quit"])
def test_a_daemon_that_ends_is_restarted(real_host: MpsHost, how: signal.Signals | str) -> None:
    """A killed daemon leaves its sockets and its pid file."""
    supervisor = unprobed(real_host)
    supervisor.ensure(replace(SPEC, default_active_thread_percentage=25), PATIENCE_S)
    former = only_process(real_host, supervisor)
    if isinstance(how, str):
        real_host.control("gpu-1")._pass((how,), 5.0)
    else:
        os.kill(former.pid, how)
    eventually(lambda: supervisor.status()[0].pid not in (None, former.pid))
    eventually(lambda: supervisor.status()[0].state == "ready")
    assert only_process(real_host, supervisor) != former
    assert ask(real_host, THREADS) == ["25.0"]


def test_a_second_daemon_of_a_device_ends_by_itself(real_host: MpsHost) -> None:
    supervisor = unprobed(real_host)
    supervisor.ensure(SPEC, PATIENCE_S)
    process = only_process(real_host, supervisor)
    directories = real_host.layout.directories("gpu-1")
    second = real_host.control("gpu-1").start()
    eventually(lambda: not processes.is_alive(second))
    processes.reap(second.pid)
    assert "An instance of this daemon is already running" in Path(directories.log, "host.out").read_text()
    assert only_process(real_host, supervisor) == process


def test_daemons_of_two_devices_do_not_know_each_other(real_host: MpsHost) -> None:
    supervisor = unprobed(real_host)
    other = MpsDaemonSpec("gpu-0", UUIDS[0], "gpu", UUIDS[0])
    limited = replace(SPEC, default_active_thread_percentage=25)
    for spec in (other, limited):
        supervisor.ensure(spec, PATIENCE_S)
    kept = only_process(real_host, supervisor)
    assert only_process(real_host, supervisor, "gpu-0") != kept
    assert (ask(real_host, THREADS), ask(real_host, THREADS, device="gpu-0")) == (["25.0"], ["100.0"])
    supervisor.stop("gpu-0", PATIENCE_S)
    assert only_process(real_host, supervisor) == kept
    assert real_host.left() == ["gpu-1", "gpu-1.json", "gpu-1.json"]


@pytest.fixture
def other_program(real_host: MpsHost) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Start another program that occupies the daemon until its input ends."""
    made: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        programs, control = real_host.tools.programs(), real_host.control("gpu-1")
        one = subprocess.Popen(
            [programs.path(CONTROL_PROGRAM)],
            env={**programs.environment(), **control._variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        made.append(one)
        output = Path(control.directories.log, "host.out")
        eventually(lambda: "NEW UI" in output.read_text().rpartition("UI closed")[2])
        return one

    yield start
    for one in made:
        one.communicate()


def test_no_answer_is_not_a_list_of_servers_when_someone_else_talks_with_the_daemon(
    real_host: MpsHost, other_program: Callable[[], subprocess.Popen[bytes]]
) -> None:
    supervisor = unprobed(real_host)
    supervisor.ensure(SPEC, PATIENCE_S)
    other_program()
    with pytest.raises(BusyError):
        real_host.control("gpu-1").query_once("get_server_list", timeout_s=5.0)


def test_a_question_is_repeated_until_the_other_program_has_ended(
    real_host: MpsHost, other_program: Callable[[], subprocess.Popen[bytes]]
) -> None:
    supervisor = unprobed(real_host)
    supervisor.ensure(SPEC, PATIENCE_S)
    threading.Timer(0.5, other_program().communicate).start()
    assert supervisor._daemons["gpu-1"]._control.query_servers() == (None, 0)


def test_next_host_does_not_end_a_daemon_with_a_server_because_someone_else_talks_with_it(
    real_host: MpsHost, other_program: Callable[[], subprocess.Popen[bytes]]
) -> None:
    first = unprobed(real_host)
    first.ensure(SPEC, PATIENCE_S)
    process = only_process(real_host, first)
    first.close()
    server = subprocess.Popen(
        ["nvidia-cuda-mps-server", "600"],  # the real one needs a GPU
        executable="/bin/sleep",
        env={processes.PIPE_VARIABLE: real_host.pipe("gpu-1")},
    )
    try:
        other = other_program()
        second = real_host.supervisor(probe=3600.0, start=4.0, answer=2.0)
        eventually(lambda: "was not ready" in (second.status()[0].problem or ""))
        assert process in processes.users_of(real_host.pipe("gpu-1"))
        other.communicate()
        eventually(lambda: second.status()[0].state == "ready")
    finally:
        server.kill()
        server.wait()
    assert only_process(real_host, second) == process


def test_our_own_questions_never_meet(real_host: MpsHost) -> None:
    supervisor = real_host.supervisor(probe=3600.0, answer=60.0)
    supervisor.ensure(SPEC, PATIENCE_S)
    conversation = supervisor._daemons["gpu-1"]._control
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: conversation.query_servers(), range(8))) == [(None, 0)] * 8
