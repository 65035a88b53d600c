"""What the plugin of this node reports as wrong, read by another process: from the plugin if it answers, else from its
file."""

from __future__ import annotations

import http.client
import time
from contextlib import closing
from pathlib import Path

from dra_driver.errors import InvalidConfigError, StateError
from dra_driver.model.ids import split_address
from dra_driver.model.problems import NodeProblem, ShownProblem
from dra_driver.reporting.node_problems import Reported, decode, read_problems

_ANSWER_S = 1.0
"""The plugin is on the same node; it answers within milliseconds unless the node is in trouble itself."""
_LONGEST = 1 << 22
NOT_RUNNING = (
    "gpu-dra-driver is not running on this node, so no pod with a GPU can start here or end; "
    "`kubectl get pods -A -o wide -l app.kubernetes.io/name=gpu-dra-driver` shows its pods"
)


def plugin_problems(directory: Path, http_endpoint: str) -> Reported:
    """The problems of the node and the failing claims as the plugin sees them; that no plugin runs is one of the
    problems.

    `directory` is that of the plugin, `http_endpoint` the address where it serves HTTP, empty if it serves none. A full
    disk keeps the file old, so the answer of the plugin comes first.
    """
    answered = _asked(http_endpoint)
    if answered is not None:
        return answered
    try:
        runs, written = read_problems(directory)
    except StateError as error:
        text = f"it is not known whether gpu-dra-driver runs and what it reports: {error}"
        return Reported((_of_now(NodeProblem("check-failed", text)),))
    if runs:
        return written
    return Reported((_of_now(NodeProblem("plugin-not-running", NOT_RUNNING)),), written.failing)


def _asked(http_endpoint: str) -> Reported | None:
    """What the plugin answers; None if it does not."""
    if not http_endpoint:
        return None
    try:
        host, port = split_address(http_endpoint)
        with closing(http.client.HTTPConnection(host or "localhost", port, timeout=_ANSWER_S)) as connection:
            connection.request("GET", "/problems")
            answer = connection.getresponse()
            return decode(answer.read(_LONGEST)) if answer.status == http.client.OK else None
    except (OSError, http.client.HTTPException, InvalidConfigError, StateError):
        return None


def _of_now(problem: NodeProblem) -> ShownProblem:
    return ShownProblem(problem, int(time.time()))
