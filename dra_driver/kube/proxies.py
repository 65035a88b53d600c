"""Which HTTP proxy the way to the API server goes through: that of the kubeconfig, else that of the environment.

The environment means what it means to kubectl and to other programs written in Go: HTTPS_PROXY and HTTP_PROXY by the
scheme of the API server, NO_PROXY with names, domains, addresses, networks and ports; in lower case where upper case is
not set. A proxy of the kubeconfig is used whatever NO_PROXY says.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from dra_driver.errors import InvalidConfigError

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Proxy:
    """One HTTP proxy. `url` is without credentials, `credentials` is `user:password`, `origin` says where it is set."""

    url: str
    origin: str
    credentials: str | None = field(default=None, repr=False)


def proxy_of_url(text: str, origin: str) -> Proxy:
    """The proxy that a URL, or `host:port`, names. Raises: InvalidConfigError, which does not show the password."""
    parsed = _split(text.strip() if "://" in text else f"http://{text.strip()}")
    try:
        port = None if parsed is None else parsed.port
    except ValueError:
        parsed, port = None, None
    if parsed is None or not parsed.hostname:
        raise InvalidConfigError(f"{origin}: the proxy's URL is not valid; write http://HOST:PORT")
    if parsed.scheme not in _DEFAULT_PORTS:
        raise InvalidConfigError(
            f"{origin}: a proxy of the kind {parsed.scheme} cannot be used; give an http or https proxy"
        )
    host = f"[{parsed.hostname}]" if ":" in parsed.hostname else parsed.hostname
    credentials = None
    if parsed.username is not None:
        credentials = f"{unquote(parsed.username)}:{unquote(parsed.password or '')}"
    return Proxy(
        f"{parsed.scheme}://{host}:{_DEFAULT_PORTS[parsed.scheme] if port is None else port}",
        origin,
        credentials,
    )


def proxy_of_environment(server: str, environ: Mapping[str, str]) -> Proxy | None:
    """The proxy that the environment names for an API server's URL; None if the way goes past it.

    Raises: InvalidConfigError for one that cannot be used.
    """
    target = urlsplit(server)
    try:
        _ = target.port
    except ValueError as error:
        raise InvalidConfigError(f"the API server's URL {server} has no usable port: {error}") from error
    name = f"{target.scheme.upper()}_PROXY"
    text = _value(environ, name)
    if not text or not target.hostname or not _goes_through(target, _value(environ, "NO_PROXY")):
        return None
    return proxy_of_url(text, name)


def _value(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.lower()) or ""


def _split(text: str) -> SplitResult | None:
    try:
        return urlsplit(text)
    except ValueError:
        return None


def _goes_through(target: SplitResult, exceptions: str) -> bool:
    host = target.hostname or ""
    port = str(_DEFAULT_PORTS[target.scheme] if target.port is None else target.port)
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return False
    entries = [entry.strip().lower() for entry in exceptions.split(",")]
    return not any(_matches(entry, host, address, port) for entry in entries if entry)


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _matches(entry: str, host: str, address: _Address | None, port: str) -> bool:
    """Whether an entry of NO_PROXY names the host."""
    if entry == "*":
        return True
    if "/" in entry:
        network = _network(entry)
        if network is not None:
            return address is not None and address in network
    name, only_port = _host_and_port(entry)
    if not name or only_port not in ("", port):
        return False
    named = _address(name)
    if named is not None or address is not None:
        return named == address
    if name.startswith("*."):
        name = name[1:]
    if name.startswith("."):
        return host.endswith(name)
    return host == name or host.endswith(f".{name}")


def _host_and_port(entry: str) -> tuple[str, str]:
    """`host:port` or `[address]:port` in its parts; an IPv6 address alone has no port."""
    host, colon, port = entry.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], port
    return (host, port) if colon and ":" not in host else (entry, "")


def _address(text: str) -> _Address | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
