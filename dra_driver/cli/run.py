"""`gpu-dra-driver run`."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
from argparse import Namespace

from dra_driver.app.settings import FLAGS as SETTINGS
from dra_driver.app.settings import GATES, Flag, resolve
from dra_driver.model.schema import Scalar

_IGNORED = ("namespace", "image_name", "image_pull_secrets", "image_pull_policy", "service_account_name")
"""Accepted, so that manifests of NVIDIA's own DRA driver still work."""

FLAGS = (
    *SETTINGS.values(),
    # klog's verbosity; 5 and above mean --log-level debug.
    Flag("verbosity", shape=Scalar(int), spelled=("-v",), env=(), hidden=True),
    Flag("feature_gates", hidden=True),
    *(Flag(name, hidden=True) for name in _IGNORED),
)
EXAMPLES = (
    "--simulate dgx-h100 --kubeconfig config --node-name a",
    "--config /etc/gpu-dra-driver.yaml",
)


_M_ARENA_MAX = -8


def run(given: Namespace) -> None:
    """Run until it receives SIGTERM.

    Flags and environment variables have the same names as in NVIDIA's own DRA driver, so its manifests work.
    """
    # Otherwise the C library creates a heap for each thread, which costs 2 MiB.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)
    settings = resolve(vars(given), given.config)
    # Modules stay, so searching them for garbage only costs time: a tenth of the start, and 50 ms in each full search.
    gc.disable()
    from dra_driver.app.daemon import Driver
    from dra_driver.app.logs import configure_logs, watch_signals

    gc.freeze()
    gc.enable()
    level = "debug" if given.log_level is None and (given.verbosity or 0) >= 5 else settings.log_level
    logs = configure_logs(level, settings.log_format)
    logs.log_crashes()
    watch = watch_signals(logs)
    warn_ignored(given.feature_gates)

    is_over = threading.Event()
    drivers: list[Driver] = []

    def end() -> None:
        is_over.set()
        for driver in drivers:
            driver.end()

    watch.on(end, signal.SIGTERM, signal.SIGINT)
    was_ready = False
    while True:
        driver = Driver(settings, was_ready=was_ready)
        drivers[:] = [driver]
        if is_over.is_set():
            return
        driver.start()
        try:
            driver.wait()
        finally:
            driver.stop()
        if not driver.starts_again:
            return
        was_ready = driver.probes.was_ready


def warn_ignored(feature_gates: str | None) -> None:
    import structlog

    # The chart runs the MPS host for MPSSupport.
    useful = [f"{gate}=true" for gate in (*GATES, "MPSSupport")]
    ignored = [
        gate for gate in (feature_gates or "").replace(" ", "").split(",") if gate and gate not in useful
    ]
    if ignored:
        reason = f"only {', '.join(useful)} have an effect; the plugin ignores other feature gates"
        log = structlog.get_logger(__name__)
        log.warning("flag_ignored", flag="--feature-gates", value=",".join(ignored), reason=reason)
