"""A small API server in this process, for `gpu-dra-driver demo` and for tests.

Real HTTP on loopback with the semantics that a DRA driver meets: resource versions, watches, conflicts,
validation, dropped fields, several served versions. Objects live in memory only.
"""

from dra_driver.embedded.apiserver.faults import Faults
from dra_driver.embedded.apiserver.resources import Resource
from dra_driver.embedded.apiserver.server import EmbeddedApiServer, Identity, RecordedRequest

__all__ = ["EmbeddedApiServer", "Faults", "Identity", "RecordedRequest", "Resource"]
