"""Where the API server is, with which credentials and through which proxy: service accounts and kubeconfigs."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

import pytest
from playground.apiserver import PlaygroundApiServer, self_signed
from urllib3.util import parse_url

from dra_driver.errors import ApiRejectedError, ApiUnavailableError, InvalidConfigError
from dra_driver.kube import transport
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import Endpoint, load_endpoint
from dra_driver.kube.proxies import environment_proxy
from tests.fakes.connect_proxy import ConnectProxy
from tests.fakes.waiting import PATIENCE_S, eventually

NODES = "/api/v1/nodes"
VERSION = "client.authentication.k8s.io/v1"
CREDENTIALS, QUOTED = "me:p@ss word", "me:p%40ss%20word"
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def _not_in_a_pod_nor_behind_a_proxy(monkeypatch):
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", *PROXY_VARIABLES):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """(certificate, key) of a server, and of another one."""
    directory = tmp_path_factory.mktemp("certificates")
    return [self_signed(directory / name, names="IP:127.0.0.1,DNS:api.test") for name in ("one", "two")]


@pytest.fixture
def tls_server(certificates):
    with PlaygroundApiServer(tls=certificates[0], tokens={"t"}) as server:
        yield server


@pytest.fixture
def client_of(tmp_path):
    """Create clients for kubeconfigs with this cluster and user, or for a pod, and close them after the
    test.
    """
    clients = []

    def make(cluster=None, user=None):
        path = None if cluster is None else write(tmp_path / f"config-{len(clients)}", cluster, user)
        clients.append(ApiClient(load_endpoint(path), timeout_s=5))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def write(path, cluster=None, user=None, **changes):
    document = {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"} | (cluster or {})}],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    } | changes
    path.write_text(json.dumps(document))
    return path


def list_nodes(client):
    return client.request("GET", NODES, action="list nodes")["items"]


def in_base64(file):
    return base64.b64encode(file.read_bytes()).decode()


def refusal(kubeconfig=None):
    """Why a configuration cannot be used; it is one line."""
    with pytest.raises(InvalidConfigError) as caught:
        ApiClient(Endpoint(kubeconfig)).open()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- in a pod ---------------------------------------------------------------------------------------


@pytest.fixture
def pod(monkeypatch, tls_server, tmp_path):
    """The directory of a service account for `tls_server`."""
    for name, value in tls_server.write_service_account(tmp_path / "account", token="t").items():
        monkeypatch.setenv(name, value)
    return tmp_path / "account"


def test_endpoint_outside_of_a_pod_names_the_flag():
    with pytest.raises(InvalidConfigError, match="this is not a pod; set --kubeconfig"):
        Endpoint()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("token", None, "/token cannot be read: No such file or directory"),
        ("token", "", "/token is empty"),
        ("token", "a\u200bb", "the bearer token has invalid characters"),
        ("ca.crt", None, "/ca.crt cannot be read: No such file or directory"),
        ("ca.crt", "", "/ca.crt is empty"),
        ("ca.crt", "no", "the CA, the client certificate or its key cannot be loaded: "),
    ],
)
def test_service_account_with_a_bad_file_is_refused(pod, file, content, said):
    (pod / file).unlink()
    if content is not None:
        (pod / file).write_text(content)
    text = refusal()
    assert said in text
    assert f"service account {pod}" in text


def test_daemon_in_a_pod_does_not_import_the_official_client(pod):
    """It is 370 modules, which take 0.4 s of CPU and 19 MiB."""
    code = f"""
        import sys
        import dra_driver.app.daemon, dra_driver.cli.run
        from dra_driver.kube.client import ApiClient
        from dra_driver.kube.endpoint import Endpoint
        endpoint = Endpoint()
        print(ApiClient(endpoint).request("GET", {NODES!r}, action="list")["items"], endpoint.namespace)
        print([name for name in ("kubernetes", "requests", "oauthlib") if name in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] default", "[]"]


def test_token_is_read_again_when_its_file_changes(pod, tls_server, client_of):
    client = client_of()
    assert list_nodes(client) == []
    tls_server.tokens = {"newer"}
    with pytest.raises(ApiRejectedError, match="HTTP 401"):
        list_nodes(client)
    (pod / "token").write_text("newer")
    assert list_nodes(client) == list_nodes(client) == []
    assert [request.status for request in tls_server.requests] == [200, 401, 401, 200, 200]


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_text("")])
def test_last_token_is_used_while_its_file_cannot_be_read(pod, client_of, harm):
    client = client_of()
    harm(pod / "token")
    assert list_nodes(client) == []


