"""What plugin and host write for each other: a host that is not there or another one, calls that cross, other people's
files."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.atomic import Stamp, stamp_or_none, write_atomically
from dra_driver.base.file_lock import hold_file
from dra_driver.base.installation import helm_set
from dra_driver.base.json_store import UnreadableFile
from dra_driver.errors import PermanentError, RetryableError, StateError
from dra_driver.host.rooted_tree import text_of
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus, MpsMember
from dra_driver.model.problems import NodeProblem
from dra_driver.model.schema import JsonObject
from dra_driver.mps_host import daemon as daemon_module
from dra_driver.mps_host import host_supervisor
from dra_driver.mps_host.daemon_compute_mode import ComputeMode
from dra_driver.mps_host.daemon_control import DaemonControl
from dra_driver.mps_host.daemon_processes import end
from dra_driver.mps_host.host_files import (
    STATUS_FILE,
    WANTED_FILE,
    DaemonRecord,
    DaemonRecords,
    MpsHostFiles,
    MpsLayout,
    NoMpsHostError,
    status_files,
    wanted_files,
)
from tests.fakes.clock import Clock
from tests.fakes.mps_behaviour import NEVER_READY, fails_to_start
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.mps_host.conftest import RETRIED_LATER, Host

SPEC = MpsDaemonSpec("gpu-1", "GPU-1", "gpu", "GPU-1", default_memory_limit_mib=64)

texts = st.text(max_size=20)


class FakeHost:
    """Holds the lock of a layout, and responds as configured."""

    def __init__(self, top: Path) -> None:
        self.layout = MpsLayout(top / "mps")
        for directory in (self.layout.wanted_directory, self.layout.statuses):
            directory.mkdir(parents=True)
        self.files = MpsHostFiles(self.layout, wait_s=0.0)
        self._held = ExitStack()

    def open(self, lock: bytes = b'{"version": 1}') -> None:
        held = hold_file(self.layout.lock, 0.0, "it")
        os.pwrite(self._held.enter_context(held), lock, 0)

    def close(self) -> None:
        self._held.close()

    def answer(self, spec: MpsDaemonSpec, **changes: object) -> None:
        """A daemon whose process is this one."""
        status = replace(MpsDaemonStatus(spec.device, "ready", spec, pid=os.getpid()), **changes)
        self.report(status)

    def report(self, status: MpsDaemonStatus) -> None:
        """As the host does it: a reader that lists the directory sees by the directory's time that a file is new."""
        write_atomically(self.layout.status(status.device), STATUS_FILE.write(status), durable=False)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeHost]:
    made = FakeHost(tmp_path)
    yield made
    made.close()


# --- files there and back ------------------------------------------------------------------------


@given(st.from_type(MpsDaemonSpec))
def test_wanted_file_is_decoded_as_encoded(
    tmp_path_factory: pytest.TempPathFactory, spec: MpsDaemonSpec
) -> None:
    layout = MpsLayout(tmp_path_factory.mktemp("there"))
    layout.wanted_directory.mkdir()
    layout.wanted("gpu-1").write_bytes(WANTED_FILE.write(spec))
    assert wanted_files(layout).all() == {"gpu-1": spec}


@given(st.builds(MpsDaemonStatus, since=st.integers(0, 2**40)))
def test_statuses_there_and_back(tmp_path_factory: pytest.TempPathFactory, status: MpsDaemonStatus) -> None:
    layout = MpsLayout(tmp_path_factory.mktemp("there"))
    layout.statuses.mkdir()
    layout.status("gpu-1").write_bytes(STATUS_FILE.write(status))
    assert status_files(layout).all() == {"gpu-1": status}


@given(
    st.binary(max_size=60) | st.builds(lambda body: json.dumps({"version": 1, "spec": body}).encode(), texts)
)
def test_anything_else_says_nothing_and_stays(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    layout = MpsLayout(tmp_path_factory.mktemp("anything"))
    layout.wanted_directory.mkdir()
    layout.wanted("gpu-1").write_bytes(content)
    reported: list[UnreadableFile] = []
    files = wanted_files(layout, reported.append)
    assert (files.all(), files.quarantined()) == ({}, [layout.wanted("gpu-1")])
    assert (len(reported), layout.wanted("gpu-1").read_bytes()) == (1, content)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"uuid": "0"}, "'0' is not the UUID of a GPU"),
        ({"device": "../x"}, "is not a device name"),
        ({"others": (MpsMember("gpu-9", "x"),)}, "'x' is not the UUID of a GPU"),
    ],
)
def test_spec_that_cannot_be_is_refused(fake: FakeHost, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PermanentError, match=text):
        fake.files.ensure(replace(SPEC, **changes))


