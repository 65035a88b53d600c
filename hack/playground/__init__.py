"""A node without Kubernetes and without GPUs, for demos, measurements and tests."""

PATIENCE_S = 120.0
"""How long to wait for what must come: a limit for hangs, on slow machines too."""
