"""The log: constant events, one line each, no secrets, and all of them in the manual."""

from __future__ import annotations

import base64
import json
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import structlog

from dra_driver.app.logs import configure_logs, show_stacks
from dra_driver.errors import DraDriverError, InvalidConfigError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from tests.fakes.logevents import LEVELS, LogCall, log_calls
from tests.fakes.tables import IsGenerated, generated, tabled
from tests.fakes.waiting import PATIENCE_S

MANUAL = Path(__file__).parents[1] / "docs/log-events.md"
COMMON_FIELDS = {"claim_uid", "device", "gpu_uuid", "reason", "error", "remedy", "exception"}
"""The table at the top of the manual has them."""
SECRET = "s3cr3t-0123456789-abcdef"
log = structlog.get_logger(__name__)


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    hooks = (sys.excepthook, threading.excepthook, warnings.showwarning)
    yield
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook, warnings.showwarning = hooks


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[dict]]:
    """The events since the last call; each is a line of its own."""
    return lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_every_event_is_a_constant_name_of_one_meaning() -> None:
    places: dict[str, set[str]] = {}
    for call in log_calls():
        assert call.events is not None, f"{call.place}: the event is no literal, or there are other arguments"
        for event in call.events:
            assert re.fullmatch(r"[a-z]+(_[a-z]+)*", event), f"{call.place}: {event!r} is not snake_case"
            places.setdefault(event, set()).add(call.file)
    assert len(places) > 100
    shared = {event: files for event, files in places.items() if len(files) > 1}
    assert not shared, "an event has one meaning, so it is written in one file"


def test_manual_lists_every_event_with_its_meaning(is_generated: IsGenerated) -> None:
    _, table, _ = generated(MANUAL, "log events")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    meanings = {row[0].split("`")[1]: row[-1] for row in rows if "`" in row[0]}
    said = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^Other events of .*", table, re.MULTILINE))))
    is_generated(MANUAL, "log events", "".join(event_table(meanings, said)))
    assert [event for event, meaning in meanings.items() if meaning in ("", "?")] == []
    assert len(set(meanings.values())) == len(meanings), "two events have the same meaning"


def event_table(meanings: dict[str, str], said: set[str]) -> Iterator[str]:
    """Production events by level: those with a meaning in a table, then those whose names say it (`said`, and new ones
    of low levels). Events of the playground's control plane are not of interest.
    """
    calls: dict[str, list[LogCall]] = {}
    for call in log_calls():
        for event in call.events or ():
            if "/playground/" not in call.file:
                calls.setdefault(event, []).append(call)
    rows: dict[str, list[str]] = {level: [] for level in reversed(LEVELS)}
    names: dict[str, list[str]] = {level: [] for level in rows}
    for event, found in sorted(calls.items()):
        used = {level for call in found for level in call.levels}
        fields = {field for call in found for field in call.fields} - {"exc_info"}
        if "exception" in used or any("exc_info" in call.fields for call in found):
            fields.add("exception")
            used = used - {"exception"} | ({"error"} if "exception" in used else set())
        *lower, level = [level for level in LEVELS if level in used] or ["info"]
        also = "".join(f", or {one}" for one in lower)
        named = ", ".join(f"`{field}`" for field in sorted(fields - COMMON_FIELDS))
        shown = f"`{event}`{also}" + (f" ({named})" if named else "")
        if event not in meanings and (event in said or level in ("info", "debug")):
            names[level].append(shown)
        else:
            rows[level].append(f"| {shown} | {meanings.get(event, '?')} |\n")
    for level, lines in rows.items():
        if lines:
            yield f"### {level.title()}\n\n| Event (more fields) | Meaning |\n|---|---|\n"
            yield from [*lines, "\n"]
        if names[level]:
            yield f"Other events of level {level}: {'; '.join(names[level])}.\n\n"