def test_differences_name_both_sides() -> None:
    other = replace(SPEC, multi_user=True, default_memory_limit_mib=None)
    assert SPEC.differences(other) == (
        "multi_user: false, not true",
        "default_memory_limit_mib: 64, not not set",
    )
    assert SPEC.differences(SPEC) == ()


# --- a host that is not there, or another one ----------------------------------------------------


@pytest.mark.parametrize(
    ("lock", "text"),
    [
        (None, r"the MPS host is not running on this node; .*helm upgrade .*--set mps\.enabled=true`"),
        (b"", "the MPS host on this node is starting"),
        (
            b'{"version": 2}',
            r"is from a different release than gpu-dra-driver; delete the pod of .*gpu-dra-driver-mps",
        ),
        (
            b'{"version": 0}',
            r"is from a different release than gpu-dra-driver; delete the pod of .*gpu-dra-driver-mps",
        ),
        (b"\0", "is from a different release than gpu-dra-driver; delete the pod"),
    ],
    ids=["absent", "starting", "newer", "older", "rubbish"],
)
def test_without_a_host_that_reads_it_nothing_is_written(
    fake: FakeHost, lock: bytes | None, text: str
) -> None:
    if lock is not None:
        fake.open(lock)
    with pytest.raises(NoMpsHostError, match=text):
        fake.files.ensure(SPEC)
    fake.files.stop("gpu-1")
    assert list(fake.layout.wanted_directory.iterdir()) == []
    fake.layout.wanted("gpu-1").write_bytes(WANTED_FILE.write(SPEC))
    fake.answer(SPEC)
    with pytest.raises(NoMpsHostError, match=text):
        fake.files.ensure(SPEC)
    with pytest.raises(NoMpsHostError, match=text):
        fake.files.stop("gpu-1")
    assert list(fake.layout.wanted_directory.iterdir()) == [], "the next host stops it"


@pytest.mark.parametrize("sees", [True, False])
def test_plugin_that_does_not_see_the_hosts_processes_believes_its_status(fake: FakeHost, sees: bool) -> None:
    """A restricted pod has its own PID namespace, in which this PID does not exist."""
    fake.open()
    files = MpsHostFiles(fake.layout, sees_daemons=lambda: sees)
    fake.answer(SPEC, pid=2**22 + 1)
    fake.layout.wanted("gpu-1").write_bytes(WANTED_FILE.write(SPEC))
    assert files.runs(SPEC) == (not sees)


SEE_PODS = "see its pod: `kubectl get pods -A -o wide -l app.kubernetes.io/component=mps`"
ENABLE = f"enable it: {helm_set('mps.enabled=true')}"
ABSENT = NodeProblem(
    "mps-host-missing",
    f"The MPS host is not running on this node; if MPS is enabled, {SEE_PODS}, otherwise {ENABLE}",
)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def files_of(fake: FakeHost, clock: Clock, *, is_expected: bool) -> MpsHostFiles:
    return MpsHostFiles(fake.layout, wait_s=0.0, is_expected=is_expected, clock=clock)


def test_absent_host_is_not_a_problem_where_no_one_needs_it(fake: FakeHost, clock: Clock) -> None:
    files = files_of(fake, clock, is_expected=False)
    clock.pause(3600)
    assert files.problems() == []


def test_absent_host_is_a_problem_after_30_s_where_the_configuration_expects_it(
    fake: FakeHost, clock: Clock
) -> None:
    files = files_of(fake, clock, is_expected=True)
    clock.pause(29)
    assert files.problems() == []
    clock.pause(1)
    assert files.problems() == [ABSENT]
    fake.open()
    assert files.problems() != [], "it holds its lock, and has not reported yet"
    fake.layout.alive.touch()
    assert files.problems() == []


def test_absent_host_is_a_problem_while_the_kubelet_requests_mps(fake: FakeHost, clock: Clock) -> None:
    files = files_of(fake, clock, is_expected=False)
    for _ in range(3):
        clock.pause(120)
        with pytest.raises(NoMpsHostError):
            files.ensure(SPEC)
        assert files.problems() == [ABSENT]
    clock.pause(600)
    assert files.problems() == [], "the pod is gone"


