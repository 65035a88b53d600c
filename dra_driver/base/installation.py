"""Commands that remedies print for someone who installed the chart. The chart sets release and namespace in its pods'
environment; outside of a pod the names of docs/install.md are used."""

from __future__ import annotations

import os
import re

_OWN_COMMAND = re.compile(r"`(?=gpu-dra-driver )")
_CHART = "daemonset/chart"
"""As docs/install.md installs it."""


def helm_set(setting: str) -> str:
    """The command that sets a value of the chart.

    >>> helm_set("mps.enabled=true")
    '`helm upgrade gpu-dra-driver -n gpu-dra-driver daemonset/chart --reuse-values --set mps.enabled=true`'
    """
    return f"`helm upgrade {_release()} {_CHART} --reuse-values --set {setting}`"


def apply_again() -> str:
    """The command that restores objects of the chart after someone changed or deleted them."""
    return f"`helm get manifest {_release()} | kubectl apply -f -` as an administrator"


def logs() -> str:
    """The command that prints the log of gpu-dra-driver."""
    return f"`kubectl -n {_namespace()} logs -l app.kubernetes.io/component=node --tail=50` shows more"


def from_outside(remedy: str) -> str:
    """The remedy with `gpu-dra-driver X` replaced by `kubectl exec`, if this process runs in a pod."""
    pod = os.environ.get("HOSTNAME")
    if pod is None or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return remedy
    return _OWN_COMMAND.sub(f"`kubectl -n {_namespace()} exec {pod} -- ", remedy)


def _release() -> str:
    return os.environ.get("RELEASE") or "gpu-dra-driver -n gpu-dra-driver"


def _namespace() -> str:
    return os.environ.get("NAMESPACE") or "gpu-dra-driver"
