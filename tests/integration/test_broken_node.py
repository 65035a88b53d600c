"""A node that is broken in one way: within a minute an event, a readiness note, the metric and `top` say so.

The daemons are processes of their own, with the time limits that users have. All nodes of this file are broken at the
same time, since each of them mostly waits.
"""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.fakes.machines import silence
from tests.fakes.scrapes import samples_in
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER, Node, parameters
from tests.integration.test_process import call
from tests.integration.test_top import options
from tests.kubelet.support import OtherDriver

MINUTE_S = 60.0
MARGIN_S = 60.0
"""A minute is what the daemon may take on a machine that has time for it."""


class Site:
    """A node, its daemon in a process, and the address where that serves HTTP."""

    def __init__(self, root: Path) -> None:
        self.node = Node(root)
        self.full_disk = root / "disk-is-full"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.process: Any = None
        self.more = ExitStack()

    def start(self) -> None:
        """Start a daemon whose writes fail as on a full disk while the file `full_disk` exists."""
        before = f"""
import errno, os, stat
write = os.write
def limited(descriptor, data):
    if os.path.exists({str(self.full_disk)!r}) and stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(descriptor, data)
os.write = limited
"""
        self.process = self.node.spawn(before=before, HTTP_ENDPOINT=self.address)

    def running(self) -> None:
        self.start()
        self.node.kubelet.wait_registered(DRIVER)
        self.node.wait_devices(8)

    def get(self, path: str) -> str:
        """The page, whatever its status is; empty while no one answers."""
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=5) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()
        except OSError:
            return ""

    def top(self) -> str:
        done = call("top", *options(self.node), "--http-endpoint", self.address)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def first_device(self) -> str:
        return str(self.node.devices()[0]["name"])

    def try_claim(self, config: list[dict[str, Any]] | None = None) -> None:
        ref = self.node.allocated_by_hand("wants-it", self.first_device(), config=config)
        self.node.kubelet.prepare(DRIVER, [ref], timeout_s=10)


@dataclass(frozen=True)
class Break:
    """How a node is broken, and what is then seen: the kind of problem, a word of its sentence, and the event."""

    do: Callable[[Site], None]
    problem: str
    says: str
    event: str
    is_running: bool = True
    fails_readiness: bool = False


def _foreign(site: Site) -> None:
    other = OtherDriver(site.node.registry / "other-reg.sock", site.node.root / "other.sock", DRIVER)
    site.more.callback(other.stop)


def _fill_the_disk(site: Site) -> None:
    site.full_disk.touch()
    site.try_claim()


def _hang(site: Site) -> None:
    site.node.machine.set_fault("nvmlDeviceGet[!HUM]*", delay_s=600, gpu=3)


def _lose_the_kubelet(site: Site) -> None:
    site.node.kubelet.stop()
    site.start()


BREAKS: Mapping[str, Break] = {
    "gpu-answers-nothing": Break(
        lambda site: silence(site.node.machine, 3), "gpu-unresponsive", "does not answer", "GPUUnhealthy"
    ),
    "gpu-hangs": Break(_hang, "gpu-unresponsive", "does not return", "GPUUnhealthy"),
    "not-registered": Break(
        _lose_the_kubelet,
        "not-registered",
        "not registered",
        "PluginNotRegistered",
        is_running=False,
        fails_readiness=True,
    ),
    "disk-full": Break(_fill_the_disk, "disk-not-writable", "disk is full", "DiskNotWritable"),
    "mps-host-absent": Break(
        lambda site: site.try_claim(parameters(strategy="MPS")),
        "mps-host-missing",
        "MPS host",
        "MpsHostMissing",
    ),
    "foreign-driver": Break(_foreign, "foreign-driver", "other-reg.sock", "ForeignDriver"),
}


@pytest.fixture(scope="module")
def broken() -> Iterator[Mapping[str, Site]]:
    """A node for each break, broken just now."""
    with ExitStack() as stack:
        sites: dict[str, Site] = {}
        for name in BREAKS:
            site = sites[name] = Site(Path(stack.enter_context(TemporaryDirectory(prefix="b-"))))
            stack.callback(site.node.stop)
            stack.enter_context(site.more)
        for name, site in sites.items():
            if BREAKS[name].is_running:
                site.running()
        for name, site in sites.items():
            BREAKS[name].do(site)
        yield sites


@pytest.mark.parametrize("name", BREAKS)
def test_broken_node_says_so_everywhere_within_a_minute(name: str, broken: Mapping[str, Site]) -> None:
    site, expected = broken[name], BREAKS[name]

    def problem() -> Any:
        page = site.get("/problems") or '{"problems": []}'
        return next((one for one in json.loads(page)["problems"] if one["problem"] == expected.problem), None)

    found = eventually(problem, MINUTE_S + MARGIN_S)
    assert expected.says in found["text"]
    ready = site.get("/readyz").splitlines()
    assert any(expected.says in line for line in ready), ready
    assert (ready[0] != "ok") == expected.fails_readiness, ready
    samples = samples_in(site.get("/metrics"))
    labels = (("driver", DRIVER), ("problem", expected.problem))
    assert samples["nvidia_dra_problems", labels] >= 1
    assert samples["nvidia_dra_node_problem", labels[:1]] == 1
    drawn = " ".join(site.top().split())
    assert "PROBLEM" in drawn
    assert expected.says in drawn, drawn
    eventually(lambda: site.node.events(expected.event), MINUTE_S + MARGIN_S)


def test_dead_plugin_is_seen_by_top_and_by_those_who_ask_it() -> None:
    """A process that is gone reports nothing itself: its probes and its scrape fail, which the kubelet and the alert
    GpuDraDriverDown act on."""
    with TemporaryDirectory(prefix="b-") as root, ExitStack() as stack:
        site = Site(Path(root))
        stack.callback(site.node.stop)
        site.running()
        assert "PROBLEM" not in site.top()
        site.process.kill()
        site.process.wait()
        assert "PROBLEM: gpu-dra-driver is not running on this node" in " ".join(site.top().split())
        assert site.get("/readyz") == site.get("/metrics") == ""
