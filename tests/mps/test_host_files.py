"""What plugin and host write for each other: a host that is not there or another one, wishes that cross, other people's
files."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import PermanentError, RetryableError, StateError
from dra_driver.files.file_lock import hold_file
from dra_driver.files.formats import parse
from dra_driver.host.reading import text_of
from dra_driver.model.mps import MPS_STATES, MpsDaemonSpec, MpsDaemonStatus, MpsMember
from dra_driver.model.problems import NodeProblem
from dra_driver.mps import host_files
from dra_driver.mps.daemon_processes import end
from dra_driver.mps.host_files import (
    MpsHostFiles,
    MpsLayout,
    NoMpsHostError,
    Report,
    encode_report,
    encode_wish,
    generation_of,
    read_wish,
)
from tests.fakes.waiting import eventually
from tests.mps.conftest import Host

SPEC = MpsDaemonSpec("gpu-1", "GPU-1", "gpu", "GPU-1", default_memory_limit_mib=64)

texts = st.text(max_size=20)
numbers = st.none() | st.integers(-(2**40), 2**40)
specs = st.builds(
    MpsDaemonSpec,
    texts, texts, st.sampled_from(["gpu", "mig"]), texts, st.booleans(), numbers, numbers,
    st.lists(st.builds(MpsMember, texts, texts, numbers), max_size=2).map(tuple),
)  # fmt: skip
statuses = st.builds(
    MpsDaemonStatus,
    texts, st.sampled_from(MPS_STATES), specs, numbers, st.integers(0, 2**40), numbers, st.none() | texts,
    st.lists(st.integers(0, 9), max_size=2).map(tuple), st.lists(texts, max_size=2).map(tuple), texts,
)  # fmt: skip


class FakeHost:
    """Holds the lock of a layout, and answers as told."""

    def __init__(self, top: Path) -> None:
        self.layout = MpsLayout(top / "mps")
        for directory in (self.layout.wishes, self.layout.statuses):
            directory.mkdir(parents=True)
        self.files = MpsHostFiles(self.layout, wait_s=0.0)
        self._held = ExitStack()

    def open(self, lock: bytes = b'{"format": 2}') -> None:
        held = hold_file(self.layout.lock, threading.Lock(), 0.0, "it")
        os.pwrite(self._held.enter_context(held), lock, 0)

    def close(self) -> None:
        self._held.close()

    def answer(self, spec: MpsDaemonSpec, **changes: object) -> None:
        status = MpsDaemonStatus(spec.device, "ready", spec, pid=7)
        seen = generation_of(self.layout.wanted(spec.device))
        self.layout.status(spec.device).write_bytes(encode_report(replace(Report(status, seen), **changes)))


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


# --- files there and back ------------------------------------------------------------------------


@given(st.none() | specs)
def test_wishes_there_and_back(tmp_path_factory: pytest.TempPathFactory, spec: MpsDaemonSpec | None) -> None:
    path = tmp_path_factory.getbasetemp() / "wish"
    path.write_bytes(encode_wish(spec))
    assert read_wish(path) == spec


@given(statuses, st.none() | texts, st.none() | texts, st.booleans())
def test_reports_there_and_back(
    status: MpsDaemonStatus, seen: str | None, refusal: str | None, is_final: bool
) -> None:
    report = Report(status, seen, refusal, is_final)
    decode = host_files._REPORT.decode
    assert parse(encode_report(report), "status", decode, known=2, field="format") == report


@given(
    st.binary(max_size=60) | st.builds(lambda body: json.dumps({"format": 2, "spec": body}).encode(), texts)
)
def test_anything_else_is_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "anything"
    path.write_bytes(content)
    if content != b'{"format": 2, "spec": ""}':
        with pytest.raises(StateError):
            read_wish(path)


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
        (None, r"the MPS host is not running on this node; see .*helm upgrade .*--set mps\.enabled=true`"),
        (b"", "the MPS host of this node is starting"),
        (b'{"format": 3}', r"of another release than gpu-dra-driver: delete the pod of .*gpu-dra-driver-mps"),
        (b"\0", "of another release than gpu-dra-driver: delete the pod"),
    ],
    ids=["absent", "starting", "newer", "rubbish"],
)
def test_without_a_host_that_reads_it_nothing_is_written(
    fake: FakeHost, lock: bytes | None, text: str
) -> None:
    if lock is not None:
        fake.open(lock)
    with pytest.raises(NoMpsHostError, match=text):
        fake.files.ensure(SPEC)
    fake.files.stop("gpu-1")
    assert list(fake.layout.wishes.iterdir()) == []
    fake.layout.directory("gpu-1").mkdir()
    with pytest.raises(NoMpsHostError, match=text):
        fake.files.stop("gpu-1", gpu_uuid="GPU-1")
    assert [path.name for path in fake.layout.wishes.iterdir()] == ["gpu-1.stop"]
    fake.close()


class SteppedClock:
    """Seconds that only a test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passed(self, seconds: float) -> None:
        self.now += seconds


