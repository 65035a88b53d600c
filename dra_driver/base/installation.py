"""Commands for the installed chart. Its pods know the names that these need; elsewhere the usual ones count."""

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
    """The command that brings back objects of the chart that someone changed or deleted."""
    return f"`helm get manifest {_release()} | kubectl apply -f -` as an administrator"


def logs() -> str:
    """Where the log of gpu-dra-driver is."""
    return f"`kubectl -n {_namespace()} logs -l app.kubernetes.io/component=node --tail=50` shows more"


def from_outside(remedy: str) -> str:
    """With the commands of gpu-dra-driver as they are typed outside of the pod in which this runs."""
    pod = os.environ.get("HOSTNAME")
    if pod is None or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return remedy
    return _OWN_COMMAND.sub(f"`kubectl -n {_namespace()} exec {pod} -- ", remedy)


def _release() -> str:
    return os.environ.get("RELEASE") or "gpu-dra-driver -n gpu-dra-driver"


def _namespace() -> str:
    return os.environ.get("NAMESPACE") or "gpu-dra-driver"
