"""A pod can always end, on a real Kubernetes: whatever is broken on the node, and whatever its neighbours do."""

from __future__ import annotations

import fcntl
import json
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import (
    CDI_DIR,
    DAEMONSET,
    NAMESPACE,
    PLUGIN_DIR,
    SIMULATOR_DIR,
    Cluster,
    claim,
    claim_and_pod,
    container,
    gpu_config,
    install,
    install_plain,
    pod,
    wait_for,
)
from tests.e2e.test_health import only
from tests.e2e.test_stopped_driver import start, stop

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

SMI = SIMULATOR_DIR / "root/usr/bin/nvidia-smi"
GRACE_S = 1.0
ENDS_WITHIN_S = GRACE_S + 15.0


BYSTANDER = pod("bystander", container(command="exec sleep 3600"))
"""A pod without claims, as every node has some: by it the driver sees that processes show their pods."""
SLICED = gpu_config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})
MPS = gpu_config(sharing={"strategy": "MPS"})


@contextmanager
def nvidia_smi(text: str) -> Iterator[None]:
    """Replace nvidia-smi; `text` begins its script, and the original continues."""
    real = SMI.read_bytes()
    program, first, rest = real.partition(b"#!/bin/sh\n")
    assert rest, "the script is behind the end of an ELF program, or alone"
    # In place: a container that starts during the test has the file mounted.
    SMI.write_bytes(program + first + f"{text}\n".encode() + rest)
    try:
        yield
    finally:
        SMI.write_bytes(real)


def drained_within(cluster: Cluster, *names: str) -> float:
    """Delete the pods as a drain does; return the seconds until none is left."""
    started = time.monotonic()
    cluster.kubectl("delete", *(f"pod/{name}" for name in names), "-n", "default", "--wait=false")

    def left() -> set[str]:
        found = {pod["metadata"]["name"] for pod in cluster.get("pods", "-n", "default")["items"]}
        return found & set(names)

    wait_for("the pods to be gone", lambda: not left())
    return time.monotonic() - started


def to_undo() -> list[Any]:
    """Return the content of the GPUs' ledgers, which is pending cleanup if no claim needs it."""
    found: list[Any] = []
    for file in (PLUGIN_DIR / "ledger").glob("*.json"):
        with suppress(FileNotFoundError):  # removed with its last entry
            found += json.loads(file.read_text())["entries"]
    return found


def prepare_failures(cluster: Cluster, pod: str) -> list[str]:
    of_pod = f"--field-selector=involvedObject.name={pod}"
    events = cluster.get("events", "-n", "default", of_pod)["items"]
    return [event["message"] for event in events if event["reason"] == "PrepareFailed"]


def durations(cluster: Cluster, *names: str) -> list[float]:
    """Seconds that the driver took for each claim's Prepare, by its log."""
    lines = cluster.kubectl("logs", DAEMONSET, "-n", NAMESPACE, "--tail=2000").splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [
        event["duration_s"]
        for event in events
        if event["event"] == "claim_prepared" and event["claim"].removeprefix("default/") in names
    ]


def test_mps_claim_without_an_mps_host_reports_why_and_ends_and_the_next_pod_gets_the_gpu(
    cluster: Cluster,
) -> None:
    """The base values have no MPS host."""
    cluster.apply(claim_and_pod("wants-mps", selector=only(7), parameters=MPS))
    reported = wait_for("an event that says why", lambda: prepare_failures(cluster, "wants-mps"))
    assert "the MPS host is not running" in reported[0]
    assert "--set mps.enabled=true" in reported[0]
    assert drained_within(cluster, "wants-mps") <= ENDS_WITHIN_S
    cluster.kubectl("delete", "resourceclaim/wants-mps", "-n", "default")
    assert (cluster.leftovers(), to_undo()) == ([], []), "nothing was done, so nothing is owed"
    cluster.start("next", selector=only(7))


