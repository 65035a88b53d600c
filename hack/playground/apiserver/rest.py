"""Handles parsed requests, apart from watches and discovery."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from playground.apiserver.apply import APPLY_TYPE, applied_status, check_manager, merge_patch
from playground.apiserver.failure import ApiFailure, Cause, bad_request, invalid, not_found
from playground.apiserver.operations import Operations
from playground.apiserver.resources import Resource, Route
from playground.apiserver.store import Key, Object, copy_json, selector
from playground.apiserver.tables import ACCEPTED, table

_PATCH_TYPES = ("application/merge-patch+json", "application/strategic-merge-patch+json")


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request. `body` contains the raw bytes."""

    method: str
    route: Route
    query: Mapping[str, str]
    body: bytes
    content_type: str
    accept: str = ""


class Rest:
    """Handles all requests except watches and discovery."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def handle(self, call: Call) -> tuple[int, dict[str, Any]]:
        """Return the HTTP code and the JSON document of the response. Raises: ApiFailure."""
        named = call.route.name is not None
        match call.method:
            case "GET" if named:
                shown = call.route.shown(self._existing(call.route))
                is_table = ACCEPTED in call.accept and call.route.subresource is None
                return 200, table([shown], {}) if is_table else shown
            case "GET":
                return 200, self._list(call)
            case "POST" if not named:
                return 201, self._create(call)
            case "PUT" if named:
                return 200, self._update(call, _decoded(call))
            case "PATCH" if named:
                return 200, self._patch(call)
            case "DELETE" if named and call.route.subresource is None:
                return 200, self._delete(call)
        text = "the server does not allow this method on the requested resource"
        raise ApiFailure(405, "MethodNotAllowed", text, details={})

    def _existing(self, route: Route) -> Object:
        found = self._operations.store.get(route.resource, _key(route))
        if found is None:
            raise not_found(route.resource.group, route.resource.plural, str(route.name))
        return found

    def _list(self, call: Call) -> dict[str, Any]:
        route = call.route
        selected = selector(route.resource, call.query, route.namespace)
        items, version = self._operations.store.select(route.resource, selected)
        page = _page(_list_document(route, items, version), call.query)
        if ACCEPTED in call.accept:
            named = [{"kind": route.resource.kind, **item} for item in page["items"]]
            return table(named, page["metadata"])
        return page

    def _create(self, call: Call) -> dict[str, Any]:
        is_dry_run = _is_dry_run(call, "CreateOptions")
        stored = self._operations.create(
            call.route.resource, call.route.namespace, _decoded(call), dry_run=is_dry_run
        )
        return call.route.shown(stored)

    def _update(self, call: Call, obj: Object) -> dict[str, Any]:
        route = call.route
        stored = self._operations.update(
            route.resource,
            _key(route),
            obj,
            status=route.subresource == "status",
            dry_run=_is_dry_run(call, "UpdateOptions"),
        )
        return route.shown(stored)

    def _patch(self, call: Call) -> dict[str, Any]:
        if call.content_type == APPLY_TYPE and _is_claim_status(call.route):
            return self._apply(call)
        if call.content_type == APPLY_TYPE and call.route.subresource is None:
            return self._apply_whole(call)
        if call.content_type not in _PATCH_TYPES:
            text = f"the body of the request was in an unknown format - accepted: {', '.join(_PATCH_TYPES)}"
            raise ApiFailure(415, "UnsupportedMediaType", text)
        route, patch = call.route, _json(call.body)
        with self._operations.store.changed:
            current = route.shown(self._existing(route))
            patched = merge_patch(current, patch)
            if not (patch.get("metadata") or {}).get("resourceVersion"):
                # Create a new dict: if the patch has no metadata, this dict belongs to the stored object.
                metadata = {k: v for k, v in patched["metadata"].items() if k != "resourceVersion"}
                patched["metadata"] = metadata
            return self._update(call, _stored(route, patched))

    def _apply(self, call: Call) -> dict[str, Any]:
        route, patch = call.route, _decoded(call)
        with self._operations.store.changed:
            applied = applied_status(
                route.resource,
                self._existing(route),
                patch,
                manager=call.query.get("fieldManager", ""),
                force=call.query.get("force") == "true",
            )
            applied["metadata"].pop("resourceVersion", None)
            return self._update(call, applied)

    def _apply_whole(self, call: Call) -> dict[str, Any]:
        """Apply as if there were only one manager: merge the patch into the object, and replace lists."""
        route, patch = call.route, _decoded(call)
        check_manager(call.query.get("fieldManager", ""))
        with self._operations.store.changed:
            existing = self._operations.store.get(route.resource, _key(route))
            if existing is None:
                return self._create(call)
            applied = merge_patch(copy_json(existing), patch)
            applied["metadata"].pop("resourceVersion", None)
            return self._update(call, applied)

    def _delete(self, call: Call) -> dict[str, Any]:
        route = call.route
        options = _json(call.body) if call.body else {}
        gone = self._operations.delete(
            route.resource,
            _key(route),
            options.get("preconditions") or {},
            dry_run=_is_dry_run(call, "DeleteOptions", options),
        )
        return _deleted(route.resource, gone)


def _list_document(route: Route, items: list[Object], version: int) -> dict[str, Any]:
    """Return the document of a list. As in the real API server, its items have no `kind` and `apiVersion`."""
    shown = [route.shown(item) for item in items]
    for item in shown:
        item.pop("kind"), item.pop("apiVersion")
    return {
        "kind": f"{route.resource.kind}List",
        "apiVersion": route.api_version,
        "metadata": {"resourceVersion": str(version)},
        "items": shown,
    }


def _page(document: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of a list for `limit` and `continue`.

    `continue` fails after any change in the store, because clients must handle that; in a real API server, it fails
    only if the old version of the list is no longer available.
    """
    items, metadata = document["items"], document["metadata"]
    version, start = metadata["resourceVersion"], 0
    if query.get("continue"):
        begun, _, offset = query["continue"].partition("/")
        if begun != version:
            text = "The provided continue parameter is too old to display a consistent list result"
            raise ApiFailure(410, "Expired", text, details={})
        start = int(offset)
    limit = int(query.get("limit") or 0) or len(items)
    rest = len(items) - start - limit
    if rest > 0:
        metadata = {**metadata, "continue": f"{version}/{start + limit}", "remainingItemCount": rest}
    return {**document, "metadata": metadata, "items": items[start : start + limit]}