@pytest.mark.parametrize("place", ["wanted", "status"])
def test_absent_host_is_a_problem_while_a_claim_has_or_had_a_daemon(
    fake: FakeHost, clock: Clock, place: str
) -> None:
    files, path = files_of(fake, clock, is_expected=False), getattr(fake.layout, place)("gpu-1")
    path.touch()
    path.with_name("README").touch()
    clock.pause(30)
    assert files.problems() == [ABSENT]
    path.unlink()
    assert files.problems() == []


def test_host_that_goes_away_is_a_problem_within_30_s_for_a_claim_that_has_a_daemon_or_requests_one(
    fake: FakeHost, clock: Clock
) -> None:
    files = files_of(fake, clock, is_expected=False)
    fake.open()
    fake.layout.alive.touch()
    assert files.problems() == []
    fake.close()
    with pytest.raises(NoMpsHostError):
        files.ensure(SPEC)
    clock.pause(29)
    assert files.problems() == []
    clock.pause(1)
    assert files.problems() == [ABSENT]
    fake.layout.wanted("gpu-1").touch()
    clock.pause(3600)
    assert files.problems() == [ABSENT], "the daemon of a claim is there as long as the claim"


def test_host_that_reports_nothing_for_30_s_is_a_problem_until_its_next_sign(
    fake: FakeHost, clock: Clock
) -> None:
    files = files_of(fake, clock, is_expected=True)
    fake.open()
    for number in range(5):
        os.utime(fake.layout.alive, (number, number)) if number else fake.layout.alive.touch()
        clock.pause(10)
        assert files.problems() == []
    clock.pause(30)
    [problem] = files.problems()
    assert problem == NodeProblem(
        "mps-host-missing",
        "The MPS host on this node has not reported for more than 30 s: it hangs, or it cannot write its files below "
        f"{fake.layout.root}; {SEE_PODS}, and its log",
    )
    os.utime(fake.layout.alive, (99, 99))
    assert files.problems() == []


def test_host_of_another_release_is_a_problem(fake: FakeHost, clock: Clock) -> None:
    files = files_of(fake, clock, is_expected=True)
    fake.open(b'{"version": 0}')
    fake.layout.alive.touch()
    clock.pause(30)
    [problem] = files.problems()
    assert problem.text.startswith(
        "The MPS host on this node is from a different release than gpu-dra-driver; delete"
    )


def test_daemon_that_failed_is_a_problem_of_its_device_until_it_works(fake: FakeHost, clock: Clock) -> None:
    files = files_of(fake, clock, is_expected=True)
    fake.open()
    failed = MpsDaemonStatus(
        "gpu-1", "failed", SPEC, problem="it ended with exit code 46", directory="/m/gpu-1"
    )
    fake.report(failed)
    for _ in range(2):
        assert files.problems() == [
            NodeProblem(
                "mps-daemon-failed",
                "The MPS daemon of gpu-1 does not work: it ended with exit code 46; its output is in /m/gpu-1/log on "
                "the node",
                "gpu-1",
            )
        ]
    fake.answer(SPEC)
    assert files.problems() == []


def test_problem_that_names_the_daemon_itself_names_it_once(fake: FakeHost, clock: Clock) -> None:
    files = files_of(fake, clock, is_expected=True)
    fake.open()
    problem = "the MPS daemon of gpu-1 (GPU-4cf8db2d) was not ready after 9.0 s"
    fake.report(MpsDaemonStatus("gpu-1", "failed", SPEC, problem=problem))
    text = "The MPS daemon of gpu-1 (GPU-4cf8db2d) was not ready after 9.0 s"
    assert files.problems() == [NodeProblem("mps-daemon-failed", text, "gpu-1")]


def test_a_host_that_comes_late_is_waited_for(host: Host) -> None:
    late = threading.Timer(0.3, host.supervisor)
    late.start()
    assert MpsHostFiles(host.layout, wait_s=20.0).ensure(host.spec()).state == "ready"
    late.join()


