"""What steps say about themselves is unique, and the manuals have all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dra_driver.journal.executor import _STEPS_OF_ANY_CLAIM
from dra_driver.model.steps import LEDGER_STEPS, STEPS, LeaveMigMode

DOCS = Path(__file__).parents[2] / "docs"
CLEANUPS = [step.cleanup for step in LEDGER_STEPS]


@pytest.mark.parametrize(
    "words",
    [
        [step.tag for step in STEPS],
        [step.shown for step in STEPS],
        [step.doing for step in STEPS],
        CLEANUPS,
    ],
)
def test_words_of_steps_are_unique(words: list[str]) -> None:
    assert len(set(words)) == len(words)


def test_step_on_a_gpu_is_in_the_ledger_or_undone_with_the_record() -> None:
    """Otherwise nothing undoes it for a claim without a readable record."""
    without_record = {type(step) for step in _STEPS_OF_ANY_CLAIM}
    assert set(STEPS) == {*LEDGER_STEPS, *without_record, LeaveMigMode}
    assert without_record.isdisjoint(LEDGER_STEPS)


def test_architecture_has_every_step_in_order() -> None:
    rows = re.findall(
        r"^\| (`[a-z_`, ]+`)[^|]* \|[^|]*\|[^|]*\|$", (DOCS / "architecture.md").read_text(), re.MULTILINE
    )
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [step.tag for step in STEPS]


def test_labels_of_metrics_have_every_step_and_cleanup(update_golden: bool) -> None:
    page, kinds = DOCS / "metrics.md", ", ".join(f"`{kind}`" for kind in CLEANUPS)
    before = page.read_text()
    after = re.sub(r"kind of step \(\d+\)", f"kind of step ({len(STEPS)})", before)
    after = re.sub(r"(?m)^\| kind \| .* \|$", f"| kind | {kinds} |", after)
    if update_golden:
        page.write_text(after)
    assert after == page.read_text(), "run pytest tests/model/test_steps.py --update-golden"


def test_manual_says_what_every_pending_cleanup_withholds() -> None:
    section = (DOCS / "operations.md").read_text().partition("## Pending cleanup")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| [^|]+ \| (`[a-z-]+`[^|]*) \| [^|]+ \|$", section, re.MULTILINE)
    assert sorted(re.findall("`([a-z-]+)`", " ".join(cells))) == sorted(CLEANUPS)
