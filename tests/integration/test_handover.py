"""Two and three daemons on a node, as in a rolling update: one of them works."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from playground.kubelet_client import KubeletError

from dra_driver.model.claim import ClaimRef, Failed, Prepared
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.integration.conftest import DRIVER, Node, own_address, page, sliced
from tests.integration.test_nvml_hangs import tainted

SLOW_NVML = """
import time
from dra_driver.nvml.session import NvmlSession
open_at_once = NvmlSession._open_counted
NvmlSession._open_counted = lambda self: (time.sleep(3), open_at_once(self))
"""
NOT_READY = """
from dra_driver.slices.publisher import Publisher
Publisher.wait_published = lambda *_: False
Publisher.problem = "bad release"
"""


def started(node: Node, name: str, **environment: str) -> Any:
    """The process of a daemon that the kubelet has registered, in a pod of this name."""
    process = node.spawn(POD_UID=name, **environment)
    instances = partial(node.kubelet.instances, DRIVER)
    eventually(lambda: any(name in one.endpoint.name and one.connected for one in instances()))
    return process


def at_work(make_node: Callable[..., Node], **environment: str) -> tuple[Node, Any]:
    """A node, and the process of the daemon that works there."""
    node = make_node()
    process = started(node, "older", **environment)
    node.wait_devices(8)
    return node, process


def answer_soon(node: Node, ref: ClaimRef) -> Any:
    """The answer to a Prepare; None if the kubelet has called a daemon that has just ended, and waits for it."""
    with suppress(KubeletError):
        return node.kubelet.prepare(DRIVER, [ref], timeout_s=5)[ref.uid]
    return None


def answer(call: Callable[[ClaimRef], Any], ref: ClaimRef) -> Any:
    """A call that reaches the older process when it has just handed over is repeated, as by the kubelet."""
    found = call(ref)[ref.uid]
    is_late = isinstance(found, Failed) and "the kubelet retries" in found.error
    return call(ref)[ref.uid] if is_late else found


def prepared(node: Node, name: str) -> None:
    """A claim is prepared by whichever daemon the kubelet calls."""
    node.ready(node.claim(name))


def test_newer_daemon_takes_over_and_no_call_is_lost(make_node: Callable[..., Node]) -> None:
    node, older = at_work(make_node)
    refs, published = [node.claim(f"claim-{number}") for number in range(7)], node.slices()
    with ThreadPoolExecutor() as pool:

        def life(ref: ClaimRef) -> list[Any]:
            answers = []
            for _ in range(12):
                answers += [answer(node.prepare, ref), answer(node.unprepare, ref)]
                time.sleep(0.05)
            return answers

        lives = [pool.submit(life, ref) for ref in refs]
        started(node, "newer")
        answers = [answer for one in lives for answer in one.result(PATIENCE_S)]
    assert [answer for answer in answers if isinstance(answer, Failed)] == []
    older.terminate()
    assert older.wait(PATIENCE_S) == 0
    assert (node.records(), node.specs(), node.slices()) == ([], [], published)
    prepared(node, "afterwards")


def test_daemon_is_registered_when_it_has_opened_nvml(make_node: Callable[..., Node]) -> None:
    """Opening NVML on a large machine takes seconds; the worker serves meanwhile."""
    node, _ = at_work(make_node)
    began = time.monotonic()
    node.spawn(POD_UID="newer", before=SLOW_NVML)
    ref = node.claim("one")
    while not any("newer" in one.endpoint.name for one in node.kubelet.instances(DRIVER)):
        assert isinstance(answer(node.prepare, ref), Prepared)
        assert answer(node.unprepare, ref) is None
    assert time.monotonic() - began > 3
    node.ready(ref)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_older_daemon_works_again_when_the_newer_one_has_ended(
    make_node: Callable[..., Node], ending: signal.Signals
) -> None:
    node, _ = at_work(make_node)
    newer = started(node, "newer")
    ref = node.claim("one")
    answer = node.ready(ref)
    newer.send_signal(ending)
    newer.wait(PATIENCE_S)

    eventually(lambda: answer_soon(node, ref) == answer)
    node.must_unprepare(ref)
    assert len(node.slices()) == 1


def test_daemon_that_crashes_after_it_has_asked_does_not_stop_the_older_one(
    make_node: Callable[..., Node],
) -> None:
    node, _ = at_work(make_node)
    crash = (
        "import os\nfrom dra_driver.app.daemon import Driver\nDriver._open_state = lambda _self: os._exit(3)"
    )
    for number in range(2):
        assert node.spawn(POD_UID=f"newer-{number}", before=crash).wait(PATIENCE_S) == 3
        eventually(lambda: any(one.connected for one in node.kubelet.instances(DRIVER)))
        ref = node.claim(f"claim-{number}")
        eventually(partial(lambda ref: isinstance(answer_soon(node, ref), Prepared), ref))


def test_gpu_whose_step_hangs_is_not_a_reason_to_keep_the_node(make_node: Callable[..., Node]) -> None:
    hangs = "TimeSliceSteps.do = lambda *_: threading.Event().wait(600)"
    soon = "import dra_driver.app.daemon as daemon\ndaemon._CALLS_S = 0.5"
    before = f"import threading\nfrom dra_driver.sharing.steps import TimeSliceSteps\n{hangs}\n{soon}"
    node, older = at_work(make_node, before=before)
    address = own_address()
    first, second = (device["name"] for device in node.devices()[:2])
    hanging = node.allocated_by_hand("one", first, config=sliced("Long"))
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(node.prepare, hanging)
        eventually(node.records)
        at_once = "import dra_driver.health.rules.state as state\nstate.UNRESPONSIVE_AFTER_S = 0"
        started(node, "newer", before=at_once, HTTP_ENDPOINT=address)
        node.ready(node.allocated_by_hand("two", second, config=sliced("Long")))
        eventually(lambda: tainted(node) == {"0": ["unresponsive"]})
        page(address, "/readyz", "the wait for another process of gpu-dra-driver")
        older.kill()
        eventually(lambda: tainted(node) == {})
        node.stop()
        answer.exception(PATIENCE_S)


def test_hand_over_that_hangs_ends_the_process(make_node: Callable[..., Node]) -> None:
    """Then the kernel releases its right to work."""
    before = """
