"""Finding the API server: kubeconfigs of all kinds, the pod's service account, and what is wrong with them."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import textwrap
import time

import pytest
from playground.apiserver import Identity, PlaygroundApiServer

from dra_driver.errors import ApiUnavailableError, InvalidConfigError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.credentials import FileToken
from dra_driver.kube.endpoint import load_endpoint

NODES = "/api/v1/nodes"
POD = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


def write(path, *, cluster=None, user=None, **changes):
    document = {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"} | (cluster or {})}],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    } | changes
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("clusters: [", "is not valid YAML"),
        ("", "names no clusters; is it the right file?"),
        ("hello", "names no clusters; is it the right file?"),
        ("clusters: [{name: c}]\ncurrent-context: y\n", "contexts has no entry 'y'; it has: none"),
    ],
)
def test_kubeconfig_is_refused_when_content_is_wrong(tmp_path, content, text):
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    with pytest.raises(InvalidConfigError) as caught:
        load_endpoint(path)
    assert str(path) in str(caught.value)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kubeconfig_is_refused_when_missing(tmp_path):
    with pytest.raises(InvalidConfigError, match=r"absent cannot be read: No such file.*check --kubeconfig"):
        load_endpoint(tmp_path / "absent")


def test_kubeconfig_is_refused_when_a_directory(tmp_path):
    with pytest.raises(InvalidConfigError, match="Is a directory"):
        load_endpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cluster": {"server": "127.0.0.1:1"}}, "has no http"),
        ({"user": {"tokenFile": "absent"}}, "absent cannot be read"),
        (
            {"cluster": {"server": "https://x", "certificate-authority": "ca.pem"}},
            "ca.pem is missing or unreadable",
        ),
        ({"cluster": {"certificate-authority-data": "!!"}}, "certificate-authority-data is not base64"),
        (
            {
                "cluster": {
                    "server": "https://x",
                    "certificate-authority-data": base64.b64encode(b"no").decode(),
                }
            },
            "certificates cannot be loaded from its inline data",
        ),
        (
            {
                "user": {
                    "exec": {"command": "/absent/plugin", "apiVersion": "client.authentication.k8s.io/v1"}
                }
            },
            "'x'",
        ),
    ],
)
def test_kubeconfig_is_refused_when_a_part_is_wrong(tmp_path, change, text):
    path = write(tmp_path / "kubeconfig", **change)
    with pytest.raises(InvalidConfigError) as caught:
        load_endpoint(path)
    assert text in str(caught.value)


def test_context_is_chosen_by_name(tmp_path):
    contexts = [{"name": n, "context": {"cluster": c}} for n, c in (("x", "c"), ("y", "d"))]
    clusters = [{"name": n, "cluster": {"server": f"http://{n}/"}} for n in ("c", "d")]
    path = write(tmp_path / "kubeconfig", contexts=contexts, clusters=clusters)
    assert load_endpoint(path).server == "http://c"
    assert load_endpoint(path, context="y").server == "http://d"
    with pytest.raises(InvalidConfigError, match="contexts has no entry 'z'; it has: x, y"):
        load_endpoint(path, context="z")


def _named(directory, name, server, **changes):
    """A kubeconfig in a folder of its own, with a context, cluster and user of that name and a token beside it."""
    directory.mkdir()
    (directory / "token").write_text(f"token-of-{name}")
    return write(
        directory / "config",
        **{
            "clusters": [{"name": name, "cluster": {"server": server}}],
            "users": [{"name": name, "user": {"tokenFile": "token"}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
            **changes,
        },
    )


@pytest.mark.parametrize(
    ("context", "server", "token"),
    [
        (None, "http://second:1", "token-of-second"),
        ("first", "http://first:1", "token-of-first"),
        ("third", "http://third:1", "token-of-third"),
        ("mixed", "http://third:1", "token-of-first"),
    ],
)
def test_several_files_are_merged_as_kubectl_does(tmp_path, context, server, token):
    mixed = {"name": "mixed", "context": {"cluster": "third", "user": "first"}}
    first = {"name": "first", "context": {"cluster": "first", "user": "first"}}
    again = {"name": "first", "cluster": {"server": "http://not-me:1"}}
    third = {"name": "third", "cluster": {"server": "http://third:1"}}
    files = [
        tmp_path / "absent",
        _named(tmp_path / "a", "first", "http://first:1", **{"current-context": ""}, contexts=[mixed, first]),
        _named(tmp_path / "b", "second", "http://second:1"),
        _named(tmp_path / "c", "third", "http://third:1", clusters=[again, third]),
    ]
    named = ":".join(map(str, files))
    endpoint = load_endpoint(named, context=context)
    assert (endpoint.server, endpoint.token.header()) == (server, f"Bearer {token}")
    if kubectl := shutil.which("kubectl"):
        chosen = ["--context", context] if context else []
        shown = subprocess.run(
            [kubectl, "config", "view", "--minify", "-o", "json", *chosen],
            env={"KUBECONFIG": named, "HOME": str(tmp_path)}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        [cluster], [user] = json.loads(shown)["clusters"], json.loads(shown)["users"]
        assert cluster["cluster"]["server"] == server
        assert f"token-of-{user['name']}" == token


def test_a_file_whose_name_has_a_colon_is_one_file(tmp_path):
    path = write(tmp_path / "a:b", cluster={"server": "http://one:1"})
    assert load_endpoint(path).server == "http://one:1"


def test_static_token_becomes_a_bearer_header(tmp_path):
    endpoint = load_endpoint(write(tmp_path / "kubeconfig", user={"token": "abc"}))
    assert endpoint.token.header() == "Bearer abc"


def test_outside_a_pod_the_error_names_the_flag():
    with pytest.raises(InvalidConfigError, match="this is not a pod; give a kubeconfig with --kubeconfig"):
        load_endpoint(environ={})


def test_service_account_is_refused_when_not_mounted(tmp_path):
    with pytest.raises(InvalidConfigError, match=r"ca\.crt is missing or unreadable"):
        load_endpoint(environ=POD, service_account_dir=tmp_path)


def test_token_file_keeps_last_token_while_unreadable(tmp_path):
    path = tmp_path / "token"
    path.write_text("one")
    token = FileToken(path)
    path.unlink()
    assert token.header() == "Bearer one"
    assert not token.refresh()
    path.write_text("")
    assert token.header() == "Bearer one"
    path.write_text("two\n")
    assert token.header() == "Bearer two"


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


def test_exec_plugin_gives_the_token(tmp_path):
    plugin = tmp_path / "plugin"
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "from-plugin"},
    }
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(credential)}'\n")
    plugin.chmod(0o755)
    user = {
        "exec": {"apiVersion": credential["apiVersion"], "command": str(plugin), "interactiveMode": "Never"}
    }
    with PlaygroundApiServer(tokens={"from-plugin": Identity("me")}) as server:
        path = write(tmp_path / "kubeconfig", user=user, cluster={"server": server.url})
        client = ApiClient(load_endpoint(path))
        assert client.request("GET", NODES, action="list nodes")["items"] == []
        client.close()


def test_error_says_what_to_install_when_the_image_lacks_the_library_for_plugins(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    exec_plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "true",
        "interactiveMode": "Never",
    }
    path = write(tmp_path / "kubeconfig", user={"exec": exec_plugin})
    with pytest.raises(
        InvalidConfigError, match="`pip install kubernetes`, the driver's image does not have it"
    ):
        load_endpoint(path)


def test_models_are_not_imported_when_not_needed(tmp_path):
    path = write(tmp_path / "kubeconfig")
    code = f"""
        import sys
        import dra_driver.kube.client, dra_driver.kube.slice_cache, dra_driver.kube.claims, dra_driver.kube.cluster
        from dra_driver.kube.endpoint import load_endpoint
        load_endpoint({str(path)!r})
        bad = [m for m in sys.modules if m.partition(".")[0] in ("kubernetes", "requests", "grpc")]
        assert not bad, bad
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_error_names_ca_when_certificate_is_not_trusted(certificates, tmp_path):
    with PlaygroundApiServer(tls=certificates("one")) as server:
        other, _ = certificates("two")
        path = write(
            tmp_path / "kubeconfig", cluster={"server": server.url, "certificate-authority": str(other)}
        )
        client = ApiClient(load_endpoint(path))
        with pytest.raises(ApiUnavailableError, match=r"certificate is not trusted .*check the CA file"):
            client.request("GET", NODES, action="list nodes")
        client.close()


