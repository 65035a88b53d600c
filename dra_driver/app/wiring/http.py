"""The pages of the HTTP endpoint."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from dra_driver.observability.http import HttpEndpoint, Response, problems_page
from dra_driver.observability.probes import Probes
from dra_driver.settings import Settings


def http_endpoint(settings: Settings, registry: CollectorRegistry, probes: Probes) -> HttpEndpoint:
    """Metrics and probes, not started yet. Raises: InvalidConfigError."""

    def metrics() -> Response:
        encode, content_type = choose_encoder("")
        return Response(200, content_type, encode(registry))

    return HttpEndpoint(
        settings.http_endpoint,
        {
            settings.metrics_path: metrics,
            "/healthz": problems_page(probes.liveness),
            "/startupz": problems_page(probes.startup),
            "/readyz": problems_page(probes.readiness, probes.notes),
        },
    )
