"""The steps of a Prepare, each with an undo that may run any number of times.

A step is data: it names what to do and everything that its undo needs, so that a record of the steps is
enough to take a claim back without API server, inventory or NVML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StepKind = Literal["write_cdi_spec"]


@dataclass(frozen=True, slots=True)
class WriteCdiSpec:
    """Write the claim's CDI spec file. Undo: remove it."""

    kind: StepKind = "write_cdi_spec"


Step = WriteCdiSpec
