"""A driver that restarts, dies or hangs in the middle of what it was asked."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from playground.kubelet_client import KubeletError

from dra_driver.journal.records import RecordStore
from dra_driver.kubelet.plugin import KubeletPlugin
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from tests.conformance.conftest import (
    OTHER_DRIVER,
    SLOW_S,
    ConformanceNode,
    LockHolder,
    Process,
    in_background,
    quietly,
)
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER, result
from tests.kubelet.support import FakeClaims

MakeNode = Callable[..., ConformanceNode]

DIE_BEFORE_THE_RECORD_SAYS_PREPARED = """
import os, signal
from dra_driver.journal.records import RecordStore

save = RecordStore.save

def save_or_die(self, record, **how):
    if record.ref.name == "doomed" and record.phase == "prepared":
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, record, **how)

RecordStore.save = save_or_die
"""

DIE_BEFORE_THE_RECORD_GOES = """
import os, signal
from dra_driver.journal.records import RecordStore

RecordStore.delete = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
"""


class Hold:
    """A call that waits until it is let go, and then does what it should."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(SLOW_S)
        return self._call(*arguments)


def registered(node: ConformanceNode) -> None:
    """Wait until a daemon that was spawned can be called, and its eight devices are published."""
    node.kubelet.wait_registered(DRIVER, timeout_s=SLOW_S)
    node.wait_devices(8)


def dies(process: Process, call: Callable[[], Any]) -> None:
    """The call kills the daemon that serves it."""
    with pytest.raises(KubeletError):
        call()
    assert process.wait(SLOW_S) == -signal.SIGKILL


