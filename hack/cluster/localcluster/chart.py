"""Renders the driver's chart as manifests for ``kubectl apply --filename``."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from localcluster import binaries
from localcluster.layout import CLUSTER_SOURCE, Layout

CHART = CLUSTER_SOURCE.parents[1] / "daemonset" / "chart"
VALUES = CLUSTER_SOURCE / "values"
NAME = "gpu-dra-driver"
"""The name of the Helm release and of its namespace, so that the objects have the names in the docs."""
_NAMESPACE = f"""\
apiVersion: v1
kind: Namespace
metadata:
  name: {NAME}
  labels:
    # The plugin opens device nodes and host directories.
    pod-security.kubernetes.io/enforce: privileged
    pod-security.kubernetes.io/audit: privileged
    pod-security.kubernetes.io/warn: privileged
"""
_HELMS_LABELS = re.compile(
    r"^    (app\.kubernetes\.io/(instance|version|managed-by)|helm\.sh/chart): .*\n", re.M
)


def helm(major: int = 3) -> Path:
    """Return the path of Helm 3 or 4 in a pinned version. Build it if it is missing."""
    return binaries.build(Layout.from_environment(), (binaries.HELM[major],)) / "helm"


def template(
    values: Any,
    *arguments: str,
    name: str = NAME,
    namespace: str = NAME,
    chart: Path = CHART,
    major: int = 3,
) -> str:
    """Return the output of `helm template` of Helm 3 or 4. Raises: CalledProcessError with helm's error in `stderr`."""
    command = [
        str(helm(major)),
        "template",
        name,
        str(chart),
        "--namespace",
        namespace,
        "-f",
        "-",
        *arguments,
    ]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True)
    return done.stdout


def manifests(*files: str) -> str:
    """Return the namespace and the chart's objects, with values from `hack/cluster/values`, such as `e2e`.

    The labels that name Helm as the owner are removed, because otherwise `helm upgrade` would adopt the objects.
    """
    chosen = [word for file in files for word in ("-f", str(VALUES / f"{file}.yaml"))]
    return f"{_NAMESPACE}{_HELMS_LABELS.sub('', template({}, *chosen))}"