LEAKS = {
    "bearer": f"Bearer {SECRET}",
    "header": f"headers {{'Authorization': 'Bearer {SECRET}'}}",
    "basic": f"authorization: Basic {SECRET}",
    "complaint": f"Invalid header value b'Bearer {SECRET[:6]}\\n{SECRET[6:]} {SECRET}'",
    "jwt": f"got eyJhbGciOiJSUzI1NiJ9.{SECRET}.{SECRET} from it",
    "kubeconfig": f'users:\n- user:\n    token: "{SECRET}"',
    "password": f"password={SECRET}",
    "proxy": f"cannot reach http://me:{SECRET}@proxy:3128/",
    "key": f"-----BEGIN EC PRIVATE KEY-----\n{SECRET}\n-----END EC PRIVATE KEY-----",
    "key of a kubeconfig": base64.b64encode(f"-----BEGIN PRIVATE KEY-----\n{SECRET}".encode()).decode(),
}


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("text", LEAKS.values(), ids=LEAKS)
def test_secret_in_a_text_is_hidden_wherever_it_is(
    text: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("debug", form)
    token = SECRET  # a variable of a frame that the traceback shows
    log.info("plain", value=text, nested=[{"a": (text,)}], other=ValueError(text), token=token)
    try:
        raise DraDriverError(text) from ValueError(text)
    except DraDriverError:
        log.exception("raised", cause=text)
    logging.getLogger("a.library").warning("it says %s", text)
    err = capsys.readouterr().err
    assert SECRET not in err
    assert LEAKS["key of a kubeconfig"] not in err
    assert err.count("[hidden]") >= 7


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_text_moves_the_cursor_of_who_reads_the_log(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", form)
    text = "a\x1b[2J\x9b\u202eb"
    try:
        raise DraDriverError(text)
    except DraDriverError:
        log.exception("raised", cause=text, nested=[{text: text}])
    err = capsys.readouterr().err
    assert err.count("a?[2J??b") >= 4
    assert all(map(str.isprintable, err.splitlines()))


def test_harmless_text_is_left_as_it_is(written: Callable[[], list[dict]]) -> None:
    configure_logs("info", "json")
    texts = [
        "the bearer token was refused: renew it",
        "token file /run/x/token is empty; mount a service-account token there",
        "https://10.0.0.1:6443/api: cannot connect (a@b)",
        "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c",
        "  spaces  stay ",
    ]
    log.info("plain", texts=texts, n=1, ratio=0.5, yes=True, none=None)
    (event,) = written()
    assert event["texts"] == [*texts[:-1], "spaces  stay"]
    assert (event["n"], event["ratio"], event["yes"], event["none"]) == (1, 0.5, True, None)


def test_every_event_is_one_line_whatever_is_in_it(written: Callable[[], list[dict]]) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no")

    configure_logs("info", "json")
    endless: list = []
    endless.append(endless)
    log.info(
        "plain", a="one\ntwo\r\n  three\u2028four", b=["x\ny"], c={"k\nk": "v\nv"}, d=Broken(), e=endless
    )
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        log.exception("raised")
    plain, raised = written()
    assert (plain["a"], plain["b"], plain["c"]) == ("one two three four", ["x y"], {"k k": "v v"})
    assert "cannot be converted to text" in plain["d"]
    (shown,) = raised["exception"]
    assert (shown["exc_type"], shown["exc_value"]) == ("ValueError", "first second")
    assert [frame["name"] for frame in shown["frames"]] == ["test_every_event_is_one_line_whatever_is_in_it"]


@tabled("part")
def test_long_text_of_anyone_costs_little_time_and_a_short_line(
    part: str, written: Callable[[], list[dict]]
) -> None:
    """A pattern that tries again at every character would take hours, in which no other thread runs."""
    configure_logs("info", "json")
    text = part * (1_000_000 // len(part)) + "x"
    log.info("plain", text=text, other=f"authorization:{text},")
    (event,) = written()
    assert all(len(event[field]) < 17_000 for field in ("text", "other"))


def test_secret_in_the_middle_of_a_long_text_is_hidden(written: Callable[[], list[dict]]) -> None:
    """Also where the text is cut."""
    configure_logs("info", "json")
    for before in range(0, 20_000, 500):
        log.info("plain", text="x" * before + f" Bearer {SECRET * 100} " + "y" * 20_000)
    assert not any(SECRET in event["text"] for event in written())


def test_crashes_and_warnings_become_events(written: Callable[[], list[dict]]) -> None:
    configure_logs("info", "json").log_crashes()

    def crash() -> None:
        raise ValueError("oops\nindeed")

    thread = threading.Thread(target=crash, name="worker")
    thread.start()
    thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old\nthing", UserWarning, stacklevel=1)
    try:
        crash()
    except ValueError:
        sys.excepthook(*sys.exc_info())
    crashed, warned, ended = written()
    assert (crashed["event"], crashed["thread"], crashed["level"]) == ("thread_crashed", "worker", "error")
    assert crashed["exception"][0]["exc_value"] == "oops indeed"
    assert (warned["event"], warned["library"]) == ("library_message", "py.warnings")
    assert (ended["event"], ended["level"]) == ("program_crashed", "critical")


@pytest.mark.parametrize("level", ["debug", "info", "warning"])
def test_debug_is_toggled_and_the_change_is_always_reported(
    level: str, written: Callable[[], list[dict]]
) -> None:
    logs = configure_logs(level, "json")
    quiet = "info" if level == "debug" else level
    first, second = (quiet, "debug") if level == "debug" else ("debug", quiet)
    for after in (first, second, first):
        before = logs.level
        logs.toggle_debug()
        log.debug("detail")
        reported, *details = written()
        assert (reported["event"], reported["before"], reported["after"]) == (
            "log_level_changed",
            before,
            after,
        )
        assert logs.level == after
        assert [event["event"] for event in details] == (["detail"] if after == "debug" else [])


@pytest.mark.parametrize("form", ["json", "console"])
def test_stacks_of_all_threads_are_shown(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    configure_logs("warning", form)
    began, done = threading.Event(), threading.Event()

    def hold_on_here() -> None:
        began.set()
        done.wait(PATIENCE_S)

    thread = threading.Thread(target=hold_on_here, name="holder")
    thread.start()
    try:
        assert began.wait(PATIENCE_S)
        show_stacks(form)
    finally:
        done.set()
        thread.join()
    err = capfd.readouterr().err
    assert "hold_on_here" in err
    if form == "json":
        (event,) = map(json.loads, err.splitlines())
        stacks = {stack["thread"]: stack["frames"] for stack in event["stacks"]}
        assert any("hold_on_here" in frame for frame in stacks["holder"])
        assert "show_stacks" in stacks["MainThread"][1]
    else:
        assert "stacks_logged" in err.splitlines()[-1]


@pytest.fixture
def unwilling() -> Iterator[str]:
    """An API server that refuses everything and repeats the headers it got."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(int(self.path.rsplit("/", 1)[1]))
            self.end_headers()
            self.wfile.write(json.dumps({"message": str(self.headers)}).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def client_of(directory: Path, server: str, token: str) -> ApiClient:
    kubeconfig = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (directory / "kubeconfig").write_text(json.dumps(kubeconfig))
    return ApiClient(load_endpoint(directory / "kubeconfig"))


def test_token_is_in_no_event_whatever_the_api_server_does(
    tmp_path: Path, unwilling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("debug", "json")
    for server in (unwilling, "http://127.0.0.1:1"):
        for code in (200, 401, 403, 500):
            client = client_of(tmp_path, server, SECRET)
            try:
                client.request("GET", f"/{code}", action="look")
            except DraDriverError:
                log.exception("refused")
            client.close()
    err = capsys.readouterr().err
    assert err.count('"refused"') == 7, "all but the first"
    assert SECRET not in err


def test_token_that_no_header_can_carry_is_not_shown(tmp_path: Path) -> None:
    """This error also goes to the kubelet and into events, past the log."""
    with pytest.raises(
        DraDriverError, match="token has invalid characters; correct the kubeconfig"
    ) as caught:
        client_of(tmp_path, "http://127.0.0.1:1", f"{SECRET}\n{SECRET}")
    assert SECRET not in str(caught.value)


def test_kubeconfig_that_is_not_yaml_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(f"users:\n- user: {{token: {SECRET}: x]\n")
    with pytest.raises(InvalidConfigError, match="line 2 is not YAML") as caught:
        load_endpoint(path)
    assert SECRET not in str(caught.value)
