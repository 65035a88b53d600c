"""The API server's address and the credentials: the official client's configuration, from a kubeconfig or a
pod's service account.

Importing `kubernetes` costs 12 MiB and a few tenths of a second. It happens when the configuration is first
needed, which in the daemon is after the kubelet has registered the plugin.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from urllib3.util import make_headers, parse_url

from dra_driver.errors import DraDriverError, InvalidConfigError
from dra_driver.kube.api_errors import one_line

if TYPE_CHECKING:
    from kubernetes.client import Configuration

_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
SERVICE_ACCOUNT_VARIABLE = "SERVICE_ACCOUNT_DIRECTORY"
"""Names another service account directory, so that tests and benchmarks can run the daemon outside a pod."""
_OTHER_USER = ("as", "as-uid", "as-groups", "as-user-extra")


class Endpoint:
    """One API server with credentials, from a kubeconfig context or from the pod. Thread-safe.

    `origin` names the source of the configuration in messages. `server` is the URL of a server that needs no
    credentials.
    """

    def __init__(
        self, kubeconfig: Path | str | None = None, *, context: str | None = None, server: str | None = None
    ) -> None:
        """Raises: InvalidConfigError if the kubeconfig cannot be read, or if neither `kubeconfig` nor `server` is
        given outside a pod.
        """
        self._kubeconfig, self._context, self._server = kubeconfig, context, server
        self._environ = dict(os.environ)
        self._directory = Path(os.environ.get(SERVICE_ACCOUNT_VARIABLE) or _SERVICE_ACCOUNT)
        account = f"service account {self._directory}"
        self.origin = server or (f"kubeconfig {kubeconfig}" if kubeconfig else account)
        self._lock = threading.Lock()
        self._read: tuple[Configuration, str] | None = None
        files = [Path(file).expanduser() for file in str(kubeconfig or "").split(os.pathsep)]
        if kubeconfig and not any(os.access(file, os.R_OK) for file in files):
            raise InvalidConfigError(
                f"{self.origin} cannot be read; check --kubeconfig and the file's permissions"
            )
        in_pod = os.environ.get("KUBERNETES_SERVICE_HOST") and os.environ.get("KUBERNETES_SERVICE_PORT")
        if not (kubeconfig or server or in_pod):
            raise InvalidConfigError(
                "no API server configured: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set, so"
                " this is not a pod; set --kubeconfig"
            )

    @property
    def configuration(self) -> Configuration:
        """The configuration as last read. Raises: InvalidConfigError that names the file and the remedy."""
        return self._current()[0]

    @property
    def server(self) -> str:
        """The URL of the API server, without trailing slash. Raises: like `configuration`."""
        return str(self.configuration.host)

    @property
    def namespace(self) -> str:
        """The default namespace. Raises: like `configuration`."""
        return self._current()[1]

    def reload(self, refused: Configuration) -> None:
        """Read the files and run the credential plugin again, unless another thread has done so since `refused`
        was read.

        Raises: InvalidConfigError.
        """
        with self._lock:
            if self._read is None or self._read[0] is refused:
                self._read = self._load()

    def _current(self) -> tuple[Configuration, str]:
        with self._lock:
            if self._read is None:
                self._read = self._load()
            return self._read

    def _load(self) -> tuple[Configuration, str]:
        from kubernetes.client import Configuration

        with _one_sentence(self.origin):
            configuration = Configuration(host=self._server or "", retries=False)
            # Like kubectl, do not use the environment's proxy for servers on this machine.
            configuration.no_proxy = f"{configuration.no_proxy or ''},localhost,127.0.0.0/8,::1"
            namespace = "default"
            if self._kubeconfig:
                namespace = _read_kubeconfig(str(self._kubeconfig), self._context, configuration)
            elif self._server is None:
                namespace = _read_service_account(self._directory, self._environ, configuration)
            if not configuration.host.startswith(("http://", "https://")):
                raise ValueError(f"{configuration.host!r} is not an http(s) URL of an API server")
            _split_proxy(configuration)
        return configuration, namespace


def load_endpoint(kubeconfig: Path | str | None = None, *, context: str | None = None) -> Endpoint:
    """Return an endpoint with its configuration loaded. Raises: InvalidConfigError that names the file and the
    remedy.
    """
    endpoint = Endpoint(kubeconfig, context=context)
    _ = endpoint.configuration
    return endpoint


@contextmanager
def _one_sentence(origin: str) -> Iterator[None]:
    """Map any error of the libraries inside the block to InvalidConfigError."""
    try:
        yield
    except DraDriverError:
        raise
    except OSError as error:
        what = f"{error.filename} cannot be read" if error.filename else "a temporary file cannot be written"
        raise InvalidConfigError(
            f"{origin}: {what}: {error.strerror}; check the path and the file's permissions"
        ) from error
    except Exception as error:
        # PyYAML's messages have several lines and quote the file, which may contain a token.
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1} is not YAML" if mark is not None else one_line(str(error))
        raise InvalidConfigError(
            f"{origin} cannot be used: {where}; correct the kubeconfig, or if this is the pod's service "
            "account, restart the pod"
        ) from None


def _read_service_account(directory: Path, environ: Mapping[str, str], configuration: Configuration) -> str:
    """Fill the configuration, and return the pod's namespace. The client reads the token again every minute."""
    from kubernetes.config.incluster_config import InClusterConfigLoader

    token, ca = str(directory / "token"), str(directory / "ca.crt")
    InClusterConfigLoader(token_filename=token, cert_filename=ca, environ=environ).load_and_set(configuration)
    try:
        return (directory / "namespace").read_text(encoding="utf-8").strip() or "default"
    except FileNotFoundError:
        return "default"


