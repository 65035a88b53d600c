"""No credential reaches an error, whatever a server, a proxy or a credential plugin answers."""

from __future__ import annotations

import base64
import json
import logging
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import DraDriverError, InvalidConfigError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import Endpoint
from tests.kube.support import raw_server

SECRET, QUOTED = "hunter2/pass word", "hunter2%2Fpass%20word"
IN_BASE64 = base64.b64encode(f"me:{SECRET}".encode()).decode()
VERSION = "client.authentication.k8s.io/v1"
TOKEN = "hunter2.token-of-a-user"
JWT = f"e30.{base64.urlsafe_b64encode(b'{}').decode().rstrip('=')}.hunter2"

Json = dict[str, Any]


def plugin(script: str, **more: Any) -> Json:
    arguments = {"command": "sh", "args": ["-c", script], "interactiveMode": "Never"}
    return {"exec": {"apiVersion": VERSION, **arguments, **more}}


def credential(**status: str) -> str:
    return json.dumps({"apiVersion": VERSION, "kind": "ExecCredential", "status": status})


GOOD: dict[str, Callable[[str], tuple[Json, Json]]] = {
    "proxy": lambda url: ({"server": "http://api", "proxy-url": url.replace("//", f"//me:{QUOTED}@")}, {}),
    "proxy of a tunnel": lambda url: (
        {"server": "https://api", "proxy-url": url.replace("//", f"//me:{QUOTED}@")},
        {},
    ),
    "server": lambda url: ({"server": url.replace("//", f"//me:{QUOTED}@")}, {}),
    "password": lambda url: ({"server": url}, {"username": "me", "password": SECRET}),
    "token": lambda url: ({"server": url}, {"token": TOKEN}),
    "token file": lambda url: ({"server": url}, {"tokenFile": "token"}),
    "plugin": lambda url: ({"server": url}, plugin(f"echo '{credential(token=TOKEN)}'")),
    "oidc": lambda url: (
        {"server": url},
        {"auth-provider": {"name": "oidc", "config": {"id-token": JWT, "client-secret": SECRET}}},
    ),
    "gcp": lambda url: (
        {"server": url},
        {"auth-provider": {"name": "gcp", "config": {"access-token": TOKEN}}},
    ),
}
"""Clusters and users of kubeconfigs with a credential that is sent to the server or the proxy."""


def kubeconfig(directory: Path, cluster: Json, user: Json) -> Path:
    (directory / "token").write_text(TOKEN)
    document = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = directory / "kubeconfig"
    path.write_text(json.dumps(document))
    return path


def echo(status: int, kind: str) -> Callable[[Callable[[bytes], None], bytes], None]:
    """Answers with all that the client sent, also decoded, as debugging proxies do."""

    def answer(send: Callable[[bytes], None], request: bytes) -> None:
        said = request.decode("latin-1").replace("\r\n", " ")
        assert "authorization: " in said.lower()
        if IN_BASE64 in said:
            said += f" me:{SECRET} {SECRET}"
        text = {
            "status": json.dumps(
                {"kind": "Status", "message": said, "reason": said, "details": {"name": "n"}}
            ),
            "text": said,
            "page": f"<html><style>{'a' * 900}</style>{said}",
            "event": json.dumps({"type": "ERROR", "object": {"code": status, "message": said}}) + "\n",
            "long": "x" * 560 + said,
        }.get(kind, "")
        body = text.encode()
        code = 200 if kind == "event" else status
        reason = said if kind == "reason" else "Something"
        length = len(body) + (10 if kind == "cut" else 0)
        send(
            f"HTTP/1.1 {code} {reason}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode(
                "latin-1"
            )
        )
        send(body)

    return answer


def errors_of(path: Path) -> list[DraDriverError]:
    """The errors of a request and of a watch."""
    found: list[DraDriverError] = []
    try:
        with closing(ApiClient(Endpoint(path), timeout_s=20)) as client:
            for call in (
                lambda: client.request("GET", "/api/v1/nodes", action="list nodes"),
                lambda: list(client.watch("/api/v1/nodes", action="watch", query={}, idle_timeout_s=5)),
            ):
                try:
                    call()
                except DraDriverError as error:
                    found.append(error)
    except DraDriverError as error:
        found.append(error)
    return found


def assert_hidden(errors: list[DraDriverError], log: str = "") -> None:
    assert errors
    for error in errors:
        shown = "".join(traceback.format_exception(error)) + repr(error) + str(vars(error)) + log
        for secret in (SECRET, QUOTED, IN_BASE64, TOKEN, JWT, "hunter2", IN_BASE64[:12]):
            assert secret not in shown


