"""Logging set-up: one JSON object or one console line an event, on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from dra_driver.errors import InvalidConfigError

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


def configure_logs(level: str, form: str) -> None:
    """Log events of at least `level` as `json` or `console`. Raises: InvalidConfigError."""
    if level not in _LEVELS:
        raise InvalidConfigError(f"log level {level!r} is unknown; choose one of {', '.join(_LEVELS)}")
    if form not in ("json", "console"):
        raise InvalidConfigError(f"log format {form!r} is unknown; choose json or console")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            *_renderers(form),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")


def _renderers(form: str) -> list[Any]:
    if form == "json":
        return [
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.JSONRenderer(default=str),
        ]
    # Local variables of a traceback could hold a token; they are shown in neither form.
    return [
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    ]
