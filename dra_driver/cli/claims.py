"""`gpu-dra-driver claims`: what is prepared on this node, by whom, since when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dra_driver.cli.inspect import Output
from dra_driver.cli.options import CdiRoot, Config, DriverName, KubeletPluginsDirectory, SimulatorDir

if TYPE_CHECKING:
    from dra_driver.model.claim import Pods
    from dra_driver.services.preparedclaims import NodeClaims, PreparedClaim, PreparedDevice

_MOST_PODS = 4


def claims(
    output: Annotated[Output, typer.Option("-o", "--output", help="How to print.")] = Output.table,
    driver_name: DriverName = None,
    kubelet_plugins_directory_path: KubeletPluginsDirectory = None,
    cdi_root: CdiRoot = None,
    config: Config = None,
    simulator_dir: SimulatorDir = None,
) -> None:
    """Print the claims that are prepared on this node, with their devices and pods, from the driver's records alone.

    Works without API server, NVML and a running driver, and changes nothing. Give the directories as `run` has them.
    The pods of a claim that several share are written down every ten minutes; json and yaml have all of them.
    """
    from datetime import UTC, datetime

    from dra_driver.host.sysfs import Sysfs
    from dra_driver.logs import configure_logs
    from dra_driver.services.preparedclaims import read_prepared_claims
    from dra_driver.settings import resolve

    configure_logs("critical", "console")
    settings = resolve(
        {
            "driver_name": driver_name,
            "kubelet_plugins_directory_path": kubelet_plugins_directory_path,
            "cdi_root": cdi_root,
            "simulator_dir": None if simulator_dir is None else str(simulator_dir),
        },
        config,
        {"node_name": "this-node"},
    )
    # The host root of a simulated machine has a boot of its own; looking it up must not heal the machine.
    proc = "/proc" if settings.simulator_dir is None else f"{settings.simulator_dir}/root/proc"
    found = read_prepared_claims(
        settings.plugin_directory,
        Path(settings.cdi_root),
        settings.driver_name,
        Sysfs(proc=proc).boot_id(),
        datetime.now(UTC),
    )
    _print(found, settings.plugin_directory, output)


def _print(found: NodeClaims, directory: Path, output: Output) -> None:
    if output is Output.table:
        typer.echo("\n".join(_lines(found, directory)))
        return
    document = json.loads(json.dumps(asdict(found)))
    if output is Output.json:
        typer.echo(json.dumps(document, indent=2))
    else:
        import yaml

        typer.echo(yaml.safe_dump(document, sort_keys=False), nl=False)


def _lines(found: NodeClaims, directory: Path) -> list[str]:
    lines = (
        [] if found.claims else [f"no claim is prepared (records are looked for in {directory / 'claims'})"]
    )
    heads = _aligned([_head(claim) for claim in found.claims])
    for claim, head in zip(found.claims, heads, strict=True):
        lines.append(head)
        lines.append(f"    uid {claim.uid}; to undo: {', '.join(claim.undo) or 'nothing'}")
        lines += [f"    {line}" for line in _aligned([_device(device) for device in claim.devices])]
    lines += [f"problem: {problem}" for problem in found.problems]
    return lines


def _head(claim: PreparedClaim) -> tuple[str, ...]:
    since = "since unknown" if claim.age_s is None else f"{age(claim.age_s)} ago"
    boot = {"this": "this boot", "earlier": "EARLIER BOOT"}.get(claim.boot, "boot unknown")
    spec = claim.cdi_spec if claim.cdi_spec != "missing" else "MISSING"
    phase = claim.phase if claim.phase == "prepared" else claim.phase.upper()
    return f"{claim.namespace}/{claim.name}", phase, since, boot, f"CDI spec {spec}", pods_text(claim.pods)


def pods_text(pods: Pods) -> str:
    """`pod a`, `pods a, b, c, d and 12 more`, `no pod`, or `pods unknown`."""
    if pods is None:
        return "pods unknown"
    if not pods:
        return "no pod"
    names = ", ".join(pod.name for pod in pods[:_MOST_PODS])
    more = f" and {len(pods) - _MOST_PODS} more" if len(pods) > _MOST_PODS else ""
    return f"{'pod' if len(pods) == 1 else 'pods'} {names}{more}"


def _device(device: PreparedDevice) -> tuple[str, ...]:
    rest = [
        device.mig,
        device.usage,
        f"share {device.share_id}" if device.share_id else None,
        "admin access" if device.admin_access else None,
        f"on {device.gpu_uuid}" if device.gpu_uuid != device.uuid else None,
    ]
    return device.device, device.kind, device.uuid or "-", "; ".join(filter(None, rest))


def age(seconds: float) -> str:
    """`45s`, `12m`, `2h05m`, `3d4h`."""
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m" if minutes else f"{whole}s"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
