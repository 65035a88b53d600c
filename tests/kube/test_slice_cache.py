"""The cache of this node's slices: it is never older than our own writes and the watch, and sends a request
only if it would be.
"""

from __future__ import annotations

import threading
import time
from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from dra_driver.errors import ApiUnavailableError
from dra_driver.kube import watch
from dra_driver.kube.slices import SliceCache
from tests.fakes.clock import Clock
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.kube.support import (
    AN_END_OF_EACH_WATCH,
    DRIVER,
    EXPIRED,
    bookmark,
    bump,
    busy,
    make_slice,
)


class Changes:
    """Counts `on_change` and lets a test wait for the next."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def changes():
    return Changes()


@pytest.fixture
def api(server, connect):
    return connect(server)


@pytest.fixture
def cache(api, changes):
    cache = SliceCache(api, DRIVER, "n", changes, backoff_s=(0.01, 0.05))
    cache.start()
    assert cache.synced.wait(PATIENCE_S)
    eventually(lambda: changes.count == 1)
    yield cache
    cache.stop()


def foreign(server, connect):
    """Another writer of the same slices."""
    return SliceCache(connect(server), DRIVER, "n")


def settle(changes):
    """Wait until nothing more is reported; bookmarks come every 0.1 s."""
    count = -1
    while count != changes.count:
        count = changes.count
        time.sleep(0.15)


def test_first_list_is_reported_and_shown(server, api, changes):
    cache = SliceCache(api, DRIVER, "n", changes)
    stored = cache.create(make_slice("n"))
    cache.start()
    assert cache.synced.wait(PATIENCE_S)
    lists = _lists(server)
    assert (cache.current(), cache.count) == ([stored], 1)
    assert _lists(server) == lists, "it is not asked for twice"
    eventually(lambda: changes.count == 1)
    cache.stop()


def test_own_writes_are_seen_at_once(server, cache):
    one = cache.create(make_slice("n", index=0))
    two = cache.create(make_slice("n", index=1))
    assert cache.current() == [one, two]
    one = cache.update(bump(one))
    assert cache.current() == [one, two]
    cache.delete(two["metadata"]["name"], two["metadata"]["uid"], two["metadata"]["resourceVersion"])
    assert cache.current() == [one]


def test_own_writes_come_to_rest(server, api):
    """Each echo signals a change; the publisher then writes nothing, and lists signal nothing."""
    looks = []
    cache = SliceCache(api, DRIVER, "n", lambda: looks.append(cache.current()))
    cache.start()
    assert cache.synced.wait(PATIENCE_S)
    lists = _lists(server)
    stored = cache.create(make_slice("n"))
    cache.update(bump(stored))
    eventually(lambda: len(looks) == 3)
    assert cache._changes == 4
    cache.current()
    assert _lists(server) <= lists + 5, "one for each write, for each echo and for the last look"
    requests = len(server.requests)
    time.sleep(0.25)
    assert len(server.requests) == requests
    cache.stop()


def test_a_write_whose_answer_is_lost_is_seen(server, api, monkeypatch):
    """Even before the watch reports it, and by a cache without a watch."""
    cache, real = SliceCache(api, DRIVER, "n"), api.call
    stored = cache.create(make_slice("n"))
    assert cache.current() == [stored]

    def cut(method, *args, **more):
        answer = real(method, *args, **more)
        if method == "PUT":
            raise ApiUnavailableError("the connection broke")
        return answer

    monkeypatch.setattr(api, "call", cut)
    with pytest.raises(ApiUnavailableError):
        cache.update(bump(stored))
    assert cache.current() == server.objects("resourceslices") != [stored]


def test_foreign_changes_are_reported(server, cache, changes, connect):
    other = foreign(server, connect)
    stored = other.create(make_slice("n"))
    eventually(lambda: changes.count == 2)
    assert cache.current() == [stored]
    stored = other.update(bump(stored))
    eventually(lambda: changes.count == 3)
    assert cache.current() == [stored]
    other.delete(stored["metadata"]["name"], stored["metadata"]["uid"])
    eventually(lambda: changes.count == 4)
    assert cache.current() == []


def test_foreign_delete_that_overtakes_the_answer_to_a_write_is_not_forgotten(
    server, cache, changes, connect, api, monkeypatch
):
    """A kubelet that starts wipes the slices that are just being written: its event may come first."""
    other, real = foreign(server, connect), api.call

    def overtaken(method, *args, **more):
        answer = real(method, *args, **more)
        if method == "POST":
            other.delete(answer["metadata"]["name"], answer["metadata"]["uid"])
            settle(changes)
            cache.current()
        return answer

    monkeypatch.setattr(api, "call", overtaken)
    cache.create(make_slice("n"))
    assert cache.current() == []


def test_a_change_while_a_list_is_on_its_way_makes_it_old(server, cache, connect, monkeypatch):
    """Both of the watch and of our own writes, from whatever thread the list comes."""
    other, real = foreign(server, connect), cache.list
    stored = []

    def slow():
        answer = real()
        if not stored:
            stored.append(other.create(make_slice("n")))
            eventually(lambda: cache._changes > changes_before)
        return answer

    cache._mark_stale()
    changes_before = cache._changes
    monkeypatch.setattr(cache, "list", slow)
    assert cache.current() == []
    assert cache.current() == stored


def test_an_earlier_list_that_arrives_later_is_not_taken(api, changes, monkeypatch):
    cache, lists = SliceCache(api, DRIVER, "n", changes), []
    real = cache.list

    def overtaken():
        answer = real()
        if not lists:
            lists.append(answer)
            cache.create(make_slice("n"))
            assert len(cache.current()) == 1
        return answer

    monkeypatch.setattr(cache, "list", overtaken)
    assert len(cache.current()) == 1


def test_cache_lists_again_when_history_is_forgotten(server, cache, changes, connect):
    foreign(server, connect).create(make_slice("n"))
    eventually(lambda: changes.count == 2)
    lists = _lists(server)
    server.store.forget()
    eventually(lambda: _lists(server) > lists)
    stored = foreign(server, connect).create(make_slice("n", index=1))
    eventually(lambda: stored in cache.current())


def turns(cache, seconds):
    """Return the pauses of a cache whose watches end at once, up to this many seconds."""
    waits = []
    while sum(waits) < seconds:
        waits.append(cache._turn())
    return waits


@pytest.mark.parametrize("end", AN_END_OF_EACH_WATCH.values(), ids=AN_END_OF_EACH_WATCH)
def test_lists_and_watches_become_rare_when_each_watch_ends_at_once(server, api, changes, end):
    SliceCache(api, DRIVER, "n").create(make_slice("n"))
    end(server.faults)
    before = len(server.requests)
    one, other = (turns(SliceCache(api, DRIVER, "n", changes), 600) for _ in range(2))
    for waits in (one, other):
        steps = chain([1.6, 3.2, 6.4, 12.8, 25.6], repeat(30.0))
        assert all(step / 2 <= wait <= step for wait, step in zip(waits, steps, strict=False))
    assert one != other
    assert len(server.requests) - before <= 2 * (len(one) + len(other)), "a list and a watch before each wait"


@pytest.mark.parametrize(("code", "asked_s", "least_s"), [(429, 40, 40), (503, 40, 40), (429, 10**9, 300)])
def test_next_watch_waits_as_long_as_asked_when_an_event_says_so(
    server, api, changes, code, asked_s, least_s
):
    server.faults.end_watches(bookmark("1000000"), busy(code, asked_s))
    waits = turns(SliceCache(api, DRIVER, "n", changes), 3600)
    assert all(least_s <= wait <= 1.2 * least_s for wait in waits)
    assert len(set(waits)) == len(waits)
    assert (_lists(server), _watches(server)) == (1, len(waits))


@pytest.mark.parametrize("end", ["cut", "expired"])
def test_wait_is_the_first_again_when_a_watch_has_lived(server, api, changes, monkeypatch, end):
    clock = Clock()
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=clock))
    cache = SliceCache(api, DRIVER, "n", changes, backoff_s=(0.02, 0.08))
    server.faults.end_watches()
    assert [cache._turn() for _ in range(5)][4] >= 0.04, "the longest"
    server.faults.clear()

    def live() -> None:
        eventually(lambda: cache._stream)
        clock.pause(1.0)  # longer than the longest wait
        (server.faults.cut_watches if end == "cut" else server.store.forget)()

    living = threading.Thread(target=live)
    living.start()
    assert 0.01 <= cache._turn() <= 0.02
    living.join()
    assert (cache._version == "") == (end == "expired"), "it lists again"


def test_cache_sees_what_happened_while_server_was_away_and_forgot(server, cache, changes):
    stored = cache.create(make_slice("n"))
    assert cache.current() == [stored]
    settle(changes)
    count = changes.count
    server.stop()
    server.operations.delete(server.resource("resourceslices"), ("", stored["metadata"]["name"]), {})
    server.store.forget()
    server.start()
    eventually(lambda: changes.count > count)
    assert cache.current() == []


def set_back(server, version, objects):
    """An etcd restored from a snapshot: old objects, old versions, no history."""
    store, resource = server.store, server.resource("resourceslices")
    store._objects[resource] = {("", obj["metadata"]["name"]): obj for obj in objects}
    store._history.clear()
    store._version = store._forgotten = version


def test_cache_takes_the_server_s_word_when_its_history_was_set_back(server, cache, changes, connect):
    kept = cache.create(make_slice("n", index=0))
    deleted = cache.create(make_slice("n", index=1))
    then = server.store.version
    cache.update(bump(kept))
    cache.delete(deleted["metadata"]["name"], deleted["metadata"]["uid"])
    void = cache.create(make_slice("n", index=2))
    assert void in cache.current()
    settle(changes)
    count = changes.count
    server.stop()
    set_back(server, then, [kept, deleted])
    time.sleep(0.2)  # searched in vain during this time
    server.start()
    eventually(lambda: changes.count > count)
    assert cache.current() == [kept, deleted]
    newer = foreign(server, connect).update(bump(kept))
    eventually(lambda: cache.current() == [newer, deleted])


def test_cache_lists_again_when_an_event_comes_from_an_earlier_version(server, cache, changes):
    stored = cache.create(make_slice("n"))
    lists, count = _lists(server), changes.count
    server.faults.end_watches(bookmark("1"))
    server.faults.cut_watches()
    eventually(lambda: _lists(server) > lists and changes.count > count)
    server.faults.clear()
    assert cache.current() == [stored]


def test_cache_survives_a_refusal(server, cache, changes, connect):
    server.faults.fail(3, 403, reason="Forbidden", path="resourceslices")
    server.faults.cut_watches()
    eventually(lambda: changes.count == 2)
    stored = foreign(server, connect).create(make_slice("n"))
    eventually(lambda: changes.count == 3)
    assert cache.current() == [stored]


def test_cache_survives_a_callback_that_raises(api, server, connect):
    reported = []

    def explode() -> None:
        reported.append(True)
        raise RuntimeError("bug in a listener")

    cache = SliceCache(api, DRIVER, "n", explode, backoff_s=(0.01, 0.02))
    cache.start()
    assert cache.synced.wait(PATIENCE_S)
    stored = foreign(server, connect).create(make_slice("n"))
    eventually(lambda: len(reported) >= 2)
    eventually(lambda: cache.current() == [stored])
    cache.stop()


def test_cache_starts_when_server_comes_later(server, api, changes):
    server.stop()
    cache = SliceCache(api, DRIVER, "n", changes, backoff_s=(0.01, 0.05))
    cache.start()
    assert not cache.synced.wait(0.05)
    server.start()
    assert cache.synced.wait(PATIENCE_S)
    cache.stop()


@pytest.mark.parametrize("state", ["watching", "backing-off", "expired", "never-started"])
def test_stop_is_prompt_and_leaves_no_thread(server, api, changes, state):
    if state == "backing-off":
        server.stop()
    if state == "expired":
        server.faults.end_watches(EXPIRED)
    cache = SliceCache(api, DRIVER, "n", changes, backoff_s=(600, 600))
    if state != "never-started":
        cache.start()
        eventually(lambda: cache.synced.is_set() or state == "backing-off")
    start = time.monotonic()
    cache.stop()
    cache.stop()
    assert time.monotonic() - start < PATIENCE_S
    assert [t.name for t in threading.enumerate() if t.name == "slice-cache"] == []


def _lists(server):
    return sum("watch" not in query for query in _queries(server))


def _watches(server):
    return sum("watch" in query for query in _queries(server))


def _queries(server):
    return [r.query for r in server.requests if r.method == "GET" and r.path.endswith("/resourceslices")]
