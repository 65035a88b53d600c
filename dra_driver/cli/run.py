"""`gpu-dra-driver run`: the daemon."""

from __future__ import annotations

import signal
from typing import Annotated, Any

import typer

from dra_driver.cli.options import (
    CdiHookPath,
    CdiRoot,
    Config,
    ContainerDriverRoot,
    DriverName,
    DynamicMig,
    HostRoot,
    Kubeconfig,
    KubeletPluginsDirectory,
    KubeletRegistrarDirectory,
    NodeName,
    NvidiaDriverRoot,
    Simulate,
    SimulatorDir,
)


def _ignored(*names: str, env: str) -> Any:
    """A flag of NVIDIA's own driver that has no meaning here; its manifests still start."""
    return typer.Option(*names, envvar=env, hidden=True)


def run(
    node_name: NodeName = None,
    driver_name: DriverName = None,
    config: Config = None,
    cdi_root: CdiRoot = None,
    nvidia_driver_root: NvidiaDriverRoot = None,
    container_driver_root: ContainerDriverRoot = None,
    host_root: HostRoot = None,
    nvidia_cdi_hook_path: CdiHookPath = None,
    kubelet_registrar_directory_path: KubeletRegistrarDirectory = None,
    kubelet_plugins_directory_path: KubeletPluginsDirectory = None,
    pod_uid: Annotated[
        str | None,
        typer.Option(
            "--pod-uid", envvar="POD_UID", help="UID of this pod; makes rolling updates without a gap."
        ),
    ] = None,
    kubeconfig: Kubeconfig = None,
    kube_api_qps: Annotated[
        float | None,
        typer.Option(
            "--kube-api-qps", envvar="KUBE_API_QPS", help="Limit of API calls a second. [default: none]"
        ),
    ] = None,
    kube_api_burst: Annotated[
        int | None, typer.Option("--kube-api-burst", envvar="KUBE_API_BURST", help="[default: 10]")
    ] = None,
    http_endpoint: Annotated[
        str | None,
        typer.Option(
            "--http-endpoint",
            envvar="HTTP_ENDPOINT",
            help="host:port of metrics, /healthz, /readyz, /startupz. [default: off]",
        ),
    ] = None,
    metrics_path: Annotated[
        str | None, typer.Option("--metrics-path", envvar="METRICS_PATH", help="[default: /metrics]")
    ] = None,
    healthcheck_port: Annotated[
        int | None,
        typer.Option(
            "--healthcheck-port",
            envvar="HEALTHCHECK_PORT",
            help="Port of the gRPC health service. [default: -1, off]",
        ),
    ] = None,
    mps_host: Annotated[
        str | None,
        typer.Option(
            "--mps-host",
            envvar="MPS_HOST",
            help="Who keeps MPS daemons: external (`gpu-dra-driver mps-host` in a DaemonSet of its own) or child. "
            "[default: external]",
        ),
    ] = None,
    simulate: Simulate = None,
    simulator_dir: SimulatorDir = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            "--log-level", envvar="LOG_LEVEL", help="debug, info, warning or error. [default: info]"
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option("--log-format", envvar="LOG_FORMAT", help="json or console. [default: json]"),
    ] = None,
    consumable_shares: Annotated[
        str | None,
        typer.Option(
            "--consumable-shares",
            envvar="CONSUMABLE_SHARES",
            help="Share every device: disabled, memory, unlimited, or a number of shares. [default: disabled]",
        ),
    ] = None,
    dynamic_mig: DynamicMig = None,
    adopt_mig: Annotated[
        str | None,
        typer.Option(
            "--adopt-mig",
            envvar="ADOPT_MIG",
            help="What becomes of GPU instances that somebody else made on GPUs with MIG on demand: leave or "
            "destroy (at start). [default: leave]",
        ),
    ] = None,
    device_metadata: Annotated[
        str | None,
        typer.Option(
            "--device-metadata",
            envvar="DEVICE_METADATA",
            help="Tell containers of their devices in files, in these versions: off, v1alpha1, v1beta1 or both. "
            "[default: off]",
        ),
    ] = None,
    verbosity: Annotated[
        int | None,
        typer.Option("-v", hidden=True, help="klog verbosity; 5 and above mean --log-level debug."),
    ] = None,
    namespace: Annotated[str | None, _ignored("--namespace", env="NAMESPACE")] = None,
    image_name: Annotated[str | None, _ignored("--image-name", env="IMAGE_NAME")] = None,
    image_pull_secrets: Annotated[
        str | None, _ignored("--image-pull-secrets", env="IMAGE_PULL_SECRETS")
    ] = None,
    image_pull_policy: Annotated[str | None, _ignored("--image-pull-policy", env="IMAGE_PULL_POLICY")] = None,
    service_account_name: Annotated[
        str | None, _ignored("--service-account-name", env="SERVICE_ACCOUNT_NAME")
    ] = None,
    additional_xids_to_ignore: Annotated[
        str | None,
        typer.Option(
            "--additional-xids-to-ignore",
            envvar="ADDITIONAL_XIDS_TO_IGNORE",
            help="Xid errors that say nothing about a GPU's health, besides the known ones: 45,63.",
        ),
    ] = None,
    feature_gates: Annotated[str | None, _ignored("--feature-gates", env="FEATURE_GATES")] = None,
) -> None:
    """Discover this node's GPUs, publish them as ResourceSlices and prepare them for pods, until SIGTERM.

    Flags and environment variables have the names that NVIDIA's own driver uses, so its manifests work.
    """
    given = dict(locals())
    from dra_driver.app.posix_signals import watch_signals
    from dra_driver.logs import configure_logs
    from dra_driver.settings import resolve

    settings = resolve(given, config)
    level = "debug" if log_level is None and (verbosity or 0) >= 5 else settings.log_level
    logs = configure_logs(level, settings.log_format)
    logs.take_crashes()
    watch = watch_signals(logs)
    _tell_ignored(given)

    from dra_driver.app.daemon import Driver

    driver = Driver(settings)
    watch.on(driver.end, signal.SIGTERM, signal.SIGINT)
    driver.start()
    try:
        driver.wait()
    finally:
        driver.stop()


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
