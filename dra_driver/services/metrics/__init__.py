"""The metrics of the process.

reasons.py    what the label `error_type` says for an error
counts.py     Metrics: what the parts of the driver count and time as it happens
views.py      what is asked of them at each scrape: devices, health, claims, MIG, MPS, notices
readings.py   the asking, in bounded time
calls.py      the kubelet's calls in flight
"""

from dra_driver.services.metrics.calls import CountedCalls
from dra_driver.services.metrics.counts import Metrics
from dra_driver.services.metrics.reasons import reason_of

__all__ = ["CountedCalls", "Metrics", "reason_of"]
