"""A claim for many GPUs while cleanups are pending on eight of them, and every tool for them hangs. All limits are a
quarter of the real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dra_driver.errors import RetryableError
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus
from dra_driver.model.record import RunMps
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node, parameters, sliced

LIMIT_S = 10 / 4
MPS = parameters(strategy="MPS", mpsConfig={})


class SlowMpsHost:
    """A daemon is there at once, and while `hangs` its end is waited for in vain."""

    hangs = False

    def ensure(self, spec: MpsDaemonSpec, _timeout_s: float) -> MpsDaemonStatus:
        return MpsDaemonStatus(spec.device, "ready", spec)

    def stop(self, device: str, timeout_s: float) -> None:
        if self.hangs:
            time.sleep(timeout_s)
            raise RetryableError(f"the MPS daemon of {device} does not end")


@contextmanager
def hanging_nvidia_smi(node: Node) -> Iterator[None]:
    program = node.machine.host_root / "usr/bin/nvidia-smi"
    real, hanging = program.with_name("real"), program.with_name("hanging")
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    # Renamed, since a program that starts at that moment cannot be written.
    program.rename(real)
    hanging.rename(program)
    yield
    real.replace(program)


@pytest.fixture(params=[("dgx-h100", 8), ("dgx-2", 16)], ids=["eight", "sixteen"])
def node(
    make_node: Callable[..., Node], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Node:
    for name in (
        "journal.cleaner.UNDO_S",
        "journal.cleaner.CLEAN_BEFORE_S",
        "journal.executor._TAKE_BACK_S",
    ):
        module, _, limit = f"dra_driver.{name}".rpartition(".")
        monkeypatch.setattr(f"{module}.{limit}", getattr(__import__(module, fromlist=[limit]), limit) / 4)
    machine, count = request.param
    return make_node(machine).running(count)


def prepared(node: Node, config: list[dict[str, Any]], *devices: str) -> list[ClaimRef]:
    """A claim for each device."""
    refs = [node.allocated_by_hand(f"one-{device}", device, config=config) for device in devices]
    assert all(isinstance(one, Prepared) for one in node.prepare(*refs).values())
    return refs


def asked(node: Node, ref: ClaimRef) -> tuple[Any, float]:
    began = time.monotonic()
    return node.prepare(ref)[ref.uid], time.monotonic() - began


def test_time_slices_that_cannot_be_reset_are_not_waited_for(node: Node) -> None:
    devices = [device["name"] for device in node.devices()]
    refs = prepared(node, sliced("Long"), *devices[:8])
    with hanging_nvidia_smi(node):
        node.take_back(*refs)
        assert len(node.driver.cleaner.outstanding()) == 8
        plain = node.allocated_by_hand("plain", *devices)
        answer, took = asked(node, plain)
        assert isinstance(answer, Prepared), answer
        assert took < LIMIT_S
        node.take_back(plain)
    eventually(lambda: node.driver.cleaner.outstanding() == [])


def test_mps_daemons_that_do_not_end_are_told_in_time(node: Node) -> None:
    host = node.driver.cleaner.runner.runners[RunMps].host = SlowMpsHost()
    devices = [device["name"] for device in node.devices()]
    refs = prepared(node, MPS, *devices[:8])
    with hanging_nvidia_smi(node):
        host.hangs = True
        node.take_back(*refs)
        assert len(node.driver.cleaner.outstanding()) == 8
        plain = node.allocated_by_hand("plain", *devices)
        answer, took = asked(node, plain)
        assert isinstance(answer, Failed)
        assert "stop the MPS daemon of device" in answer.error
        assert took < LIMIT_S
        assert node.records() == []
    host.hangs = False
    answer, took = asked(node, plain)
    assert isinstance(answer, Prepared), answer
    assert took < LIMIT_S
    eventually(lambda: node.driver.cleaner.outstanding() == [])
