"""Telling a waiting person which step runs and for how long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_HEARTBEAT_SECONDS = 20.0


def say(text: str) -> None:
    """One line on standard error, so that standard output stays for data."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print ``title ... 23 s`` around a step, with a sign of life while it runs."""
    started = time.monotonic()
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_HEARTBEAT_SECONDS):
            say(f"{title} ... {time.monotonic() - started:.0f} s, still running")

    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
    try:
        yield
    except BaseException:
        say(f"{title} ... failed after {time.monotonic() - started:.1f} s")
        raise
    else:
        say(f"{title} ... {time.monotonic() - started:.1f} s")
    finally:
        done.set()
        heart.join()
