from tests.fakes.fixtures import h100, logs, node

__all__ = ["h100", "logs", "node"]
