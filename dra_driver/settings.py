"""What `run` is told: flags and environment variables over a configuration file over defaults.

Read once by the command line and passed on as one value; nothing else reads the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dra_driver.errors import InvalidConfigError

DEFAULT_DRIVER_NAME = "gpu.nvidia.com"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `run`. Paths are as this process sees them unless the name says host.

    `healthcheck_port` -1 and an empty `http_endpoint` switch the service off. `pod_uid` makes two instances
    of a rolling update possible. `kube_api_qps` 0 is no limit.
    """

    node_name: str
    driver_name: str = DEFAULT_DRIVER_NAME
    cdi_root: str = "/etc/cdi"
    nvidia_driver_root: str = "/"
    container_driver_root: str = "/driver-root"
    nvidia_cdi_hook_path: str | None = None
    kubelet_registrar_directory_path: str = "/var/lib/kubelet/plugins_registry"
    kubelet_plugins_directory_path: str = "/var/lib/kubelet/plugins"
    pod_uid: str | None = None
    kubeconfig: str | None = None
    kube_api_qps: float = 0.0
    kube_api_burst: int = 10
    http_endpoint: str = ""
    metrics_path: str = "/metrics"
    healthcheck_port: int = -1
    simulate: str | None = None
    simulator_dir: str | None = None
    log_level: str = "info"
    log_format: str = "json"

    @property
    def plugin_directory(self) -> Path:
        """Where sockets, records and locks of this driver lie: below the kubelet's plugins directory."""
        return Path(self.kubelet_plugins_directory_path) / self.driver_name


def resolve(given: Mapping[str, Any], config_file: Path | None) -> Settings:
    """Settings from what was given on the command line (None means not given) and a file.

    Raises: InvalidConfigError that lists every fault with its path.
    """
    values: dict[str, Any] = read_config_file(config_file) if config_file else {}
    values.update({name: value for name, value in given.items() if value is not None})
    values = {name: value for name, value in values.items() if value is not None}
    if not values.get("node_name"):
        raise InvalidConfigError(
            "the node's name is missing; set --node-name or NODE_NAME (in a pod: fieldRef spec.nodeName)"
        )
    known = {entry.name for entry in fields(Settings)}
    return Settings(**{name: value for name, value in values.items() if name in known})


def read_config_file(path: Path) -> dict[str, Any]:
    """The values of a YAML file by setting name.

    Raises: InvalidConfigError that lists every fault with its path in the file.
    """
    import yaml

    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InvalidConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise InvalidConfigError(f"configuration file {path} is no YAML: {reason}") from error
    return _validated(document if document is not None else {}, path)


def _validated(document: Any, path: Path) -> dict[str, Any]:
    from pydantic import ValidationError

    from dra_driver.configfile import ConfigFile

    try:
        parsed = ConfigFile.model_validate(document)
    except ValidationError as error:
        faults = tuple(
            f"{'.'.join(str(part) for part in fault['loc']) or '(document)'}: {fault['msg']}"
            for fault in error.errors()
        )
        raise InvalidConfigError(f"configuration file {path}: {'; '.join(faults)}", faults=faults) from error
    return parsed.model_dump(exclude_none=True)
