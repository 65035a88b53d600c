"""Which proxy of the environment leads to the API server: the rules of Go, and so of kubectl."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from urllib3.util import Url


def environment_proxy(server: Url, environ: Mapping[str, str]) -> str | None:
    """Return HTTPS_PROXY (HTTP_PROXY for plain HTTP) unless NO_PROXY names the server, or the server is on this
    machine.
    """
    proxy = _variable(environ, f"{server.scheme}_proxy")
    host = (server.host or "").strip("[]").rstrip(".").lower()
    port = server.port or {"https": 443}.get(server.scheme or "", 80)
    if not proxy or host == "localhost" or _is_excepted(host, port, _variable(environ, "no_proxy")):
        return None
    return proxy


def _variable(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name.upper()) or environ.get(name) or ""


def _is_excepted(host: str, port: int, exceptions: str) -> bool:
    address = _address(host)
    if address is not None and address.is_loopback:
        return True
    return any(_names(entry.strip().lower(), host, port, address) for entry in exceptions.split(","))


def _names(
    entry: str, host: str, port: int, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None
) -> bool:
    """Whether an entry of NO_PROXY, such as `10.96.0.0/12`, `[::1]:6443` or `.example.com`, names the host."""
    if entry == "*":
        return True
    if address is not None and "/" in entry:
        try:
            return address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    if _address(entry) is None and entry.rpartition(":")[2].isdecimal():
        entry, _, wanted = entry.rpartition(":")
        if int(wanted) != port:
            return False
    named = _address(entry.strip("[]"))
    if address is not None or named is not None:
        return named == address
    domain = entry.removeprefix("*")
    return bool(domain.strip(".")) and (host == domain or host.endswith(f".{domain.removeprefix('.')}"))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