SEE_PODS = "see its pod: `kubectl get pods -A -o wide -l app.kubernetes.io/component=mps`"
ENABLE = "enable it: `helm upgrade RELEASE CHART -n NAMESPACE --reuse-values --set mps.enabled=true`"
ABSENT = NodeProblem(
    "mps-host-missing", f"The MPS host is not running on this node; {SEE_PODS}, or {ENABLE} if there are none"
)


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


def files_of(fake: FakeHost, clock: SteppedClock, *, is_expected: bool) -> MpsHostFiles:
    return MpsHostFiles(fake.layout, wait_s=0.0, is_expected=is_expected, clock=clock)


def test_absent_host_is_no_problem_where_nobody_needs_it(fake: FakeHost, clock: SteppedClock) -> None:
    files = files_of(fake, clock, is_expected=False)
    clock.passed(3600)
    assert files.problems() == []


def test_absent_host_is_a_problem_after_30_s_where_the_configuration_expects_it(
    fake: FakeHost, clock: SteppedClock
) -> None:
    files = files_of(fake, clock, is_expected=True)
    clock.passed(29)
    assert files.problems() == []
    clock.passed(1)
    assert files.problems() == [ABSENT]
    fake.open()
    assert files.problems() != [], "it holds its lock, and has not reported yet"
    fake.layout.alive.touch()
    assert files.problems() == []
    fake.close()


def test_absent_host_is_a_problem_while_the_kubelet_asks_for_mps(fake: FakeHost, clock: SteppedClock) -> None:
    files = files_of(fake, clock, is_expected=False)
    for _ in range(3):
        clock.passed(120)
        with pytest.raises(NoMpsHostError):
            files.ensure(SPEC)
        assert files.problems() == [ABSENT]
    clock.passed(600)
    assert files.problems() == [], "the pod is gone"


@pytest.mark.parametrize("wish", ["gpu-1.json", "gpu-1.stop"])
def test_absent_host_is_a_problem_while_a_claim_has_or_had_a_daemon(
    fake: FakeHost, clock: SteppedClock, wish: str
) -> None:
    files = files_of(fake, clock, is_expected=False)
    (fake.layout.wishes / wish).touch()
    (fake.layout.wishes / "README").touch()
    clock.passed(30)
    assert files.problems() == [ABSENT]
    (fake.layout.wishes / wish).unlink()
    assert files.problems() == []


def test_host_that_goes_away_is_a_problem_within_30_s_for_a_claim_that_has_a_daemon_or_asks_for_one(
    fake: FakeHost, clock: SteppedClock
) -> None:
    files = files_of(fake, clock, is_expected=False)
    fake.open()
    fake.layout.alive.touch()
    assert files.problems() == []
    fake.close()
    with pytest.raises(NoMpsHostError):
        files.ensure(SPEC)
    clock.passed(29)
    assert files.problems() == []
    clock.passed(1)
    assert files.problems() == [ABSENT]
    fake.layout.wanted("gpu-1").touch()
    clock.passed(3600)
    assert files.problems() == [ABSENT], "the daemon of a claim is there as long as the claim"