def test_ca_is_loaded_again_when_it_is_replaced(certificates, tmp_path):
    with PlaygroundApiServer(tls=certificates("one"), tokens={"t": Identity("me")}) as server:
        (tmp_path / "ca.crt").write_bytes(certificates("two")[0].read_bytes())
        (tmp_path / "token").write_text("t")
        environ = POD | {"KUBERNETES_SERVICE_PORT": str(server.port)}
        client = ApiClient(load_endpoint(environ=environ, service_account_dir=tmp_path))
        with pytest.raises(ApiUnavailableError):
            client.request("GET", NODES, action="list nodes")
        fresh = tmp_path / "fresh"
        fresh.write_bytes(certificates("one")[0].read_bytes())
        fresh.rename(tmp_path / "ca.crt")
        assert client.request("GET", NODES, action="list nodes")["items"] == []
        client.close()


def test_answer_that_drips_over_tls_ends_with_the_time_that_it_may_take(certificates, tmp_path):
    with PlaygroundApiServer(tls=certificates("one")) as server:
        server.write_kubeconfig(tmp_path / "kubeconfig")
        client = ApiClient(load_endpoint(tmp_path / "kubeconfig"))
        server.faults.drip("/nodes", 0.1)
        start = time.monotonic()
        with pytest.raises(ApiUnavailableError, match="did not answer in time"):
            client.request("GET", NODES, action="list nodes", timeout_s=1.0)
        assert time.monotonic() - start < 6
        server.faults.clear()
        assert client.request("GET", NODES, action="list nodes")["items"] == []
        client.close()