import threading
import dra_driver.app.daemon as daemon
from dra_driver.slices.publisher import Publisher
daemon._HAND_OVER_S = 0.5
Publisher.stop = lambda _self: threading.Event().wait(600)
"""
    node, older = at_work(make_node, before=before)
    prepared(node, "one")
    started(node, "newer")
    prepared(node, "two")
    assert older.wait(PATIENCE_S)


def test_nvml_that_hangs_when_it_is_closed_does_not_delay_the_hand_over(
    make_node: Callable[..., Node],
) -> None:
    before = """
import threading
from dra_driver.nvml.health_source import HealthSource
HealthSource.close = lambda _self: threading.Event().wait(600)
"""
    node, older = at_work(make_node, before=before)
    started(node, "newer")
    prepared(node, "one")
    assert older.poll() is None


def test_newer_daemon_restores_what_the_older_one_lost(
    make_node: Callable[..., Node], tmp_path: Path
) -> None:
    """For example time slices after a reload of the NVIDIA driver."""
    mark = tmp_path / "mark"
    before = f"""
from pathlib import Path
from dra_driver.sharing.steps import TimeSliceSteps
TimeSliceSteps.driver_reloaded = lambda _self: Path({str(mark)!r}).touch()
"""
    node, _ = at_work(make_node)
    started(node, "newer", before=before)
    prepared(node, "one")
    eventually(mark.exists)


def test_daemon_that_was_not_ready_is_not_ready_after_it_has_handed_over(
    make_node: Callable[..., Node],
) -> None:
    """Otherwise a bad release would be rolled out to the next node when its predecessor starts again."""
    node, address = make_node(), own_address()
    started(node, "bad", before=NOT_READY, HTTP_ENDPOINT=address)
    page(address, "/readyz", "bad release")
    started(node, "restarted")
    prepared(node, "one")
    assert not page(address, "/readyz", "has handed the node over").startswith("ok")


def test_daemon_that_handed_over_before_it_was_ready_ends_to_take_the_node_back(
    make_node: Callable[..., Node],
) -> None:
    """Otherwise a rolling update never ends if the older pod's container starts again during it."""
    node = make_node()
    at_once = "import dra_driver.app.daemon as daemon\ndaemon._TAKES_BACK_S = 0.5"
    newer = started(node, "newer", before=NOT_READY + at_once)
    started(node, "older-again")
    assert newer.wait(PATIENCE_S) == 1
    started(node, "newer-again")
    prepared(node, "one")


