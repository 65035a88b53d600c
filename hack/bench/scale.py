"""`make scale`: what the publishers of many nodes cost the API server, measured.

The real client, slice cache and publisher of the daemon run once for each node, many in a process; the rest of it
says nothing to the API server while its node is quiet. The exit code is 1 if a restart of all of them wrote anything.

    hack/bench scale                            1,000 nodes against the playground's API server
    hack/bench scale --kubeconfig FILE          against a server that runs; --pid kube-apiserver=N to measure it
    hack/bench scale --dynamic-mig --nodes 200  with MIG devices on demand, whose slices are the largest
    hack/bench scale --forget 60                in the end the playground's server answers each watch with 410
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import publishers
import servers

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.model.inventory import Inventory
from dra_driver.slices.rules.build import build_pool
from dra_driver.slices.rules.diff import Owner, slice_changes

_PREFIX = "scale-node-"
_WRITES = ("POST", "PUT", "PATCH", "DELETE")
_CONFLICT = 409


@dataclass(frozen=True, slots=True)
class Phase:
    """What one order to all publishers cost."""

    what: str
    seconds: float
    requests: Counter[str]
    server_cpu_s: float
    server_mib: dict[str, float]
    publishers_mib: float

    @property
    def writes(self) -> int:
        """Requests that change something."""
        return sum(self.requests[method] for method in _WRITES)


class Fleet:
    """The publishers of all nodes, in a few processes."""

    def __init__(
        self, server: servers.Server, names: Sequence[str], content: Inventory, processes: int
    ) -> None:
        self._server = server
        self._orders: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        for number in range(processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, str(server.kubeconfig), list(names[number::processes]), content)
            process = context.Process(target=publishers.run, args=arguments, daemon=True)
            process.start()
            self._orders.append(ours)
            self._processes.append(process)

    def order(self, what: str, *orders: str) -> Phase:
        """Have all processes do this, one order after the other, and measure it."""
        began, cpu = time.monotonic(), self._server.cpu_s()
        requests: Counter[str] = Counter()
        memory = 0.0
        for order in orders:
            for connection in self._orders:
                connection.send(order)
            answers = [connection.recv() for connection in self._orders]
            memory = sum(answer.resident_mib for answer in answers)
            for answer in answers:
                requests.update(answer.requests)
        seconds = time.monotonic() - began
        used = self._server.cpu_s() - cpu
        return Phase(what, seconds, requests, used, self._server.resident_mib(), memory)

    def settle(self, phase: Phase) -> None:
        """Wait, ten seconds at most, for half a second without a request; what comes until then counts too."""
        for _ in range(20):
            if not (late := self.order("", "rest 0.5").requests):
                return
            phase.requests.update(late)

    def end(self) -> None:
        """End the processes."""
        for connection, process in zip(self._orders, self._processes, strict=True):
            with contextlib.suppress(OSError):
                connection.send("end")
            process.join(10)
            process.kill()


def measure(
    server: servers.Server, nodes: int, processes: int, content: Inventory, rest_s: float, forget_s: float
) -> list[Phase]:
    """All phases; Node objects and slices are taken away again."""
    client = ApiClient(load_endpoint(str(server.kubeconfig)), timeout_s=60.0)
    names = [f"{_PREFIX}{number:05d}" for number in range(nodes)]
    for name in names:
        make_node(client, name)
    fleet = Fleet(server, names, content, processes)
    try:
        phases = [
            fleet.order("nothing yet"),
            fleet.order("list and watch", "watch"),
            fleet.order("first publication", "publish"),
        ]
        fleet.settle(phases[-1])
        phases += [
            fleet.order("at rest", f"rest {rest_s}"),
            fleet.order("restart of all", "stop", "watch", "publish"),
        ]
        fleet.settle(phases[-1])
        phases.append(fleet.order("at rest again", f"rest {rest_s}"))
        if forget_s and server.forget is not None:
            server.forget()
            phases += [fleet.order(f"410, {when}", f"rest {forget_s}") for when in ("at first", "later")]
        return phases
    finally:
        fleet.end()
        clean(client, names)
        client.close()


def make_node(client: ApiClient, name: str) -> None:
    """A Node object, which owns slices."""
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    try:
        client.request("POST", "/api/v1/nodes", body=body, action=f"create node {name}")
    except ApiRejectedError as error:
        if error.status != _CONFLICT:
            raise


def clean(client: ApiClient, names: Sequence[str]) -> None:
    """Delete what was made for the measurement, and nothing else."""
    slices = "/apis/resource.k8s.io/v1/resourceslices"
    wanted = set(names)
    for entry in client.request("GET", slices, action="list slices")["items"]:
        if entry["spec"].get("nodeName") in wanted:
            name = entry["metadata"]["name"]
            client.request("DELETE", f"{slices}/{name}", action=f"delete slice {name}")
    for name in names:
        client.request("DELETE", f"/api/v1/nodes/{name}", action=f"delete node {name}")


def bytes_of_set(content: Inventory) -> tuple[int, int]:
    """Slices of a node and their bytes as JSON."""
    made = slice_changes(
        build_pool(content, f"{_PREFIX}00000"), (), Owner("gpu.nvidia.com", f"{_PREFIX}00000", "u" * 36)
    )
    bodies = [json.dumps(entry, separators=(",", ":")) for entry in made.creates]
    return len(bodies), sum(map(len, bodies))


def show(phases: Sequence[Phase], nodes: int, content: Inventory) -> None:
    """The table, and the figures for one node that docs/scale.md computes with."""
    count, size = bytes_of_set(content)
    print(f"{nodes} nodes, {count} slices of {size} bytes of JSON a node\n")
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
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="bench scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2, help="that the publishers share (default 2)")
    parser.add_argument("--rest", type=float, default=10.0, help="seconds of watching idle publishers")
    parser.add_argument(
        "--forget", type=float, default=0.0, metavar="SECONDS", help="twice, with watches refused"
    )
    parser.add_argument("--dynamic-mig", action="store_true", help="publish MIG devices on demand")
    parser.add_argument("--kubeconfig", type=Path, help="of a server that runs")
    parser.add_argument("--pid", action="append", default=[], metavar="NAME=PID", help="process to measure")
    arguments = parser.parse_args(options)
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    content = publishers.inventory_of("dgx-h100", dynamic_mig=arguments.dynamic_mig)
    pids = dict(pair.split("=", 1) for pair in arguments.pid)
    with contextlib.ExitStack() as stack:
        if arguments.kubeconfig:
            server = servers.Server(arguments.kubeconfig, {name: int(pid) for name, pid in pids.items()})
        else:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="scale-"))
            server = stack.enter_context(servers.playground(Path(scratch)))
        phases = measure(
            server, arguments.nodes, arguments.processes, content, arguments.rest, arguments.forget
        )
    show(phases, arguments.nodes, content)
    rewritten = phases[4].writes
    print(
        "\na restart of all writes nothing"
        if not rewritten
        else f"\nA RESTART OF ALL WROTE {rewritten} TIMES"
    )
    return 1 if rewritten else 0