def test_refused_token_whose_file_cannot_be_read_fails_the_request_in_a_sentence(pod, tls_server, client_of):
    client = client_of()
    tls_server.tokens = ()
    (pod / "token").unlink()
    with pytest.raises(
        ApiUnavailableError,
        match=r"cannot list nodes: service account .*/token cannot be read: No such file or directory",
    ):
        list_nodes(client)


def test_requests_of_threads_share_connections(pod, tls_server, client_of, monkeypatch):
    """Also after a change of the token, but not of the CA."""
    made = []
    connect = transport._TlsConnection.connect
    monkeypatch.setattr(transport._TlsConnection, "connect", lambda self: (made.append(1), connect(self)))
    client = client_of()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: list_nodes(client), range(20)))
    tls_server.tokens = {"t", "newer"}
    (pod / "token").write_text("newer")
    list_nodes(client)
    assert len(made) <= 2
    (pod / "ca.crt").write_text((pod / "ca.crt").read_text() + "\n")
    list_nodes(client)
    assert len(made) <= 3


def test_ca_is_loaded_again_when_it_is_replaced(pod, certificates, client_of):
    def replace_ca(certificate):
        (pod / "fresh").write_bytes(certificate[0].read_bytes())
        (pod / "fresh").rename(pod / "ca.crt")

    client = client_of()
    replace_ca(certificates[1])
    with pytest.raises(ApiUnavailableError, match=r"certificate is not trusted .*check the CA file"):
        list_nodes(client)
    replace_ca(certificates[0])
    assert list_nodes(client) == []


def test_answer_that_drips_over_tls_ends_with_the_time_that_it_may_take(pod, tls_server, client_of):
    client = client_of()
    tls_server.faults.drip("/nodes", 0.1)
    with pytest.raises(ApiUnavailableError, match="did not answer in time"):
        client.request("GET", NODES, action="list nodes", timeout_s=0.4)
    tls_server.faults.clear()
    assert list_nodes(client) == []


def test_watch_stops_promptly_over_tls(pod, tls_server, client_of):
    stream = client_of().watch(NODES, action="watch", query={"watch": "true"}, idle_timeout_s=60)
    ended = threading.Event()
    reader = threading.Thread(target=lambda: (list(stream), ended.set()))
    reader.start()
    tls_server.add("nodes", {"metadata": {"name": "n"}})
    stream.close()
    assert ended.wait(PATIENCE_S)
    reader.join()


# --- kubeconfigs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"clusters: [", "line 1 is not YAML"),
        (b"clusters: [5, 6]", "cannot be used: "),
        (b"", "file is empty"),
        (b"clusters: [{name: c}]\ncurrent-context: y\n", "Expected object with name y in"),
        ("clusters: [{name: c}]\n".encode("utf-16"), "cannot be used: "),
        (None, "cannot be read; check --kubeconfig"),
    ],
)
def test_kubeconfig_is_refused_when_its_content_is_wrong(tmp_path, content, said):
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_bytes(content)
    text = refusal(path)
    assert said in text
    assert f"kubeconfig {path}" in text


