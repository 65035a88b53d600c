"""Where the bearer token of a request comes from; each source notices rotation by itself."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from dra_driver.base.atomic import Stamp, stamp_or_none
from dra_driver.errors import InvalidConfigError


class TokenSource(Protocol):
    """Gives the value of the Authorization header for the next request."""

    def header(self) -> str | None:
        """`Bearer …`, or None for a connection that needs no token."""
        ...

    def refresh(self, used: str | None) -> bool:
        """Told after a 401 for what `header` gave: reads its source again; True if other credentials are in use now."""
        ...


class NoToken:
    """Client certificates, or a server that asks for nothing."""

    def header(self) -> str | None:
        """None."""
        return None

    def refresh(self, used: str | None) -> bool:
        """Nothing to read again."""
        return False


class FileToken:
    """A token file, such as the projected service-account token that the kubelet renews in place.

    The file is stat'ed for every request (microseconds) and read again only when it was replaced, so a
    new token is used at once. While it cannot be read the last good token stays in use.
    Raises at construction: InvalidConfigError if the file is missing, unreadable or empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: Stamp | None = None
        self._token = ""
        try:
            self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfigError(
                f"token file {path} cannot be read: {error}; mount a service-account token there"
            ) from error
        if not self._token:
            raise InvalidConfigError(f"token file {path} is empty; mount a service-account token there")

    def header(self) -> str | None:
        """The token of the file as it is now."""
        with self._lock:
            try:
                if stamp_or_none(self._path) != self._seen:
                    self._read()
            except (OSError, UnicodeDecodeError):
                pass  # in the middle of a rotation: the old token is valid for a while yet
            return f"Bearer {self._token}"

    def refresh(self, used: str | None) -> bool:
        """Read the file whatever its stamp says; True if the token differs."""
        with self._lock:
            with suppress(OSError, UnicodeDecodeError):
                self._read()
            return f"Bearer {self._token}" != used

    def _read(self) -> None:
        seen = stamp_or_none(self._path)  # before the content: a change in between is seen next time
        token = self._path.read_text(encoding="utf-8").strip()
        if token:
            self._token, self._seen = token, seen