def test_daemons_are_known_while_a_host_runs(fake: FakeHost) -> None:
    fake.layout.wanted("gpu-1").write_bytes(WANTED_FILE.write(SPEC))
    fake.answer(SPEC, pid=7)
    for name, content in (("gpu-2.json", "{"), ("gpu-3.json", '{"version": 9}'), ("FOREIGN", "")):
        (fake.layout.statuses / name).write_text(content)
    assert fake.files.statuses() == ()
    fake.open()
    assert fake.files.statuses() == (MpsDaemonStatus("gpu-1", "ready", SPEC, pid=7),)
    assert fake.files.unseen() == []
    two, other = replace(SPEC, device="gpu-2"), replace(SPEC, multi_user=True)
    fake.layout.wanted("gpu-2").write_bytes(WANTED_FILE.write(two))
    assert fake.files.unseen() == ["gpu-2"]
    fake.answer(two)
    write_atomically(
        fake.layout.wanted("gpu-1"), WANTED_FILE.write(other), durable=False
    )  # as the plugin does it
    assert fake.files.unseen() == ["gpu-1"]
    fake.layout.wanted("gpu-1").unlink()
    assert fake.files.unseen() == ["gpu-1"], "it shall stop"


def test_a_host_that_does_nothing_is_named(fake: FakeHost) -> None:
    fake.open()
    with pytest.raises(RetryableError, match=r"did not start .* gpu-1 within 0\.1 s; see `kubectl logs`"):
        fake.files.ensure(SPEC, 0.1)
    fake.answer(SPEC)
    with pytest.raises(RetryableError, match=r"did not stop the MPS daemon of gpu-1 within 0\.1 s"):
        fake.files.stop("gpu-1", 0.1)
    fake.close()
    with pytest.raises(NoMpsHostError):
        fake.files.ensure(SPEC, 0.1)


@pytest.mark.parametrize("which", ["runs", "has ended", "is to stop", "has another spec"])
def test_only_for_a_daemon_that_runs_as_wanted_nothing_waits(host: Host, fake: FakeHost, which: str) -> None:
    """The host does nothing here, so waiting always times out."""
    supervisor, spec = host.supervisor(probe=60), host.spec()
    first = supervisor.ensure(spec, PATIENCE_S)
    supervisor.close()
    if which == "has ended":
        end(host.daemons(), 2.0)
    if which == "is to stop":
        stopped = STATUS_FILE.write(replace(first, state="stopped", pid=None))
        write_atomically(host.layout.status(spec.device), stopped)
    if which == "has another spec":
        host.layout.wanted(spec.device).unlink()
        spec = replace(spec, multi_user=not spec.multi_user)
    fake.layout, fake.files = host.layout, MpsHostFiles(host.layout, wait_s=0.0)
    fake.open()
    assert fake.files.runs(spec) == (which == "runs")
    if which == "runs":
        assert fake.files.ensure(spec, 0.0) == first
    else:
        with pytest.raises(RetryableError, match="the MPS host did not start the MPS daemon of gpu-2"):
            fake.files.ensure(spec, 0.0)


def test_daemon_that_is_not_wanted_any_more_does_not_count_as_running(host: Host) -> None:
    supervisor, spec = host.supervisor(), host.spec()
    supervisor.ensure(spec, PATIENCE_S)
    supervisor.close()
    files = MpsHostFiles(host.layout)
    assert files.runs(spec)
    host.layout.wanted("gpu-2").unlink()
    assert not files.runs(spec)


# --- calls that cross ----------------------------------------------------------------------------


def test_a_start_is_cancelled_when_the_daemon_should_stop(host: Host) -> None:
    host.behave(**NEVER_READY)
    supervisor = host.supervisor(start=60)
    with pytest.raises(RetryableError, match="did not start the MPS daemon of gpu-2 within 1 s"):
        supervisor.ensure(host.spec(), 1)
    eventually(host.daemons)
    host.assert_stops_without_a_trace(supervisor)