def test_host_that_reports_nothing_for_30_s_is_a_problem_until_its_next_sign(
    fake: FakeHost, clock: SteppedClock
) -> None:
    files = files_of(fake, clock, is_expected=True)
    fake.open()
    for number in range(5):
        os.utime(fake.layout.alive, (number, number)) if number else fake.layout.alive.touch()
        clock.passed(10)
        assert files.problems() == []
    clock.passed(30)
    [problem] = files.problems()
    assert problem == NodeProblem(
        "mps-host-missing",
        "The MPS host of this node has not reported for more than 30 s: it hangs, or it cannot write its files below "
        f"{fake.layout.root}; {SEE_PODS}, and its log",
    )
    os.utime(fake.layout.alive, (99, 99))
    assert files.problems() == []
    fake.close()


def test_host_of_another_release_is_a_problem(fake: FakeHost, clock: SteppedClock) -> None:
    files = files_of(fake, clock, is_expected=True)
    fake.open(b'{"format": 1}')
    fake.layout.alive.touch()
    clock.passed(30)
    [problem] = files.problems()
    assert problem.text.startswith(
        "The MPS host on this node is of another release than gpu-dra-driver: delete"
    )
    fake.close()


def test_daemon_that_failed_is_a_problem_of_its_device_until_it_works(
    fake: FakeHost, clock: SteppedClock
) -> None:
    files = files_of(fake, clock, is_expected=True)
    fake.open()
    failed = MpsDaemonStatus(
        "gpu-1", "failed", SPEC, problem="it ended with exit code 46", directory="/m/gpu-1"
    )
    fake.answer(SPEC, status=failed)
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
    fake.close()


def test_a_host_that_comes_late_is_waited_for(host: Host) -> None:
    late = threading.Timer(0.3, host.supervisor)
    late.start()
    assert MpsHostFiles(host.layout, wait_s=20.0).ensure(host.spec()).state == "ready"
    late.join()


def test_daemons_are_known_while_a_host_runs(fake: FakeHost) -> None:
    fake.layout.wanted("gpu-1").write_bytes(encode_wish(SPEC))
    fake.answer(SPEC)
    for name, content in (("gpu-2.json", "{"), ("gpu-3.json", '{"format": 9}'), ("FOREIGN", "")):
        (fake.layout.statuses / name).write_text(content)
    assert fake.files.statuses() == ()
    fake.open()
    assert fake.files.statuses() == (MpsDaemonStatus("gpu-1", "ready", SPEC, pid=7),)
    assert fake.files.unseen() == []
    fake.layout.wanted("gpu-2").write_bytes(encode_wish(None))
    assert fake.files.unseen() == ["gpu-2"]
    fake.close()


def test_a_host_that_does_nothing_is_named(fake: FakeHost) -> None:
    fake.open()
    with pytest.raises(
        RetryableError, match=r"has not made .* gpu-1 ready within 0\.1 s; see `kubectl logs`"
    ):
        fake.files.ensure(SPEC, 0.1)
    with pytest.raises(RetryableError, match=r"has not stopped the MPS daemon of gpu-1 within 0\.1 s"):
        fake.files.stop("gpu-1", 0.1)
    fake.close()
    with pytest.raises(NoMpsHostError):
        fake.files.ensure(SPEC, 0.1)


@pytest.mark.parametrize("which", ["runs", "has ended", "is to stop", "has another spec"])
def test_only_for_a_daemon_that_runs_as_wanted_nobody_waits(host: Host, fake: FakeHost, which: str) -> None:
    """The host does nothing here, so whoever waits for it waits in vain."""
    supervisor, spec = host.supervisor(probe=60), host.spec()
    first = supervisor.ensure(spec, 10)
    supervisor.close()
    if which == "has ended":
        end(host.daemons(), 2.0)
    if which == "is to stop":
        host.layout.unwanted(spec.device).touch()
    if which == "has another spec":
        spec = replace(spec, multi_user=not spec.multi_user)
    fake.layout, fake.files = host.layout, MpsHostFiles(host.layout, wait_s=0.0)
    fake.open()
    before = generation_of(host.layout.wanted(spec.device))
    if which == "runs":
        assert fake.files.ensure(spec, 0.0) == first
    else:
        with pytest.raises(RetryableError, match="the MPS host has not made the MPS daemon of gpu-2 ready"):
            fake.files.ensure(spec, 0.0)
    assert generation_of(host.layout.wanted(spec.device)) != before, "the host looks at it all the same"
    fake.close()


