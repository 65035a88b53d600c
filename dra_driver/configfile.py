"""The `--config` file: every setting of `run` that a flag has, in camelCase, checked strictly."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

_AbsolutePath = Annotated[str, Field(pattern=r"^/")]


class ConfigFile(BaseModel):
    """The document. Unknown keys are errors, because a misspelt key would else be a silent default."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel, populate_by_name=False)

    node_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    driver_name: (
        Annotated[
            str,
            Field(
                max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
            ),
        ]
        | None
    ) = None
    cdi_root: _AbsolutePath | None = Field(default=None, alias="cdiRoot")
    nvidia_driver_root: _AbsolutePath | None = None
    container_driver_root: _AbsolutePath | None = None
    nvidia_cdi_hook_path: _AbsolutePath | None = Field(default=None, alias="nvidiaCDIHookPath")
    kubelet_registrar_directory_path: _AbsolutePath | None = None
    kubelet_plugins_directory_path: _AbsolutePath | None = None
    pod_uid: str | None = Field(default=None, alias="podUID")
    kubeconfig: str | None = None
    kube_api_qps: Annotated[float, Field(ge=0)] | None = Field(default=None, alias="kubeAPIQPS")
    kube_api_burst: Annotated[int, Field(ge=1)] | None = Field(default=None, alias="kubeAPIBurst")
    http_endpoint: str | None = None
    metrics_path: Annotated[str, Field(pattern=r"^/")] | None = None
    healthcheck_port: Annotated[int, Field(ge=-1, le=65535)] | None = None
    simulate: str | None = None
    simulator_dir: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    log_format: Literal["json", "console"] | None = None
