"""Commands in remedies, for users who installed the Helm chart.

The chart sets the release and the namespace in its pods. Outside a pod, the names of docs/install.md apply.
"""

from __future__ import annotations

import os
import re

_OWN_COMMAND = re.compile(r"`(?=gpu-dra-driver )")
_CHART = "daemonset/chart"


def helm_set(setting: str) -> str:
    """Return the command that sets a value of the chart.

    >>> helm_set("mps.enabled=true")
    '`helm upgrade gpu-dra-driver -n gpu-dra-driver daemonset/chart --reset-then-reuse-values --set mps.enabled=true`'
    """
    return f"`helm upgrade {_release()} {_CHART} --reset-then-reuse-values --set {setting}`"


def apply_again() -> str:
    return f"`helm get manifest {_release()} | kubectl apply -f -` as an administrator"


def logs() -> str:
    return f"`kubectl -n {_namespace()} logs -l app.kubernetes.io/component=node --tail=50` shows more"


def from_outside(remedy: str) -> str:
    """Replace `gpu-dra-driver X` in a remedy with a `kubectl exec` command, if this process runs in a pod."""
    pod = os.environ.get("HOSTNAME")
    if pod is None or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return remedy
    return _OWN_COMMAND.sub(f"`kubectl -n {_namespace()} exec {pod} -- ", remedy)


def _release() -> str:
    return os.environ.get("RELEASE") or "gpu-dra-driver -n gpu-dra-driver"


def _namespace() -> str:
    return os.environ.get("NAMESPACE") or "gpu-dra-driver"
