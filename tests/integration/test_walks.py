"""The walks of docs/architecture.md against the files that really run."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dra_driver.kubelet.dra import V1, DraService, method_path
from dra_driver.kubelet.pb import dra_v1_pb2 as pb
from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.slices.publisher import Publisher
from tests.fakes.waiting import PATIENCE_S
from tests.integration.conftest import Node

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
FEATURES = ("claims", "journal", "cdi", "sharing", "mig", "inventory", "slices", "app")
"""Packages that a reader of Prepare must know, without adapters and reporting."""

PUBLISHING = ("inventory", "mig", "sharing", "slices")
BESIDE = ("slices/rules/other_writers.py", "mig/layouts.py", "mig/offer.py")
"""They say whether and when slices may be written and which devices are withheld, and do not see the pool's content."""


class Context:
    """What gRPC hands to a call."""

    def time_remaining(self) -> float:
        return 45.0

    def is_active(self) -> bool:
        return True


def listed(name: str) -> list[str]:
    """The files of a walk, in the order of the page."""
    walk = re.search(rf"<!-- walk: {name} -->(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert walk is not None
    return re.findall(r"^\d+\. `([a-z_/]+\.py)`", walk[1], re.MULTILINE)


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
    files = listed("prepare")
    assert ran(node, "second") == set(files)
    assert len(files) == len(set(files)) <= 12


def entered_until_written(publisher: Publisher) -> list[str]:
    """Files that shape the pool, in the order in which calls from other files enter them, until a slice is written:
    each function counts once, and a file that is entered twice in a row counts once."""
    package, seen, found = f"{ROOT}/dra_driver/", set(), [""]
    is_written = False

    def note(frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal is_written
        code, caller = frame.f_code, frame.f_back
        file = code.co_filename.removeprefix(package)
        if event != "call" or code in seen or is_written:
            return
        seen.add(code)
        is_written = file == "kube/slices.py" and code.co_name in ("create", "update")
        is_entered = caller is not None and caller.f_code.co_filename != code.co_filename
        if is_entered and file.startswith(PUBLISHING) and file not in BESIDE and file != found[-1]:
            found.append(file)

    sys.setprofile(note)
    try:
        publisher._publish_once()
    finally:
        sys.setprofile(None)
    assert is_written
    return found[1:]


def test_publish_passes_through_the_files_of_the_second_walk_and_returns_to_none_twice(make_node) -> None:
    shares = share_all(SharingRule("shares", 4, "mps"))
    driver = make_node().start_driver(sharing=shares, dynamic_mig=True)
    publisher, discovery = driver.publishing.publisher, driver.discovery
    assert publisher.wait_published(PATIENCE_S)
    publisher.stop()
    publisher._worker._stopping.clear()  # the thread is gone, and this one does its work
    discovery.inventory = replace(discovery.inventory, gpus=discovery.inventory.gpus[1:])
    entered = entered_until_written(publisher)
    assert list(dict.fromkeys(entered)) == listed("publish")
    assert len(set(entered)) <= 10
    assert max(entered.count(file) for file in entered) <= 2


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", PAGE.read_text()))))
def test_every_file_that_the_page_names_is_there(name: str) -> None:
    assert any((ROOT / top / name).is_file() for top in ("dra_driver", "hack", ".")), name
