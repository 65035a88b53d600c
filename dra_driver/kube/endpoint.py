"""How to reach the API server: in-cluster service account or kubeconfig, and the TLS settings of either."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dra_driver.base.atomic import Stamp, stamp_or_none
from dra_driver.errors import InvalidConfigError
from dra_driver.kube.credentials import FileToken, NoToken, TokenSource
from dra_driver.kube.proxies import Proxy, proxy_of_environment

_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
SERVICE_ACCOUNT_VARIABLE = "SERVICE_ACCOUNT_DIRECTORY"
"""Names another directory, for tests and measurements: there a daemon outside of pods finds what a pod has."""


@dataclass(slots=True)
class TlsSettings:
    """Files of the server's CA and of the client certificate; all None with plain HTTP. A credential plugin may give
    another certificate later."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    insecure: bool = False
    server_name: str | None = None

    def fingerprint(self) -> tuple[Stamp | None, ...]:
        """One entry a file; it differs once any of them was replaced. Missing files count as None."""
        return tuple(map(stamp_or_none, self._files()))

    def context(self) -> ssl.SSLContext:
        """A client context from the files as they are now.

        Raises: OSError (ssl.SSLError is one) if a file is missing or is not PEM.
        """
        context = ssl.create_default_context(cafile=self.ca_file)
        # Python 3.13 began to refuse CAs without key identifiers; Kubernetes installers make such CAs.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context

    def check(self, origin: str) -> None:
        """Fails at start instead of at the first request. Raises: InvalidConfigError with the file's name."""
        for path in self._files():
            if not os.access(path, os.R_OK):
                raise InvalidConfigError(f"{origin}: {path} is missing or unreadable; mount or repair it")
        try:
            self.context()
        except (OSError, ValueError) as error:
            raise InvalidConfigError(
                f"{origin}: the CA, the client certificate or its key cannot be loaded: {error}; give them as PEM"
            ) from error

    def _files(self) -> list[Path]:
        return [path for path in (self.ca_file, self.cert_file, self.key_file) if path is not None]


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
) -> Endpoint:
    """The kubeconfig if one is given, else the pod's service account; through the proxy of the kubeconfig, else that of
    the environment.

    Raises: InvalidConfigError naming the file and what to do.
    """
    environ = os.environ if environ is None else environ
    endpoint = _of_kubeconfig(kubeconfig, context) if kubeconfig else _in_cluster(environ)
    if endpoint.proxy is not None:
        return endpoint
    return replace(endpoint, proxy=proxy_of_environment(endpoint.server, environ))


def _of_kubeconfig(kubeconfig: Path | str, context: str | None) -> Endpoint:
    try:
        from dra_driver.kube.kubeconfig import kubeconfig_endpoint
    except ModuleNotFoundError as error:
        raise InvalidConfigError(
            f"kubeconfig {kubeconfig}: the Python package `kubernetes`, which reads kubeconfigs, is missing"
            f" ({error}); run the command where it is installed (`pip install kubernetes`; the image of"
            " gpu-dra-driver does not have it), or in a pod leave --kubeconfig out"
        ) from error
    return kubeconfig_endpoint(kubeconfig, context=context)


def _in_cluster(environ: Mapping[str, str]) -> Endpoint:
    """The endpoint that the kubelet gives every pod. Raises: InvalidConfigError."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise InvalidConfigError(
            "no API server configured: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set, so"
            " this is not a pod; give a kubeconfig with --kubeconfig"
        )
    directory = Path(environ.get(SERVICE_ACCOUNT_VARIABLE) or _SERVICE_ACCOUNT)
    tls = TlsSettings(ca_file=directory / "ca.crt")
    tls.check(f"service account {directory}")
    bracketed = f"[{host}]" if ":" in host else host
    try:
        namespace = (directory / "namespace").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        namespace = ""
    token = FileToken(directory / "token")
    return Endpoint(
        f"https://{bracketed}:{port}", str(directory), tls, token, namespace=namespace or "default"
    )
