"""Sends requests to the cluster's servers."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from typing import Any

from localcluster.layout import NODE_NAME, Layout

_TIMEOUT_SECONDS = 10.0


def answers(layout: Layout, probe: str) -> bool:
    """Whether a component's probe succeeds. It is a URL, or ``unix:`` and the path of a socket."""
    if probe.startswith("unix:"):
        return _socket_answers(probe.removeprefix("unix:"))
    certificate = "etcd" if probe.endswith("/health") else "admin"
    try:
        _get(layout, probe, certificate)
    except (OSError, http.client.HTTPException):
        return False
    return True


def node_ready(layout: Layout) -> bool:
    """Whether the node's condition Ready is True."""
    node = _object(layout, f"/api/v1/nodes/{NODE_NAME}")
    conditions = node.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def default_account_exists(layout: Layout) -> bool:
    """Whether the default namespace has its service account, without which no pod can be created."""
    return bool(_object(layout, "/api/v1/namespaces/default/serviceaccounts/default"))


def _object(layout: Layout, path: str) -> dict[str, Any]:
    """Return an object from the API server; empty if it does not exist or the server does not answer."""
    try:
        [cluster] = json.loads(layout.kubeconfig.read_text())["clusters"]
        found = json.loads(_get(layout, f"{cluster['cluster']['server']}{path}", "admin"))
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return found if isinstance(found, dict) else {}


def _get(layout: Layout, url: str, certificate: str) -> bytes:
    """Return the body of a successful response. A proxy in the environment is not used."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        context = ssl.create_default_context(cafile=str(layout.certificate("ca")))
        context.load_cert_chain(layout.certificate(certificate), layout.key(certificate))
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    with opener.open(url, timeout=_TIMEOUT_SECONDS) as answer:
        body = answer.read()
    return bytes(body)


def _socket_answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_TIMEOUT_SECONDS)
        try:
            client.connect(path)
        except OSError:
            return False
    return True