def _deleted(resource: Resource, obj: Object) -> dict[str, Any]:
    details = {"name": obj["metadata"]["name"], "kind": resource.plural, "uid": obj["metadata"]["uid"]}
    if resource.group:
        details["group"] = resource.group
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def _is_claim_status(route: Route) -> bool:
    return route.resource.kind == "ResourceClaim" and route.subresource == "status"


def _is_dry_run(call: Call, kind: str, options: Mapping[str, Any] | None = None) -> bool:
    """Whether the query, or the body of a deletion, requests a dry run. Raises: ApiFailure 422."""
    asked = [call.query["dryRun"]] if "dryRun" in call.query else (options or {}).get("dryRun") or []
    for value in asked:
        if value != "All":
            fault = Cause("dryRun", f'Unsupported value: "{value}": supported values: "All"')
            raise invalid("meta.k8s.io", kind, "", [fault])
    return bool(asked)


def _decoded(call: Call) -> Object:
    route, obj = call.route, _json(call.body)
    wanted = route.api_version
    if obj.get("apiVersion", wanted) != wanted or obj.get("kind", route.resource.kind) != route.resource.kind:
        sent = f"{obj.get('kind')} in version {obj.get('apiVersion')}"
        raise bad_request(f"{sent} cannot be handled as a {route.resource.kind} in version {wanted}")
    return _stored(route, obj)


def _stored(route: Route, obj: Object) -> Object:
    """Return a copy in stored form, which is that of version v1."""
    return copy_json(replace(route, version="v1").shown(obj))


def _json(body: bytes) -> dict[str, Any]:
    try:
        decoded = json.loads(body)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise bad_request("the body must be a JSON object")
    return decoded


def _key(route: Route) -> Key:
    return route.namespace or "", str(route.name)
