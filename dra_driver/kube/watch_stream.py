"""The body of a watch: one JSON event a line, readable until either side ends it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError

from dra_driver.errors import ApiUnavailableError
from dra_driver.kube.api_errors import api_errors, decoded_json, failure, one_line

_READ_BYTES = 65536


class WatchStream:
    """Iterate for events ({"type", "object"}); `close()` from any thread ends the iteration at once.

    Ends silently when the server closes the watch in order. Raises while iterating: ApiUnavailableError
    when the connection breaks or stays silent too long, and for an ERROR event as for an answer of its code.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, action: str) -> None:
        self._response = response
        self._action = action
        self._closed = threading.Event()

    def close(self) -> None:
        """Wake the reader, if there is one, and make it end."""
        self._closed.set()
        # Not response.close(): that would wait for the lock that the reader holds.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._response.shutdown()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with api_errors(self._action):
                for line in self._lines():
                    yield self._event(line)
        except ApiUnavailableError:
            if not self._closed.is_set():
                raise
        finally:
            self._closed.set()
            self._response.close()

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        for chunk in self._response.stream(_READ_BYTES):
            if self._closed.is_set():
                return
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line for line in lines if line)
        if rest and not self._closed.is_set():
            raise HTTPError("the watch ended in the middle of an event")

    def _event(self, line: bytes) -> dict[str, Any]:
        event = decoded_json(line, self._action)
        if not isinstance(event, dict):
            raise ApiUnavailableError(f"{self._action}: an event of the watch is not an object")
        if event.get("type") != "ERROR":
            return event
        status = event.get("object")
        status = status if isinstance(status, dict) else {}
        code = status.get("code")
        code = code if isinstance(code, int) else 500
        text = f"{self._action}: {one_line(str(status.get('message') or 'watch failed'))} (HTTP {code})"
        raise failure(text, code, status)