def test_daemon_that_works_again_and_hands_over_before_it_is_ready_stays_ready(
    make_node: Callable[..., Node], tmp_path: Path
) -> None:
    node, address, mark = make_node(), own_address(), tmp_path / "mark"
    before = f"""
from pathlib import Path
from dra_driver.slices.publisher import Publisher
Publisher.wait_published = lambda *_: not Path({str(mark)!r}).exists()
Publisher.problem = "bad release"
"""
    started(node, "older", before=before, HTTP_ENDPOINT=address)
    assert page(address, "/readyz", "ok").startswith("ok\n")
    newer = started(node, "newer")
    page(address, "/readyz", "has handed the node over")
    mark.touch()
    newer.kill()
    eventually(lambda: not page(address, "/readyz", "").startswith("ok"))
    started(node, "newer-again")
    assert page(address, "/readyz", "has handed the node over").startswith("ok\n")


def test_daemon_that_stands_by_while_nvml_hangs_is_not_restarted(make_node: Callable[..., Node]) -> None:
    node, _ = at_work(make_node)
    address = own_address()
    hangs = "NvmlSession._open_counted = lambda _self: threading.Event().wait(600)"
    before = f"import threading\nfrom dra_driver.nvml.session import NvmlSession\n{hangs}"
    node.spawn(POD_UID="newer", before=before, HTTP_ENDPOINT=address)
    assert not page(address, "/readyz", "").startswith("ok")
    assert [page(address, path, "") for path in ("/startupz", "/healthz")] == ["ok\n", "ok\n"]


def test_daemon_that_gets_no_answer_from_the_worker_is_not_ready_and_says_so(
    make_node: Callable[..., Node],
) -> None:
    node, older = at_work(make_node)
    os.kill(older.pid, signal.SIGSTOP)
    address, damaged = own_address(), node.plugin_dir / f"claims/{uuid4()}.json"
    damaged.write_text("damaged")
    before = "import dra_driver.app.daemon as daemon\ndaemon._LATE_S = 0.5"
    node.spawn(POD_UID="newer", before=before, HTTP_ENDPOINT=address)

    assert "has not handed this node over for" in page(address, "/readyz", "not handed")
    assert node.records() == [damaged.name], "only the process that works sets files aside"
    os.kill(older.pid, signal.SIGCONT)
    node.kubelet.wait_registered(DRIVER, count=1)
    prepared(node, "one")
    assert damaged.name not in node.records()


def test_daemon_whose_lock_file_was_removed_ends(make_node: Callable[..., Node]) -> None:
    node, worker = at_work(make_node)
    (node.plugin_dir / "worker.lock").unlink()
    assert worker.wait(PATIENCE_S) == 1


def test_daemon_that_has_handed_over_stays_ready_and_has_no_socket(make_node: Callable[..., Node]) -> None:
    """Otherwise Kubernetes deletes its pod while the new one is not ready, and a restarted kubelet calls it."""
    address = own_address()
    node, _ = at_work(make_node, HTTP_ENDPOINT=address)
    node.spawn(POD_UID="newer")
    said = page(address, "/readyz", "has handed the node over")
    assert said.startswith("ok\n")
    assert page(address, "/healthz", "") == "ok\n"
    assert page(address, "/problems", "").startswith("another process of gpu-dra-driver works")
    node.kubelet.wait_registered(DRIVER, count=1)
    node.kubelet.restart()
    [left] = node.kubelet.wait_registered(DRIVER, count=1)
    assert "newer" in left.endpoint.name
    node.wait_devices(8)
    prepared(node, "one")
