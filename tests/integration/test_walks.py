"""The walks of docs/architecture.md against the files that really run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dra_driver.kubelet.dra import V1, DraService, method_path
from dra_driver.kubelet.pb import dra_v1_pb2 as pb
from tests.integration.conftest import Node

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
FEATURES = ("claims", "journal", "cdi", "sharing", "mig", "inventory", "slices", "app")
"""Rooms that a reader of a Prepare has to know: edges are foreign worlds, and nobody waits for those who tell users."""


class Context:
    """What gRPC hands to a call."""

    def time_remaining(self) -> float:
        return 45.0

    def is_active(self) -> bool:
        return True


def listed() -> list[str]:
    """The files of the first walk."""
    walk = re.search(r"<!-- walk: prepare -->(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert walk is not None
    return re.findall(r"`([a-z_/]+\.py)`", walk[1])


def ran(node: Node, name: str) -> set[str]:
    """Files of features in which a function was called while a claim was prepared, without codecs."""
    ref = node.claim(name)
    methods = DraService(node.driver.claims.service).methods()
    prepare = methods[method_path(V1, "NodePrepareResources")].unary_unary
    package, found = f"{ROOT}/dra_driver/", set()

    def note(frame: FrameType, event: str, _arg: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package):
            found.add(file.removeprefix(package))

    claim = pb.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid)
    sys.setprofile(note)
    try:
        answer = prepare(pb.NodePrepareResourcesRequest(claims=[claim]), Context())
    finally:
        sys.setprofile(None)
    assert answer.claims[ref.uid].error == ""
    assert len(answer.claims[ref.uid].devices) == 1
    return {file for file in found if file.startswith(FEATURES) and "codec" not in file}


def test_plain_prepare_passes_through_the_files_of_the_first_walk(node: Node) -> None:
    ran(node, "first")  # what is read only once is not of the walk
    files = listed()
    assert ran(node, "second") == set(files)
    assert len(files) == len(set(files)) <= 20


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", PAGE.read_text()))))
def test_every_file_that_the_page_names_is_there(name: str) -> None:
    assert any((ROOT / top / name).is_file() for top in ("dra_driver", "hack", ".")), name