@pytest.mark.parametrize(
    "broken",
    [
        "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
        "exit 255",
        "exec sleep 600",
    ],
    ids=["driver package upgraded", "exit 255", "hangs"],
)
def test_drain_ends_while_nvidia_smi_is_broken(cluster: Cluster, broken: str) -> None:
    names = ["sliced-0", "sliced-1", "plain"]
    cluster.apply(
        claim_and_pod(names[0], selector=only(0), parameters=SLICED)
        + claim_and_pod(names[1], selector=only(1), parameters=SLICED)
        + claim_and_pod(names[2], selector=only(2))
    )
    cluster.wait_running(*names)
    with nvidia_smi(broken):
        assert drained_within(cluster, *names) <= ENDS_WITHIN_S
        assert len(to_undo()) == 2
        assert not cluster.leftovers()
        cluster.kubectl("delete", "resourceclaim", "--all", "-n", "default")
        cluster.apply(claim_and_pod("next", selector=only(0)))
        cluster.wait_running("next")  # a long time slice does not block the GPU
    wait_for("the time slices to be set back", lambda: not to_undo(), timeout_s=90)
    slices = SIMULATOR_DIR / "root/var/lib/nvidia-simulator/timeslice"
    assert {file.read_text().strip() for file in slices.glob("*")} <= {"0", ""}


def test_drain_ends_when_the_mps_host_is_gone_and_the_gpu_is_kept_until_it_is_back(cluster: Cluster) -> None:
    install(cluster, "e2e-sharing")
    try:
        cluster.start("served", selector=only(6), parameters=MPS)
        cluster.kubectl("delete", "daemonset/gpu-dra-driver-mps", "-n", NAMESPACE, "--cascade=orphan")
        for pod in cluster.staying_pods(
            "mps"
        ):  # its daemons exit with it, but their records and modes remain
            name = pod["metadata"]["name"]
            cluster.kubectl("delete", f"pod/{name}", "-n", NAMESPACE, "--timeout=300s")
        assert drained_within(cluster, "served") <= ENDS_WITHIN_S
        cluster.kubectl("delete", "resourceclaim/served", "-n", "default")
        assert not cluster.leftovers()
        assert len(to_undo()) == 1
        wait_for("the GPU to be tainted", lambda: tainted(cluster, 6))
    finally:
        install(cluster, "e2e-sharing")
        wait_for("the daemon to be stopped", lambda: not to_undo(), timeout_s=90)
        wait_for("the GPU to be on offer again", lambda: not tainted(cluster, 6))
        install_plain(cluster, instead_of="e2e-sharing")


def tainted(cluster: Cluster, index: int) -> bool:
    [device] = [one for one in cluster.devices() if one["attributes"]["index"]["int"] == index]
    return any(one["key"] == "gpu.nvidia.com/cleanup" for one in device.get("taints", []))


def test_drain_ends_while_nvml_hangs_or_a_gpu_is_lost(cluster: Cluster) -> None:
    names = [f"pod-{index}" for index in (2, 3, 4)]
    for name in names:
        cluster.start(name, selector=only(int(name[-1])))
    cluster.simulate("lose", "4")
    cluster.simulate("fault", "*", "--delay", "600")
    try:
        assert drained_within(cluster, *names) <= ENDS_WITHIN_S
        assert (cluster.leftovers(), to_undo()) == ([], [])
    finally:
        cluster.simulate("clear-faults")
        cluster.simulate("restore", "4")
        # Calls that began before still wait in this instance.
        cluster.roll_out()
        wait_for("the driver to have settled", cluster.driver_has_settled)
        cluster.simulate("reset", "4", "--force")


def test_drain_ends_while_the_api_server_answers_503_to_all_but_the_kubelet(cluster: Cluster) -> None:
    names = ["plain", "sliced", "second"]
    cluster.apply(
        claim_and_pod(names[0], selector=only(0))
        + claim_and_pod(names[1], selector=only(1), parameters=SLICED)
        + claim_and_pod(names[2], selector=only(2))
    )
    cluster.wait_running(*names)
    with overloaded_for_pods() as requested:
        wait_for("the driver to meet a 503", lambda: any("resourceslices" in path for path in requested))
        assert drained_within(cluster, *names) <= ENDS_WITHIN_S
        assert (cluster.leftovers(), to_undo()) == ([], [])
    wait_for("the driver to have settled", cluster.driver_has_settled)


