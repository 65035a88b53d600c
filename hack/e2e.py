"""`make e2e`: cluster, image, driver, tests, and everything taken away again, whatever happens in between.

A cluster that is up already is used and left in place, and so is its simulated machine.

python hack/e2e.py            all tests of tests/e2e
python hack/e2e.py --keep     leave the cluster up afterwards
python hack/e2e.py --ip-family ipv6   a cluster that has no IPv4 address
python hack/e2e.py -- -k mig  arguments for pytest
python hack/e2e.py --matrix   the core of the tests on each release of Kubernetes, as it is by default, with the
                              kubelet as a node, and with IPv6 only

A kubelet that acts as a node loses a race against the node authorizer for about one claim in eight. The pod then waits
for the kubelet's second try, a minute or more. That is not the driver's, and the tests allow for it there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType

import elf_programs

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = [sys.executable, "hack/cluster/cluster.py"]
SIMULATOR_STATE = Path("/var/lib/gpu-dra-simulator")
INSTALL = [sys.executable, "hack/cluster/install.py", "--overlay", "e2e"]
MACHINE = [sys.executable, "-m", "dra_driver.cli.main", "simulate", "create", "dgx-h100"]
HOOK = [sys.executable, "hack/cdi_hook.py", str(SIMULATOR_STATE / "root")]
MATRIX = (
    ("1.34", ()),
    ("1.35", ()),
    ("1.36", ()),
    ("1.36", ("--kubelet-as-node",)),
    ("1.36", ("--ip-family=ipv6",)),
)
"""Each release of Kubernetes as it is by default, and how else the cluster differs."""
IMAGE = [sys.executable, "hack/image/build.py"]


class Interrupted(Exception):  # noqa: N818  a signal is no error
    """SIGINT or SIGTERM came in."""


def main() -> int:
    """Run everything; the tests' exit code, or that of the step that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="leave the cluster up afterwards")
    parser.add_argument(
        "--ip-family", choices=("ipv4", "ipv6"), default="ipv4", help="of a cluster that is not up yet"
    )
    parser.add_argument("--matrix", action="store_true", help="the core, on each release of Kubernetes")
    parser.add_argument("--release", choices=sorted({release for release, _ in MATRIX}), help="of the matrix")
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
            print(
                "e2e: a cluster is up; it gets this driver and stays afterwards, with its simulated machine"
            )
        else:
            _clear_away()  # an interrupted run may have left pods, claims and records, and a machine broken on purpose
        return _run_all(["--ip-family", arguments.ip_family], arguments.pytest_args)
    except Interrupted:
        print("e2e: interrupted")
        return 130
    finally:
        if was_up:
            print("e2e: the cluster was up before and is left in place; `make cluster-down` takes it down")
        elif not arguments.keep:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            _clear_away()


def _clear_away() -> None:
    _step("take the cluster down", [*CLUSTER, "down"])
    shutil.rmtree(SIMULATOR_STATE, ignore_errors=True)


def _refuse_matrix() -> int:
    print("e2e: the matrix brings its own clusters up; take this one down first: make cluster-down")
    return 1


def _run_matrix(only: str | None, pytest_args: list[str]) -> int:
    """Every row, also after one that failed; the first failure's exit code."""
    verdicts: list[tuple[str, int]] = []
    for release, flags in MATRIX:
        if only not in (None, release):
            continue
        # The usual programs are those of the newest release.
        os.environ["GPU_DRA_KUBERNETES"] = "" if release == MATRIX[-1][0] else release
        os.environ["GPU_DRA_KUBELET_AS_NODE"] = "true" if "--kubelet-as-node" in flags else ""
        _clear_away()
        status = _run_all(["--default-gates", *flags], ["-m", "core", *pytest_args])
        verdicts.append((" ".join((release, *flags)), status))
    for row, status in verdicts:
        print(f"e2e: Kubernetes {row}: {'passed' if status == 0 else f'FAILED with exit code {status}'}")
    return next((status for _, status in verdicts if status), 0)


def _run_all(flags: Sequence[str], pytest_args: list[str]) -> int:
    os.environ |= elf_programs.hostile()
    for title, command in (
        ("build the image", IMAGE),
        ("bring the cluster up", [*CLUSTER, "up", *flags]),
        ("make the simulated machine", MACHINE),
        ("put NVIDIA's CDI hook on it", HOOK),
        ("install the driver", INSTALL),
    ):
        status = _step(title, command)
        if status:
            return status
    # The contract tests of the API client run against the real API server too.
    os.environ["DRA_TEST_KUBECONFIG"] = str(_cluster().kubeconfig())
    pytest = [sys.executable, "-m", "pytest", "-m", "cluster"]
    pytest += ["tests/e2e", "tests/conformance", "tests/kube", "tests/deploy", "tests/playground"]
    # A limit for what hangs: each wait in the tests has one of its own, which tells what it was.
    pytest += ["--timeout=1800", "-v", "-s", "--no-header", "--durations=10"]
    return _step("run the tests", [*pytest, *pytest_args])


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
