"""Kubeconfigs, as the Python package `kubernetes` reads them. Import this module only where one is given: the package
takes 20 MiB and some tenths of a second, and the image does not have it."""

from __future__ import annotations

import base64
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kubernetes.client import Configuration
from kubernetes.config import ConfigException
from kubernetes.config.dateutil import parse_rfc3339
from kubernetes.config.exec_provider import ExecProvider
from kubernetes.config.kube_config import ConfigNode, KubeConfigLoader, KubeConfigMerger

from dra_driver.errors import ApiUnavailableError, DraDriverError, InvalidConfigError
from dra_driver.kube.api_errors import one_line
from dra_driver.kube.credentials import FileToken
from dra_driver.kube.endpoint import Endpoint, TlsSettings
from dra_driver.kube.proxies import proxy_of_url
from dra_driver.model.schema import JsonObject

_PLUGIN_S = 60
"""How long a credential plugin may take, unless somebody sits at a terminal."""
_AT_LEAST = timedelta(minutes=1)
"""As long is used what a plugin gives, also if it has expired by a clock that differs."""
_CERTIFICATE = {"clientCertificateData": "client-certificate-data", "clientKeyData": "client-key-data"}
_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_OTHER_USER = ("as", "as-uid", "as-groups", "as-user-extra")


def kubeconfig_endpoint(kubeconfig: Path | str, *, context: str | None = None) -> Endpoint:
    """The cluster and user of a kubeconfig's context, by default its current one. Several files, as the variable
    KUBECONFIG has them, are merged as kubectl merges them.

    Raises: InvalidConfigError.
    """
    names = str(kubeconfig)
    with _in_a_sentence(names):
        merger = _merged(names)
        # The first that a file names, as for kubectl; for the package it is the last.
        current = (file.get("current-context") for file in merger.config_files.values())
        chosen, _ = _entry(merger, "contexts", context or next(filter(None, current), ""))
        cluster, _ = _entry(merger, "clusters", chosen.get("cluster"))
        user, directory = _entry(merger, "users", chosen["user"]) if "user" in chosen else ({}, Path())
        if acts_as := sorted(user.keys() & {*_OTHER_USER}):
            raise ConfigException(
                f"user {chosen['user']!r} acts as another one (`{acts_as[0]}`), which gpu-dra-driver cannot;"
                " choose another context with --context"
            )
        if cluster.get("insecure-skip-tls-verify", True) is not True:  # 'false' in quotes would be true
            raise ConfigException("insecure-skip-tls-verify is neither true nor false; repair the file")
        token_file = user.get("tokenFile")  # it counts before all other credentials
        if token_file:
            user = {key: value for key, value in user.items() if key.startswith("client-")}
        credentials = _Credentials(names, cluster, user, directory)
        found = credentials.configuration
        if not found.host.startswith(("http://", "https://")):
            raise ConfigException(f"cluster {chosen.get('cluster')!r} has no http(s) `server`")
        if found.host.startswith("https://"):
            credentials.tls.check(f"kubeconfig {names}")
        proxy = proxy_of_url(found.proxy, f"proxy-url of kubeconfig {names}") if found.proxy else None
        token = FileToken(Path(token_file)) if token_file else credentials
        namespace = str(chosen.get("namespace") or "default")
        return Endpoint(found.host, names, credentials.tls, token, proxy, namespace)


@contextmanager
def _in_a_sentence(names: str) -> Iterator[None]:
    """Raises: InvalidConfigError for whatever is raised inside."""
    try:
        yield
    except DraDriverError:
        raise
    except ConfigException as error:
        raise InvalidConfigError(f"kubeconfig {names}: {one_line(str(error))}") from None
    except OSError as error:
        raise InvalidConfigError(
            f"kubeconfig {error.filename or names} cannot be read: {error.strerror}; check --kubeconfig and the file's"
            " permissions"
        ) from None
    except Exception as error:  # noqa: BLE001  what is not a kubeconfig; without its text, in which there may be a token
        mark = getattr(error, "problem_mark", None)
        what = f"a kubeconfig in UTF-8 ({type(error).__name__})"
        if mark is not None:
            what = f"valid YAML at line {mark.line + 1}, column {mark.column + 1} of {mark.name}"
        raise InvalidConfigError(f"kubeconfig {names} is not {what}; is it the right file?") from None


def _merged(names: str) -> KubeConfigMerger:
    """Of several files those that exist; of one, or where none exists, the first."""
    whole = Path(names).expanduser()
    listed = [Path(name).expanduser() for name in names.split(os.pathsep) if name]
    merger = KubeConfigMerger("")
    for path in [whole] if whole.exists() else [path for path in listed if path.exists()] or listed[:1]:
        with suppress(ConfigException):  # it is empty
            merger.load_config(str(path))
    if merger.config is None or not merger.config.value["clusters"]:
        raise ConfigException("it names no clusters; is it the right file?")
    return merger


