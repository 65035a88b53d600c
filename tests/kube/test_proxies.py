"""The way to the API server through a proxy: which one, with whose credentials, and what is said if it refuses."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playground.apiserver import Identity, PlaygroundApiServer, self_signed
from urllib3.exceptions import ProxyError

from dra_driver.errors import ApiUnavailableError, InvalidConfigError
from dra_driver.kube.api_errors import _proxy_text
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import Endpoint, load_endpoint
from dra_driver.kube.proxies import Proxy, proxy_of_environment, proxy_of_url
from tests.fakes.connect_proxy import ConnectProxy
from tests.fakes.tables import tabled

NODES = "/api/v1/nodes"
SECRET = "p@ss word"
CREDENTIALS = f"me:{SECRET}"
QUOTED = "me:p%40ss%20word"
SERVICE_IP = "10.96.0.1"


@tabled("server", "exceptions", "through")
def test_the_environment_means_what_it_means_to_go(server: str, exceptions: str, through: bool) -> None:
    environ = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": exceptions}
    assert (proxy_of_environment(server, environ) is not None) is through


@tabled("environ", "url")
def test_the_variables_in_turn(environ: dict[str, str], url: str | None) -> None:
    found = proxy_of_environment("https://api.example.com:6443", environ)
    assert (None if found is None else found.url) == url


def test_credentials_are_decoded_and_not_shown() -> None:
    proxy = proxy_of_url(f"http://{QUOTED}@proxy:3128", "HTTPS_PROXY")
    assert proxy == Proxy("http://proxy:3128", "HTTPS_PROXY", CREDENTIALS)
    assert "ss" not in repr(proxy).replace("Proxy", "")


@tabled("text", "said")
def test_a_proxy_that_cannot_be_used_is_told_at_start(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_endpoint(kubeconfig(tmp_path, {"server": "https://api.test", "proxy-url": text}))
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "secret" not in str(caught.value)


# --- a real proxy, with TLS through it -----------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(
        tmp_path_factory.mktemp("tls") / "tls", names=f"IP:127.0.0.1,IP:{SERVICE_IP},DNS:api.test"
    )


@pytest.fixture
def server(certificate: tuple[Path, Path]) -> Iterator[PlaygroundApiServer]:
    with PlaygroundApiServer(tls=certificate, tokens={"t": Identity("me")}) as running:
        yield running


@pytest.fixture
def proxy(server: PlaygroundApiServer) -> Iterator[ConnectProxy]:
    with ConnectProxy(server.port, credentials=CREDENTIALS) as running:
        yield running


def kubeconfig(directory: Path, cluster: dict, user: dict | None = None) -> Path:
    path = directory / "kubeconfig"
    document = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user or {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(document))
    return path


def listed(path: Path | None, environ: dict[str, str] | None = None) -> int:
    """How many nodes the API server lists."""
    client = ApiClient(load_endpoint(path, environ=environ or {}), timeout_s=5)
    try:
        return len(client.request("GET", NODES, action="list nodes")["items"])
    finally:
        client.close()


def behind(proxy: ConnectProxy, credentials: str = f"{QUOTED}@") -> str:
    return f"http://{credentials}{proxy.address}"


def test_the_proxy_of_the_kubeconfig_with_credentials_whatever_no_proxy_says(
    tmp_path: Path, certificate: tuple[Path, Path], proxy: ConnectProxy
) -> None:
    cluster = {"server": "https://api.test:6443", "certificate-authority": str(certificate[0])}
    path = kubeconfig(tmp_path, cluster | {"proxy-url": behind(proxy)})
    assert listed(path, {"HTTPS_PROXY": "http://127.0.0.1:1", "NO_PROXY": "*"}) == 0
    assert proxy.asked == ["api.test:6443"]


def test_the_proxy_of_the_environment_and_no_proxy(
    tmp_path: Path, certificate: tuple[Path, Path], proxy: ConnectProxy, server: PlaygroundApiServer
) -> None:
    cluster = {"server": "https://api.test:6443", "certificate-authority": str(certificate[0])}
    path = kubeconfig(tmp_path, cluster)
    assert listed(path, {"https_proxy": behind(proxy)}) == 0
    assert proxy.asked == ["api.test:6443"]
    with pytest.raises(ApiUnavailableError, match="cannot connect to the API server"):
        listed(path, {"HTTPS_PROXY": behind(proxy), "NO_PROXY": ".test"})
    assert proxy.asked == ["api.test:6443"]
    path = kubeconfig(tmp_path, cluster | {"server": server.url})
    assert listed(path, {"HTTPS_PROXY": behind(proxy)}) == 0
    assert len(proxy.asked) == 1, "loopback is never behind a proxy"


def test_networks_of_no_proxy_count_for_kubeconfigs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package that reads them knows no networks there."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    assert load_endpoint(kubeconfig(tmp_path, {"server": "https://10.0.0.1"})).proxy is None


def test_a_proxy_with_tls_is_verified_by_the_authorities_of_the_system(
    tmp_path: Path,
    certificate: tuple[Path, Path],
    server: PlaygroundApiServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not by the CA of the API server. `SSL_CERT_FILE` names others, as for programs in Go."""
    cluster = {"server": "https://api.test:6443", "certificate-authority": str(certificate[0])}
    with ConnectProxy(server.port, certificate=certificate) as proxy:
        path = kubeconfig(tmp_path, cluster | {"proxy-url": f"https://{proxy.address}"})
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
        with pytest.raises(ApiUnavailableError) as caught:
            listed(path)
        assert f"the certificate of the proxy https://{proxy.address}" in str(caught.value)
        assert "SSL_CERT_FILE" in str(caught.value)
        assert proxy.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert listed(path) == 0
        assert proxy.asked == ["api.test:6443"]


