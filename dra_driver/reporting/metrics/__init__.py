"""The metrics of the process.

error_types.py     the value of the label `error_type` for an error
definitions.py     Metrics: what the parts of the plugin count and time when it happens
collectors.py      what each scrape asks of them: devices, health, claims, MIG, MPS, reports
bounded_reads.py   asks the sources at each scrape, in limited time
"""

from dra_driver.reporting.metrics.definitions import Metrics
from dra_driver.reporting.metrics.error_types import reason_of

__all__ = ["Metrics", "reason_of"]