def test_start_that_fails_while_the_daemon_is_stopped_is_not_the_failure_of_the_stop(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting, problems = threading.Event(), iter("ab")

    def start(control: DaemonControl) -> None:
        problem = next(problems)
        if problem == "b":
            starting.set()
            eventually(lambda: not host.layout.wanted("gpu-2").exists())
        raise RetryableError(f"no start: {problem}")

    monkeypatch.setattr(DaemonControl, "start", start)
    supervisor = host.supervisor(look=0.5, **RETRIED_LATER)  # the failure is shown that long
    with pytest.raises(RetryableError, match="no start: a"):
        supervisor.ensure(host.spec(), PATIENCE_S)
    supervisor._daemons["gpu-2"]._retry_at = 0.0
    assert starting.wait(PATIENCE_S)
    host.assert_stops_without_a_trace(supervisor)


def test_a_daemon_that_is_wanted_again_while_it_stops_is_recreated(host: Host) -> None:
    supervisor = host.supervisor(patience=0.5)
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    os.kill(first.pid, 19)  # so that its exit takes a while
    with pytest.raises(RetryableError, match="did not stop"):
        supervisor.stop("gpu-2", 0.1)
    eventually(lambda: any(daemon.ending for daemon in [*supervisor._daemons.values()]))
    second = supervisor.ensure(host.spec(), PATIENCE_S)
    assert [daemon.pid for daemon in host.daemons()] == [second.pid]
    assert second.pid != first.pid
    host.assert_stops_without_a_trace(supervisor)


def test_daemon_that_is_wanted_again_before_the_host_stops_it_runs_on(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has seen that its file is gone, and sees it again after it has withdrawn `ready`."""
    supervisor, spec = host.supervisor(probe=60), host.spec()
    first = supervisor.ensure(spec, PATIENCE_S)
    published: list[str] = []
    write = host_supervisor.write_atomically

    def write_and_want(path: Path, content: bytes, **how: bool) -> None:
        write(path, content, **how)
        published.append(json.loads(content)["state"])
        if published == ["stopped"]:
            write(host.layout.wanted("gpu-2"), WANTED_FILE.write(spec))

    monkeypatch.setattr(host_supervisor, "write_atomically", write_and_want)
    host.layout.wanted("gpu-2").unlink()
    eventually(lambda: published == ["stopped", "ready"])
    assert supervisor.ensure(spec, PATIENCE_S).pid == first.pid
    host.assert_stops_without_a_trace(supervisor)


def test_daemon_is_not_stopped_while_its_status_says_that_it_serves(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk keeps the status as it is; then it is removed before the daemon is stopped."""
    supervisor, spec = host.supervisor(probe=60), host.spec()
    supervisor.ensure(spec, PATIENCE_S)
    said: list[bool] = []
    take_down = daemon_module.Daemon._take_down

    def note(daemon: daemon_module.Daemon) -> None:
        said.append(host.layout.status("gpu-2").exists())
        take_down(daemon)

    monkeypatch.setattr(daemon_module.Daemon, "_take_down", note)
    monkeypatch.setattr(host_supervisor, "write_atomically", refuse_write)
    supervisor.stop("gpu-2", PATIENCE_S)
    assert said == [False]
    host.assert_nothing_left()


def refuse_write(path: Path, content: bytes, **how: bool) -> None:
    raise StateError("the disk is full")


def test_start_that_is_withdrawn_before_the_host_has_a_record_changes_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin finds no trace, and forgets the daemon, while the host is about to write its record."""
    supervisor, spec, save = host.supervisor(), host.spec(), DaemonRecords.save
    withdrawn: list[str] = []
    changed: list[object] = []

    def withdraw_and_save(records: DaemonRecords, record: DaemonRecord) -> None:
        if not withdrawn:
            host.layout.wanted("gpu-2").unlink()
            withdrawn.append(record.spec.device)
        save(records, record)

    monkeypatch.setattr(DaemonRecords, "save", withdraw_and_save)
    monkeypatch.setattr(ComputeMode, "set", lambda *given: changed.append(given))
    with pytest.raises(RetryableError, match="did not start"):
        supervisor.ensure(spec, 1)
    eventually(lambda: withdrawn == ["gpu-2"])
    eventually(lambda: supervisor.status() == () and not host.layout.has_traces("gpu-2"))
    assert changed == []
    host.assert_nothing_left()


def test_daemon_of_another_spec_than_wanted_is_stopped_first(host: Host) -> None:
    """It should have stopped while no host ran, and another claim has requested it since."""
    first, spec = host.supervisor(), host.spec()
    before = first.ensure(spec, PATIENCE_S)
    first.close()
    host.layout.wanted("gpu-2").unlink()
    other = replace(spec, default_active_thread_percentage=50)
    host.layout.wanted("gpu-2").write_bytes(WANTED_FILE.write(other))
    status = host.supervisor().ensure(other, PATIENCE_S)
    assert (status.spec, status.pid != before.pid) == (other, True)
    assert host.control().query("get_default_active_thread_percentage") == ["50.0"]


def test_failed_start_is_retried_at_once_when_it_is_requested_again(host: Host) -> None:
    host.behave(**fails_to_start("no"))
    supervisor = host.supervisor(**RETRIED_LATER)
    for _ in range(2):
        with pytest.raises(RetryableError, match="stopped during its start"):
            supervisor.ensure(host.spec(), PATIENCE_S)
    host.behave()
    assert supervisor.ensure(host.spec(), PATIENCE_S).state == "ready"


def test_failed_start_is_retried_while_the_daemon_should_run(host: Host) -> None:
    host.behave(**fails_to_start("no"))
    supervisor = host.supervisor()
    with pytest.raises(RetryableError, match="stopped during its start"):
        supervisor.ensure(host.spec(), PATIENCE_S)
    host.behave()
    eventually(lambda: MpsHostFiles(host.layout).runs(host.spec()))
    host.assert_stops_without_a_trace(supervisor)


def test_a_stop_needs_no_space_on_the_disk(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = host.supervisor()
    supervisor.ensure(host.spec(), PATIENCE_S)

    def write(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        with pytest.raises(StateError, match="the disk is full"):
            supervisor.ensure(host.spec(3), PATIENCE_S)
        supervisor.stop("gpu-2", PATIENCE_S)
    host.assert_nothing_left()


@pytest.mark.parametrize("content", ["", "{", '{"version": 0, "spec": null}'])
def test_unreadable_wanted_file_stops_no_daemon_and_is_kept(host: Host, content: str, logs) -> None:
    supervisor = host.supervisor()
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    wanted = host.layout.wanted("gpu-2")
    write_atomically(wanted, content.encode())
    eventually(lambda: "mps_wanted_unreadable" in [line["event"] for line in logs])
    supervisor.close()
    supervisor = host.supervisor()
    eventually(lambda: supervisor.status()[0].state == "ready")
    assert (supervisor.status()[0].pid, wanted.read_text()) == (first.pid, content)
    assert supervisor.ensure(host.spec(), PATIENCE_S).pid == first.pid, "it is written anew"
    host.assert_stops_without_a_trace(supervisor)


def test_directory_that_is_gone_or_no_directory_ends_no_daemon(host: Host, logs) -> None:
    supervisor = host.supervisor()
    first = supervisor.ensure(host.spec(), PATIENCE_S)
    kept = host.layout.wanted_directory.rename(host.layout.root / "elsewhere")
    eventually(lambda: "mps_wanted_unreadable" in [line["event"] for line in logs])
    host.layout.wanted_directory.touch()
    supervisor.close()
    supervisor = host.supervisor()
    eventually(lambda: supervisor.status()[0].state == "ready")
    assert supervisor.status()[0].pid == first.pid
    with pytest.raises(StateError, match=r"host\.wanted"):
        supervisor.ensure(host.spec(3), PATIENCE_S)
    host.layout.wanted_directory.unlink()
    kept.rename(host.layout.wanted_directory)
    assert supervisor.ensure(host.spec(), PATIENCE_S).pid == first.pid
    host.assert_stops_without_a_trace(supervisor)


def test_foreign_files_are_left_alone(host: Host) -> None:
    host.layout.wanted_directory.mkdir(parents=True)
    names = {"README", "GPU.json", "gpu-2.json.unreadable", "gpu-9.other"}
    for name in names:
        (host.layout.wanted_directory / name).touch()
    supervisor = host.supervisor()
    supervisor.ensure(host.spec(), PATIENCE_S)
    supervisor.stop("gpu-2", PATIENCE_S)
    assert {path.name for path in host.layout.wanted_directory.iterdir()} == names
    assert supervisor.status() == ()


def test_a_refused_spec_ends_no_daemon_that_runs_with_another(host: Host) -> None:
    """Also not after the host was restarted."""
    supervisor = host.supervisor()
    first = supervisor.ensure(host.spec(default_active_thread_percentage=50), PATIENCE_S)
    with pytest.raises(PermanentError, match="50, not 60"):
        supervisor.ensure(host.spec(default_active_thread_percentage=60), PATIENCE_S)
    supervisor.close()
    second = host.supervisor()
    with pytest.raises(PermanentError, match="50, not 60"):
        second.ensure(host.spec(default_active_thread_percentage=60), PATIENCE_S)
    assert second.ensure(first.spec, PATIENCE_S).pid == first.pid


def test_a_status_that_could_not_be_written_is_written_later(
    host: Host, monkeypatch: pytest.MonkeyPatch, logs: list
) -> None:
    failures = iter([StateError("the disk is full")] * 3)

    def encode(status: MpsDaemonStatus) -> JsonObject:
        if (error := next(failures, None)) is not None:
            raise error
        return STATUS_FILE.encode(status)

    monkeypatch.setattr(host_supervisor, "STATUS_FILE", replace(STATUS_FILE, encode=encode))
    assert host.supervisor().ensure(host.spec(), PATIENCE_S).state == "ready"
    assert "mps_status_not_written" in [line["event"] for line in logs]


def test_refusal_that_could_not_be_written_is_written_later(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has no daemon to check again; and its sign of life returns."""
    supervisor, alive = host.supervisor(sign=0.01), host.layout.alive
    host.behave(**fails_to_start("no"))

    with monkeypatch.context() as full:
        full.setattr(host_supervisor, "write_atomically", refuse_write)
        with pytest.raises(RetryableError, match="did not start the MPS daemon of gpu-2 within"):
            supervisor.ensure(host.spec(), 1.0)
        eventually(lambda: not supervisor._is_written)
    eventually(lambda: "stopped during its start" in text_of(host.layout.status("gpu-2")))
    before = stamp_or_none(alive)
    eventually(lambda: stamp_or_none(alive) != before)


def test_host_gives_signs_while_it_can_write_what_it_knows(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, alive = host.supervisor(sign=0.01), host.layout.alive
    supervisor.ensure(host.spec(), PATIENCE_S)
    before = stamp_or_none(alive)
    eventually(lambda: stamp_or_none(alive) != before)

    with monkeypatch.context() as full:
        full.setattr(host_supervisor, "write_atomically", refuse_write)
        os.kill(host.daemons()[0].pid, 9)
        eventually(lambda: not supervisor._is_written)
        signs: list[Stamp | None] = []

        def gives_none() -> bool:
            signs.append(stamp_or_none(alive))
            return len(signs) > 20 and len(set(signs[-20:])) == 1

        eventually(gives_none)
    before = stamp_or_none(alive)
    eventually(lambda: stamp_or_none(alive) != before)
    assert stat.S_IMODE(alive.stat().st_mode) == 0o600


def test_a_host_at_rest_writes_nothing(host: Host) -> None:
    supervisor = host.supervisor()
    supervisor.ensure(host.spec(), PATIENCE_S)
    status = host.layout.status("gpu-2")
    eventually(lambda: supervisor.status()[0].clients == 0 and '"clients":0' in status.read_text())
    seen: list[tuple[object, object]] = []

    def writes_nothing() -> bool:
        # What it has found out by now may still have to be written once.
        seen.append((stamp_or_none(status), stamp_or_none(host.layout.record("gpu-2"))))
        return len(seen) > 50 and len(set(seen[-50:])) == 1

    eventually(writes_nothing)


def test_only_the_owner_reads_what_is_wanted_and_what_runs(host: Host) -> None:
    host.supervisor(probe=60).ensure(host.spec(), PATIENCE_S)  # no status is written while they are listed
    for directory in (host.layout.wanted_directory, host.layout.statuses):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_daemon_with_the_record_of_a_newer_release_is_neither_started_nor_stopped(host: Host) -> None:
    """The record may have settings to restore that this release does not know."""
    first = host.supervisor()
    status = first.ensure(host.spec(), PATIENCE_S)
    first.close()
    record = host.layout.record("gpu-2")
    newer = json.dumps(json.loads(record.read_text()) | {"version": 2, "release": "9.0.0"})
    record.write_text(newer)
    supervisor = host.supervisor()
    with pytest.raises(
        RetryableError, match=r"install gpu-dra-driver 9\.0\.0 or newer, or remove .*gpu-2\.json"
    ):
        supervisor.stop("gpu-2", 3)
    assert (record.read_text(), [one.pid for one in host.daemons()]) == (newer, [status.pid])
    supervisor.close()
    record.write_text(json.dumps(json.loads(newer) | {"version": 1}))  # the newer release is back
    host.assert_stops_without_a_trace(host.supervisor())
