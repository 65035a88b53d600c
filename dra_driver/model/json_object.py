"""Objects of JSON, as the API server, files and people have them."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