def _entry(merger: KubeConfigMerger, section: str, name: Any) -> tuple[JsonObject, Path]:
    """What an entry of `contexts`, `clusters` or `users` says, and the directory of its file. Empty values are left
    out. Files are absolute: the package would look for those of users beside the file of the cluster."""
    entries = {entry.value["name"]: entry for entry in merger.config.value[section]}
    if name not in entries:
        known = ", ".join(sorted(map(str, entries)))
        raise ConfigException(
            f"{section} has no entry {name!r}; it has: {known or 'none'}; repair it, or choose a context with --context"
        )
    directory = Path(entries[name].path).absolute().parent
    found = {key: value for key, value in (entries[name].value.get(section[:-1]) or {}).items() if value}
    return found | {key: str(directory / found[key]) for key in _FILES if key in found}, directory


class _Credentials:
    """The token of a user's entry, and with `tls` its certificate. A plugin is asked again when what it gave has
    expired, a plugin or auth-provider after a 401."""

    def __init__(self, names: str, cluster: JsonObject, user: JsonObject, directory: Path) -> None:
        self._names = names
        self._cluster = cluster
        self._user = user
        self._directory = directory
        self._plugin: JsonObject = {} if "token" in user else user.pop("exec", {})
        # Held while a plugin is asked: whoever waits for it wants what the plugin gives.
        self._asking = threading.Lock()
        self._header: str | None = None
        self._expires: datetime | None = None
        self.tls = TlsSettings()
        self.configuration = self._load()

    def header(self) -> str | None:
        """For the next request. Raises: ApiUnavailableError if a plugin fails to renew what has expired."""
        if self._expires is not None and datetime.now(UTC) >= self._expires:
            self.refresh(self._header)
        return self._header

    def refresh(self, used: str | None) -> bool:
        """Asks a plugin or provider again. Raises: ApiUnavailableError if it fails."""
        with self._asking:
            before = used, self.tls.cert_file
            if self._header == used and (self._plugin or "auth-provider" in self._user):
                try:
                    with _in_a_sentence(self._names):
                        self._load()
                except InvalidConfigError as error:
                    raise ApiUnavailableError(str(error)) from error
            return (self._header, self.tls.cert_file) != before

    def _load(self) -> Configuration:
        user = self._user | (self._ask_plugin() if self._plugin else {})
        document = {
            "contexts": [{"name": "chosen", "context": {"cluster": "chosen", "user": "chosen"}}],
            "clusters": [{"name": "chosen", "cluster": self._cluster}],
            "users": [{"name": "chosen", "user": user}],
        }
        # The environment's proxy is not the package's to choose: see `proxies`.
        found = Configuration(host="", proxy="", no_proxy="")
        try:
            KubeConfigLoader(document, "chosen", config_base_path="").load_and_set(found)
        except Exception as error:  # of odd values, and whatever the libraries of auth-providers raise
            raise ConfigException(f"its cluster or user cannot be used: {error!r}") from error
        self._header = found.api_key.get("BearerToken")
        if self._header is None and "auth-provider" in user:
            raise ConfigException(
                "its auth-provider gave no credentials; log in with it, or use another user"
            )
        tls = self.tls
        tls.ca_file = Path(found.ssl_ca_cert) if found.ssl_ca_cert else None
        tls.cert_file = Path(found.cert_file) if found.cert_file else None
        tls.key_file = Path(found.key_file) if found.key_file else None
        tls.insecure, tls.server_name = not found.verify_ssl, found.tls_server_name
        return found

    def _ask_plugin(self) -> JsonObject:
        """What a credential plugin gives, as the entry of a user would say it. Raises: ConfigException."""
        plugin, name = self._plugin, self._plugin.get("command")
        # The package waits for ever. Somebody at a terminal may be logging in, and can end by Ctrl-C what hangs.
        if name and not (sys.stdin.isatty() or sys.stdout.isatty()):
            arguments = ["-k", "5", str(_PLUGIN_S), name, *(plugin.get("args") or ())]
            plugin = plugin | {"command": "timeout", "args": arguments}
        cluster = ConfigNode("cluster", self._cluster)
        try:
            status = ExecProvider(ConfigNode("exec", plugin), str(self._directory), cluster).run() or {}
        except (ConfigException, OSError) as error:
            said = str(error).replace("process returned 124", f"it has not ended for more than {_PLUGIN_S} s")
            raise ConfigException(f"the credential plugin {name!r} failed: {said}; run it by hand") from None
        given: JsonObject = {"token": status["token"]} if status.get("token") else {}
        for theirs, ours in _CERTIFICATE.items():
            if status.get(theirs):
                given[ours] = base64.b64encode(status[theirs].encode()).decode()
        if not given:
            raise ConfigException(f"the credential plugin {name!r} gave no credentials; run it by hand")
        until = status.get("expirationTimestamp")
        self._expires = max(parse_rfc3339(until), datetime.now(UTC) + _AT_LEAST) if until else None
        return given
