"""The playground's API server: a small one in this process, for `make demo`, `make playground` and the tests.

Real HTTP on loopback with the semantics that a DRA driver meets: resource versions, watches, conflicts,
validation, dropped fields, several served versions. Objects live in memory only.
"""

from playground.apiserver.faults import Faults
from playground.apiserver.resources import Resource
from playground.apiserver.server import PlaygroundApiServer, RecordedRequest, self_signed

__all__ = ["PlaygroundApiServer", "Faults", "RecordedRequest", "Resource", "self_signed"]
