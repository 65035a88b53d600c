"""Kubeconfigs of all kinds, and what is wrong with them."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playground.apiserver import Identity, PlaygroundApiServer, self_signed

from dra_driver.errors import ApiRejectedError, ApiUnavailableError, InvalidConfigError
from dra_driver.kube import kubeconfig as kubeconfig_module
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from tests.fakes.tables import tabled

NODES = "/api/v1/nodes"
VERSION = "client.authentication.k8s.io/v1"


def write(path, *, cluster=None, user=None, **changes):
    document = {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"} | (cluster or {})}],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    } | changes
    path.write_text(json.dumps(document))
    return path


def in_base64(file):
    return base64.b64encode(file.read_bytes()).decode()


def list_nodes(client):
    return client.request("GET", NODES, action="list nodes")["items"]


@pytest.fixture
def connect(tmp_path):
    """Clients with a kubeconfig that says this of cluster and user; all are closed at the end."""
    clients = []

    def make(cluster, user=None):
        path = write(tmp_path / f"kubeconfig-{len(clients)}", cluster=cluster, user=user)
        clients.append(ApiClient(load_endpoint(path), timeout_s=5))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("tls") / "one", names="IP:127.0.0.1,DNS:api.test")


# --- files, contexts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"clusters: [", "is not valid YAML at line 1, column 12 of "),
        (b"clusters: 2024-13-45", "is not a kubeconfig in UTF-8 (ValueError); is it the right file?"),
        (b"clusters: " + b"[" * 1000, "is not a kubeconfig in UTF-8 (RecursionError)"),
        (b"", "names no clusters; is it the right file?"),
        (b"contexts: []", "names no clusters; is it the right file?"),
        (b"hello", "is not a kubeconfig in UTF-8 (TypeError); is it the right file?"),
        (b"clusters: [5, 6]", "is not a kubeconfig in UTF-8 (TypeError); is it the right file?"),
        (b"clusters: [5]\ncontexts: [6]\ncurrent-context: x", "is not a kubeconfig in UTF-8 (TypeError)"),
        (b"clusters: [{name: c}]\ncurrent-context: y\n", "contexts has no entry 'y'; it has: none"),
        (b"clusters: [{name: c}]\ncontexts: [{name: x}, {name: y}]", "contexts has no entry ''; it has: x, y; repair"),
        ("clusters: [{name: c}]\n".encode("utf-16"), "is not a kubeconfig in UTF-8 (UnicodeDecodeError)"),
        (None, "cannot be read: No such file or directory; check --kubeconfig and the file's permissions"),
    ],
)  # fmt: skip
def test_kubeconfig_is_refused_when_content_is_wrong(tmp_path, content, text):
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_bytes(content)
    _refused(path, text)


def _refused(path, text):
    with pytest.raises(InvalidConfigError) as caught:
        load_endpoint(path)
    assert text in str(caught.value)
    assert str(path.parent) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kubeconfig_is_refused_when_it_may_not_be_read(tmp_path, monkeypatch):
    def refuse(self, **_options):
        raise PermissionError(13, "Permission denied", str(tmp_path / "config"))

    _refused(tmp_path, "cannot be read: Is a directory; check --kubeconfig")
    monkeypatch.setattr(Path, "exists", refuse)
    _refused(tmp_path / "config", "config cannot be read: Permission denied; check --kubeconfig")


TLS = {"server": "https://x"}


@tabled("change", "text")
def test_kubeconfig_is_refused_when_a_part_is_wrong(tmp_path, change, text):
    _refused(write(tmp_path / "kubeconfig", **change), text)


def _named(directory, name, server, **changes):
    """A kubeconfig in a folder of its own, with a context, cluster and user of that name, and their files beside it."""
    directory.mkdir()
    (directory / "token").write_text(f"token-of-{name}")
    user = {"tokenFile": "token", "client-certificate": "tls.crt", "client-key": "tls.key"}
    return write(
        directory / "config",
        **{
            "clusters": [{"name": name, "cluster": {"server": server}}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
            **changes,
        },
    )


@tabled("context", "server", "user")
def test_several_files_are_merged_as_kubectl_does(tmp_path, certificate, context, server, user):
    mixed = {"name": "mixed", "context": {"cluster": "third", "user": "first"}}
    first = {"name": "first", "context": {"cluster": "first", "user": "first"}}
    again = {"name": "first", "cluster": {"server": "http://not-me:1"}}
    third = {"name": "third", "cluster": {"server": "https://third:1"}}
    (tmp_path / "empty").touch()
    files = [
        tmp_path / "absent",
        tmp_path / "empty",
        _named(tmp_path / "a", "first", "http://first:1", **{"current-context": ""}, contexts=[mixed, first]),
        _named(tmp_path / "b", "second", "http://second:1"),
        _named(tmp_path / "c", "third", "https://third:1", clusters=[again, third]),
    ]
    directory = {"first": "a", "second": "b", "third": "c"}[user]
    for source, name in zip(certificate, ("tls.crt", "tls.key"), strict=True):
        shutil.copy(source, tmp_path / directory / name)
    named = ":".join(map(str, files))
    endpoint = load_endpoint(named, context=context)
    assert (endpoint.server, endpoint.token.header()) == (server, f"Bearer token-of-{user}")
    if server.startswith("https"):
        beside = [tmp_path / directory / name for name in ("tls.crt", "tls.key")]
        assert [endpoint.tls.cert_file, endpoint.tls.key_file] == beside
    if kubectl := shutil.which("kubectl"):
        chosen = ["--context", context] if context else []
        shown = subprocess.run(
            [kubectl, "config", "view", "--minify", "-o", "json", *chosen],
            env={"KUBECONFIG": named, "HOME": str(tmp_path)}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        [cluster], [entry] = json.loads(shown)["clusters"], json.loads(shown)["users"]
        assert (cluster["cluster"]["server"], entry["name"]) == (server, user)


def test_a_file_whose_name_has_a_colon_is_one_file(tmp_path):
    path = write(tmp_path / "a:b", cluster={"server": "http://one:1"})
    assert load_endpoint(path).server == "http://one:1"


# --- TLS ----------------------------------------------------------------------------------------------


def test_client_certificate_works_inline_and_as_file(certificate, tmp_path, connect):
    names = ("client-certificate", "client-key")
    for name, file in zip(("ca", *names), (certificate[0], *certificate), strict=True):
        shutil.copy(file, tmp_path / name)
    inline = {f"{name}-data": in_base64(file) for name, file in zip(names, certificate, strict=True)}
    with PlaygroundApiServer(tls=certificate) as server:
        for user in (inline, {name: name for name in names}):
            assert list_nodes(connect({"server": server.url, "certificate-authority": "ca"}, user)) == []


def test_inline_keys_lie_in_files_of_the_owner_until_the_process_ends(certificate, tmp_path):
    cert, key = map(in_base64, certificate)
    user = {"client-certificate-data": cert, "client-key-data": key}
    path = write(tmp_path / "kubeconfig", user=user, cluster=TLS | {"certificate-authority-data": cert})
    code = f"""
        import os
        os.umask(0)
        from dra_driver.kube.endpoint import load_endpoint
        tls = load_endpoint({str(path)!r}).tls
        for file in (tls.ca_file, tls.cert_file, tls.key_file):
            print(file.parent, oct(file.stat().st_mode))
    """
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environ = os.environ | {"TMPDIR": str(temporary)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    # The CA and the certificate are one here.
    assert done.stdout.splitlines() == [f"{temporary} 0o100600"] * 3
    assert list(temporary.iterdir()) == []


def test_verification_can_be_skipped_and_the_name_of_the_certificate_given(certificate, connect):
    with PlaygroundApiServer(tls=certificate) as server:
        here = {"server": server.url, "certificate-authority-data": ""}  # as if it were not there
        named = here | {"certificate-authority": str(certificate[0])}
        for cluster in (here | {"insecure-skip-tls-verify": True}, named | {"tls-server-name": "api.test"}):
            assert list_nodes(connect(cluster)) == []
        with pytest.raises(ApiUnavailableError, match=r"hostname 'other\.test' doesn't match"):
            list_nodes(connect(named | {"tls-server-name": "other.test"}))


# --- credentials --------------------------------------------------------------------------------------


@tabled("user", "header")
def test_credentials_become_a_header(tmp_path, user, header):
    (tmp_path / "token").write_text("of-file\n")
    endpoint = load_endpoint(write(tmp_path / "kubeconfig", users=[{"name": "u", "user": user}]))
    assert endpoint.token.header() == header
    assert endpoint.token.refresh(header) is False


class Plugin:
    """A credential plugin that a kubeconfig names; `gives` is what it prints, `runs` how often it ran."""

    def __init__(self, directory):
        self.directory = directory
        self.user = {"exec": {"apiVersion": VERSION, "command": "./plugin", "interactiveMode": "Never"}}
        self.does("cat answer.json")

    def does(self, script):
        path = self.directory / "plugin"
        path.write_text(f"#!/bin/sh\ncd {self.directory}; echo run >>runs\n{script}\n")
        path.chmod(0o755)

    def gives(self, valid_s=None, **status):
        if valid_s is not None:
            status["expirationTimestamp"] = (datetime.now(UTC) + timedelta(seconds=valid_s)).isoformat()
        answer = {"apiVersion": VERSION, "kind": "ExecCredential", "status": status}
        (self.directory / "answer.json").write_text(json.dumps(answer))

    @property
    def runs(self):
        path = self.directory / "runs"
        return path.read_text().count("run") if path.exists() else 0


@pytest.fixture
def plugin(tmp_path):
    return Plugin(tmp_path)


def test_exec_plugin_gives_the_token_and_another_after_a_401(plugin, connect):
    plugin.gives(token="first")
    with PlaygroundApiServer(tokens={"first": Identity("me")}) as server:
        client = connect({"server": server.url}, plugin.user)
        assert list_nodes(client) == list_nodes(client) == []
        assert plugin.runs == 1
        server.tokens = {"second": Identity("me")}
        plugin.gives(token="second")
        assert list_nodes(client) == list_nodes(client) == []
        assert plugin.runs == 2
        server.tokens = {}
        with pytest.raises(ApiRejectedError, match="HTTP 401"):
            list_nodes(client)
        assert [request.status for request in server.requests] == [200, 200, 401, 200, 200, 401]


def test_exec_plugin_is_asked_again_when_what_it_gave_has_expired(tmp_path, plugin):
    plugin.gives(token="first", valid_s=1000)
    token = load_endpoint(write(tmp_path / "kubeconfig", user=plugin.user)).token
    plugin.gives(token="second", valid_s=-1)
    assert token.header() == "Bearer first"
    token._expires = datetime.now(UTC)
    assert [token.header() for _ in range(3)] == ["Bearer second"] * 3
    assert plugin.runs == 2, "a plugin whose clock is wrong is not asked before each request"
    token._expires = datetime.now(UTC)
    plugin.gives(token="third")
    assert [token.header() for _ in range(3)] == ["Bearer third"] * 3
    assert plugin.runs == 3


def test_exec_plugin_is_asked_once_when_several_threads_find_the_token_refused(tmp_path, plugin):
    plugin.gives(token="first")
    token = load_endpoint(write(tmp_path / "kubeconfig", user=plugin.user)).token
    plugin.gives(token="second")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(token.refresh, ["Bearer first"] * 4)) == [True] * 4
    assert plugin.runs == 2


def test_exec_plugin_gives_a_certificate_and_later_another_one(
    tmp_path, plugin, certificate, connect, caplog
):
    def give(pair, **more):
        cert, key = (file.read_text() for file in pair)
        plugin.gives(clientCertificateData=cert, clientKeyData=key, **more)

    with PlaygroundApiServer(tls=certificate) as server:
        give(certificate, valid_s=1000)
        client = connect({"server": server.url, "certificate-authority": str(certificate[0])}, plugin.user)
        assert list_nodes(client) == []
        give(self_signed(tmp_path / "two"))
        server.faults.fail(1, 401)
        assert list_nodes(client) == []
        assert client.endpoint.tls.cert_file.read_bytes() == (tmp_path / "two.crt").read_bytes()
        assert plugin.runs == 2
        assert "root" not in {record.name for record in caplog.records}, "where the package would complain"


@tabled("script", "said")
def test_exec_plugin_that_fails_is_told_in_a_sentence(tmp_path, plugin, monkeypatch, script, said):
    monkeypatch.setattr(kubeconfig_module, "_PLUGIN_S", 1)
    plugin.does(script)
    _refused(
        write(tmp_path / "kubeconfig", user=plugin.user),
        f"kubeconfig: the credential plugin './plugin' {said}",
    )


def test_exec_plugin_may_take_its_time_when_somebody_sits_at_a_terminal(tmp_path, plugin, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(kubeconfig_module, "_PLUGIN_S", 0.1)
    plugin.gives(token="t")
    plugin.does("sleep 0.5; cat answer.json")
    assert load_endpoint(write(tmp_path / "kubeconfig", user=plugin.user)).token.header() == "Bearer t"


def test_request_says_why_when_the_exec_plugin_fails_later(plugin, connect):
    plugin.gives(token="t")
    with PlaygroundApiServer(tokens={}) as server:
        client = connect({"server": server.url}, plugin.user)
        plugin.does("echo session ended >&2; exit 1")
        with pytest.raises(ApiUnavailableError, match=r"returned 1\. session ended; run it by hand"):
            list_nodes(client)


def test_commands_say_what_to_install_when_the_package_is_missing(tmp_path):
    """As in the image."""
    code = f"""
        import sys
        sys.modules["kubernetes"] = None
        sys.argv = ["gpu-dra-driver", "cluster", "--kubeconfig", {str(write(tmp_path / "k"))!r}]
        from dra_driver.cli.main import main
        main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "the Python package `kubernetes`, which reads kubeconfigs, is missing" in done.stderr
    assert "`pip install kubernetes`; the image of gpu-dra-driver does not have it" in done.stderr