@pytest.mark.parametrize("place", GOOD)
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "status"),
        (401, "reason"),
        (407, "reason"),
        (407, "text"),
        (500, "page"),
        (500, "long"),
        (503, "event"),
        (200, "text"),
        (200, "page"),
        (200, "cut"),
    ],
)
def test_credential_is_hidden_in_what_a_server_says(
    tmp_path: Path, place: str, status: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_server(echo(status, kind)) as port:
        path = kubeconfig(tmp_path, *GOOD[place](f"http://127.0.0.1:{port}"))
        assert_hidden(errors_of(path), caplog.text)


PEM = "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----\n"
IN_BASE64_PEM = base64.b64encode(PEM.encode()).decode()
BAD: dict[str, tuple[Json, Json]] = {
    "proxy": ({"proxy-url": f"socks5://me:{QUOTED}@p:1"}, {}),
    "proxy port": ({"proxy-url": f"http://me:{QUOTED}@p:99999"}, {}),
    "proxy slash": ({"proxy-url": f"http://me:{SECRET}@p:1"}, {}),
    "server": ({"server": f"ftp://me:{QUOTED}@p:1"}, {}),
    "server port": ({"server": f"https://me:{QUOTED}@p:99999"}, {}),
    "impersonation": ({}, {"token": TOKEN, "as": "admin"}),
    "token": ({}, {"token": f"{TOKEN}\u200b"}),
    "token of lines": ({}, {"token": f"{TOKEN}\nX: y"}),
    "token object": ({}, {"token": {"hunter2": TOKEN}}),
    "token file": ({}, {"tokenFile": {"hunter2": 1}}),
    "key": ({}, {"client-certificate-data": IN_BASE64_PEM, "client-key-data": IN_BASE64_PEM}),
    "key that is not base64": (
        {},
        {"client-certificate-data": IN_BASE64_PEM, "client-key-data": f"{SECRET}="},
    ),
    "plugin that fails": ({}, plugin("echo $P >&2; exit 1", env=[{"name": "P", "value": SECRET}])),
    "plugin that prints its arguments": (
        {},
        {
            "exec": {
                "apiVersion": VERSION,
                "command": "sh",
                "args": ["-c", 'echo "$@" >&2; exit 1', "x", "--p=hunter2", TOKEN],
            }
        },
    ),
    "plugin with a secret inside an argument": ({}, plugin("echo hunter2 >&2; exit 3")),
    "plugin that prints no JSON": ({}, plugin("echo hunter2")),
    "plugin that prints an object": ({}, plugin(f"echo '{credential(hunter2=TOKEN)}'")),
    "plugin that prints objects in its error": ({}, plugin('echo \'{"token": "hunter2"}\' >&2; exit 1')),
    "plugin of another version": ({}, plugin(f"echo '{credential(token=TOKEN)}'", apiVersion="v1")),
    "plugin with a key of its own": (
        {},
        plugin(f"echo '{credential(clientCertificateData='x', clientKeyData='hunter2')}'"),
    ),
    "plugin with a variable without a value": ({}, plugin("", env=[{"name": "P", "hunter2": SECRET}])),
    "plugin without a command": (
        {},
        {"exec": {"apiVersion": VERSION, "env": [{"name": "P", "value": SECRET}]}},
    ),
    "oidc": ({}, {"auth-provider": {"name": "oidc", "config": {"client-secret": SECRET}}, "token": TOKEN}),
    "gcp": (
        {},
        {
            "auth-provider": {
                "name": "gcp",
                "config": {"cmd-path": "sh", "cmd-args": f"-c {TOKEN}", "refresh-token": SECRET},
            }
        },
    ),
}


@pytest.mark.parametrize("part", BAD)
def test_credential_is_hidden_in_what_is_wrong_with_a_kubeconfig(
    tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    cluster, user = BAD[part]
    assert_hidden(
        errors_of(kubeconfig(tmp_path, {"server": "https://127.0.0.1:1"} | cluster, user)), caplog.text
    )


def test_credential_is_hidden_in_entries_that_cannot_be_merged(tmp_path: Path) -> None:
    one = kubeconfig(tmp_path, {"server": "https://127.0.0.1:1"}, {"token": TOKEN})
    two = tmp_path / "two"
    for entry in ({"user": {"token": TOKEN}}, {"name": {"hunter2": TOKEN}}, {"name": "u"}):
        document = json.loads(one.read_text())
        document["users"] = [entry, *document["users"], entry]
        two.write_text(json.dumps(document))
        assert_hidden(errors_of(Path(f"{two}:{one}")))


def test_secret_of_long_ago_is_forgotten(tmp_path: Path) -> None:
    """A daemon gets a new token each hour."""
    endpoint = Endpoint(kubeconfig(tmp_path, {"server": "https://api"}, {"tokenFile": "token"}))
    for number in range(50):
        (tmp_path / "token").write_text(f"token-{number}-{time.monotonic_ns()}")
        access = endpoint.access()
    assert access.authorization.removeprefix("Bearer ") not in endpoint.hide(access.authorization)
    assert len(endpoint._secrets) <= 32


def test_exit_status_of_a_plugin_is_shown_and_nothing_that_it_prints(tmp_path: Path) -> None:
    user = plugin("echo S3cret >&2; echo again S3cret >&2; exit 3")
    with pytest.raises(
        InvalidConfigError,
        match=r"failed: exec: process returned 3; run the credential plugin yourself to see why$",
    ):
        Endpoint(kubeconfig(tmp_path, {"server": "https://api"}, user)).access()
