"""Closing NVML temporarily: the file, the lock, the command's part, and the node's part."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base.bounded_program import start_program
from dra_driver.base.file_lock import UseMark, hold_file
from dra_driver.errors import (
    ClaimsInTheWayError,
    DeviceBusyError,
    InvalidConfigError,
    NvmlDetachedError,
    NvmlInUseError,
    NvmlPausedError,
    NvmlUnavailableError,
    RetryableError,
    StateError,
)
from dra_driver.host.driver_programs import NvidiaSmi
from dra_driver.inventory import detachment
from dra_driver.inventory import discovery as discovery_module
from dra_driver.inventory.detachment import LOCK_FILE, Detachments, detach, nvml_paused
from dra_driver.inventory.discovery import NOT_DISCOVERED, Discovery
from dra_driver.inventory.rules.gpu_names import named_gpus
from dra_driver.model.claim import ClaimRef
from dra_driver.model.maintenance import Detachment
from dra_driver.nvml.reader import NvmlReader
from dra_driver.simulator import SimulatedLibrary
from tests.fakes.clock import Clock
from tests.fakes.machines import SimulatedNode
from tests.fakes.preparing import in_threads
from tests.fakes.waiting import PATIENCE_S, eventually

RESET, FLASH = ClaimRef("ops", "reset", "uid-1"), ClaimRef("ops", "flash", "uid-2")


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def detachments(tmp_path: Path, clock: Clock) -> Detachments:
    """As a process has it that is not the worker."""
    return Detachments(tmp_path, "boot-1", clock)


@pytest.fixture
def worker(tmp_path: Path, clock: Clock) -> Detachments:
    return Detachments(tmp_path, "boot-1", clock, lambda: True)


def test_detachment_lasts_as_long_as_requested(
    detachments: Detachments, clock: Clock, tmp_path: Path
) -> None:
    assert detachments.now() is None
    made = detachments.begin(300)
    assert detachments.now() == made
    assert made.problem.startswith(f"NVML is closed until {made.until}")
    assert Detachments(tmp_path, "boot-2", clock).now() is None, "a reboot ends it"
    clock.now += 299
    assert detachments.now() == made
    clock.now += 1
    assert detachments.now() is None
    detachments.begin(60)
    detachments.end()
    detachments.end()
    assert detachments.now() is None


def test_maintenance_claim_keeps_its_detachment_and_waits_for_any_other(
    detachments: Detachments, clock: Clock
) -> None:
    made = detachments.begin(300, RESET, ("GPU-1",))
    assert made.problem.startswith(f"NVML is closed until {made.until} for maintenance claim ops/reset; ")
    assert detachments.begin(600, RESET) == made
    with pytest.raises(DeviceBusyError, match="for maintenance claim ops/reset"):
        detachments.begin(300, FLASH)
    assert not detachments.end_of(FLASH)
    clock.now += 300
    assert (detachments.now(), detachments.written()) == (None, made)
    other = detachments.begin(300, FLASH)
    assert (detachments.now(), detachments.end_of(RESET)) == (other, False)
    assert detachments.end_of(FLASH)
    detachments.begin(300)
    with pytest.raises(NvmlDetachedError, match="detach --end"):
        detachments.begin(300, FLASH)


@pytest.mark.parametrize("seconds", [10, 3600])
def test_detach_does_not_replace_the_closing_for_a_maintenance_claim(
    detachments: Detachments, seconds: int
) -> None:
    made = detachments.begin(900, RESET, ("GPU-1",))
    with pytest.raises(DeviceBusyError, match="for maintenance claim ops/reset; NVML opens again when"):
        detach(detachments, seconds, None)
    assert detachments.now() == made


def test_detach_that_fails_does_not_write_the_file_of_a_claim_that_has_ended(
    detachments: Detachments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim ends, and the closing of `detach` begins, between two reads of the file."""
    detachments.begin(900, RESET, ("GPU-1",))
    begin = detachments.begin

    def after_the_claim(seconds: float) -> Detachment:
        assert detachments.end_of(RESET)
        return begin(seconds)

    monkeypatch.setattr(detachments, "begin", after_the_claim)
    answers = iter([[], ["team/late"]])
    with pytest.raises(ClaimsInTheWayError, match="team/late"):
        detach(detachments, 60, lambda: next(answers))
    assert detachments.written() is None


