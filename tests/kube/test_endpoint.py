"""Finding the API server in a pod: the service account, what is wrong with it, and what is replaced in it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

import pytest
from playground.apiserver import Identity, PlaygroundApiServer, self_signed

from dra_driver.errors import ApiUnavailableError, InvalidConfigError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.credentials import FileToken
from dra_driver.kube.endpoint import load_endpoint

NODES = "/api/v1/nodes"
POD = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


def test_outside_a_pod_the_error_names_the_flag():
    with pytest.raises(InvalidConfigError, match="this is not a pod; give a kubeconfig with --kubeconfig"):
        load_endpoint(environ={})


def test_service_account_is_refused_when_not_mounted(tmp_path):
    with pytest.raises(InvalidConfigError, match=r"ca\.crt is missing or unreadable"):
        load_endpoint(environ=POD | {"SERVICE_ACCOUNT_DIRECTORY": str(tmp_path)})
    with pytest.raises(
        InvalidConfigError, match=r"/var/run/secrets/kubernetes\.io/serviceaccount/ca\.crt is miss"
    ):
        load_endpoint(environ=POD)


def test_service_account_is_refused_when_the_ca_is_not_pem(tmp_path):
    (tmp_path / "ca.crt").write_text("no")
    with pytest.raises(
        InvalidConfigError, match=rf"service account {tmp_path}: the CA, .* cannot be loaded: .*PEM"
    ):
        load_endpoint(environ=POD | {"SERVICE_ACCOUNT_DIRECTORY": str(tmp_path)})


def test_token_file_keeps_last_token_while_unreadable(tmp_path):
    path = tmp_path / "token"
    path.write_text("one")
    token = FileToken(path)
    path.unlink()
    assert token.header() == "Bearer one"
    assert not token.refresh("Bearer one")
    path.write_text("")
    assert token.header() == "Bearer one"
    path.write_text("two\n")
    assert token.header() == "Bearer two"
    assert token.refresh("Bearer one"), "another thread has seen the new one"


def test_token_file_follows_a_projected_volume(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(name)
    link = tmp_path / "..data"
    link.symlink_to("first")
    token = FileToken(link / "token")
    assert token.header() == "Bearer first"
    fresh = tmp_path / "..data_tmp"
    fresh.symlink_to("second")
    fresh.rename(link)
    assert token.header() == "Bearer second"


def test_a_daemon_in_a_pod_does_not_load_the_package_kubernetes(tmp_path):
    """Nor do commands without a kubeconfig; it takes 20 MiB."""
    with PlaygroundApiServer(tokens={"t": Identity("me")}) as server:
        environ = server.write_service_account(tmp_path, token="t")
        code = """
            import os, sys
            import dra_driver.app.daemon, dra_driver.cli.run, dra_driver.kube.claims, dra_driver.kube.cluster
            from dra_driver.kube.client import ApiClient
            from dra_driver.kube.endpoint import load_endpoint
            endpoint = load_endpoint()
            print(endpoint.namespace, ApiClient(endpoint).request("GET", "/api/v1/nodes", action="list")["items"])
            print([name for name in sys.modules if name.partition(".")[0] in ("kubernetes", "requests", "oauthlib")])
        """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["default []", "[]"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """(certificate, key) of a server, and of another one."""
    directory = tmp_path_factory.mktemp("certificates")
    return [self_signed(directory / name) for name in ("one", "two")]


@pytest.fixture
def in_pod(certificates, tmp_path):
    """A server with TLS, and a client with a service account for it in `tmp_path`."""
    with PlaygroundApiServer(tls=certificates[0], tokens={"t": Identity("me")}) as server:
        client = ApiClient(load_endpoint(environ=server.write_service_account(tmp_path, token="t")))
        yield server, client
        client.close()


def test_ca_is_loaded_again_when_it_is_replaced(in_pod, certificates, tmp_path):
    def replace_ca(certificate):
        fresh = tmp_path / "fresh"
        fresh.write_bytes(certificate[0].read_bytes())
        fresh.rename(tmp_path / "ca.crt")

    _, client = in_pod
    replace_ca(certificates[1])
    with pytest.raises(ApiUnavailableError, match=r"certificate is not trusted .*check the CA file"):
        client.request("GET", NODES, action="list nodes")
    replace_ca(certificates[0])
    assert client.request("GET", NODES, action="list nodes")["items"] == []


def test_answer_that_drips_over_tls_ends_with_the_time_that_it_may_take(in_pod):
    server, client = in_pod
    server.faults.drip("/nodes", 0.1)
    start = time.monotonic()
    with pytest.raises(ApiUnavailableError, match="did not answer in time"):
        client.request("GET", NODES, action="list nodes", timeout_s=1.0)
    assert time.monotonic() - start < 6
    server.faults.clear()
    assert client.request("GET", NODES, action="list nodes")["items"] == []


def test_watch_stops_promptly_over_tls(in_pod):
    server, client = in_pod
    stream = client.watch(NODES, action="watch", query={"watch": "true"}, idle_timeout_s=5)
    ended = threading.Event()
    reader = threading.Thread(target=lambda: (list(stream), ended.set()))
    reader.start()
    server.add("nodes", {"metadata": {"name": "n"}})
    stream.close()
    assert ended.wait(0.5)
    reader.join()
