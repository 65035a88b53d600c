"""How to reach the API server: in-cluster service account or kubeconfig, and the TLS settings of either."""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dra_driver.errors import InvalidConfigError
from dra_driver.kube.credentials import (
    FileToken,
    Fingerprint,
    LibraryToken,
    NoToken,
    StaticToken,
    TokenSource,
    fingerprint,
)
from dra_driver.kube.proxies import Proxy, proxy_of_environment, proxy_of_url

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Files or PEM bytes of the server's CA and of the client certificate; all None with plain HTTP."""

    ca_file: Path | None = None
    ca_data: bytes | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    cert_data: bytes | None = None
    key_data: bytes | None = None
    insecure: bool = False
    server_name: str | None = None

    def fingerprint(self) -> tuple[Fingerprint | None, ...]:
        """One entry a file; it differs once any of them was replaced. Missing files count as None."""
        return tuple(_fingerprint_or_none(path) for path in (self.ca_file, self.cert_file, self.key_file))

    def context(self) -> ssl.SSLContext:
        """A client context from the files as they are now.

        Raises: OSError (ssl.SSLError is one) if a file is missing or is not PEM.
        """
        ca_text = self.ca_data.decode("ascii", "replace") if self.ca_data else None
        context = ssl.create_default_context(cafile=self.ca_file, cadata=ca_text)
        # Python 3.13 began to refuse CAs without key identifiers; Kubernetes installers make such CAs.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file)
        elif self.cert_data:
            _load_from_memory(context, self.cert_data, self.key_data)
        return context


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One API server. `server` is its URL without trailing slash, `origin` says where that was read,
    `namespace` is that of objects that name none."""

    server: str
    origin: str
    tls: TlsSettings = field(default_factory=TlsSettings)
    token: TokenSource = field(default_factory=NoToken)
    proxy: Proxy | None = None
    namespace: str = "default"


def load_endpoint(
    kubeconfig: Path | str | None = None,
    *,
    context: str | None = None,
    environ: Mapping[str, str] | None = None,
    service_account_dir: Path = SERVICE_ACCOUNT_DIR,
) -> Endpoint:
    """The kubeconfig if one is given, else the pod's service account; through the proxy of the kubeconfig, else that of
    the environment.

    Raises: InvalidConfigError naming the file and what to do.
    """
    environ = os.environ if environ is None else environ
    if kubeconfig:
        endpoint = kubeconfig_endpoint(kubeconfig, context=context)
    else:
        endpoint = in_cluster_endpoint(environ, service_account_dir)
    if endpoint.proxy is not None:
        return endpoint
    return replace(endpoint, proxy=proxy_of_environment(endpoint.server, environ))


def in_cluster_endpoint(environ: Mapping[str, str], directory: Path) -> Endpoint:
    """The endpoint that the kubelet gives every pod. Raises: InvalidConfigError."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise InvalidConfigError(
            "no API server configured: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set, so"
            " this is not a pod; give a kubeconfig with --kubeconfig"
        )
    ca_file = directory / "ca.crt"
    tls = TlsSettings(ca_file=ca_file)
    _check_tls(tls, f"service account {directory}")
    bracketed = f"[{host}]" if ":" in host else host
    try:
        namespace = (directory / "namespace").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        namespace = ""
    token = FileToken(directory / "token")
    return Endpoint(
        f"https://{bracketed}:{port}", str(directory), tls, token, namespace=namespace or "default"
    )


