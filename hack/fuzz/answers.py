"""More fuzz targets: answers of the API server, files that people give to commands, and texts for the log."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

from dra_driver import logs
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, InvalidConfigError
from dra_driver.kube.api_errors import api_errors, check_status
from dra_driver.kube.claims import parse_claim_now
from dra_driver.kube.slice_cache import version_after
from dra_driver.kube.watch_stream import WatchStream
from dra_driver.model.claim import ClaimRef
from dra_driver.validation.documents import read_documents
from dra_driver.validation.rules.selection import NotJudgedError, SelectorError, view
from dra_driver.validation.rules.selectors import compiled, hints

LONGEST_WAIT_S = 600.0
LONGEST_ERROR = 2_000
LONGEST_LOG_TEXT = 20_000
DEVICE = view(
    "a",
    {"attributes": {"type": {"string": "gpu"}, "version": {"version": "9.0.0"}, "list": {"strings": ["a"]}}},
)

Parser = Callable[[bytes], object]


def parsers(scratch: Path) -> dict[str, Parser]:
    """By the name of the target; those that read files have a directory below `scratch`."""
    directory = scratch / "documents"
    directory.mkdir(parents=True, exist_ok=True)
    return {
        "api-refusal": api_refusal,
        "api-claim": api_claim,
        "api-watch": api_watch,
        "documents": documents(directory),
        "selector": selector,
        "log-text": log_text,
    }


def api_refusal(content: bytes) -> None:
    """A failed request: a line of status code and Retry-After, then the body of the API server or of a proxy."""
    head, _, body = content.partition(b"\n")
    code, _, retry_after = head.decode("latin-1").partition(" ")
    response = mock.Mock(status=int(code) if code.isdecimal() and len(code) < 4 else 503, data=body)
    response.reason, response.headers = "a reason", {"Retry-After": retry_after}
    try:
        check_status("try", response)
    except ApiUnavailableError as error:
        _check_error(error)
        if not 0 <= (error.retry_after_s or 0) <= LONGEST_WAIT_S:
            raise AssertionError(f"a wait of {error.retry_after_s} s") from error
    except ApiRejectedError as error:
        _check_error(error)


def _check_error(error: Exception) -> None:
    if "\n" in str(error) or len(str(error)) > LONGEST_ERROR:
        raise AssertionError(f"no short line: {str(error)[:100]!r}")


def api_claim(content: bytes) -> None:
    """The object that is there now under the name of a claim."""
    with suppress(ApiUnavailableError), api_errors("look"):
        found = json.loads(content)
        if isinstance(found, dict):
            parse_claim_now(found, ClaimRef("default", "claim", "uid"))


def api_watch(content: bytes) -> None:
    """The body of a watch, cut into pieces anywhere."""
    pieces = [content[place : place + 1024] for place in range(0, len(content), 1024)]
    stream = WatchStream(mock.Mock(stream=lambda _size: iter(pieces)), "watch")
    with suppress(ApiUnavailableError, ApiRejectedError):
        for event in stream:
            version_after("1", event)


def documents(directory: Path) -> Parser:
    def parse(content: bytes) -> None:
        """YAML for `validate`: what is taken can be written out."""
        path = directory / "some.yaml"
        path.write_bytes(content)
        with suppress(InvalidConfigError):
            for document in read_documents([str(path)]):
                _ = document.place, document.name
                with suppress(TypeError, ValueError, RecursionError):
                    json.dumps(document.content)

    return parse


def selector(content: bytes) -> None:
    """CEL of selectors, for a device."""
    text = content.decode(errors="replace")
    hints(text, "a", [DEVICE])
    with suppress(InvalidConfigError, NotJudgedError, SelectorError):
        chosen = compiled(text)
        if not chosen.matches(DEVICE):
            chosen.why_not(DEVICE)


def log_text(content: bytes) -> None:
    """What anybody has written into the log: a bounded line."""
    text = content.decode(errors="replace")
    shown = logs._clean(None, "info", {"event": "told", "text": text, "more": [text, {"a": text}]})
    for line in (shown["text"], shown["more"][0], shown["more"][1]["a"]):
        if "\n" in line or len(line) > LONGEST_LOG_TEXT:
            raise AssertionError("a long line, or several")
