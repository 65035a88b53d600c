"""`make scale`: measures what the publishers of many nodes cost the API server.

The daemon's real client, slice cache and publisher run once for each node, all in this process. The other parts of the
daemon send nothing to the API server while the node is idle. The exit code is 1 if a restart of all publishers writes
anything.

    hack/bench scale                            1,000 nodes with the playground's API server
    hack/bench scale --kubeconfig FILE          with a running API server; --pid kube-apiserver=N measures it
    hack/bench scale --dynamic-mig --nodes 200  with MIG devices on demand, which have the largest slices
    hack/bench scale --forget 60                at the end, the playground's API server fails each watch with 410
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import servers
import structlog
from processes import resident_mib

from dra_driver.app.platforms import platform_of
from dra_driver.app.settings import Settings
from dra_driver.errors import ApiRejectedError
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.discovery import discover_once
from dra_driver.kube.client import ApiClient
from dra_driver.kube.cluster import node_uid
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.kube.slices import SliceCache
from dra_driver.model.inventory import Inventory, OfferedDevice
from dra_driver.model.sharing import NO_SHARING
from dra_driver.nvml.reader import NvmlReader
from dra_driver.slices.api_support import ApiSupport, Support
from dra_driver.slices.publisher import Publisher
from dra_driver.slices.rules.build import TaintLimits, Taints, build_pool, none_withheld, untainted
from dra_driver.slices.rules.diff import Owner, slice_changes

DRIVER = "gpu.nvidia.com"
_PREFIX = "scale-node-"
_WRITES = ("POST", "PUT", "PATCH", "DELETE")
_CONFLICT = 409
_PUBLISHED_S = 300.0


@dataclass(frozen=True, slots=True)
class Phase:
    """The cost of an action of all publishers."""

    what: str
    seconds: float
    requests: Counter[str]
    server_cpu_s: float
    server_mib: dict[str, float]
    publishers_mib: float

    @property
    def writes(self) -> int:
        """The number of requests that change something."""
        return sum(self.requests[method] for method in _WRITES)


def inventory_of(machine: str, *, dynamic_mig: bool) -> Inventory:
    """Return the devices of a simulated machine. Raises: NvmlUnavailableError."""
    with tempfile.TemporaryDirectory(prefix="scale-") as scratch:
        settings = Settings("any", simulate=machine, simulator_dir=scratch, dynamic_mig=dynamic_mig)
        platform = platform_of(settings)
        reader = NvmlReader(platform.load_nvml, settings.on_demand)
        try:
            return discover_once(reader, Sysfs(platform.paths.sys, platform.paths.proc), None)
        finally:
            reader.session.close()


class _KeepsAll(ApiSupport):
    """Skips the dry runs by which a daemon checks the API server at its start; they are not part of the measurement."""

    def _ask(self, _known: Support, _owner: Owner) -> Support:
        return Support()


class NodePublisher:
    """The part of a daemon that sends requests to the API server while nothing changes on its node."""

    def __init__(self, kubeconfig: str, name: str, content: Inventory, observe: Callable[..., None]) -> None:
        self._client = ApiClient(load_endpoint(kubeconfig), observe=observe, timeout_s=60.0)
        api = self._client
        self.cache = SliceCache(api, DRIVER, name, lambda: self.publisher.mark_dirty())  # noqa: PLW0108  made next
        self._name, self._content = name, content
        support = _KeepsAll(api, NO_SHARING, mock.Mock())
        self.publisher = Publisher(self, self.cache, NO_SHARING, support, mock.Mock())

    def inventory(self) -> Inventory:
        """Return the devices, which never change."""
        return self._content

    def owner(self) -> Owner:
        """Return the Node object as the owner of the slices."""
        return Owner(DRIVER, self._name, node_uid(self._client, self._name))

    def taints(self, _limits: TaintLimits) -> Taints:
        """Return a function that returns no taints."""
        return untainted

    def left_out(self, _dropped: bool) -> Callable[[OfferedDevice], bool]:
        """Return a function that withholds no device."""
        return none_withheld

    def stop(self) -> None:
        """Stop like a daemon; the slices remain."""
        self.publisher.stop()
        self.cache.stop()
        self._client.close()


class Fleet:
    """The publishers of all nodes."""

    def __init__(self, server: servers.Server, names: Sequence[str], content: Inventory) -> None:
        self._server = server
        self._names = names
        self._content = content
        self._requests: Counter[str] = Counter()
        self._nodes: list[NodePublisher] = []

    def watch(self) -> None:
        """Create publishers that list and watch, but do not publish yet. Raises: TimeoutError."""
        self._nodes = [
            NodePublisher(str(self._server.kubeconfig), name, self._content, self._count)
            for name in self._names
        ]
        for node in self._nodes:
            node.cache.start()
        for node in self._nodes:
            if not node.cache.synced.wait(_PUBLISHED_S):
                raise TimeoutError(f"the slices were not listed within {_PUBLISHED_S:.0f} s")

    def publish(self) -> None:
        """Make all nodes publish their slices. Raises: TimeoutError."""
        for node in self._nodes:
            node.publisher.start()
        for node in self._nodes:
            if not node.publisher.wait_published(_PUBLISHED_S):
                raise TimeoutError(f"not published within {_PUBLISHED_S:.0f} s: {node.publisher.problem}")

    def stop(self) -> None:
        """Stop all publishers."""
        for node in self._nodes:
            node.stop()

    def restart(self) -> None:
        """Restart all publishers, as an update of the plugin does. Raises: TimeoutError."""
        self.stop()
        self.watch()
        self.publish()

    def phase(self, what: str, act: Callable[[], object]) -> Phase:
        """Run `act`, and measure its cost."""
        began, cpu = time.monotonic(), self._server.cpu_s()
        self._requests.clear()
        act()
        seconds = time.monotonic() - began
        used, memory = self._server.cpu_s() - cpu, self._server.resident_mib()
        return Phase(what, seconds, Counter(self._requests), used, memory, resident_mib(os.getpid()))

    def calm_down(self, phase: Phase) -> None:
        """Wait, at most ten seconds, for half a second without a request. Add the requests until then to the phase."""
        for _ in range(20):
            if not (late := self.rest("", 0.5).requests):
                return
            phase.requests.update(late)

    def rest(self, what: str, seconds: float) -> Phase:
        """Measure the publishers while nothing changes."""
        return self.phase(what, lambda: time.sleep(seconds))

    def _count(self, method: str, _status: int | None) -> None:
        self._requests[method] += 1


def measure(
    server: servers.Server, nodes: int, content: Inventory, rest_s: float, forget_s: float
) -> list[Phase]:
    """Measure all phases, and delete the Node objects and slices afterwards."""
    client = ApiClient(load_endpoint(str(server.kubeconfig)), timeout_s=60.0)
    names = [f"{_PREFIX}{number:05d}" for number in range(nodes)]
    for name in names:
        make_node(client, name)
    fleet = Fleet(server, names, content)
    try:
        phases = [
            fleet.rest("nothing yet", 0.0),
            fleet.phase("list and watch", fleet.watch),
            fleet.phase("first publication", fleet.publish),
        ]
        fleet.calm_down(phases[-1])
        phases += [fleet.rest("at rest", rest_s), fleet.phase("restart of all", fleet.restart)]
        fleet.calm_down(phases[-1])
        phases.append(fleet.rest("at rest again", rest_s))
        if forget_s and server.forget is not None:
            server.forget()
            phases += [fleet.rest(f"410, {when}", forget_s) for when in ("at first", "later")]
        return phases
    finally:
        fleet.stop()
        clean(client, names)
        client.close()


def make_node(client: ApiClient, name: str) -> None:
    """Create a Node object, which will own slices, unless it exists."""
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    try:
        client.request("POST", "/api/v1/nodes", body=body, action=f"create node {name}")
    except ApiRejectedError as error:
        if error.status != _CONFLICT:
            raise


def clean(client: ApiClient, names: Sequence[str]) -> None:
    """Delete the slices and Node objects that were created for the measurement."""
    slices = "/apis/resource.k8s.io/v1/resourceslices"
    for node in names:
        of_node = {"fieldSelector": f"spec.nodeName={node}"}
        for entry in client.request("GET", slices, query=of_node, action="list slices")["items"]:
            name = entry["metadata"]["name"]
            client.request("DELETE", f"{slices}/{name}", action=f"delete slice {name}")
        client.request("DELETE", f"/api/v1/nodes/{node}", action=f"delete node {node}")


def bytes_of_set(content: Inventory) -> tuple[int, int]:
    """Return the number of slices of a node and their size as JSON, in bytes."""
    made = slice_changes(
        build_pool(content, f"{_PREFIX}00000"), (), Owner(DRIVER, f"{_PREFIX}00000", "u" * 36)
    )
    bodies = [json.dumps(entry, separators=(",", ":")) for entry in made.creates]
    return len(bodies), sum(map(len, bodies))


def show(phases: Sequence[Phase], nodes: int, content: Inventory) -> None:
    """Print the table, and the figures for one node, which docs/scale.md uses."""
    count, size = bytes_of_set(content)
    print(f"{nodes} nodes; each has {count} slices with {size} bytes of JSON\n")
    names = sorted(phases[0].server_mib)
    heads = "".join(f"{name + ' MiB':>26}" for name in names)
    print(f"{'':<22}{'s':>8}{'GET':>8}{'writes':>8}{'server CPU s':>14}{heads}{'publishers MiB':>16}")
    for phase in phases:
        memory = "".join(f"{phase.server_mib[name]:>26.0f}" for name in names)
        print(
            f"{phase.what:<22}{phase.seconds:>8.1f}{phase.requests['GET']:>8}{phase.writes:>8}"
            f"{phase.server_cpu_s:>14.1f}{memory}{phase.publishers_mib:>16.0f}"
        )
    start, watching, published = phases[:3]
    print("\nfor each node:")
    for name in names:
        of_watch = (watching.server_mib[name] - start.server_mib[name]) / nodes * 1024
        of_set = (published.server_mib[name] - watching.server_mib[name]) / nodes * 1024
        print(f"  {name}: {of_watch:.0f} KiB for list and watch, {of_set:.0f} KiB for its slices")
    for phase in (watching, published, phases[4], *phases[6:]):
        print(
            f"  {phase.what}: {sum(phase.requests.values()) / nodes:.1f} requests,"
            f" {phase.server_cpu_s / nodes * 1000:.1f} ms of server CPU"
        )


def main(options: Sequence[str]) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        prog="bench scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rest", type=float, default=10.0, help="seconds to measure idle publishers")
    parser.add_argument(
        "--forget",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="measure twice this long while watches fail",
    )
    parser.add_argument("--dynamic-mig", action="store_true", help="publish MIG devices on demand")
    parser.add_argument("--kubeconfig", type=Path, help="use a running API server")
    parser.add_argument("--pid", action="append", default=[], metavar="NAME=PID", help="process to measure")
    arguments = parser.parse_args(options)
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    content = inventory_of("dgx-h100", dynamic_mig=arguments.dynamic_mig)
    pids = dict(pair.split("=", 1) for pair in arguments.pid)
    with contextlib.ExitStack() as stack:
        if arguments.kubeconfig:
            server = servers.Server(arguments.kubeconfig, {name: int(pid) for name, pid in pids.items()})
        else:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="scale-"))
            server = stack.enter_context(servers.playground(Path(scratch)))
        structlog.configure(processors=[_silent])
        phases = measure(server, arguments.nodes, content, arguments.rest, arguments.forget)
    show(phases, arguments.nodes, content)
    rewritten = phases[4].writes
    print(
        "\na restart of all publishers writes nothing"
        if not rewritten
        else f"\nA RESTART OF ALL PUBLISHERS WROTE {rewritten} TIMES"
    )
    return 1 if rewritten else 0


def _silent(_logger: object, _name: str, _event: MutableMapping[str, object]) -> str:
    raise structlog.DropEvent
