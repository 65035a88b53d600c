from tests.fakes.fixtures import h100, logs, node
from tests.kube.conftest import connect

__all__ = ["connect", "h100", "logs", "node"]