def test_the_address_in_the_cluster_goes_the_way_that_the_environment_says(
    tmp_path: Path, server: PlaygroundApiServer, proxy: ConnectProxy
) -> None:
    account = server.write_service_account(tmp_path, token="t")
    pod = account | {"KUBERNETES_SERVICE_HOST": SERVICE_IP, "KUBERNETES_SERVICE_PORT": "443"}
    assert listed(None, pod | {"HTTPS_PROXY": behind(proxy)}) == 0
    assert proxy.asked == [f"{SERVICE_IP}:443"]
    past = load_endpoint(environ=pod | {"HTTPS_PROXY": behind(proxy), "NO_PROXY": "10.96.0.0/12"})
    assert past.proxy is None


def test_a_credential_plugin_and_a_proxy(
    tmp_path: Path, certificate: tuple[Path, Path], proxy: ConnectProxy
) -> None:
    plugin = tmp_path / "plugin"
    version = "client.authentication.k8s.io/v1"
    credential = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": "t"}}
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(credential)}'\n")
    plugin.chmod(0o755)
    user = {"exec": {"apiVersion": version, "command": str(plugin), "interactiveMode": "Never"}}
    cluster = {"server": "https://api.test:6443", "certificate-authority": str(certificate[0])}
    assert listed(kubeconfig(tmp_path, cluster, user), {"HTTPS_PROXY": behind(proxy)}) == 0
    assert listed(kubeconfig(tmp_path, cluster | {"proxy-url": behind(proxy)}, user)) == 0
    assert proxy.asked == ["api.test:6443"] * 2


def test_a_watch_and_many_requests_go_through(
    tmp_path: Path, certificate: tuple[Path, Path], proxy: ConnectProxy, server: PlaygroundApiServer
) -> None:
    cluster = {"server": "https://api.test:6443", "certificate-authority": str(certificate[0])}
    client = ApiClient(load_endpoint(kubeconfig(tmp_path, cluster), environ={"HTTPS_PROXY": behind(proxy)}))
    stream = client.watch(NODES, action="watch nodes", query={"watch": "true"}, idle_timeout_s=5)
    server.add("nodes", {"metadata": {"name": "n"}})
    assert next(iter(stream))["object"]["metadata"]["name"] == "n"
    stream.close()
    for _ in range(3):
        client.request("GET", NODES, action="list nodes")
    client.close()
    assert len(proxy.asked) == 2, "one connection for the watch and one for all the rest"