@contextmanager
def overloaded_for_pods() -> Iterator[list[str]]:
    """An API server that answers 503 to pods, but works for the kubelet, which is on the host; yields the
    requested paths.
    """
    requested: list[str] = []

    class Overloaded(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def refuse(self) -> None:
            requested.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.dumps(
                {"kind": "Status", "status": "Failure", "reason": "ServiceUnavailable", "code": 503}
            )
            self.send_response(503)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")  # a connection that is open stays translated
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = refuse  # noqa: N815  names of http.server

        def log_message(self, *_arguments: object) -> None:
            """Nothing: the test's output is for the test."""

    import localcluster
    from localcluster.layout import API_PORT, BRIDGE, Layout, endpoint

    layout, addresses = Layout.from_environment(), localcluster.addresses()

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in addresses.service else socket.AF_INET

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(layout.certificate("apiserver"), layout.key("apiserver"))
    with Server((addresses.service, 0), Overloaded) as server, ExitStack() as undo:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        undo.callback(server.shutdown)
        # New connections come here; existing ones were translated permanently, and are reset.
        to_us = ["-d", addresses.service, "-p", "tcp", "--dport", "443"]
        to_us += ["-j", "DNAT", "--to-destination", endpoint(addresses.service, server.server_port)]
        reset = ["-p", "tcp", "--dport", str(API_PORT), "-j", "REJECT", "--reject-with", "tcp-reset"]
        for table, chain, rule in (("nat", "PREROUTING", to_us), ("filter", "INPUT", reset)):
            command = [addresses.iptables, "--wait", "-t", table]
            rule = [chain, "-i", BRIDGE, *rule]  # noqa: PLW2901
            subprocess.run([*command, "-I", *rule], check=True)
            undo.callback(subprocess.run, [*command, "-D", *rule], check=True)
        yield requested


def test_eight_claims_of_one_pod_wait_for_nvidia_smi_at_the_same_time(cluster: Cluster) -> None:
    """With steps of three seconds the pod ran after 24 s, and with longer ones never."""
    claims = [f"part-{index}" for index in range(8)]
    requested = [claim(name, selector=only(index), parameters=SLICED) for index, name in enumerate(claims)]
    entries = [{"name": name, "resourceClaimName": name} for name in claims]
    user = pod("all-eight", container("main", *claims), resourceClaims=entries)
    with nvidia_smi('case "$*" in *set-timeslice*) sleep 3 ;; esac'):
        cluster.apply([*requested, user])
        cluster.wait_running("all-eight")
        took = durations(cluster, *claims)
        assert len(took) == 8
        assert max(took) < 12, took
        assert drained_within(cluster, "all-eight") <= ENDS_WITHIN_S
    cluster.kubectl("delete", "resourceclaim", "--all", "-n", "default")
    wait_for("nothing to be owed", lambda: not to_undo(), timeout_s=90)


def test_a_busy_gpu_holds_up_neither_a_monitor_nor_a_claim_on_another_gpu(cluster: Cluster) -> None:
    [busy] = [one for one in cluster.devices() if one["attributes"]["index"]["int"] == 1]
    uuid = busy["attributes"]["uuid"]["string"]
    monitor = claim_and_pod("monitor", namespace="admin", allocationMode="All", adminAccess=True)
    cluster.make_namespace("admin", {"resource.kubernetes.io/admin-access": "true"})
    try:
        with locked(PLUGIN_DIR / "locks" / f"{uuid}.lock"):
            cluster.apply(monitor + claim_and_pod("neighbour", selector=only(0)))
            cluster.wait_running("neighbour")
            cluster.wait_running("monitor", namespace="admin")
            assert max(durations(cluster, "neighbour")) < 5
            assert drained_within(cluster, "neighbour") <= ENDS_WITHIN_S
            started = time.monotonic()
            cluster.kubectl("delete", "pod/monitor", "-n", "admin", "--timeout=300s")
            assert time.monotonic() - started <= ENDS_WITHIN_S
    finally:
        cluster.kubectl("delete", "namespace", "admin", "--timeout=300s")


def test_claim_that_ended_while_no_driver_ran_makes_no_pod_wait(cluster: Cluster) -> None:
    """Only its record is left; the next pod used to wait for 75 s."""
    cluster.apply([*claim_and_pod("ended", selector=only(3)), BYSTANDER])
    cluster.wait_running("ended", "bystander")
    kept = {
        file: file.read_bytes()
        for place in (PLUGIN_DIR / "claims", CDI_DIR)
        for file in place.glob("*.[jy]*")
    }
    cluster.kubectl("delete", "pod/ended", "resourceclaim/ended", "-n", "default", "--timeout=300s")
    wait_for("the node to be clean", lambda: not cluster.leftovers())
    stop(cluster)
    try:
        for file, content in kept.items():
            file.write_bytes(content)
    finally:
        start(cluster)
    cluster.start("next", selector=only(3))
    assert max(durations(cluster, "next")) < 10
    assert len(cluster.leftovers()) == 2, "the record and the CDI spec of the next one"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """The lock of a GPU, as a call that hangs in the other instance of the driver has it."""
    with path.open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
        yield
