"""Threads of gRPC do not survive a fork without an exec."""

from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "dra_driver"
BEFORE_GRPC = {"simulator/scripts/nvidia-cuda-mps-control.py"}
"""They run before anything imports gRPC, or in programs that never do."""


def test_nothing_forks_without_an_exec_when_grpc_is_loaded():
    forks = ("os.fork(", "forkpty", "preexec_fn", "multiprocessing", "ProcessPoolExecutor")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(word in path.read_text() for word in forks)
    }
    assert found <= BEFORE_GRPC
