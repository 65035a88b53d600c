"""Compares what the driver makes of a machine with real GPUs with what the machine itself says. Read-only."""
