"""Every kind of claim meets every failure of what a step needs, in Prepare, in Unprepare, and with a restart between.

Unprepare succeeds under each, other claims feel nothing, and when the failure is over nothing is left.
docs/conformance.md has the table.
"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/conformance.md"
SLICED = {"several requests", "time-slicing", "metadata"}
SERVED = {"MPS settings", "MPS over several GPUs", "share", "share beside another"}
SERVED |= {"MIG on demand with MPS and metadata"}
