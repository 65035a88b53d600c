"""`make e2e`: starts a cluster, builds the image, installs the driver, runs the tests, and always removes
everything again.

If a cluster is already running, the tests use it and keep it, including its simulated machine.

python hack/e2e.py                      all tests of tests/e2e, on several clusters in parallel
python hack/e2e.py --one-cluster        all tests, on one cluster
python hack/e2e.py --keep               keep the cluster running afterwards
python hack/e2e.py --ip-family ipv6     a cluster without IPv4 addresses
python hack/e2e.py -- -k mig            arguments for pytest
python hack/e2e.py --matrix             the core tests on each release of Kubernetes; on the newest one also with the
                                        kubelet as a node, and with IPv6 only

Tests wait for the cluster most of the time. Therefore some of them run at the same time on two more clusters, which are
isolated from the first one and from the network (hack/e2e.yaml, hack/cluster/localcluster/apart.py). The bundle for a
machine with a GPU is tried beside them, with the cluster in it. If you select tests, they run on one cluster.

A kubelet that acts as a node loses a race with the node authorizer for about one claim in eight. The pod then
waits for the kubelet's second attempt, a minute or more. The driver does not cause this, and the tests allow
for it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO

import debian_programs
import yaml

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = [sys.executable, "hack/cluster/cluster.py"]
QUICK = ["--sync-frequency", "10s"]
"""The kubelet retries a failed Prepare after 10 to 15 s instead of 60 to 90 s. Tests that require success at the first
attempt check the pod's events, not the time."""
SIMULATOR_STATE = Path("/var/lib/gpu-dra-simulator")
BUILD = (
    ("build the image", [sys.executable, "hack/image.py"]),
    ("build and download the clusters' programs", [*CLUSTER, "fetch"]),
)
"""What takes minutes, before the tests: a test does not build anything."""
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-m",
    "cluster",
    "--timeout=1800",
    "-v",
    "-s",
    "--no-header",
    "--durations=10",
]
"""The timeout is for tests that hang. Each wait in a test has its own timeout, with an error that says what it waited
for."""
INSTALL = [sys.executable, "hack/cluster/install.py"]
MACHINE = [sys.executable, "-m", "dra_driver.cli.main", "simulate", "create", "dgx-h100"]
HOOK = [sys.executable, "hack/cdi_hook.py", str(SIMULATOR_STATE / "root")]
MATRIX = (
    ("1.34", ()),
    ("1.35", ()),
    ("1.36", ()),
    ("1.37", ()),
    ("1.37", ("--kubelet-as-node",)),
    ("1.37", ("--ip-family=ipv6",)),
)
"""Rows of the matrix: a release of Kubernetes, and flags of `cluster.py up`."""
APART = tuple(map(tuple, yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())))
"""The tests of each cluster after the first one."""
_SUMMARY = re.compile(r"(FAILED|ERROR) .*|=+ \d+ .* in [\d.]+s.* =+")
"""The summary lines of pytest."""
NODE = "tests/gpunode"
"""Tests that start a cluster of their own, and need the network to make it."""
TESTS = ("tests/e2e", "tests/kube", "tests/deploy", "tests/playground", NODE)


class Interrupted(Exception):  # noqa: N818  a signal is no error
    """SIGINT or SIGTERM was received."""


