"""Many claims at once on the largest machine."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dra_driver.model.claim import ClaimRef, Prepared
from dra_driver.model.sharing import SharingRule, share_all
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node

CALLS, CLAIMS, GPUS = 64, 100, 16


def test_hundred_claims_at_once_on_sixteen_gpus(make_node: Callable[..., Node]) -> None:
    """All are answered, each with its device and its share; when they are gone nothing of them is left."""
    node = make_node("dgx-2")
    node.start_driver(sharing=share_all(SharingRule("shares", 8)))
    names = [device["name"] for device in node.wait_devices(GPUS)]
    published = node.slices()
    wanted: dict[str, tuple[str, str]] = {}
    refs: list[ClaimRef] = []
    for number in range(CLAIMS):
        device, share = names[number % GPUS], str(uuid.uuid4())
        ref = node.allocated_by_hand(f"claim-{number}", device, shareID=share)
        wanted[ref.uid] = (device, share)
        refs.append(ref)
    threads, descriptors = threading.active_count(), _descriptors()
    for _ in range(2):
        with ThreadPoolExecutor(CALLS) as pool:
            answers = list(pool.map(lambda ref: node.prepare(ref)[ref.uid], refs))
        for ref, answer in zip(refs, answers, strict=True):
            assert isinstance(answer, Prepared), answer
            [device] = answer.devices
            assert (device.device, device.share_id) == wanted[ref.uid]
        assert len(node.records()) == len(node.specs()) == CLAIMS
    with ThreadPoolExecutor(CALLS) as pool:
        assert all(pool.map(lambda ref: node.unprepare(ref) == {ref.uid: None}, refs))
    assert (node.specs(), node.records()) == ([], [])
    assert node.slices() == published
    connections = 16
    eventually(lambda: threading.active_count() <= threads + connections)
    assert _descriptors() <= descriptors + 2 * connections, "both ends of idle connections to the API server"


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
