"""Compares what the driver finds on a machine with real GPUs with what the machine's own tools show. Read-only."""