def main() -> int:
    """Run everything. Return the exit code of the tests, or of the step that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="keep the cluster running afterwards")
    parser.add_argument(
        "--ip-family", choices=("ipv4", "ipv6"), default="ipv4", help="the IP family of a new cluster"
    )
    parser.add_argument("--one-cluster", action="store_true", help="run all tests on one cluster")
    parser.add_argument("--part", type=int, choices=range(len(APART) + 1), help=argparse.SUPPRESS)
    parser.add_argument(
        "--matrix", action="store_true", help="run the core tests on each release of Kubernetes"
    )
    parser.add_argument(
        "--release", choices=sorted({release for release, _ in MATRIX}), help="the only release"
    )
    parser.add_argument("pytest_args", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("make e2e needs root: it runs a kubelet and a container runtime. Try: sudo make e2e")
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    was_up = False
    try:
        was_up = _cluster().is_up()
        if arguments.matrix:
            return _run_matrix(arguments.release, arguments.pytest_args) if not was_up else _refuse_matrix()
        if was_up:
            print("e2e: a cluster is running; it gets this driver, and is kept with its simulated machine")
        else:
            if (
                not (arguments.keep or arguments.one_cluster or arguments.pytest_args)
                and arguments.part is None
            ):
                return _run_side_by_side(["--ip-family", arguments.ip_family])
            _clear_away()  # an interrupted run may have left pods, claims and records, and a machine with faults
        return _run_all(
            ["--ip-family", arguments.ip_family, *QUICK],
            arguments.pytest_args,
            _tests_of(arguments.part),
        )
    except Interrupted:
        print("e2e: interrupted")
        return 130
    finally:
        if was_up:
            print("e2e: the cluster was already running, so it is kept; `make cluster-down` removes it")
        elif not arguments.keep:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            _clear_away()


def _clear_away() -> None:
    _step("remove the cluster", [*CLUSTER, "down"])
    shutil.rmtree(SIMULATOR_STATE, ignore_errors=True)


def _refuse_matrix() -> int:
    print("e2e: the matrix starts its own clusters; remove the running one first: make cluster-down")
    return 1


def _run_matrix(only: str | None, pytest_args: list[str]) -> int:
    """Run every row, even after a failure. Return the exit code of the first failure."""
    verdicts: list[tuple[str, int]] = []
    for release, flags in MATRIX:
        if only not in (None, release):
            continue
        # The default programs are those of the newest release.
        os.environ["GPU_DRA_KUBERNETES"] = "" if release == MATRIX[-1][0] else release
        os.environ["GPU_DRA_KUBELET_AS_NODE"] = "true" if "--kubelet-as-node" in flags else ""
        _clear_away()
        status = _run_all(list(flags), ["-m", "core", *pytest_args])
        verdicts.append((" ".join((release, *flags)), status))
    for row, status in verdicts:
        print(f"e2e: Kubernetes {row}: {'passed' if status == 0 else f'FAILED with exit code {status}'}")
    return next((status for _, status in verdicts if status), 0)


def _tests_of(part: int | None) -> list[str]:
    """Return the tests of one cluster, as arguments of pytest; all tests if `part` is None."""
    if part:
        return list(APART[part - 1])
    elsewhere = [] if part is None else [NODE, *(path for paths in APART for path in paths)]
    # pytest also collects ignored paths if they are given.
    here = [path for path in TESTS if path not in elsewhere]
    return [*here, *(f"--ignore={path}" for path in elsewhere)]


def _run_side_by_side(flags: list[str]) -> int:
    """Run all tests on several clusters. Each line of output begins with the cluster's number. Return the exit code of
    the first failure.
    """
    for title, command in BUILD:
        status = _step(title, command)
        if status:
            return status
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    summaries: list[str] = []
    try:
        commands = [
            [
                *([*CLUSTER, "apart"] if part else []),
                sys.executable,
                "hack/e2e.py",
                "--part",
                str(part),
                *flags,
            ]
            for part in range(len(APART) + 1)
        ]
        for part, command in enumerate([*commands, [*PYTEST, NODE]]):
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            processes.append(process)
            readers.append(threading.Thread(target=_copy_lines, args=(part + 1, process.stdout, summaries)))
            readers[-1].start()
        statuses = [process.wait() for process in processes]
    except Interrupted:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        raise
    finally:
        for reader in readers:
            reader.join()
    for part, status in enumerate(statuses):
        print(f"e2e: cluster {part + 1}: {'passed' if status == 0 else f'FAILED with exit code {status}'}")
    print("\n".join(summaries))
    return next((status for status in statuses if status), 0)


def _copy_lines(number: int, output: IO[bytes], summaries: list[str]) -> None:
    """Print each line with the cluster's number, and add the summary line of pytest to `summaries`."""
    with output:
        for content in output:
            line = content.decode(errors="replace").rstrip()
            if _SUMMARY.fullmatch(line):
                summaries.append(f"{number}| {line}")
            print(f"{number}| {line}", flush=True)


def _run_all(flags: Sequence[str], pytest_args: list[str], tests: Sequence[str] = TESTS) -> int:
    os.environ |= debian_programs.hostile()
    for title, command in (
        *BUILD,
        ("start the cluster", [*CLUSTER, "up", *flags]),
        ("create the simulated machine", MACHINE),
        ("install NVIDIA's CDI hook on it", HOOK),
        ("install the driver", INSTALL),
    ):
        status = _step(title, command)
        if status:
            return status
    # The contract tests of the API client run against the real API server too.
    os.environ["DRA_TEST_KUBECONFIG"] = str(_cluster().kubeconfig())
    return _step("run the tests", [*PYTEST, *tests, *pytest_args])


def _cluster() -> ModuleType:
    sys.path.insert(0, str(ROOT / "hack" / "cluster"))
    import localcluster

    return localcluster


def _step(title: str, command: list[str]) -> int:
    print(f"e2e: {title}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        status = process.wait()
    except Interrupted:
        process.terminate()
        process.wait()
        raise
    verdict = "done" if status == 0 else f"FAILED with exit code {status}"
    print(f"e2e: {title}: {verdict} after {time.monotonic() - started:.0f} s", flush=True)
    return status


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


if __name__ == "__main__":
    sys.exit(main())
