"""The configuration of the official client: service accounts, kubeconfigs and proxies, and what is wrong with them."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import textwrap
import threading
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
from playground.apiserver import PlaygroundApiServer, self_signed

from dra_driver.errors import ApiRejectedError, ApiUnavailableError, InvalidConfigError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import Endpoint, load_endpoint
from tests.fakes.connect_proxy import ConnectProxy
from tests.fakes.waiting import PATIENCE_S

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
    """Creates clients for kubeconfigs with this cluster and user, or for a pod, and closes them after the
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
        ("token", None, "Service token file does not exist"),
        ("token", "", "Token file exists but empty"),
        ("ca.crt", None, "Service certification file does not exist"),
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


def test_daemon_imports_the_official_client_with_its_first_request(pod):
    """It takes 12 MiB and some tenths of a second, which the registration with the kubelet need not wait for."""
    code = f"""
        import sys
        import dra_driver.app.daemon, dra_driver.cli.run
        from dra_driver.kube.client import ApiClient
        from dra_driver.kube.endpoint import Endpoint
        loaded = lambda: [name for name in ("kubernetes", "kubernetes.client.api") if name in sys.modules]
        endpoint = Endpoint()
        client = ApiClient(endpoint)
        print(loaded())
        print(client.request("GET", {NODES!r}, action="list")["items"], endpoint.namespace, loaded())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[] default ['kubernetes']"]


def test_token_is_read_again_when_it_is_refused(pod, tls_server, client_of):
    client = client_of()
    assert list_nodes(client) == []
    tls_server.tokens = {"newer"}
    with pytest.raises(ApiRejectedError, match="HTTP 401"):
        list_nodes(client)
    (pod / "token").write_text("newer")
    assert list_nodes(client) == list_nodes(client) == []
    assert [request.status for request in tls_server.requests] == [200, 401, 401, 401, 200, 200]


def test_last_token_serves_on_while_the_file_cannot_be_read(pod, client_of):
    client = client_of()
    (pod / "token").write_text("")
    later = datetime.now() + timedelta(minutes=2)
    clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda: later), timedelta=timedelta)
    with mock.patch("kubernetes.config.incluster_config.datetime", clock):
        assert list_nodes(client) == []


def test_token_that_cannot_be_read_again_fails_the_request_in_a_sentence(pod, tls_server, client_of):
    client = client_of()
    tls_server.tokens = ()
    (pod / "token").unlink()
    with pytest.raises(
        ApiUnavailableError, match=r"list nodes: service account .*: Service token file does not exist"
    ):
        list_nodes(client)


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
        client.request("GET", NODES, action="list nodes", timeout_s=1.0)
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
            match=r"returned 1\. session ended; run the credential plugin yourself to see why",
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
    assert Path(client.endpoint.configuration.cert_file).read_bytes() == certificates[1][0].read_bytes()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no session >&2; exit 3", "process returned 3. no session"),
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
    monkeypatch.setenv("NO_PROXY", ".test")
    with pytest.raises(ApiUnavailableError, match="cannot connect to the API server"):
        list_nodes(client_of(behind, {"token": "t"}))
    assert len(proxy.requested) == 2, "not for loopback, nor for what NO_PROXY names"


def test_proxy_of_the_kubeconfig_goes_before_that_of_the_environment(monkeypatch, proxy, behind, client_of):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    client = client_of(behind | {"proxy-url": f"http://{QUOTED}@{proxy.address}"}, {"token": "t"})
    assert list_nodes(client) == []
    assert proxy.requested == ["api.test:6443"]


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
        f"list nodes: the proxy http://{proxy.address} cannot be used: {said}; check proxy-url in the kubeconfig, or"
        " HTTPS_PROXY and NO_PROXY (credentials: http://USER:PASSWORD@HOST:PORT)"
    )


def test_proxy_that_is_absent_is_named(behind, client_of):
    client = client_of(behind | {"proxy-url": f"http://{QUOTED}@127.0.0.1:1"})
    with pytest.raises(
        ApiUnavailableError, match=r"the proxy http://127\.0\.0\.1:1 cannot be used: Connection refused"
    ):
        list_nodes(client)