def test_watch_stops_promptly_over_tls(certificates, tmp_path):
    import threading

    with PlaygroundApiServer(tls=certificates("one")) as server:
        server.write_kubeconfig(tmp_path / "kubeconfig")
        client = ApiClient(load_endpoint(tmp_path / "kubeconfig"))
        stream = client.watch(NODES, action="watch", query={"watch": "true"}, idle_timeout_s=5)
        ended = threading.Event()
        reader = threading.Thread(target=lambda: (list(stream), ended.set()))
        reader.start()
        server.add("nodes", {"metadata": {"name": "n"}})
        stream.close()
        assert ended.wait(0.5)
        reader.join()
        client.close()


def test_client_certificate_works_inline_and_as_file(certificates, tmp_path):
    cert, key = certificates("one")
    inline = {
        "client-certificate-data": base64.b64encode(cert.read_bytes()).decode(),
        "client-key-data": base64.b64encode(key.read_bytes()).decode(),
    }
    files = {"client-certificate": cert.name, "client-key": key.name}
    with PlaygroundApiServer(tls=(cert, key)) as server:
        for number, user in enumerate((inline, files)):
            cluster = {"server": server.url, "certificate-authority": cert.name}
            path = write(cert.parent / f"kubeconfig-{number}", cluster=cluster, user=user)
            client = ApiClient(load_endpoint(path))
            assert client.request("GET", NODES, action="list nodes")["items"] == []
            client.close()


def test_insecure_skips_verification(certificates, tmp_path):
    with PlaygroundApiServer(tls=certificates("one")) as server:
        cluster = {"server": server.url, "insecure-skip-tls-verify": True}
        client = ApiClient(load_endpoint(write(tmp_path / "kubeconfig", cluster=cluster)))
        assert client.request("GET", NODES, action="list nodes")["items"] == []
        client.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """Make a self-signed certificate for 127.0.0.1 by name: (certificate, key)."""
    directory = tmp_path_factory.mktemp("certificates")

    def make(name):
        cert, key = directory / f"{name}.crt", directory / f"{name}.key"
        if not cert.exists():
            command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
            command += [
                "-nodes",
                "-days",
                "2",
                "-subj",
                f"/CN={name}",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
            ]
            command += ["-keyout", str(key), "-out", str(cert)]
            subprocess.run(command, check=True, capture_output=True)
        return cert, key

    return make