def test_who_wants_it_otherwise_while_it_is_waited_for_wins(fake: FakeHost) -> None:
    fake.open()
    other = replace(SPEC, default_memory_limit_mib=32)
    with ThreadPoolExecutor(2) as callers:
        asked = callers.submit(fake.files.ensure, SPEC, 20)
        while not fake.layout.wanted("gpu-1").exists():
            pass
        same = callers.submit(fake.files.ensure, other, 20)
        while read_wish(fake.layout.wanted("gpu-1")) != other:
            pass
        fake.answer(other)
        assert same.result().pid == 7
        with pytest.raises(RetryableError, match="another call wants another MPS daemon of gpu-1"):
            asked.result()
    fake.close()


# --- wishes that cross ---------------------------------------------------------------------------


def test_a_start_is_broken_off_when_the_daemon_shall_stop(host: Host) -> None:
    host.behave(never_ready=True)
    supervisor = host.supervisor(start=60)
    with ThreadPoolExecutor(1) as caller:
        asked = caller.submit(supervisor.ensure, host.spec(), 60)
        eventually(host.daemons)
        supervisor.stop("gpu-2", 60)
        with pytest.raises(RetryableError, match="was to be stopped while it started"):
            asked.result()
    host.assert_nothing_left()


def test_a_daemon_that_is_wanted_again_while_it_stops_is_made_anew(host: Host) -> None:
    supervisor = host.supervisor(patience=0.5)
    first = supervisor.ensure(host.spec(), 10)
    os.kill(first.pid, 19)  # so that its end takes a while
    with ThreadPoolExecutor(1) as caller:
        stopped = caller.submit(supervisor.stop, "gpu-2", 20)
        eventually(host.layout.unwanted("gpu-2").exists)
        second = supervisor.ensure(host.spec(), 20)
        stopped.result()
    assert [daemon.pid for daemon in host.daemons()] == [second.pid]
    assert second.pid != first.pid
    supervisor.stop("gpu-2", 10)
    host.assert_nothing_left()


