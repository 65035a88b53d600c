"""Maps transport errors and HTTP status codes to the plugin's errors."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ProtocolError,
    ProxyError,
    SSLError,
)
from urllib3.exceptions import TimeoutError as HTTPTimeoutError

from dra_driver.errors import ApiRejectedError, ApiUnavailableError, InvalidConfigError
from dra_driver.model.ids import printable

RETRYABLE_STATUS = frozenset({408, 429})
_MAX_TEXT = 600
_SHOWN_BYTES = 60
_SHOWN_OF_PAGE = 4096
_TAGS = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
_MAX_RETRY_AFTER_S = 300.0
"""The longest Retry-After that the plugin obeys. A proxy in maintenance may send a longer one."""


class PathNotFoundError(ApiRejectedError):
    """404 for a path that the server does not serve, as opposed to a missing object."""


class WatchExpiredError(ApiRejectedError):
    """410: the resource version is older than the server's history, so the client must list again."""


@contextmanager
def api_errors(action: str, proxy: str | None = None) -> Iterator[None]:
    """Map errors of urllib3, JSON decoding and reading the configuration inside the block to
    ApiUnavailableError.

    `action` begins every message; `proxy` is the URL of the proxy for the API server, without credentials.
    """
    try:
        yield
    except InvalidConfigError as error:
        raise ApiUnavailableError(f"{action}: {error}") from error
    except HTTPError as error:
        is_brief = isinstance(error, ConnectTimeoutError | ProtocolError)
        # In urllib3 a refused connection is a timeout.
        timed_out = isinstance(error, HTTPTimeoutError) and not isinstance(error, NewConnectionError)
        text = f"{action}: {_transport_text(error, proxy)}"
        raise ApiUnavailableError(text, is_brief=is_brief, timed_out=timed_out) from error
    # The certificates are being rotated, or the body is not JSON or is nested too deeply.
    except (OSError, ValueError, RecursionError) as error:
        timed_out = isinstance(error, TimeoutError)
        raise ApiUnavailableError(f"{action}: {one_line(str(error))}", timed_out=timed_out) from error


def decoded_json(data: bytes, action: str) -> Any:
    """Decode the JSON of a response or an event. Raises: ApiUnavailableError."""
    try:
        value = json.loads(data)
        if b"\\ud" in data or b"\\uD" in data:
            # Unpaired surrogates can neither be written nor sent, so replace them.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        start = one_line(data[:_SHOWN_BYTES].decode("utf-8", "replace"))
        text = (
            _page_text(data) or f"the response begins with {start!r} and is not JSON: {one_line(str(error))}"
        )
        raise ApiUnavailableError(
            f"{action}: {text}; check the server of the kubeconfig and the proxy in front of it"
        ) from error
    return value


def check_status(action: str, response: urllib3.BaseHTTPResponse, body: bytes) -> None:
    """Raise an error for any status other than 2xx, with the API's own message from the body.

    Raises: ApiUnavailableError for 5xx, 408 and 429 (`retry_after_s` from Retry-After or the Status);
    WatchExpiredError for 410; PathNotFoundError for a path that is not served; otherwise ApiRejectedError.
    """
    code = response.status
    if 200 <= code < 300:
        return
    status = _decode_status(body)
    message = one_line(str(status.get("message") or response.reason or "no message"))
    raise failure(f"{action}: {message} (HTTP {code})", code, status, response.headers.get("Retry-After", ""))


def failure(
    text: str, code: int, status: dict[str, Any], retry_after: str = ""
) -> ApiUnavailableError | ApiRejectedError:
    """Return the error for a failed request, or for an ERROR event of a watch.

    `status` is the API's Status object ({} if there is none); `retry_after` is the header Retry-After.
    """
    if code in RETRYABLE_STATUS or code >= 500:
        retry_s = _retry_after(retry_after.strip(), status)
        return ApiUnavailableError(text, retry_after_s=retry_s, is_brief=True)
    reason = str(status.get("reason") or "")
    if code == 410:
        return WatchExpiredError(text, status=code, reason=reason or "Expired")
    if code == 404 and not _details(status).get("name"):
        return PathNotFoundError(text, status=code, reason=reason or "NotFound")
    return ApiRejectedError(text, status=code, reason=reason)


def one_line(text: str) -> str:
    """Collapse white space, and shorten the text so that it fits an event or a log line.

    Servers and proxies may send anything, so unprintable characters become question marks.
    """
    flat = printable(" ".join(text.split()))
    return flat if len(flat) <= _MAX_TEXT else flat[: _MAX_TEXT - 1] + "…"


def _page_text(body: bytes) -> str | None:
    """Return a message with the beginning of a web page's text; None if the body is not a web page."""
    start = body[:_SHOWN_OF_PAGE].decode("utf-8", "replace")
    if not start.lstrip().startswith("<"):
        return None
    return (
        "the response is a web page, so it is not from the API server: "
        f"{one_line(_TAGS.sub(' ', start))[:_SHOWN_BYTES].rstrip()}"
    )


def _decode_status(body: bytes) -> dict[str, Any]:
    """Return the Status object in a body, or the plain text that proxies and unknown paths send."""
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError):
        return {"message": _page_text(body) or body.decode("utf-8", "replace")}
    return decoded if isinstance(decoded, dict) else {}


def _retry_after(header: str, status: dict[str, Any]) -> float | None:
    """Return the seconds to wait: from the header as a number or a date, else from the Status; None if neither
    has it.
    """
    asked: float | None = None
    if header.isdecimal():
        asked = float(header)
    elif header:
        with suppress(ValueError, OverflowError):
            when = parsedate_to_datetime(header)
            asked = (when - datetime.now(UTC)).total_seconds() if when.tzinfo else None
    else:
        hint = _details(status).get("retryAfterSeconds")
        asked = min(hint, _MAX_RETRY_AFTER_S) if isinstance(hint, int) and hint > 0 else None
    return None if asked is None else min(max(asked, 0.0), _MAX_RETRY_AFTER_S)


def _details(status: dict[str, Any]) -> dict[str, Any]:
    details = status.get("details")
    return details if isinstance(details, dict) else {}


def _transport_text(error: HTTPError, proxy: str | None) -> str:
    """Describe the cause for users. urllib3's own messages contain the addresses of Python objects."""
    if isinstance(error, ProxyError):
        return (
            f"the proxy {proxy or 'in front of the API server'} cannot be used: {_root_text(error.original_error)}; "
            "check proxy-url in the kubeconfig, or HTTPS_PROXY and NO_PROXY (credentials: "
            "http://USER:PASSWORD@HOST:PORT)"
        )
    if isinstance(error, SSLError):
        return _tls_text(error)
    if isinstance(error, NewConnectionError):
        return f"cannot connect to the API server: {_root_text(error)}"
    if isinstance(error, HTTPTimeoutError):
        return "the API server did not answer in time"
    if type(error) is HTTPError:  # raised by this package
        return str(error)
    return f"connection to the API server broke: {_root_text(error)}"


def _tls_text(error: SSLError) -> str:
    inner = error.args[0] if error.args else error
    if isinstance(inner, ssl.SSLCertVerificationError):
        return f"the API server's certificate is not trusted ({inner.verify_message}); check the CA file"
    return f"TLS with the API server failed: {one_line(str(inner))}"


def _root_text(error: BaseException) -> str:
    seen = error
    while seen.__cause__ is not None or (seen.args and isinstance(seen.args[-1], BaseException)):
        seen = seen.__cause__ or seen.args[-1]
    return one_line(str(getattr(seen, "strerror", None) or seen))