def test_plain_http_goes_through_a_proxy_too(tmp_path: Path) -> None:
    with PlaygroundApiServer() as server, ConnectProxy(server.port, credentials=CREDENTIALS) as proxy:
        path = kubeconfig(tmp_path, {"server": "http://api.test:8080"}, {"token": "t"})
        assert listed(path, {"HTTP_PROXY": behind(proxy)}) == 0
        assert proxy.asked == [f"http://api.test:8080{NODES}"]


def error_through(path: Path, environ: dict[str, str]) -> str:
    with pytest.raises(ApiUnavailableError) as caught:
        listed(path, environ)
    text = str(caught.value)
    assert "\n" not in text
    assert SECRET not in text
    assert QUOTED not in text
    return text


def test_a_refusal_names_the_proxy_and_what_to_do(
    tmp_path: Path, certificate: tuple[Path, Path], proxy: ConnectProxy
) -> None:
    cluster = {"server": "https://api.test:6443", "certificate-authority": str(certificate[0])}
    path = kubeconfig(tmp_path, cluster)
    named = (
        f"list nodes: the proxy http://{proxy.address} (HTTPS_PROXY) refused the way to https://api.test:6443"
    )
    assert error_through(path, {"HTTPS_PROXY": behind(proxy, "")}) == (
        f"{named}: Proxy Authentication Required (HTTP 407); it wants credentials: "
        "write http://USER:PASSWORD@HOST:PORT"
    )
    assert "(HTTP 407); it does not take these credentials" in error_through(
        path, {"HTTPS_PROXY": behind(proxy, "me:wrong@")}
    )
    proxy.refuses = 403
    assert error_through(path, {"HTTPS_PROXY": behind(proxy)}) == (
        f"{named}: Forbidden (HTTP 403); allow it there, or set NO_PROXY if the API server can be reached without"
    )
    path = kubeconfig(tmp_path, cluster | {"proxy-url": behind(proxy)})
    told = error_through(path, {})
    assert f"(proxy-url of kubeconfig {path})" in told
    assert "or remove the proxy-url if" in told


def test_a_proxy_that_is_not_there(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cluster = {"server": "https://api.test:6443", "certificate-authority": str(certificate[0])}
    told = error_through(kubeconfig(tmp_path, cluster), {"HTTPS_PROXY": f"http://{QUOTED}@127.0.0.1:1"})
    assert told == "list nodes: the proxy http://127.0.0.1:1 (HTTPS_PROXY) cannot be used: Connection refused"


def test_a_certificate_that_is_not_trusted_is_the_servers_and_not_the_proxys(
    tmp_path: Path, proxy: ConnectProxy
) -> None:
    path = kubeconfig(tmp_path, {"server": "https://api.test:6443"})
    told = error_through(path, {"HTTPS_PROXY": behind(proxy)})
    assert "the API server's certificate is not trusted" in told


def test_credentials_are_sent_as_go_sends_them() -> None:
    """In UTF-8, also where Latin-1 has no such letter."""
    endpoint = Endpoint(
        "https://10.0.0.1", "x", proxy=Proxy("http://127.0.0.1:9", "HTTPS_PROXY", "u:pä\u017e")
    )
    pool: Any = ApiClient(endpoint)._new_pool()
    kind, _, text = pool.proxy_headers["proxy-authorization"].partition(" ")
    assert (kind, base64.b64decode(text).decode()) == ("Basic", "u:pä\u017e")


def test_a_port_that_is_none_is_told() -> None:
    with pytest.raises(InvalidConfigError, match=r"https://a.b:99999 has no usable port"):
        proxy_of_environment("https://a.b:99999", {"HTTPS_PROXY": "http://p:1"})


@pytest.mark.parametrize(
    ("status", "said"), [("503 Service Unavailable", "cannot reach"), ("403 Forbidden", "refused the way")]
)
def test_a_proxy_that_cannot_is_told_apart_from_one_that_does_not_want(status: str, said: str) -> None:
    endpoint = Endpoint("https://10.0.0.1", "x", proxy=Proxy("http://p:3128", "HTTPS_PROXY"))
    error = ProxyError("x", OSError(f"Tunnel connection failed: {status}"))
    assert said in _proxy_text(error, endpoint)