def _read_kubeconfig(paths: str, context: str | None, configuration: Configuration) -> str:
    """Fill the configuration, and return the namespace of the context. Raises: the errors of `kubernetes`."""
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    merger = KubeConfigMerger(paths)
    # Like kubectl, use the first file that names a context. `kubernetes` would use the last one.
    current = next(filter(None, (file.get("current-context") for file in merger.config_files.values())), None)
    loader = KubeConfigLoader(
        config_dict=merger.config, active_context=context or current, config_base_path=None
    )
    chosen = loader.current_context["context"]
    user: dict[str, Any] = next(
        (
            one.value.get("user") or {}
            for one in merger.config.value["users"]
            if one.value["name"] == chosen.get("user")
        ),
        {},
    )
    if acts_as := sorted(user.keys() & {*_OTHER_USER}):
        raise ValueError(
            f"its user impersonates another user (`{acts_as[0]}`), which gpu-dra-driver does not support; choose "
            "another context with --context"
        )
    with _failures_logged() as failures:
        loader.load_and_set(configuration)
    if failures and not configuration.api_key and not configuration.cert_file:
        raise ValueError(
            f"its credential plugin failed: {one_line('; '.join(failures))}; run the credential plugin yourself to see "
            "why"
        )
    return str(chosen.get("namespace") or "default")


@contextmanager
def _failures_logged() -> Iterator[list[str]]:
    """Collect error messages logged inside the block, because `kubernetes` only logs the failure of a credential
    plugin.
    """
    failures: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: failures.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield failures
    finally:
        root.removeHandler(handler)


def _split_proxy(configuration: Configuration) -> None:
    """Move the proxy's credentials from its URL to a header, because the client sends them only from a header, and
    messages contain the URL. Raises: ValueError.
    """
    if not configuration.proxy:
        return
    text = configuration.proxy
    with suppress(ValueError):  # its message would contain the credentials
        url = parse_url(text if "://" in text else f"http://{text}")
        if url.scheme in ("http", "https") and url.host:
            configuration.proxy = url._replace(auth=None).url
            if url.auth:
                configuration.proxy_headers = make_headers(proxy_basic_auth=unquote(url.auth))
            return
    raise ValueError("its proxy is not http://HOST:PORT or https://HOST:PORT")
