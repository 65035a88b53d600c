from tests.fakes.fixtures import h100, logs, machine, node

__all__ = ["h100", "logs", "machine", "node"]