def test_c07_restarts_during_calls_of_two_drivers(
    make_node: MakeNode,
    other_driver: Callable[[ConformanceNode, FakeClaims], KubeletPlugin],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours dies in Prepare and is restarted in Unprepare, while the other driver works or fails; both end well."""
    node = make_node()
    claims = FakeClaims()
    claims.on_prepare = gate = Hold(claims.on_prepare)
    other_driver(node, claims)
    process = node.spawn(before=DIE_BEFORE_THE_RECORD_SAYS_PREPARED)
    registered(node)
    ours = node.devices()[0]["name"]
    theirs = result("eth1", "nic") | {"driver": OTHER_DRIVER}
    ref = node.allocated_by_hand("doomed", theirs, ours)

    thread, theirs = in_background(lambda: node.kubelet.prepare(OTHER_DRIVER, [ref]))
    assert gate.entered.wait(SLOW_S)
    dies(process, lambda: node.prepare(ref))
    gate.opened.set()
    thread.join(SLOW_S)
    assert isinstance(theirs[0][ref.uid], Prepared), "the other call goes on"
    driver = node.start_driver()
    answer = node.prepare(ref)
    assert [device.device for device in answer[ref.uid].devices] == [ours]
    assert node.kubelet.prepare(OTHER_DRIVER, [ref]) == theirs[0]
    assert node.prepare(ref) == answer

    hold = Hold(driver.records.delete)
    monkeypatch.setattr(driver.records, "delete", hold)
    claims.on_unprepare = lambda refs: {ref.uid: Failed("link is busy") for ref in refs}
    call, answers = in_background(lambda: node.unprepare(ref))
    assert hold.entered.wait(SLOW_S)
    stop, _ = in_background(driver.stop)
    eventually(lambda: driver._plugin is not None and driver._plugin.stopping)
    assert node.kubelet.unprepare(OTHER_DRIVER, [ref]) == {ref.uid: Failed("link is busy")}
    hold.opened.set()
    for one in (call, stop):
        one.join(SLOW_S)
    assert answers == [{ref.uid: None}], "a driver that is told to end finishes its calls"
    node.start_driver()
    claims.on_unprepare = FakeClaims().on_unprepare
    for driver_name in (DRIVER, OTHER_DRIVER):
        assert node.kubelet.unprepare(driver_name, [ref]) == {ref.uid: None}, "all are asked again"
    assert node.is_clean()


def test_c09_plugin_that_stops_responding(make_node: MakeNode) -> None:
    """A plugin that hangs keeps its slices until a kubelet starts; one that is dead loses them; both get them back."""
    node = make_node()
    process = node.spawn()
    registered(node)
    published, ref = node.slices(), node.claim("one")
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    with pytest.raises(KubeletError) as caught:
        node.kubelet.prepare(DRIVER, [ref], timeout_s=0.3)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert node.slices() == published, "its connection is there"
    kubelet = node.use_kubelet()
    asked = eventually(lambda: kubelet.calls("GetInfo"))
    assert asked[0].error is not None
    assert node.slices() == []
    with pytest.raises(KubeletError, match="is not registered"):
        node.prepare(ref)
    process.send_signal(signal.SIGCONT)
    registered(node)
    assert [one["spec"]["devices"] for one in node.slices()] == [one["spec"]["devices"] for one in published]
    answer = eventually(lambda: quietly(node, ref))
    assert isinstance(answer, Prepared)

    node.use_kubelet(wipe_after_s=0.1)
    registered(node)
    [instance] = node.kubelet.instances(DRIVER)
    process.kill()
    process.wait()
    eventually(lambda: node.slices() == [])
    assert instance.socket.is_socket(), "it did not sign off"
    node.start_driver()
    node.wait_devices(8)
    assert eventually(lambda: quietly(node, ref)) == answer


def test_c23_killed_between_cdi_file_and_record(make_node: MakeNode) -> None:
    """A kill between CDI file and record, beside a call that still runs, costs neither claim more than a retry."""
    node = make_node()
    process = node.spawn(before=DIE_BEFORE_THE_RECORD_SAYS_PREPARED)
    registered(node)
    first, second = (device["name"] for device in node.devices()[:2])
    doomed, waiting = node.allocated_by_hand("doomed", first), node.allocated_by_hand("waiting", second)
    holder = LockHolder(node.lock_file(1))
    try:
        thread, answers = in_background(lambda: quietly(node, waiting, timeout_s=45))
        eventually(lambda: node.was_read("waiting"))
        dies(process, lambda: node.prepare(doomed))
        thread.join(SLOW_S)
        assert answers == [None], "it was under way until then"
        assert one_is_left(node, doomed, "preparing")
        driver = node.start_driver()
        retry, again = in_background(lambda: node.prepare(waiting)[waiting.uid])
        answer = node.prepare(doomed)[doomed.uid]
        assert isinstance(answer, Prepared)
        assert again == []
    finally:
        holder.release()
    retry.join(SLOW_S)
    assert isinstance(again[0], Prepared)
    assert {record.phase for record in driver.records.all().values()} == {"prepared"}
    assert len(node.records()) == len(node.specs()) == 2
    node.take_back(doomed, waiting)
    assert node.is_clean()


def one_is_left(node: ConformanceNode, ref: ClaimRef, phase: str) -> bool:
    """Whether there is a record of this claim in this phase with its CDI file, and nothing of any other."""
    records = RecordStore(node.plugin_dir / "claims").all()
    specs = [name for name in node.specs() if ref.uid in name]
    return (
        {uid: record.phase for uid, record in records.items()} == {ref.uid: phase}
        and len(specs) == 1
        and node.specs() == specs
    )


def test_c23_killed_while_it_takes_back(make_node: MakeNode) -> None:
    """A kill after the CDI file went and before the record did: Unprepare is asked again, and the device is free."""
    node = make_node()
    process = node.spawn(before=DIE_BEFORE_THE_RECORD_GOES)
    registered(node)
    device = node.devices()[0]["name"]
    ref, successor = node.allocated_by_hand("old", device), node.allocated_by_hand("new", device)
    node.ready(ref)
    dies(process, lambda: node.unprepare(ref))
    assert (node.specs(), node.records()) == ([], [f"{ref.uid}.json"])
    node.start_driver()
    node.take_back(ref)
    assert node.is_clean()
    node.ready(successor)