@pytest.mark.parametrize(
    ("cluster", "user", "said"),
    [
        ({"server": "api.test"}, {}, "'api.test' is not an http(s) URL of an API server"),
        ({}, {"as": "admin"}, "its user impersonates another user (`as`), which gpu-dra-driver does not support"),
        ({"server": "https://x", "certificate-authority": "absent"}, {}, "File does not exist: "),
        ({"proxy-url": "socks5://me:secret@p:1"}, {}, "its proxy is not http://HOST:PORT or https://HOST:PORT"),
        ({"proxy-url": "http://me:secret@p:99999"}, {}, "its proxy is not http://HOST:PORT or https://HOST:PORT"),
    ],
)  # fmt: skip
def test_kubeconfig_is_refused_when_a_part_is_wrong(tmp_path, cluster, user, said):
    text = refusal(write(tmp_path / "kubeconfig", cluster, user))
    assert said in text
    assert "secret" not in text


def test_kubeconfigs_of_several_files_are_merged_as_kubectl_does(tmp_path):
    one = write(tmp_path / "one", {"server": "http://one:1"})
    contexts = [{"name": "y", "context": {"cluster": "d", "user": "u", "namespace": "team"}}]
    clusters = [{"name": "d", "cluster": {"server": "http://two:1"}}]
    two = write(tmp_path / "two", contexts=contexts, clusters=clusters, **{"current-context": "y"})
    both = f"{tmp_path / 'absent'}:{one}:{two}"
    found = [load_endpoint(both, context=context) for context in (None, "y")]
    assert [(each.server, each.namespace) for each in found] == [
        ("http://one:1", "default"),
        ("http://two:1", "team"),
    ]


def test_client_certificate_works_inline_and_as_file(certificates, tmp_path, tls_server, client_of):
    tls_server.tokens = None
    names = ("client-certificate", "client-key")
    for name, file in zip(("ca", *names), (certificates[0][0], *certificates[0]), strict=True):
        shutil.copy(file, tmp_path / name)
    inline = {f"{name}-data": in_base64(file) for name, file in zip(names, certificates[0], strict=True)}
    for user in (inline, {name: name for name in names}):
        assert list_nodes(client_of({"server": tls_server.url, "certificate-authority": "ca"}, user)) == []


def test_verification_can_be_skipped_and_the_name_of_the_certificate_given(
    certificates, tls_server, client_of
):
    here = {"server": tls_server.url}
    named = here | {"certificate-authority": str(certificates[0][0])}
    for cluster in (here | {"insecure-skip-tls-verify": True}, named | {"tls-server-name": "api.test"}):
        assert list_nodes(client_of(cluster, {"token": "t"})) == []
    with pytest.raises(ApiUnavailableError, match=r"not trusted .*other\.test"):
        list_nodes(client_of(named | {"tls-server-name": "other.test"}, {"token": "t"}))


class Plugin:
    """A credential plugin that a kubeconfig names; `gives` is what it prints, `runs` how often it ran."""

    user: ClassVar = {"exec": {"apiVersion": VERSION, "command": "./plugin", "interactiveMode": "Never"}}

    def __init__(self, directory):
        self.directory = directory
        self.does("cat answer.json")

    def does(self, script):
        path = self.directory / "plugin"
        path.write_text(f"#!/bin/sh\ncd {self.directory}; echo run >>runs\n{script}\n")
        path.chmod(0o755)

    def gives(self, **status):
        answer = {"apiVersion": VERSION, "kind": "ExecCredential", "status": status}
        (self.directory / "answer.json").write_text(json.dumps(answer))

    @property
    def runs(self):
        return (self.directory / "runs").read_text().count("run")

    def child(self):
        """The process whose PID the script wrote, or None before that."""
        path = self.directory / "child"
        text = path.read_text() if path.exists() else ""
        return int(text) if text.endswith("\n") else None


