"""The metrics of the process.

reasons.py    the value of the label `error_type` for an error
counts.py     Metrics: what the parts of the driver count and time when it happens
views.py      what each scrape asks of them: devices, health, claims, MIG, MPS, reports
readings.py   asks the sources at each scrape, in limited time
calls.py      the kubelet's calls in flight
"""

from dra_driver.observability.metrics.calls_in_flight import CountedCalls
from dra_driver.observability.metrics.definitions import Metrics
from dra_driver.observability.metrics.error_types import reason_of

__all__ = ["CountedCalls", "Metrics", "reason_of"]