def kubeconfig_endpoint(kubeconfig: Path | str, *, context: str | None = None) -> Endpoint:
    """The cluster and user of a kubeconfig's context, by default its current one. Several files, as the variable
    KUBECONFIG has them, are read as kubectl reads them.

    Token, token file and client certificates are read here; `exec` and `auth-provider` users go through
    the Kubernetes client library, which is imported only then: it takes 20 MiB.
    Raises: InvalidConfigError.
    """
    files = _Kubeconfig(_files_of(str(kubeconfig)))
    name = context or files.current_context()
    chosen, _ = files.entry("contexts", name)
    chosen = chosen.get("context") or {}
    cluster, cluster_path = files.entry("clusters", chosen.get("cluster"))
    cluster = cluster.get("cluster") or {}
    user: dict[str, Any] = {}
    user_path = cluster_path
    if chosen.get("user"):
        user, user_path = files.entry("users", chosen["user"])
        user = user.get("user") or {}
    server = str(cluster.get("server") or "").rstrip("/")
    if not server.startswith(("http://", "https://")):
        raise InvalidConfigError(
            f"kubeconfig {cluster_path}: cluster {chosen.get('cluster')!r} has no http(s) `server`"
        )
    namespace = str(chosen.get("namespace") or "default")
    proxy = cluster.get("proxy-url")
    proxy = proxy_of_url(str(proxy), f"proxy-url of kubeconfig {cluster_path}") if proxy else None
    if "exec" in user or "auth-provider" in user:
        return replace(
            _library_endpoint(files.names, user_path, name, server), proxy=proxy, namespace=namespace
        )
    tls = _tls_of(cluster, cluster_path, user, user_path)
    if server.startswith("https://"):
        _check_tls(tls, f"kubeconfig {files.names}")
    return Endpoint(server, files.names, tls, _token_of(user, user_path), proxy, namespace)


def _files_of(kubeconfig: str) -> list[Path]:
    """Of several files those that exist; of one, or where none exists, the first."""
    whole = Path(kubeconfig).expanduser()
    if whole.exists():
        return [whole]
    named = [Path(name).expanduser() for name in kubeconfig.split(os.pathsep) if name] or [whole]
    return [path for path in named if path.exists()] or named[:1]


