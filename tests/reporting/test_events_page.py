"""docs/events.md lists every reason of an event."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from dra_driver.model.problems import EventReason

PAGE = Path(__file__).parents[2] / "docs/events.md"


def test_page_lists_every_reason_of_an_event() -> None:
    table = PAGE.read_text().partition("<!-- events -->\n")[2].partition("<!-- end of events -->")[0]
    listed = re.findall(r"^\| `(\w+)` \| (?:Normal|Warning) \| ", table, re.MULTILINE)
    assert len(listed) > 20
    assert sorted(listed) == sorted({*get_args(EventReason)} - {"Prepared"})  # that one is a condition's only
