"""The driver's chart, rendered as manifests for ``kubectl apply --filename``."""

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
"""Of the release and its namespace: the objects then have the names that the docs use."""
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
    """Helm 3 or 4 of a pinned version, built first if it is not there."""
    return binaries.build(Layout.from_environment(), (binaries.HELM[major],)) / "helm"


def template(
    values: Any,
    *arguments: str,
    name: str = NAME,
    namespace: str = NAME,
    chart: Path = CHART,
    major: int = 3,
) -> str:
    """What `helm template` of Helm 3 or 4 prints. Raises: CalledProcessError with helm's words in `stderr`."""
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
    """Returns the chart's objects with the values of files in `hack/cluster/values`, such as `e2e`, and their
    namespace.

    Omits the labels that name Helm as the owner, because `helm upgrade` would adopt the objects.
    """
    chosen = [word for file in files for word in ("-f", str(VALUES / f"{file}.yaml"))]
    return f"{_NAMESPACE}{_HELMS_LABELS.sub('', template({}, *chosen))}"