def test_inline_keys_and_those_of_a_plugin_leave_no_file(
    tmp_path, plugin, certificates, tls_server, client_of, monkeypatch
):
    """A new connection needs none of the files that were there at the start."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    tls_server.tokens = None
    ca = {"server": tls_server.url, "certificate-authority-data": in_base64(certificates[0][0])}
    cert, key = certificates[0]
    plugin.gives(clientCertificateData=cert.read_text(), clientKeyData=key.read_text())
    inline = {"client-certificate-data": in_base64(cert), "client-key-data": in_base64(key)}
    for user in (inline, plugin.user):
        client = client_of(ca, user)
        assert list(directory.iterdir()) == []
        client.close()
        assert list_nodes(client) == []
        assert list(directory.iterdir()) == []


def test_files_that_a_kubeconfig_names_are_read_again_when_they_change(
    tmp_path, certificates, tls_server, client_of
):
    shutil.copy(certificates[1][0], tmp_path / "ca")
    (tmp_path / "token").write_text("older")
    client = client_of({"server": tls_server.url, "certificate-authority": "ca"}, {"tokenFile": "token"})
    with pytest.raises(ApiUnavailableError, match="certificate is not trusted"):
        list_nodes(client)
    shutil.copy(certificates[0][0], tmp_path / "ca")
    (tmp_path / "token").write_text("t")
    assert list_nodes(client) == []
    write(tmp_path / "config-0", {"server": "http://127.0.0.1:1"}, {})
    assert client.endpoint.server == "http://127.0.0.1:1"


def test_password_in_the_url_of_the_server_is_sent_like_kubectl_does(client_of):
    client = client_of({"server": f"https://{QUOTED}@api.test/base/"})
    access = client.endpoint.access()
    assert (access.route.server, access.authorization) == (
        "https://api.test/base",
        f"Basic {base64.b64encode(CREDENTIALS.encode()).decode()}",
    )


@pytest.fixture
def plugin(tmp_path):
    return Plugin(tmp_path)


def test_exec_plugin_gives_the_token_and_another_after_a_401(plugin, client_of):
    plugin.gives(token="first")
    with PlaygroundApiServer(tokens={"first"}) as server:
        client = client_of({"server": server.url}, plugin.user)
        assert list_nodes(client) == list_nodes(client) == []
        assert plugin.runs == 1
        server.tokens = {"second"}
        plugin.gives(token="second")
        assert list_nodes(client) == list_nodes(client) == []
        assert plugin.runs == 2
        plugin.does("echo session ended >&2; exit 1")
        server.tokens = ()
        with pytest.raises(
            ApiUnavailableError,
            match=r"returned 1; run the credential plugin yourself to see why",
        ):
            list_nodes(client)


def test_exec_plugin_gives_a_certificate_and_later_another_one(
    tmp_path, plugin, certificates, tls_server, client_of
):
    def give(pair):
        cert, key = (file.read_text() for file in pair)
        plugin.gives(clientCertificateData=cert, clientKeyData=key)

    tls_server.tokens = None
    give(certificates[0])
    cluster = {"server": tls_server.url, "certificate-authority": str(certificates[0][0])}
    client = client_of(cluster, plugin.user)
    assert list_nodes(client) == []
    give(certificates[1])
    tls_server.faults.fail(1, 401)
    assert list_nodes(client) == []
    assert client.endpoint.access().route.certificate == certificates[1][0].read_bytes()


def test_exec_plugin_with_short_tokens_does_not_run_for_each_request(plugin, client_of, monkeypatch):
    """Not even if the token has expired already. Afterwards it runs again."""
    plugin.gives(token="t", expirationTimestamp=(datetime.now(UTC) - timedelta(hours=1)).isoformat())
    with PlaygroundApiServer(tokens={"t"}) as server:
        client = client_of({"server": server.url}, plugin.user)
        for _ in range(10):
            list_nodes(client)
        assert plugin.runs == 1
        monkeypatch.setattr("dra_driver.kube.endpoint._SHORTEST_S", 0.0)
        client.endpoint.renew(client.endpoint.access(), 10)
        list_nodes(client)
        assert plugin.runs == 3


def test_token_of_an_exec_plugin_is_used_until_it_expires(plugin, client_of):
    plugin.gives(token="t", expirationTimestamp=(datetime.now(UTC) + timedelta(minutes=4)).isoformat())
    with PlaygroundApiServer(tokens={"t"}) as server:
        endpoint = client_of({"server": server.url}, plugin.user).endpoint
    assert 200 < endpoint.access().expires_at - time.monotonic() <= 240


def test_exec_plugin_that_hangs_takes_neither_the_time_of_a_request_nor_longer_than_its_own(
    plugin, client_of, monkeypatch
):
    """Several requests wait for one run, and its children end with it."""
    plugin.gives(token="t")
    with PlaygroundApiServer(tokens={"t"}) as server:
        client = client_of({"server": server.url}, plugin.user)
        server.tokens = ()
        plugin.does("sleep 1000 & echo $! >child; wait")
        monkeypatch.setattr("dra_driver.kube.endpoint.PLUGIN_S", PATIENCE_S)
        for _ in range(2):
            with pytest.raises(
                ApiUnavailableError,
                match=r"^cannot list nodes: kubeconfig .*: its credential plugin has not finished; run the",
            ) as caught:
                client.request("GET", NODES, action="list nodes", timeout_s=0.2)
            assert caught.value.timed_out
        os.kill(eventually(plugin.child), signal.SIGKILL)
        eventually(lambda: client.endpoint._reading is None)
        assert plugin.runs == 2
        monkeypatch.setattr("dra_driver.kube.endpoint.PLUGIN_S", 2)
        with pytest.raises(
            InvalidConfigError, match="its credential plugin failed: exec: it did not finish within 2 s"
        ):
            client.endpoint.renew(client.endpoint.access(), PATIENCE_S)
        child = plugin.child()
        eventually(lambda: not Path(f"/proc/{child}").exists())


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no session >&2; exit 3", "process returned 3;"),
        ("echo hello", "failed to decode process output"),
        ("rm plugin; exec ./plugin", "process returned 127"),
    ],
)
def test_exec_plugin_that_fails_is_reported_in_a_sentence(tmp_path, plugin, script, said, caplog):
    plugin.does(script)
    text = refusal(write(tmp_path / "kubeconfig", user=plugin.user))
    assert said in text
    assert "its credential plugin failed: " in text


# --- proxies ----------------------------------------------------------------------------------------


@pytest.fixture
def proxy(tls_server):
    with ConnectProxy(tls_server.port, credentials=CREDENTIALS) as running:
        yield running


@pytest.fixture
def behind(certificates):
    """The cluster of a kubeconfig that only the proxy can reach."""
    return {"server": "https://api.test:6443", "certificate-authority": str(certificates[0][0])}


def test_requests_and_watches_go_through_the_proxy_of_the_environment(
    monkeypatch, proxy, behind, tls_server, client_of
):
    monkeypatch.setenv("HTTPS_PROXY", f"{QUOTED}@{proxy.address}")  # the scheme is optional, as for kubectl
    client = client_of(behind, {"token": "t"})
    stream = client.watch(NODES, action="watch nodes", query={"watch": "true"}, idle_timeout_s=60)
    tls_server.add("nodes", {"metadata": {"name": "n"}})
    assert next(iter(stream))["object"]["metadata"]["name"] == "n"
    stream.close()
    assert len(list_nodes(client)) == len(list_nodes(client)) == 1
    assert proxy.requested == ["api.test:6443"] * 2, "one connection for the watch and one for all the rest"
    assert len(list_nodes(client_of(behind | {"server": tls_server.url}, {"token": "t"}))) == 1
    assert len(proxy.requested) == 2, "not for loopback"


@pytest.mark.parametrize(
    ("server", "exceptions", "proxied"),
    [
        ("https://api.test:6443", "", True),
        ("https://api.test:6443", ".test", False),
        ("https://api.test:6443", "test", False),
        ("https://api.test:6443", "*.test", False),
        ("https://api.test:6443", "other, API.TEST", False),
        ("https://api.test:6443", "api.test:6443", False),
        ("https://api.test:6443", "api.test:443", True),
        ("https://api.test", "api.test:443", False),
        ("https://api.test:6443", ".api.test", True),
        ("https://api.test:6443", "pi.test", True),
        ("https://api.test:6443", "*", False),
        ("https://10.96.0.1:443", "10.96.0.0/12", False),
        ("https://10.96.0.1:443", "10.96.0.1", False),
        ("https://10.96.0.1:443", "10.96.0.1:443", False),
        ("https://10.96.0.1:443", "10.112.0.0/12,10.96.0.0/99", True),
        ("https://[fd00::1]:443", "fd00::/8", False),
        ("https://[fd00::1]:443", "[fd00::1]:443", False),
        ("https://[fd00::1]:443", "fd00:0::1", False),
        ("https://127.1.2.3:6443", "", False),
        ("https://[::1]:6443", "", False),
        ("https://localhost:6443", "", False),
        ("http://api.test:8080", "", False),
    ],
)
def test_proxy_of_the_environment_does_not_serve_what_no_proxy_names(server, exceptions, proxied):
    """As for kubectl. HTTPS_PROXY is for https, and nothing but the kubeconfig is for loopback."""
    environ = {"https_proxy": "http://p:1", "NO_PROXY": exceptions}
    assert environment_proxy(parse_url(server), environ) == ("http://p:1" if proxied else None)


def test_proxy_of_the_kubeconfig_is_used_whatever_the_environment_says(
    monkeypatch, proxy, behind, tls_server, client_of
):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "*")
    through = behind | {"proxy-url": f"http://{QUOTED}@{proxy.address}"}
    for server in (behind["server"], tls_server.url):
        client = client_of(through | {"server": server}, {"token": "t"})
        assert list_nodes(client) == list_nodes(client) == []
    assert proxy.requested == ["api.test:6443", tls_server.url.removeprefix("https://")]


def test_proxy_with_tls_is_verified_with_the_cas_of_the_system(
    monkeypatch, certificates, behind, tls_server, client_of
):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates[1][0]))
    with ConnectProxy(tls_server.port, certificate=certificates[1]) as proxy:
        cluster = behind | {"proxy-url": f"https://{proxy.address}"}
        assert list_nodes(client_of(cluster, {"token": "t"})) == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates[0][0]))
        with pytest.raises(
            ApiUnavailableError, match=r"the proxy https://127.* cannot be used: .*certificate verify"
        ):
            list_nodes(client_of(cluster, {"token": "t"}))


@pytest.mark.parametrize(
    ("credentials", "said"),
    [
        ("", "Tunnel connection failed: 407 Proxy Authentication Required"),
        (f"{QUOTED}@", "Tunnel connection failed: 403 Forbidden"),
    ],
)
def test_proxy_that_refuses_is_named_with_what_to_check(proxy, behind, client_of, credentials, said):
    proxy.refuses = 403 if credentials else None
    client = client_of(behind | {"proxy-url": f"http://{credentials}{proxy.address}"}, {"token": "t"})
    with pytest.raises(ApiUnavailableError) as caught:
        list_nodes(client)
    assert str(caught.value) == (
        f"cannot list nodes: the proxy http://{proxy.address} cannot be used: {said}; check proxy-url in the "
        "kubeconfig, or HTTPS_PROXY and NO_PROXY (credentials: http://USER:PASSWORD@HOST:PORT)"
    )


def test_proxy_that_is_absent_is_named(behind, client_of):
    client = client_of(behind | {"proxy-url": f"http://{QUOTED}@127.0.0.1:1"})
    with pytest.raises(
        ApiUnavailableError, match=r"the proxy http://127\.0\.0\.1:1 cannot be used: Connection refused"
    ):
        list_nodes(client)
