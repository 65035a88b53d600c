"""The API server's address and the credentials, from a pod's service account or a kubeconfig.

The official client reads kubeconfigs. Importing it costs 370 modules, so the service account is read without it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from urllib3.util import Url, make_headers, parse_url

from dra_driver.base.atomic import stamp_or_none
from dra_driver.errors import DraDriverError, InvalidConfigError
from dra_driver.kube.api_errors import one_line
from dra_driver.kube.proxies import environment_proxy
from dra_driver.kube.transport import Route
from dra_driver.model.dataclass import dataclass, field

_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
SERVICE_ACCOUNT_VARIABLE = "SERVICE_ACCOUNT_DIRECTORY"
"""For tests and benchmarks, which run the daemon outside a pod."""
_OTHER_USER = ("as", "as-uid", "as-groups", "as-user-extra")
PLUGIN_S = 30
"""How long a credential plugin may run, unless it can ask a person at the terminal."""
_TIMED_OUT = 124  # exit status of timeout(1)
_SHORTEST_S = 10.0
"""The shortest use of credentials: a plugin with short tokens must not run for each request."""
_HIDDEN = "[hidden]"
_SHORTEST_SECRET = 4  # a shorter one would occur in any text
_REMEMBERED = 32
_SECRET_KEYS = (
    "token",
    "password",
    "client-key-data",
    "access-token",
    "id-token",
    "refresh-token",
    "client-secret",
)


@dataclass(frozen=True, slots=True)
class Access:
    """`authorization` is a header's value, or empty. `files` were read, with their stamps. `expires_at` is of
    time.monotonic().
    """

    route: Route
    authorization: str = field(repr=False)
    namespace: str
    files: tuple[tuple[str, Any], ...]
    expires_at: float = math.inf

    def is_current(self) -> bool:
        return time.monotonic() < self.expires_at and all(
            stamp_or_none(path) == stamp for path, stamp in self.files
        )


class Endpoint:
    """One API server with credentials, from a kubeconfig context or from the pod. Thread-safe.

    `origin` is for messages. `server` needs no credentials. A thread of its own reads files and runs credential
    plugins.
    """

    def __init__(
        self, kubeconfig: Path | str | None = None, *, context: str | None = None, server: str | None = None
    ) -> None:
        """Raise InvalidConfigError if the kubeconfig cannot be read, or if nothing is given outside a pod."""
        self._kubeconfig, self._context, self._server = kubeconfig, context, server
        self._environ = dict(os.environ)
        self._directory = Path(os.environ.get(SERVICE_ACCOUNT_VARIABLE) or _SERVICE_ACCOUNT)
        account = f"service account {self._directory}"
        self.origin = server or (f"kubeconfig {kubeconfig}" if kubeconfig else account)
        self._lock = threading.Lock()
        self._known: Access | None = None
        self._reading: Future[Access] | None = None
        self._again_at = -math.inf  # when to read again after a failure
        self._secrets: tuple[str, ...] = ()
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
    def server(self) -> str:
        return self.access().route.server

    @property
    def namespace(self) -> str:
        return self.access().namespace

    def access(self, wait_s: float | None = None) -> Access:
        """Return the current route and credentials; reads changed files again, and renews expired credentials.

        If that fails, returns the last ones, which may still be valid. Raises: InvalidConfigError; TimeoutError if a
        credential plugin runs longer than `wait_s`.
        """
        known = self._known
        if known is not None and (known.is_current() or time.monotonic() < self._again_at):
            return known
        try:
            return self._read(known, wait_s)
        except InvalidConfigError:
            if known is None:
                raise
            self._again_at = time.monotonic() + _SHORTEST_S
            return known

    def renew(self, refused: Access, wait_s: float) -> Access:
        """Read everything again, unless another thread has done so since `refused`. Raises: InvalidConfigError,
        TimeoutError.
        """
        return self._read(refused, wait_s)

    def hide(self, text: str) -> str:
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        return text

    def _read(self, outdated: Access | None, wait_s: float | None) -> Access:
        """Read in the background, once for all threads that wait."""
        with self._lock:
            if self._known is not None and self._known is not outdated:
                return self._known
            if self._reading is None:
                self._reading = Future()
                thread = threading.Thread(
                    target=self._run, args=(self._reading,), name="credentials", daemon=True
                )
                thread.start()
            reading = self._reading
        try:
            return reading.result(wait_s)
        except FutureTimeout:
            raise TimeoutError(
                f"{self.origin}: its credential plugin has not finished; run the credential plugin yourself to see why"
            ) from None

    def _run(self, reading: Future[Access]) -> None:
        try:
            access = self._load()
        except BaseException as error:
            with self._lock:
                self._reading = None
            reading.set_exception(error)
        else:
            with self._lock:
                self._known, self._reading = access, None
            reading.set_result(access)

    def _load(self) -> Access:
        remedy = "correct the kubeconfig" if self._kubeconfig else "restart the pod"
        with _one_sentence(self.origin, self.hide, remedy):
            if self._kubeconfig:
                return self._from_kubeconfig(str(self._kubeconfig))
            if self._server is not None:
                return self._made(self._server, "default", ())
            return self._from_service_account()

    def _from_service_account(self) -> Access:
        token, ca = (str(self._directory / name) for name in ("token", "ca.crt"))
        files = tuple((path, stamp_or_none(path)) for path in (token, ca))
        bearer, certificates = _content(token).decode().strip(), _content(ca)
        host, port = (self._environ[f"KUBERNETES_SERVICE_{part}"] for part in ("HOST", "PORT"))
        server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        try:
            namespace = (self._directory / "namespace").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            namespace = ""
        return self._made(
            server, namespace or "default", files, authorization=f"Bearer {bearer}", ca=certificates
        )

    def _from_kubeconfig(self, paths: str) -> Access:
        from kubernetes.config import kube_config

        merger = kube_config.KubeConfigMerger(paths)
        stamps = {path: stamp_or_none(path) for path in merger.paths}
        # Like kubectl, use the first file that names a context. `kubernetes` would use the last one.
        current = next(
            filter(None, (file.get("current-context") for file in merger.config_files.values())), None
        )
        found = SimpleNamespace(api_key={}, ssl_ca_cert=None, cert_file=None, key_file=None, proxy=None)
        # The official client writes inline keys, and those from a plugin, to files. They are read at once.
        with tempfile.TemporaryDirectory(prefix="gpu-dra-driver-") as directory:
            loader = kube_config.KubeConfigLoader(
                config_dict=merger.config,
                active_context=self._context or current,
                config_base_path=None,
                temp_file_path=directory,
            )
            chosen = loader.current_context["context"]
            named = (one for one in merger.config.value["users"] if one.value["name"] == chosen.get("user"))
            node = next(named, None)
            user: dict[str, Any] = {} if node is None else node.value.get("user") or {}
            self._conceal(*_secrets_of(user))
            if acts_as := sorted(user.keys() & {*_OTHER_USER}):
                raise ValueError(
                    f"its user impersonates another user (`{acts_as[0]}`), which gpu-dra-driver does not support; "
                    "choose another context with --context"
                )
            if user.get("tokenFile") and node is not None:
                path = str(Path(node.path).parent / user["tokenFile"])
                stamps[path] = stamp_or_none(path)
            self._load_official(loader, found, user)
            named_files = [found.ssl_ca_cert, found.cert_file, found.key_file]
            stamps |= {
                path: stamp_or_none(path) for path in named_files if path and not path.startswith(directory)
            }
            ca, certificate, key = (None if path is None else _content(path) for path in named_files)
        kube_config._temp_files.clear()  # it would keep the keys
        return self._made(
            str(getattr(found, "host", "")),
            str(chosen.get("namespace") or "default"),
            tuple(stamps.items()),
            authorization=found.api_key.get("BearerToken", ""),
            proxy=found.proxy,
            expires_at=_moment(getattr(loader, "expiry", None)),
            ca=ca,
            certificate=certificate,
            key=key,
            verify=getattr(found, "verify_ssl", True),
            server_name=getattr(found, "tls_server_name", None),
        )

    def _load_official(self, loader: Any, found: SimpleNamespace, user: dict[str, Any]) -> None:
        """Let `loader` fill `found`; this runs the credential plugin."""
        plugin = user.get("exec")
        if isinstance(plugin, dict) and "command" in plugin and not sys.stdout.isatty():
            # `kubernetes` has no limit for a plugin. At a terminal it may ask a person, who can end it.
            limit = ["--kill-after=1", str(PLUGIN_S), plugin["command"]]
            plugin["command"], plugin["args"] = "timeout", [*limit, *(plugin.get("args") or ())]
        with _failures_logged() as failures:
            loader.load_and_set(found)
        if failures and not found.api_key and not found.cert_file:
            # What the plugin printed follows its exit status, and may contain credentials.
            why = "; ".join(re.sub(r"(?s)(process returned -?\d+).*", r"\1", text) for text in failures)
            why = why.replace(f"process returned {_TIMED_OUT}", f"it did not finish within {PLUGIN_S} s")
            raise InvalidConfigError(
                f"{self.origin}: its credential plugin failed: {_without_objects(self.hide(why))}; run the credential "
                "plugin yourself to see why"
            )

    def _made(
        self,
        server: str,
        namespace: str,
        files: tuple[tuple[str, Any], ...],
        *,
        authorization: str = "",
        proxy: str | None = None,
        expires_at: float = math.inf,
        **route: Any,
    ) -> Access:
        self._conceal(authorization.partition(" ")[2])
        url = _url(server) if server.startswith(("http://", "https://")) else None
        if url is None:
            raise ValueError(f"{server.rpartition('@')[2]!r} is not an http(s) URL of an API server")
        if url.auth:
            authorization = authorization or self._basic(url.auth)
        proxy_authorization = ""
        proxy = proxy or environment_proxy(url, self._environ)
        if proxy:
            proxy_url = _url(proxy if "://" in proxy else f"http://{proxy}")
            if proxy_url is None or proxy_url.scheme not in ("http", "https"):
                raise ValueError("its proxy is not http://HOST:PORT or https://HOST:PORT")
            proxy = proxy_url._replace(auth=None).url
            proxy_authorization = self._basic(proxy_url.auth) if proxy_url.auth else ""
        if not (authorization.isascii() and authorization.isprintable()):
            # http.client's error message would contain the token.
            raise ValueError("the bearer token has invalid characters")
        made = Route(
            url._replace(auth=None).url.rstrip("/"),
            proxy=proxy,
            proxy_authorization=proxy_authorization,
            **route,
        )
        return Access(made, authorization, namespace, files, expires_at)

    def _basic(self, user_info: str) -> str:
        pair = unquote(user_info)
        header = make_headers(basic_auth=pair)["authorization"]
        self._conceal(
            user_info, pair, header.partition(" ")[2], *(part.partition(":")[2] for part in (user_info, pair))
        )
        return header

    def _conceal(self, *secrets: str) -> None:
        """Hide these secrets from now on, and forget those of long ago."""
        new = [secret for secret in secrets if len(secret) >= _SHORTEST_SECRET]
        self._secrets = (*(secret for secret in self._secrets if secret not in new), *new)[-_REMEMBERED:]


def load_endpoint(kubeconfig: Path | str | None = None, *, context: str | None = None) -> Endpoint:
    """Return an endpoint with its configuration loaded. Raises: InvalidConfigError."""
    endpoint = Endpoint(kubeconfig, context=context)
    endpoint.access()
    return endpoint


@contextmanager
def _one_sentence(origin: str, hide: Callable[[str], str], remedy: str) -> Iterator[None]:
    """Map any error to InvalidConfigError, without its cause, which may contain credentials."""
    try:
        yield
    except DraDriverError:
        raise
    except OSError as error:
        what = f"{error.filename} cannot be read" if error.filename else "a temporary file cannot be written"
        raise InvalidConfigError(f"{origin}: {what}: {error.strerror}; {remedy}") from None
    except Exception as error:
        # PyYAML's messages have several lines and quote the file, which may contain a token.
        mark = getattr(error, "problem_mark", None)
        where = (
            f"line {mark.line + 1} is not YAML" if mark is not None else _without_objects(hide(str(error)))
        )
        raise InvalidConfigError(f"{origin} cannot be used: {where}; {remedy}") from None


def _without_objects(text: str) -> str:
    """Return a message up to the first object, which may be a user with its token."""
    return one_line(text.partition("{")[0])


def _content(path: str) -> bytes:
    content = Path(path).read_bytes()
    if not content.strip():
        raise ValueError(f"{path} is empty")
    return content


def _moment(expiry: datetime | None) -> float:
    if expiry is None:
        return math.inf
    return time.monotonic() + max((expiry - datetime.now(UTC)).total_seconds(), _SHORTEST_S)


def _url(text: str) -> Url | None:
    """Return None instead of an error, which may contain a password."""
    with suppress(ValueError):
        url = parse_url(text)
        return url if url.host else None
    return None


def _secrets_of(user: dict[str, Any]) -> Iterator[str]:
    provider = user.get("auth-provider")
    config = provider.get("config") if isinstance(provider, dict) else None
    for entries in (user, config if isinstance(config, dict) else {}):
        yield from (str(entries[name]) for name in _SECRET_KEYS if entries.get(name))
        yield from str(entries.get("cmd-args") or "").split()


@contextmanager
def _failures_logged() -> Iterator[list[str]]:
    """Collect the errors that this thread logs, because `kubernetes` only logs the failure of a credential plugin.

    They may contain credentials, so they do not reach the log.
    """
    failures: list[str] = []
    thread = threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        if record.thread == thread:
            failures.append(record.getMessage())
        return record.thread != thread

    root = logging.getLogger()
    root.addFilter(is_other)
    try:
        yield failures
    finally:
        root.removeFilter(is_other)
