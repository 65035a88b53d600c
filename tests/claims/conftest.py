from tests.fakes.fixtures import h100, logs, node
from tests.fakes.kindnode import site

__all__ = ["h100", "logs", "node", "site"]