def test_a_stop_needs_no_space_on_the_disk(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = host.supervisor()
    supervisor.ensure(host.spec(), 10)

    def write(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        with pytest.raises(StateError, match="the disk is full"):
            supervisor.ensure(host.spec(3), 10)
        supervisor.stop("gpu-2", 10)
    host.assert_nothing_left()


@pytest.mark.parametrize("content", ["", "{", '{"format": 3}', '{"format": 2, "spec": null}'])
def test_a_wish_that_cannot_be_read_ends_no_daemon(host: Host, content: str) -> None:
    supervisor = host.supervisor()
    first = supervisor.ensure(host.spec(), 10)
    host.layout.wanted("gpu-2").write_text(content)
    eventually(lambda: 'refusal": null' not in host.layout.status("gpu-2").read_text())
    assert supervisor.status()[0].pid == first.pid
    host.layout.wanted("gpu-2").unlink()
    supervisor.close()
    supervisor = host.supervisor()
    eventually(lambda: supervisor.status()[0].state == "ready")
    assert supervisor.status()[0].pid == first.pid
    supervisor.stop("gpu-2", 10)
    host.assert_nothing_left()


def test_foreign_files_are_left_alone(host: Host) -> None:
    host.layout.wishes.mkdir(parents=True)
    names = {"README", ".gpu-2.json.7-7.tmp", "GPU.json", "gpu-2.json.unreadable", "gpu-9.other"}
    for name in names:
        (host.layout.wishes / name).touch()
    supervisor = host.supervisor()
    supervisor.ensure(host.spec(), 10)
    supervisor.stop("gpu-2", 10)
    assert {path.name for path in host.layout.wishes.iterdir()} == names
    assert supervisor.status() == ()


def test_a_refused_spec_ends_no_daemon_that_runs_with_another(host: Host) -> None:
    """Also not after the host was restarted, which has seen neither wish."""
    supervisor = host.supervisor()
    first = supervisor.ensure(host.spec(default_active_thread_percentage=50), 10)
    with pytest.raises(PermanentError, match="50, not 60"):
        supervisor.ensure(host.spec(default_active_thread_percentage=60), 10)
    supervisor.close()
    second = host.supervisor()
    with pytest.raises(PermanentError, match="50, not 60"):
        second.ensure(host.spec(default_active_thread_percentage=60), 10)
    assert second.ensure(first.spec, 10).pid == first.pid


def test_a_status_that_could_not_be_written_is_written_later(
    host: Host, monkeypatch: pytest.MonkeyPatch, logs: list
) -> None:
    failures = iter([StateError("the disk is full")] * 3)
    written = host_files.encode_report

    def encode(report: Report) -> bytes:
        if (error := next(failures, None)) is not None:
            raise error
        return written(report)

    monkeypatch.setattr("dra_driver.mps.host_supervisor.encode_report", encode)
    assert host.supervisor().ensure(host.spec(), 10).state == "ready"
    assert "mps_status_not_written" in [line["event"] for line in logs]


def test_refusal_that_could_not_be_written_is_written_later(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no daemon that the host looks at again; and it gives signs of life again."""
    supervisor, alive = host.supervisor(sign=0.01), host.layout.alive
    host.behave(fail_to_start="no")

    def encode(report: Report) -> bytes:
        raise StateError("the disk is full")

    with monkeypatch.context() as full:
        full.setattr("dra_driver.mps.host_supervisor.encode_report", encode)
        with pytest.raises(RetryableError, match="has not made the MPS daemon of gpu-2 ready within"):
            supervisor.ensure(host.spec(), 1.0)
        eventually(lambda: "gpu-2" in supervisor._unwritten)
    eventually(lambda: "ended while it started" in text_of(host.layout.status("gpu-2")))
    before = generation_of(alive)
    eventually(lambda: generation_of(alive) != before)


def test_host_gives_signs_while_it_can_write_what_it_knows(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, alive = host.supervisor(sign=0.01), host.layout.alive
    supervisor.ensure(host.spec(), 10)
    before = generation_of(alive)
    eventually(lambda: generation_of(alive) != before)

    def encode(report: Report) -> bytes:
        raise StateError("the disk is full")

    with monkeypatch.context() as full:
        full.setattr("dra_driver.mps.host_supervisor.encode_report", encode)
        os.kill(host.daemons()[0].pid, 9)
        eventually(lambda: "gpu-2" in supervisor._unwritten)
        signs: list[str | None] = []

        def gives_none() -> bool:
            signs.append(generation_of(alive))
            return len(signs) > 20 and len(set(signs[-20:])) == 1

        eventually(gives_none)
    before = generation_of(alive)
    eventually(lambda: generation_of(alive) != before)
    assert stat.S_IMODE(alive.stat().st_mode) == 0o600


def test_a_host_at_rest_writes_nothing(host: Host) -> None:
    supervisor = host.supervisor()
    supervisor.ensure(host.spec(), 10)
    status = host.layout.status("gpu-2")
    eventually(lambda: supervisor.status()[0].clients == 0 and '"clients": 0' in status.read_text())
    seen: list[tuple[object, object]] = []

    def writes_nothing() -> bool:
        # What it has found out by now may still have to be written once.
        seen.append((generation_of(status), generation_of(host.layout.record("gpu-2"))))
        return len(seen) > 50 and len(set(seen[-50:])) == 1

    eventually(writes_nothing)


def test_only_the_owner_reads_what_is_wanted_and_what_runs(host: Host) -> None:
    host.supervisor().ensure(host.spec(), 10)
    for directory in (host.layout.wishes, host.layout.statuses):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
