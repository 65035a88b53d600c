"""The settings of the kubelet's side."""

from __future__ import annotations

from pathlib import Path

from dra_driver.kubelet.server import PluginSettings
from dra_driver.settings import Settings


def plugin_settings(settings: Settings) -> PluginSettings:
    """Sockets and ports that the kubelet uses."""
    port = settings.healthcheck_port
    return PluginSettings(
        driver=settings.driver_name,
        registry_dir=Path(settings.kubelet_registrar_directory_path),
        plugins_dir=Path(settings.kubelet_plugins_directory_path),
        pod_uid=settings.pod_uid,
        health_address=f"[::]:{port}" if port >= 0 else None,
    )