class _Kubeconfig:
    """What several files say together: of two entries with one name, and of two current contexts, the first counts."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._documents = [(path, _read_yaml(path)) for path in paths]
        self.names = os.pathsep.join(map(str, paths))
        if not any(document.get("clusters") for _, document in self._documents):
            raise InvalidConfigError(f"kubeconfig {self.names} names no clusters; is it the right file?")

    def current_context(self) -> str:
        """Empty if no file names one."""
        named = (document.get("current-context") for _, document in self._documents)
        return str(next(filter(None, named), ""))

    def entry(self, section: str, name: Any) -> tuple[dict[str, Any], Path]:
        """An entry by its name, and the file that has it. Raises: InvalidConfigError with those that there are."""
        entries = [
            (entry, path)
            for path, document in self._documents
            for entry in document.get(section) or ()
            if isinstance(entry, dict)
        ]
        for entry, path in entries:
            if entry.get("name") == name:
                return entry, path
        known = ", ".join(sorted({str(entry.get("name")) for entry, _ in entries}))
        raise InvalidConfigError(
            f"kubeconfig {self.names}: {section} has no entry {name!r}; it has: {known or 'none'}"
        )


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml  # not needed in a pod

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - both are the safe ones
    except OSError as error:
        raise InvalidConfigError(
            f"kubeconfig {path} cannot be read: {error.strerror};"
            " check --kubeconfig and the file's permissions"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that cannot be is a ValueError
        # Without the excerpt that the parser shows: there may be a token in it.
        raise InvalidConfigError(
            f"kubeconfig {path} is not valid YAML{_where(error)}; repair the file"
        ) from None
    if document is not None and not isinstance(document, dict):
        raise InvalidConfigError(f"kubeconfig {path} names no clusters; is it the right file?")
    return document or {}


def _where(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"


def _tls_of(
    cluster: Mapping[str, Any], cluster_path: Path, user: Mapping[str, Any], user_path: Path
) -> TlsSettings:
    return TlsSettings(
        ca_file=_path_of(cluster, "certificate-authority", cluster_path),
        ca_data=_data_of(cluster, "certificate-authority-data", cluster_path),
        cert_file=_path_of(user, "client-certificate", user_path),
        key_file=_path_of(user, "client-key", user_path),
        cert_data=_data_of(user, "client-certificate-data", user_path),
        key_data=_data_of(user, "client-key-data", user_path),
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
        server_name=cluster.get("tls-server-name"),
    )


def _path_of(section: Mapping[str, Any], key: str, path: Path) -> Path | None:
    """A file named in a kubeconfig is relative to that kubeconfig; inline data wins over it."""
    if not section.get(key) or section.get(f"{key}-data"):
        return None
    return path.parent / str(section[key])


def _data_of(section: Mapping[str, Any], key: str, path: Path) -> bytes | None:
    if not section.get(key):
        return None
    try:
        return base64.b64decode(str(section[key]), validate=True)
    except binascii.Error as error:
        raise InvalidConfigError(f"kubeconfig {path}: {key} is not base64: {error}") from error


def _token_of(user: Mapping[str, Any], path: Path) -> TokenSource:
    if user.get("tokenFile"):
        return FileToken(path.parent / str(user["tokenFile"]))
    if user.get("token"):
        return StaticToken(str(user["token"]))
    return NoToken()


def _library_endpoint(files: str, path: Path, context: str, server: str) -> Endpoint:
    """`path` is the one of the files that has the user."""
    try:
        from kubernetes import config
        from kubernetes.client import Configuration
    except ModuleNotFoundError as error:
        raise InvalidConfigError(
            f"kubeconfig {path}: the credentials of {context!r} come from a plugin, and for that the Python package "
            "`kubernetes` is missing; run the command where it is installed (`pip install kubernetes`, the driver's "
            "image does not have it), or give a kubeconfig with a token or a certificate"
        ) from error
    configuration = Configuration()
    try:
        config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=files, context=context, client_configuration=configuration, persist_config=False
        )
    except Exception as error:  # ConfigException, and whatever a provider's own libraries raise
        raise InvalidConfigError(f"kubeconfig {path}: credentials of {context!r} failed: {error}") from error
    if not (configuration.get_api_key_with_prefix("BearerToken") or configuration.cert_file):
        # The library only logs that a plugin is missing or failed, and would go on without credentials.
        raise InvalidConfigError(
            f"kubeconfig {path}: the plugin of {context!r} gave no credentials; run it by hand"
        )
    tls = TlsSettings(
        ca_file=Path(configuration.ssl_ca_cert) if configuration.ssl_ca_cert else None,
        cert_file=Path(configuration.cert_file) if configuration.cert_file else None,
        key_file=Path(configuration.key_file) if configuration.key_file else None,
        insecure=not configuration.verify_ssl,
        server_name=configuration.tls_server_name,
    )
    return Endpoint(server, files, tls, LibraryToken(configuration))


def _check_tls(tls: TlsSettings, origin: str) -> None:
    """Fail at start, with the file's name, instead of at the first request."""
    for path in (tls.ca_file, tls.cert_file, tls.key_file):
        if path is not None and not os.access(path, os.R_OK):
            raise InvalidConfigError(f"{origin}: {path} is missing or unreadable; mount or repair it")
    try:
        tls.context()
    except (OSError, ValueError) as error:
        files = (
            ", ".join(str(p) for p in (tls.ca_file, tls.cert_file, tls.key_file) if p) or "its inline data"
        )
        raise InvalidConfigError(f"{origin}: certificates cannot be loaded from {files}: {error}") from error


def _load_from_memory(context: ssl.SSLContext, cert: bytes, key: bytes | None) -> None:
    """OpenSSL wants a file name; an anonymous memory file keeps the key off every disk."""
    descriptor = os.memfd_create("client-certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, cert + b"\n" + (key or b""))
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _fingerprint_or_none(path: Path | None) -> Fingerprint | None:
    if path is None:
        return None
    try:
        return fingerprint(path)
    except OSError:
        return None
