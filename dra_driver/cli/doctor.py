"""`gpu-dra-driver doctor`: is everything there that the driver needs on this node, and if not, what to do."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dra_driver.cli.inspect import Output
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

if TYPE_CHECKING:
    from dra_driver.platforms import Platform
    from dra_driver.services.checks.outcome import Check, Outcome
    from dra_driver.settings import Settings


def doctor(
    output: Annotated[Output, typer.Option("-o", "--output", help="How to print.")] = Output.table,
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
    kubeconfig: Kubeconfig = None,
    simulate: Simulate = None,
    simulator_dir: SimulatorDir = None,
    dynamic_mig: DynamicMig = None,
) -> None:
    """Look at everything that the driver needs: host, runtime, kubelet, cluster. Changes nothing.

    Run it in the driver's pod (`kubectl exec`), where it has the settings of the driver, or on the node with the
    options of `run`. Exit code 0: all in order or only warnings, 1: something fails.
    """
    given = {name: value for name, value in locals().items() if name not in ("output", "config")}
    from dra_driver.logs import configure_logs
    from dra_driver.platforms import platform_of
    from dra_driver.services.checks.outcome import run_checks
    from dra_driver.settings import resolve

    configure_logs("critical", "console")
    given["simulator_dir"] = None if simulator_dir is None else str(simulator_dir)
    settings = resolve(given, config, {"node_name": socket.gethostname().lower()})
    outcomes = run_checks(_checks(settings, platform_of(settings)))
    _print(outcomes, output)
    code = 1 if any(outcome.finding.status == "FAIL" for outcome in outcomes) else 0
    if code:
        raise typer.Exit(code)


def _checks(settings: Settings, platform: Platform) -> list[Check]:
    from dra_driver.platforms import NvmlReader
    from dra_driver.services.checks.cluster import ClusterChecks
    from dra_driver.services.checks.driver import DriverChecks
    from dra_driver.services.checks.kubelet import KubeletChecks
    from dra_driver.services.checks.outcome import Check, Shared
    from dra_driver.services.checks.runtime import RuntimeChecks

    def inventory() -> Any:
        reader = NvmlReader(platform.load_nvml)
        try:
            reader.reopen()
            return reader.read_inventory()
        finally:
            reader.close()

    def client() -> Any:
        from dra_driver.kube.client import ApiClient
        from dra_driver.kube.endpoint import load_endpoint

        return ApiClient(load_endpoint(settings.kubeconfig), timeout_s=4.0)

    host = _host_view(settings, platform)
    driver = DriverChecks(
        platform.paths, platform.nodes, Shared(inventory), settings.nvidia_cdi_hook_path, settings.dynamic_mig
    )
    runtime = RuntimeChecks(settings.cdi_root, host)
    kubelet = KubeletChecks(
        settings.driver_name,
        Path(settings.kubelet_registrar_directory_path),
        Path(settings.kubelet_plugins_directory_path),
        host,
        settings.mps_host == "external",
        Path(settings.cdi_root),
    )
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    cluster = ClusterChecks(
        Shared(client),
        settings.driver_name,
        settings.node_name,
        settings.dynamic_mig,
        sharing=bool(settings.sharing.entries),
        configured=settings.kubeconfig is not None or in_pod,
    )
    looks = [
        *driver.all(),
        ("runtime", runtime.runtime),
        ("CDI directory", runtime.directory),
        ("CDI specs", runtime.specs),
        *kubelet.all(),
        *cluster.all(),
    ]
    return [Check(name, look) for name, look in looks]


def _host_view(settings: Settings, platform: Platform) -> str | None:
    """Where this process sees the host's `/`: its own mount, the driver root if that is the host's, or our own `/`
    outside of a pod."""
    paths = platform.paths
    if settings.simulate is not None or paths.host_root is not None:
        return paths.host_root or paths.driver_root
    if paths.host_driver_root == "/":
        return paths.driver_root
    return None if "KUBERNETES_SERVICE_HOST" in os.environ else "/"


def _print(outcomes: Sequence[Outcome], output: Output) -> None:
    counts = {
        status: sum(1 for outcome in outcomes if outcome.finding.status == status)
        for status in ("OK", "WARN", "FAIL", "SKIP")
    }
    if output is not Output.table:
        checks = [{"check": outcome.check, **asdict(outcome.finding)} for outcome in outcomes]
        document = {"counts": counts, "checks": checks}
        if output is Output.json:
            typer.echo(json.dumps(document, indent=2))
        else:
            import yaml

            typer.echo(yaml.safe_dump(document, sort_keys=False), nl=False)
        return
    width = max(len(outcome.check) for outcome in outcomes)
    for outcome in outcomes:
        finding = outcome.finding
        typer.echo(f"{finding.status:<4}  {outcome.check:<{width}}  {finding.seen}")
        if finding.remedy is not None:
            typer.echo(f"      {'':<{width}}  -> {finding.remedy}")
    typer.echo(f"\n{counts['OK']} OK, {counts['WARN']} WARN, {counts['FAIL']} FAIL, {counts['SKIP']} SKIP")
