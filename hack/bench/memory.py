"""Where the memory of the daemon is: what each library and each part adds, in the order in which it loads them.

Runs in a process of its own, since nothing that is loaded ever leaves. Anonymous memory is the process's own; pages of
files (libraries) are shared with whoever else has them open.
"""

from __future__ import annotations

import importlib
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

Step = tuple[str, Callable[[], Any]]


def resident() -> tuple[float, float]:
    """MiB of anonymous memory and of pages of files."""
    with open("/proc/self/status") as file:  # noqa: PTH123  nothing is imported before the first look
        status = file.read()
    found = dict(line.split(":", 1) for line in status.splitlines())
    return tuple(int(found[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))  # type: ignore[return-value]


def _load(*names: str) -> Callable[[], Any]:
    return lambda: [importlib.import_module(name) for name in names]


def steps(scratch: str) -> Iterator[Step]:
    """What is loaded, in order. Each keeps what it makes."""
    kept: list[Any] = []

    def serve(name: str) -> None:
        structlog = sys.modules["structlog"]
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
        serving = sys.modules["dra_driver.kubelet.serving"]
        kept.append(serving.SocketServer(name, pathlib.Path(scratch, f"{name}.sock"), {}))
        kept[-1].start()

    yield "standard library", _load("dataclasses", "inspect", "json", "logging", "threading", "subprocess")
    yield "OpenSSL", _load("ssl")
    yield "asyncio, which gRPC and structlog import", _load("asyncio")
    yield "structlog", _load("structlog")
    yield "urllib3, http.client", _load("http.client", "urllib3")
    yield "gRPC", _load("grpc")
    yield "protobuf", _load("dra_driver.kubelet.pb.dra_v1_pb2")
    yield "pynvml", _load("pynvml")
    yield "prometheus-client", _load("prometheus_client")
    yield "the driver's own code", _load("dra_driver.app.daemon")
    yield (
        "a TLS context with the system's CAs",
        lambda: kept.append(sys.modules["ssl"].create_default_context()),
    )
    yield "two gRPC servers", lambda: [*map(serve, ("one", "two"))]
    yield "the simulator and its YAML parser", _load("dra_driver.simulator", "yaml")


def table() -> str:
    """A line each: what, and MiB of anonymous memory and of files."""
    # As the daemon does.
    sys.modules["rich"] = None  # type: ignore[assignment]
    lines = [f"{'MiB':<44}{'anonymous':>10}{'files':>10}"]
    first = last = resident()
    lines.append(f"{'the interpreter':<44}{first[0]:>10.1f}{first[1]:>10.1f}")
    scratch = f"/tmp/gpu-dra-bench-{os.getpid()}"
    os.mkdir(scratch)  # noqa: PTH102  as above
    for what, load in steps(scratch):
        load()
        now = resident()
        lines.append(f"{what:<44}{now[0] - last[0]:>10.1f}{now[1] - last[1]:>10.1f}")
        last = now
    sys.modules["shutil"].rmtree(scratch)
    lines.append(f"{'together':<44}{last[0]:>10.1f}{last[1]:>10.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), flush=True)
