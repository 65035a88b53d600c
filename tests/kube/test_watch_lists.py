"""A watch that begins with a list, as kubectl's does since 1.36: without its bookmark `kubectl wait` waits for ever."""

from __future__ import annotations

from tests.kube.support import make_slice

_QUERY = {
    "watch": "true",
    "sendInitialEvents": "true",
    "resourceVersionMatch": "NotOlderThan",
    "allowWatchBookmarks": "true",
    "timeoutSeconds": "20",
}


def test_a_bookmark_tells_where_the_list_ends(target):
    stored = target.slices().create(make_slice(target.node))
    query = _QUERY | {"fieldSelector": f"spec.nodeName={target.node}"}
    stream = target.api.watch("resourceslices", action="watch slices", query=query, idle_timeout_s=20)
    try:
        events = iter(stream)
        first, end = next(events), next(events)
    finally:
        stream.close()
    assert (first["type"], first["object"]["metadata"]["name"]) == ("ADDED", stored["metadata"]["name"])
    assert end["type"] == "BOOKMARK"
    assert end["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
