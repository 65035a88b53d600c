"""The one error this program reports to a person."""

from __future__ import annotations


class ClusterError(Exception):
    """Something a person has to know, in one sentence that says what to do."""
