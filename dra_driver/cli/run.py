"""`gpu-dra-driver run`: the daemon."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dra_driver.cli.flags import (
    CDI_HOOK_PATH,
    CDI_ROOT,
    CONFIG,
    CONTAINER_DRIVER_ROOT,
    DRIVER_NAME,
    DYNAMIC_MIG,
    HOST_DEVICES,
    HOST_ROOT,
    IMEX_CHANNEL,
    KUBECONFIG,
    KUBELET_PLUGINS_DIRECTORY,
    KUBELET_REGISTRAR_DIRECTORY,
    NODE_NAME,
    NVIDIA_DRIVER_ROOT,
    SIMULATE,
    SIMULATOR_DIR,
    Flag,
    parse,
)

if TYPE_CHECKING:
    from dra_driver.settings import Settings

_IGNORED = ("namespace", "image_name", "image_pull_secrets", "image_pull_policy", "service_account_name")
"""Flags of NVIDIA's own driver that have no meaning here; its manifests still start."""

FLAGS = (
    NODE_NAME,
    DRIVER_NAME,
    CONFIG,
    CDI_ROOT,
    NVIDIA_DRIVER_ROOT,
    CONTAINER_DRIVER_ROOT,
    HOST_ROOT,
    CDI_HOOK_PATH,
    KUBELET_REGISTRAR_DIRECTORY,
    KUBELET_PLUGINS_DIRECTORY,
    Flag("pod_uid", "UID of this pod; makes rolling updates without a gap."),
    KUBECONFIG,
    Flag("kube_api_qps", "Limit of API calls a second; 0 is none. [default: 20]", float),
    Flag("kube_api_burst", "API calls at once. [default: 100]", int),
    Flag("http_endpoint", "host:port of metrics, /healthz, /readyz, /startupz. [default: off]"),
    Flag("metrics_path", "[default: /metrics]"),
    Flag("healthcheck_port", "Port of the gRPC health service. [default: -1, off]", int),
    Flag(
        "mps_host",
        "Who keeps MPS daemons: external (`gpu-dra-driver mps-host` in a DaemonSet of its own) or child. "
        "[default: external]",
    ),
    SIMULATE,
    SIMULATOR_DIR,
    Flag("log_level", "debug, info, warning or error. [default: info]"),
    Flag("log_format", "json or console. [default: json]"),
    Flag(
        "consumable_shares",
        "Share every device: disabled, memory, unlimited, or a number of shares. [default: disabled]",
    ),
    DYNAMIC_MIG,
    Flag(
        "adopt_mig",
        "What becomes of GPU instances that somebody else made on GPUs with MIG on demand: leave or destroy (at "
        "start). [default: leave]",
    ),
    Flag(
        "device_metadata",
        "Tell containers of their devices in files, in these versions: off, v1alpha1, v1beta1 or both. "
        "[default: off]",
    ),
    Flag(
        "unhealthy_devices",
        "How new pods are kept from unhealthy devices: taint, withdraw (leave them out of the slices), or auto: "
        "withdraw where the API server drops taints. [default: auto]",
    ),
    Flag(
        "additional_xids_to_ignore",
        "Xid errors that say nothing about a GPU's health, besides the known ones: 45,63.",
    ),
    IMEX_CHANNEL,
    HOST_DEVICES,
    Flag(
        "claim_host_devices",
        "Of these nodes, those that the author of any claim may ask for by parameters. DeviceClasses may have all of "
        "them. [default: none]",
    ),
    # klog's verbosity; 5 and above mean --log-level debug.
    Flag("verbosity", kind=int, spelled=("-v",), env=(), hidden=True),
    Flag("feature_gates", hidden=True),
    *(Flag(name, hidden=True) for name in _IGNORED),
)


def run(arguments: Sequence[str]) -> None:
    """Discover this node's GPUs, publish them as ResourceSlices and prepare them for pods, until SIGTERM.

    Flags and environment variables have the names that NVIDIA's own driver uses, so its manifests work.
    """
    given = parse(run, FLAGS, arguments)
    reading = _read_settings(given)
    from dra_driver.app.daemon import Driver
    from dra_driver.app.posix_signals import watch_signals
    from dra_driver.logs import configure_logs

    settings = reading()
    level = "debug" if given["log_level"] is None and (given["verbosity"] or 0) >= 5 else settings.log_level
    logs = configure_logs(level, settings.log_format)
    logs.take_crashes()
    watch = watch_signals(logs)
    _tell_ignored(given)

    driver = Driver(settings)
    watch.on(driver.end, signal.SIGTERM, signal.SIGINT)
    driver.start()
    try:
        driver.wait()
    finally:
        driver.stop()


def _read_settings(given: dict[str, Any]) -> Callable[[], Settings]:
    """Begins to read the settings; the function that is returned waits for them. Raises: InvalidConfigError.

    What reads a file (pydantic and a YAML parser, 9 MiB) leaves the memory again.
    """
    from dra_driver.settings import resolve

    if given["config"] is None:
        settings = resolve(given, None)
        return lambda: settings
    from dra_driver.concurrency.forked import Forked

    return Forked(lambda: resolve(given, given["config"])).result


_CHANGES_BEHAVIOUR = {
    "feature_gates": "of the feature gates only DynamicMIG means something here; all else that is built is on",
}


def _tell_ignored(given: dict[str, Any]) -> None:
    """Warn of a flag that has no effect but that a user may count on. Flags that only served the Deployments of the
    other driver are passed over in silence."""
    import structlog

    log = structlog.get_logger(__name__)
    for name, reason in _CHANGES_BEHAVIOUR.items():
        value = given.get(name)
        if value and value != "DynamicMIG=true":
            log.warning("flag_ignored", flag=f"--{name.replace('_', '-')}", value=value, reason=reason)
