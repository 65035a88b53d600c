"""The playground's API server: a small API server in this process, for `make demo`, `make playground` and the tests.

It serves real HTTP on loopback with the semantics that matter to a DRA driver: resource versions, watches, conflicts,
validation, dropped fields, several API versions. Objects are stored only in memory.
"""

from playground.apiserver.faults import Faults
from playground.apiserver.resources import Resource
from playground.apiserver.server import PlaygroundApiServer, RecordedRequest, self_signed

__all__ = ["PlaygroundApiServer", "Faults", "RecordedRequest", "Resource", "self_signed"]