def test_detach_that_fails_late_leaves_the_file_of_a_claim_that_began_meanwhile(
    detachments: Detachments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim begins between the last read of the file and its removal."""
    other, now, begun = Detachments(tmp_path, "boot-1", lambda: 1000.0), detachments.now, []
    made = detachments.begin(60)
    monkeypatch.setattr(detachment, "_CLOSING_S", 0.0)

    def overtaken() -> Detachment | None:
        found = now()
        other.end()
        with suppress(RetryableError):
            begun.append(other.begin(900, RESET))
        return found

    monkeypatch.setattr(detachments, "now", overtaken)
    detachments.restore(made, None)
    assert [other.written()] == (begun or [None])


@pytest.mark.parametrize("content", ["torn", None])
def test_damaged_file_is_removed_but_not_the_one_that_a_claim_wrote_meanwhile(
    detachments: Detachments, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "detach.json"
    if content is not None:
        file.write_text(content)
    detachments.remove_damaged()
    assert not file.exists()
    made = detachments.begin(900, RESET)
    detachments.remove_damaged()
    assert detachments.now() == made


def test_directory_in_place_of_the_detach_file_is_removed_by_hand(
    detachments: Detachments, tmp_path: Path
) -> None:
    (tmp_path / "detach.json").mkdir()
    assert re.search(r"detach\.json: .*not a regular file; remove it$", detachments.problem() or "")
    with pytest.raises(StateError, match="not a regular file; remove it"):
        detachments.end()


def test_program_that_outlives_the_plugin_counts_as_a_user_of_nvml(detachments: Detachments) -> None:
    """Such as an nvidia-smi that hangs when the plugin is killed: the kernel closes the plugin's descriptors."""
    with detachments.using_nvml():
        left = start_program(["sleep", "600"])
    try:
        with pytest.raises(NvmlInUseError, match="has not closed NVML"):
            detach(detachments, 60, None, timeout_s=0.2)
        with pytest.raises(NvmlInUseError, match="running nvidia-smi"):
            detachments.wait_for_smi(0.0)
    finally:
        left.kill()
        left.wait()
    detach(detachments, 60, None, timeout_s=10)


def unreadable(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """From now on, files with this name cannot be opened, also not by root."""
    opened = os.open

    def refuse(path: Any, *given: Any, **more: Any) -> int:
        if Path(os.fsdecode(path)).name == name:
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *given, **more)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_file_that_cannot_be_read_now_opens_no_nvml_and_stays(
    node: SimulatedNode, detachments: Detachments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    made = detachments.begin(300)
    _, discovery = instance(node, tmp_path, Detachments(tmp_path, "boot-1", lambda: 1000.0), [])
    with monkeypatch.context() as patch:
        unreadable(patch, "detach.json", code)
        discovery.scan_now(5)
        assert "cannot read " in (discovery.unavailable() or "")
        assert "`gpu-dra-driver detach --end` removes" in (discovery.unavailable() or "")
        assert not detachments.is_nvml_open()
        for call in (lambda: detachments.begin(60), lambda: detachments.begin(60, RESET), detachments.now):
            with pytest.raises(StateError, match=r"cannot read .*detach\.json"):
                call()
        with pytest.raises(NvmlDetachedError, match="cannot read"), detachments.using_nvml():
            pytest.fail("nvidia-smi ran")
    assert detachments.now() == made
    with monkeypatch.context() as patch:
        unreadable(patch, "detach.json", code)
        detachments.end()
    discovery.scan_now(5)
    assert discovery.unavailable() is None


def test_nvml_stays_as_it_is_while_the_file_cannot_be_read(
    node: SimulatedNode, detachments: Detachments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, discovery = instance(node, tmp_path, detachments, [])
    for is_closed in (False, True):
        if is_closed:
            detachments.begin(300, RESET, ("GPU-1",))
        discovery.scan_now(5)
        before = discovery.unavailable()
        assert (before is not None, detachments.is_nvml_open()) == (is_closed, not is_closed)
        with monkeypatch.context() as patch:
            unreadable(patch, "detach.json", errno.EMFILE)
            discovery.scan_now(5)
            assert (discovery.unavailable(), detachments.is_nvml_open()) == (before, not is_closed)
            assert discovery.gpus_in_maintenance == (("GPU-1",) if is_closed else ())
    discovery.stop()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
def test_lock_file_that_cannot_be_read_does_not_mean_that_nvml_is_closed(
    detachments: Detachments, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    unreadable(monkeypatch, LOCK_FILE, code)
    with pytest.raises(StateError, match=r"cannot open the lock file .*nvml\.lock"):
        detachments.is_nvml_open()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
def test_nvml_opens_once_the_lock_file_can_be_read_but_the_worker_does_not_wait_for_it(
    node: SimulatedNode,
    detachments: Detachments,
    worker: Detachments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    _, discovery = instance(node, tmp_path, detachments, [])
    with monkeypatch.context() as patch:
        unreadable(patch, LOCK_FILE, code)
        discovery.scan_now(5)
        said = "whether NVML must stay closed is unknown: cannot open the lock file"
        assert (discovery.unavailable() or "").startswith(said)
        assert worker.problem() is None
    discovery.scan_now(5)
    assert discovery.unavailable() is None
    with monkeypatch.context() as patch:
        unreadable(patch, LOCK_FILE, code)
        discovery.scan_now(5)
        assert discovery.unavailable() is None, "an open NVML stays open"
    discovery.stop()


def test_detach_while_another_process_writes_the_file_names_no_claim(
    detachments: Detachments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detachment, "_CLOSING_S", 0.0)
    detachments.begin(300)
    [lock] = tmp_path.rglob("detach.lock")
    with (
        hold_file(lock, 0.0, "it"),
        pytest.raises(RetryableError, match=r"^another process is writing the detach file; try again$"),
    ):
        detachments.begin(300)


def test_of_claims_that_begin_at_once_one_closes_nvml(tmp_path: Path) -> None:
    """Each in an instance of its own."""
    refs = [ClaimRef("ops", f"claim-{number}", f"uid-{number}") for number in range(8)]
    instances = [Detachments(tmp_path, "boot-1") for _ in refs]
    begun = in_threads(*(partial(one.begin, 300, ref) for one, ref in zip(instances, refs, strict=True)))
    assert len([one for one in begun if isinstance(one, Detachment)]) == 1
    assert len([one for one in begun if isinstance(one, DeviceBusyError)]) == 7


def test_end_leaves_the_file_of_a_maintenance_claim_with_its_time_over(
    detachments: Detachments, clock: Clock
) -> None:
    made = detachments.begin(300, RESET, ("GPU-1",))
    clock.now += 100
    detachments.end()
    found = detachments.written()
    assert (detachments.now(), found.claim, found.gpu_uuids) == (None, RESET, ("GPU-1",))
    assert found.until_s == clock.now
    assert found.until <= made.until
    detachments.end()
    assert detachments.written() == found, "it was over since the first end"
    assert detachments.end_of(RESET)
    assert detachments.written() is None


def test_closing_that_someone_ends_is_not_waited_for(detachments: Detachments, tmp_path: Path) -> None:
    mark = UseMark(tmp_path / LOCK_FILE)
    mark.hold()
    made = detachments.begin(300, RESET)
    detachments.end()
    with pytest.raises(RetryableError, match="another process ended the detachment"):
        detachments.wait_closed(made, 60)
    mark.release()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"version": 0}',
        '{"version": 1, "bootID": "boot-1"}',
        "\0",
        '{"version": 1, "bootID": "boot-1", "untilS": "later", "until": "later"}',
    ],
)
def test_a_file_that_cannot_be_read_detaches_no_one(
    detachments: Detachments, tmp_path: Path, content: str
) -> None:
    (tmp_path / "detach.json").write_text(content)
    assert detachments.now() is None
    detachments.begin(60)
    assert detachments.now() is not None


def test_the_command_waits_until_everyone_has_released_nvml(detachments: Detachments, tmp_path: Path) -> None:
    marks = [UseMark(tmp_path / LOCK_FILE) for _ in range(2)]
    for mark in marks:
        mark.hold()
    done = threading.Event()
    waiting = threading.Thread(target=lambda: (detach(detachments, 60, None), done.set()))
    waiting.start()
    marks[0].release()
    assert not done.wait(0.3)
    marks[1].release()
    assert done.wait(PATIENCE_S)
    waiting.join()
    assert detachments.now() is not None


def test_an_instance_that_does_not_release_nvml_leaves_nothing_detached(
    detachments: Detachments, tmp_path: Path
) -> None:
    mark = UseMark(tmp_path / LOCK_FILE)
    mark.hold()
    with pytest.raises(NvmlInUseError, match="has not closed NVML"):
        detach(detachments, 60, None, timeout_s=0.2)
    assert detachments.now() is None
    mark.release()


def test_claims_are_in_the_way_also_those_that_come_in_between(detachments: Detachments) -> None:
    answers = [["team/b", "team/a"]]
    with pytest.raises(ClaimsInTheWayError, match="claims use the GPUs: team/a, team/b; delete their pods"):
        detach(detachments, 60, lambda: answers[0])
    assert detachments.now() is None
    came = iter([[], ["team/late"]])
    with pytest.raises(ClaimsInTheWayError, match="team/late"):
        detach(detachments, 60, lambda: next(came))
    assert detachments.now() is None
    detach(detachments, 60, None)
    assert detachments.now() is not None


def test_a_directory_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"detach\.lock"):
        detach(Detachments(tmp_path / "away", "boot-1"), 60, None)


@pytest.fixture
def node(machine: Callable[[str], SimulatedNode]) -> SimulatedNode:
    return machine("dgx-h100")


def test_gpus_are_named_as_people_name_them(node: SimulatedNode) -> None:
    inventory = node.discover()
    gpu = inventory.gpus[2]
    [name] = [device.name for device in inventory.by_name.values() if device.uuid == gpu.uuid]
    for given in ("2", gpu.uuid, gpu.uuid.upper(), gpu.pci_bus_id or "", name):
        assert named_gpus([given, "0"], inventory, {}, is_whole=True) == {gpu.uuid, inventory.gpus[0].uuid}
    with pytest.raises(InvalidConfigError, match="there is no GPU '8'; use a device name"):
        named_gpus(["2", "8"], inventory, {}, is_whole=True)
    with pytest.raises(InvalidConfigError, match="there is no GPU 'GPU-none'"):
        named_gpus(["GPU-none"], inventory, {}, is_whole=True)


def test_a_lost_gpu_is_named_by_what_is_known_of_it_and_indices_are_not_sure(node: SimulatedNode) -> None:
    lost = node.discover().gpus[3]
    node.machine.lose_gpu(3)
    node.session.reopen()
    inventory = node.read()
    known = {"gpu-lost-one": lost.uuid, lost.pci_bus_id or "": lost.uuid}
    for given in ("gpu-lost-one", lost.pci_bus_id or "", lost.uuid):
        assert named_gpus([given], inventory, known, is_whole=False) == {lost.uuid}
    for shown in (inventory, None):
        with pytest.raises(InvalidConfigError, match="index 3 is not reliable"):
            named_gpus(["3"], shown, known, is_whole=False)
    assert named_gpus(["gpu-lost-one"], None, known, is_whole=False) == {lost.uuid}


def test_concurrent_opening_of_nvml_is_waited_for(
    node: SimulatedNode, tmp_path: Path, detachments: Detachments
) -> None:
    """The daemon takes the mark first, then reads the file. The command does this in reverse order, so it
    sees the mark.
    """
    mark = UseMark(tmp_path / LOCK_FILE)
    looked, go_on = threading.Event(), threading.Event()

    def load() -> object:
        looked.set()
        assert go_on.wait(PATIENCE_S)
        return SimulatedLibrary(node.machine)

    reader = NvmlReader(detachments.guarded(load), mark=mark)
    opening = threading.Thread(target=reader.reopen)
    opening.start()
    assert looked.wait(PATIENCE_S)
    with pytest.raises(NvmlInUseError):
        detach(detachments, 60, None, timeout_s=0.2)
    go_on.set()
    opening.join()
    detachments.begin(60)
    with pytest.raises(NvmlDetachedError):
        reader.reopen()
    assert not detachments.is_nvml_open()


def test_a_new_session_keeps_the_mark(node: SimulatedNode, tmp_path: Path, detachments: Detachments) -> None:
    seen: list[bool] = []

    def load() -> object:
        seen.append(detachments.is_nvml_open())
        return SimulatedLibrary(node.machine)

    reader = NvmlReader(load, mark=UseMark(tmp_path / LOCK_FILE))
    reader.reopen()
    reader.reopen()
    assert seen == [True, True]
    assert reader.session.driver_loads == 0
    reader.session.close()


def test_a_failure_leaves_what_others_requested(detachments: Detachments, clock: Clock) -> None:
    first = detach(detachments, 60, list)
    answers = iter([[], ["team/late"]])
    with pytest.raises(ClaimsInTheWayError):
        detach(detachments, 3600, lambda: next(answers))
    assert detachments.now() == first, "as long as before"

    def meanwhile() -> list[str]:
        calls.append(1)
        if len(calls) == 2:
            detachments.begin(120)
            return ["team/late"]
        return []

    calls: list[int] = []
    with pytest.raises(ClaimsInTheWayError):
        detach(detachments, 600, meanwhile)
    found = detachments.now()
    assert found.until_s == clock.now + 120, "another command has asked since"


def test_nvidia_smi_does_not_run_in_between(detachments: Detachments) -> None:
    smi = NvidiaSmi(lambda: pytest.fail("it was looked for"), detachments.using_nvml)
    detachments.begin(60)
    with pytest.raises(RetryableError, match="NVML is closed until") as waits:
        smi.set_time_slice("GPU-1", 0)
    assert waits.value.has_no_effect
    assert not isinstance(waits.value, NvmlUnavailableError), "then the undo would count as done"


def test_discovery_releases_and_reopens_nvml(
    node: SimulatedNode,
    tmp_path: Path,
    detachments: Detachments,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dra_driver.nvml.session._PATIENCE_S", 0.1)
    received: list[str] = []
    reader, discovery = instance(node, tmp_path, detachments, received)
    discovery.scan_now(5)
    assert (detachments.is_nvml_open(), received) == (True, ["change", "reload"])
    made = detachments.begin(60)
    with reader.session.operation(lambda: 0.0):
        discovery.scan_now(5)
        assert (detachments.is_nvml_open(), discovery.unavailable()) == (True, None), (
            "a change to a GPU goes first"
        )
    received.clear()
    discovery.scan_now(5)
    assert (detachments.is_nvml_open(), discovery.unavailable()) == (False, made.problem)
    assert (list(discovery.inventory.every_gpu), received) == ([], ["change"])
    with pytest.raises(NvmlUnavailableError, match="NVML is closed until"), reader.session.kept_open():
        pass
    discovery.scan_now(5)
    assert received == ["change"], "reported once"
    clock.now += 60
    discovery.scan_now(5)
    assert (len(discovery.inventory.gpus), detachments.is_nvml_open()) == (8, True)
    assert received == ["change", "change", "hardware"], "what the closing lost is set again"
    reader.session.close()
    assert not detachments.is_nvml_open()


# --- a pause ----------------------------------------------------------------------------------------


def instance(
    node: SimulatedNode, directory: Path, detachments: Detachments, received: list[str]
) -> tuple[NvmlReader, Discovery]:
    """What an instance of the plugin has of all this."""
    load = detachments.guarded(lambda: SimulatedLibrary(node.machine))
    reader = NvmlReader(load, mark=UseMark(directory / LOCK_FILE))
    change, reload, hardware = (partial(received.append, what) for what in ("change", "reload", "hardware"))
    discovery = Discovery(reader, node.host, change, reload, None, hardware, detachments)
    return reader, discovery


PAUSES = """
import sys
from pathlib import Path
from dra_driver.inventory.detachment import Detachments

with Detachments(Path(sys.argv[1]), "boot-1").pause("changes GPU-7"):
    sys.stdin.read()
"""


@contextmanager
def paused_elsewhere(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that keeps NVML closed."""
    command = [sys.executable, "-u", "-c", PAUSES, str(directory)]
    made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert "nvml_paused" in made.stdout.readline()
    yield made
    made.kill()
    made.communicate()


@pytest.fixture
def pausing(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with paused_elsewhere(tmp_path) as made:
        yield made


def test_process_closes_nvml_during_a_pause_of_another_one_and_keeps_its_devices(
    node: SimulatedNode, tmp_path: Path, detachments: Detachments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery_module, "_CHECK_EVERY_S", 0.01)
    received: list[str] = []
    _, discovery = instance(node, tmp_path, detachments, received)
    discovery.start()
    known = ["change", "reload"]
    eventually(lambda: received == known)
    gone = node.machine.gpu(7)
    with paused_elsewhere(tmp_path):
        eventually(lambda: not detachments.is_nvml_open())
        assert node.machine.clients(with_own=True) == []
        node.machine.give_to(7, "vfio-pci")
        assert (discovery.unavailable(), len(discovery.inventory.gpus), received) == (None, 8, known)
    eventually(lambda: received == [*known, "change", "hardware"])
    assert gone.uuid not in {gpu.uuid for gpu in discovery.inventory.every_gpu}, "neither shown nor lost"
    assert (len(discovery.inventory.gpus), detachments.is_nvml_open()) == (7, True)
    discovery.stop()


def test_settings_are_set_again_after_a_pause_though_the_hardware_is_the_same(
    node: SimulatedNode, tmp_path: Path, detachments: Detachments
) -> None:
    received: list[str] = []
    reader, discovery = instance(node, tmp_path, detachments, received)
    discovery.scan_now(5)
    received.clear()
    with reader.session.closed(lambda: 0.0):
        pass
    assert discovery._has_changed()
    discovery.scan_now(5)
    assert (received, discovery._has_changed()) == (["hardware"], False)
    reader.session.close()


def test_look_that_gives_way_to_a_pause_is_made_again_and_withdraws_nothing(
    node: SimulatedNode, tmp_path: Path, detachments: Detachments, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[str] = []
    reader, discovery = instance(node, tmp_path, detachments, received)
    discovery.scan_now(5)
    read, gives_way, is_overtaken = reader.read_inventory, iter([1, 1]), iter([1])

    def give_way() -> object:
        if next(gives_way, 0):
            raise NvmlPausedError
        return read()

    def cards(_gpus: object) -> tuple[()]:
        if next(is_overtaken, 0):
            with reader.session.closed(lambda: 0.0):
                pass
        return ()

    monkeypatch.setattr(reader, "read_inventory", give_way)
    discovery.cards = cards
    received.clear()
    discovery.scan_now(5)
    assert (next(gives_way, 0), next(is_overtaken, 0)) == (0, 0), "it was made four times"
    assert (received, discovery.unavailable()) == (["hardware"], None)
    reader.session.close()


def test_hanging_change_ends_the_pause_and_others_continue(
    node: SimulatedNode, tmp_path: Path, detachments: Detachments, logs: list
) -> None:
    reader, discovery = instance(node, tmp_path, detachments, [])
    discovery.scan_now(5)
    logs.clear()
    closed = partial(nvml_paused, reader.session, detachments)
    with pytest.raises(RetryableError, match="unbind hangs"), closed("unbinds", lambda: 5.0):
        raise RetryableError("unbind hangs")
    with reader.session.operation(lambda: 0.0):
        assert len(reader.read_inventory().gpus) == 8
    assert not detachments.paused()
    assert [line["event"] for line in logs] == ["nvml_paused", "nvml_pause_ended"]
    reader.session.close()


def test_pause_waits_for_changes_and_nvidia_smi_and_keeps_no_one_from_them(
    node: SimulatedNode, tmp_path: Path, detachments: Detachments
) -> None:
    reader, _ = instance(node, tmp_path, detachments, [])
    reader.reopen()
    closed, session = partial(nvml_paused, reader.session, detachments), reader.session
    uses: list[Callable[[], AbstractContextManager[object]]] = [
        lambda: session.operation(lambda: 0.0),
        lambda: detachments.using_nvml(0.0),
    ]
    for under_way in uses:
        done = threading.Event()

        def pause(done: threading.Event = done) -> None:
            with closed("tests", lambda: 20.0):
                done.set()

        with under_way():
            waiting = threading.Thread(target=pause)
            waiting.start()
            for use in uses:
                with use(), session.kept_open():
                    assert not detachments.paused()
            assert not done.is_set()
        waiting.join(PATIENCE_S)
        assert done.is_set()
        with session.operation(lambda: 10.0):
            assert session.is_open
    with (
        detachments.using_nvml(0.0),
        pytest.raises(NvmlInUseError, match="gpu-dra-driver is running nvidia-smi, and retries soon"),
        closed("tests", lambda: 0.0),
    ):
        pytest.fail("it began")
    assert session.pauses == 2
    session.close()


def test_pause_ends_when_someone_does_not_close_nvml(detachments: Detachments, tmp_path: Path) -> None:
    mark = UseMark(tmp_path / LOCK_FILE)
    mark.hold()
    refused = pytest.raises(NvmlInUseError, match="another process of gpu-dra-driver on this node")
    with refused, detachments.pause("tests", 0.0):
        pytest.fail("it began")
    assert not detachments.paused()
    mark.release()


def test_no_pause_begins_while_the_node_is_detached(detachments: Detachments) -> None:
    detachments.begin(60)
    with pytest.raises(NvmlDetachedError, match="NVML is closed until"), detachments.pause("tests"):
        pytest.fail("it began")


def test_pause_of_another_process_ends_although_it_is_killed_and_still_a_zombie(
    detachments: Detachments, pausing: subprocess.Popen[str]
) -> None:
    assert (detachments.paused(), detachments.problem()) == (True, str(NvmlPausedError()))
    with pytest.raises(NvmlPausedError), detachments.using_nvml(0.0):
        pytest.fail("nvidia-smi ran")
    pausing.kill()
    eventually(lambda: Path(f"/proc/{pausing.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert (detachments.paused(), detachments.problem()) == (False, None)
    with detachments.using_nvml(0.0):
        pass


def test_worker_ignores_a_pause_that_another_process_left(
    node: SimulatedNode,
    tmp_path: Path,
    detachments: Detachments,
    worker: Detachments,
    pausing: subprocess.Popen[str],
) -> None:
    """As of a process that was killed while it hangs in the kernel, which keeps its locks."""
    reader, discovery = instance(node, tmp_path, worker, [])
    discovery.scan_now(5)
    assert (discovery.unavailable(), worker.problem(), reader.session.is_open) == (None, None, True)
    with worker.using_nvml(0.0):
        assert detachments.paused()
    with nvml_paused(reader.session, worker, "tests", lambda: 0.0):
        assert not worker.is_nvml_open()
        with pytest.raises(NvmlPausedError), worker.using_nvml(0.0):
            pytest.fail("nvidia-smi ran during a pause of its own process")
    assert (reader.session.is_open, detachments.paused()) == (True, True)
    discovery.stop()


@pytest.mark.parametrize("becomes_the_worker", [False, True])
def test_process_that_stands_by_opens_nvml_after_the_pause_or_as_the_worker(
    node: SimulatedNode, tmp_path: Path, pausing: subprocess.Popen[str], becomes_the_worker: bool
) -> None:
    is_worker = threading.Event()
    detachments = Detachments(tmp_path, "boot-1", is_worker=is_worker.is_set)
    reader, discovery = instance(node, tmp_path, detachments, [])
    discovery.start()
    try:
        eventually(lambda: reader.session.pauses == 1)
        assert (discovery.unavailable(), detachments.is_nvml_open()) == (NOT_DISCOVERED, False)
        if becomes_the_worker:
            is_worker.set()
        else:
            pausing.kill()
        eventually(lambda: discovery.unavailable() is None)
        assert detachments.is_nvml_open()
    finally:
        discovery.stop()


def test_pause_of_a_process_that_continues_with_nvml_closes_it_in_the_others(
    worker: Detachments, detachments: Detachments, tmp_path: Path
) -> None:
    own, other = UseMark(tmp_path / LOCK_FILE), UseMark(tmp_path / LOCK_FILE)
    own.hold()
    with worker.pause("tests", own=own):
        assert (detachments.is_nvml_open(), detachments.paused()) == (True, True)
    other.hold()
    with pytest.raises(NvmlInUseError), worker.pause("tests", 0.0, own):
        pytest.fail("another has NVML open")
    own.release()
    other.release()


def test_pauses_of_one_process_overlap(worker: Detachments, detachments: Detachments) -> None:
    with worker.pause("tests"):
        with worker.pause("tests, too"):
            pass
        assert detachments.paused()
        with pytest.raises(NvmlPausedError), worker.using_nvml(0.0):
            pytest.fail("nvidia-smi ran")
    assert not detachments.paused()
    with worker.using_nvml(0.0):
        pass


def test_nvidia_smi_and_the_mps_host_wait_for_the_end_of_a_pause(detachments: Detachments) -> None:
    ended, waits = threading.Event(), threading.Event()

    def run() -> None:
        waits.set()
        with detachments.using_nvml(10.0):
            assert ended.is_set()
            assert detachments.is_nvml_open()
            done.set()

    done = threading.Event()
    runs = threading.Thread(target=run)
    with detachments.pause("tests"):
        with pytest.raises(NvmlPausedError), detachments.using_nvml(0.0):
            pytest.fail("it ran")
        assert not detachments.is_nvml_open()
        runs.start()
        assert waits.wait(PATIENCE_S)
        ended.set()
    runs.join(PATIENCE_S)
    assert done.is_set()
    smi = NvidiaSmi(lambda: pytest.fail("it was looked for"), detachments.using_nvml)
    with (
        detachments.pause("tests"),
        pytest.raises(RetryableError, match="NVML is closed for a moment") as refused,
    ):
        smi.set_time_slice("GPU-1", 0, timeout_s=0.0)
    assert refused.value.has_no_effect


def test_detach_file_of_a_newer_release_lasts_until_its_claim_ends_or_for_a_day(
    detachments: Detachments, clock: Clock, tmp_path: Path
) -> None:
    file = tmp_path / "detach.json"
    detachments.begin(60, RESET)
    newer = json.dumps(json.loads(file.read_text()) | {"version": 2, "release": "9.0.0"})
    file.write_text(newer)
    clock.now, now = 100_000.0, time.time()
    os.utime(file, (now - 86_500, now - 86_500))
    assert detachments.problem() is None
    os.utime(file, (now - 86_000, now - 86_000))
    assert "at the latest (a newer release" in (detachments.problem() or "")
    assert not detachments.end_of(FLASH)
    assert detachments.end_of(RESET)
    assert (detachments.problem(), file.exists()) == (None, False)
    file.write_text(newer)
    os.utime(file, (now - 86_500, now - 86_500))
    assert detachments.begin(60) == detachments.now(), "a file whose day is over is in no one's way"
    file.write_text(newer)
    os.utime(file, (0, 0))  # from before this boot
    assert detachments.problem() is None
    file.touch()
    assert detachments.problem() is not None
    detachments.end()
    assert detachments.problem() is None
