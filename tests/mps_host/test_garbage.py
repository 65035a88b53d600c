"""What is in the places of the MPS host's files and directories, and is none of the host's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dra_driver.errors import RetryableError
from dra_driver.mps_host.host_files import MpsHostFiles
from tests.base.test_strays import STRAYS, full_directory
from tests.fakes.waiting import PATIENCE_S
from tests.mps_host.conftest import RETRIED_LATER

PLACES = (
    "host.wanted", "host.status", "host.lib", "host.lock", "host.modes", "host.alive", "gpu-2.json", "x.json", "junk",
)  # fmt: skip
BELOW = (
    "host.wanted/x.json", "host.wanted/gpu-4.stop", "host.wanted/x", "host.status/gpu-2.json", "host.status/gpu-4.json",
    "host.status/x", "host.status/.gpu-2.json.1.tmp",
)  # fmt: skip


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\x00")


def closed(path: Path) -> None:
    path.touch(mode=0)


@pytest.mark.parametrize("places", [PLACES, BELOW], ids=["host", "below"])
@pytest.mark.parametrize("kind", [*STRAYS, garbage, closed])
def test_host_whose_files_are_something_else_starts_and_stops_daemons(
    host, logs, kind: Callable[[Path], None], places: tuple[str, ...]
) -> None:
    for place in places:
        path = host.layout.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (kind is full_directory and place in ("host.wanted", "host.status", "host.lib")):
            kind(path)
    one, spec = host.supervisor(sign=0.01), host.spec()
    assert one.ensure(spec, PATIENCE_S).state == "ready"
    reported = {status.device: status.problem for status in MpsHostFiles(host.layout).statuses()}
    assert reported.pop("gpu-2") is None
    assert None not in reported.values(), "what is wanted and cannot be read is refused"
    one.stop(spec.device, PATIENCE_S)
    assert (host.daemons(), host.compute_mode()) == ((), 0)


@pytest.mark.parametrize("kind", [os.mkfifo, garbage])
def test_file_in_the_place_of_a_daemons_directory_is_refused_once(host, kind: Callable[[Path], None]) -> None:
    host.layout.root.mkdir()
    kind(host.layout.directory("gpu-2"))
    one, spec = host.supervisor(**RETRIED_LATER), host.spec()
    with pytest.raises(
        RetryableError, match=r"cannot create the directories of the MPS daemon: .* File exists"
    ):
        one.ensure(spec, PATIENCE_S)
    assert one.ensure(spec, PATIENCE_S).state == "ready"
    one.stop(spec.device, PATIENCE_S)
    host.assert_nothing_left()
