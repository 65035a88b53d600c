"""Maps transport errors and HTTP status codes to the plugin's errors."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator
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
from dra_driver.kube.decoding import TooLargeError, decode
from dra_driver.model.dataclass import dataclass
from dra_driver.model.ids import printable

RETRYABLE_STATUS = frozenset({408, 429})
_MAX_TEXT = 600
_SHOWN = 60
_SEARCHED_BYTES = 1 << 16
_TAGS = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
_MAX_RETRY_AFTER_S = 300.0
"""The longest Retry-After that the plugin obeys."""


class PathNotFoundError(ApiRejectedError):
    """404 for a path that the server does not serve, as opposed to a missing object."""


class WatchExpiredError(ApiRejectedError):
    """410: the resource version is older than the server's history, so the client must list again."""


class ResponseTooLargeError(ApiUnavailableError):
    """The response would take too much memory. A list with a smaller `limit` may fit."""


@dataclass(frozen=True, slots=True)
class ApiErrors:
    """Makes one request's errors. Every message begins with "cannot" and `action`.

    `hide` removes credentials from text from outside. `proxy` is a URL without credentials.
    """

    action: str
    hide: Callable[[str], str] = str
    proxy: str | None = None

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Map errors of urllib3, and of reading the configuration, to ApiUnavailableError.

        The original error is not chained, because it may contain credentials.
        """
        try:
            yield
        except InvalidConfigError as error:
            raise ApiUnavailableError(f"cannot {self.action}: {error}") from None
        except TooLargeError as error:
            raise ResponseTooLargeError(f"cannot {self.action}: {error}") from None
        except HTTPError as error:
            is_brief = isinstance(error, ConnectTimeoutError | ProtocolError)
            # In urllib3 a refused connection is a timeout.
            timed_out = isinstance(error, HTTPTimeoutError) and not isinstance(error, NewConnectionError)
            text = f"cannot {self.action}: {self._transport_text(error)}"
            raise ApiUnavailableError(text, is_brief=is_brief, timed_out=timed_out) from None
        # Certificates are being rotated, or a value cannot be sent.
        except (OSError, ValueError, RecursionError) as error:
            timed_out = isinstance(error, TimeoutError)
            text = f"cannot {self.action}: {self.line(str(error))}"
            raise ApiUnavailableError(text, timed_out=timed_out) from None

    def decoded(self, data: bytes | bytearray) -> Any:
        """Decode the JSON of a response or an event. Raises: ApiUnavailableError."""
        try:
            with self.mapped():
                return decode(data)
        except ResponseTooLargeError:
            raise
        except ApiUnavailableError as error:
            why = str(error).removeprefix(f"cannot {self.action}: ")
            start = self._start(data)
            shown = one_line(start[:_SHOWN])
            text = _page_text(start) or f"the response begins with {shown!r} and is not JSON: {why}"
            raise ApiUnavailableError(
                f"cannot {self.action}: {text}; check the server of the kubeconfig and the proxy in front of it"
            ) from None

    def check_status(self, response: urllib3.BaseHTTPResponse, body: bytes | bytearray) -> None:
        """Raise the error for any status other than 2xx, with the API's own message from the body.

        Raises: ApiUnavailableError for 5xx, 408 and 429; WatchExpiredError for 410; PathNotFoundError;
        ApiRejectedError.
        """
        code = response.status
        if 200 <= code < 300:
            return
        try:
            status = decode(body)
            status = status if isinstance(status, dict) else {}
        except (
            ValueError,
            RecursionError,
            TooLargeError,
        ):  # plain text, as from proxies and for unknown paths
            start = self._start(body)
            status = {"message": _page_text(start) or start}
        message = status.get("message") or response.reason or "no message"
        raise self.failure(str(message), code, status, response.headers.get("Retry-After", ""))

    def failure(
        self, message: str, code: int, status: dict[str, Any], retry_after: str = ""
    ) -> ApiUnavailableError | ApiRejectedError:
        """Return the error for a failed request, or for an ERROR event of a watch. `status` is the API's Status
        object.
        """
        text = f"cannot {self.action}: {self.line(message)} (HTTP {code})"
        if code in RETRYABLE_STATUS or code >= 500:
            retry_s = _retry_after(retry_after.strip(), status)
            return ApiUnavailableError(text, retry_after_s=retry_s, is_brief=True)
        reason = self.line(str(status.get("reason") or ""))
        if code == 410:
            return WatchExpiredError(text, status=code, reason=reason or "Expired")
        if code == 404 and not _details(status).get("name"):
            return PathNotFoundError(text, status=code, reason=reason or "NotFound")
        return ApiRejectedError(text, status=code, reason=reason)

    def line(self, text: str) -> str:
        return one_line(self.hide(text))

    def _start(self, data: bytes | bytearray) -> str:
        """Return more of a body than is shown, because half a credential is not hidden."""
        return self.hide(data[:_SEARCHED_BYTES].decode("utf-8", "replace"))

    def _transport_text(self, error: HTTPError) -> str:
        """Describe the cause for users: urllib3's messages contain the addresses of Python objects."""
        if isinstance(error, ProxyError):
            return (
                f"the proxy {self.proxy or 'in front of the API server'} cannot be used: "
                f"{self.line(_root_text(error.original_error))}; check proxy-url in the kubeconfig, or HTTPS_PROXY and "
                "NO_PROXY (credentials: http://USER:PASSWORD@HOST:PORT)"
            )
        if isinstance(error, SSLError):
            return self.line(_tls_text(error))
        if isinstance(error, NewConnectionError):
            return f"cannot connect to the API server: {self.line(_root_text(error))}"
        if isinstance(error, HTTPTimeoutError):
            return "the API server did not answer in time"
        if type(error) is HTTPError:  # raised by this package
            return str(error)
        return f"connection to the API server broke: {self.line(_root_text(error))}"


def one_line(text: str) -> str:
    """Collapse white space, replace unprintable characters, and shorten the text."""
    flat = printable(" ".join(text.split()))
    return flat if len(flat) <= _MAX_TEXT else flat[: _MAX_TEXT - 1] + "…"


def _page_text(start: str) -> str | None:
    """Return a message if the body is a web page."""
    if not start.lstrip().startswith("<"):
        return None
    return (
        "the response is a web page, so it is not from the API server: "
        f"{one_line(_TAGS.sub(' ', start))[:_SHOWN].rstrip()}"
    )


def _retry_after(header: str, status: dict[str, Any]) -> float | None:
    """Read the header, a number of seconds or a date, else the Status."""
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


def _tls_text(error: SSLError) -> str:
    inner = error.args[0] if error.args else error
    if isinstance(inner, ssl.SSLCertVerificationError):
        return f"the API server's certificate is not trusted ({inner.verify_message}); check the CA file"
    return f"TLS with the API server failed: {inner}"


def _root_text(error: BaseException) -> str:
    seen = error
    while seen.__cause__ is not None or (seen.args and isinstance(seen.args[-1], BaseException)):
        seen = seen.__cause__ or seen.args[-1]
    return str(getattr(seen, "strerror", None) or seen)
