"""An action in a thread of its own, its result or error handed to the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_own_thread(name: str, action: Callable[[], T]) -> T:
    """What the action returns or raises, run in a thread that ends with it."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(action())
        except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
