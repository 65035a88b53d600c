"""The cache of this node's slices: own writes are silent, everything else is told once, nothing is missed."""

from __future__ import annotations

import threading
import time
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playground.apiserver import PlaygroundApiServer

from dra_driver.kube.slice_cache import SliceCache
from dra_driver.kube.slice_store import SliceStore
from dra_driver.kube.slices import SliceClient
from dra_driver.kube.versions import ResourceApi
from tests.kube.support import (
    AN_END_OF_EACH_WATCH,
    DRIVER,
    EXPIRED,
    Patience,
    bookmark,
    bump,
    busy,
    make_slice,
    wait_until,
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
def client(server, connect):
    return SliceClient(ResourceApi(connect(server)), DRIVER, "n")


@pytest.fixture
def cache(client, changes):
    cache = SliceCache(client, changes, backoff_s=(0.01, 0.05))
    cache.start()
    assert cache.synced.wait(20)
    wait_until(lambda: changes.count == 1)
    yield cache
    cache.stop()


def foreign(server, connect):
    """Another writer of the same slices."""
    return SliceClient(ResourceApi(connect(server)), DRIVER, "n")


def settle(server, cache):
    """Give every echo time to arrive: bookmarks come each 0.1 s."""
    seen = server.store.version
    time.sleep(0.15)
    assert server.store.version == seen
    assert cache.healthy


def test_first_list_is_told_and_shown(server, client, changes):
    stored = client.create(make_slice("n"))
    cache = SliceCache(client, changes)
    cache.start()
    assert cache.synced.wait(20)
    assert cache.snapshot() == [stored]
    wait_until(lambda: changes.count == 1)
    cache.stop()


def test_own_writes_are_visible_and_silent(server, cache, changes):
    one = cache.create(make_slice("n", index=0))
    two = cache.create(make_slice("n", index=1))
    assert cache.snapshot() == [one, two]
    one = cache.update(bump(one))
    assert cache.snapshot() == [one, two]
    cache.delete(two["metadata"]["name"], two["metadata"]["uid"], two["metadata"]["resourceVersion"])
    assert cache.snapshot() == [one]
    settle(server, cache)
    assert cache.snapshot() == [one]
    assert changes.count == 1


def test_own_writes_stay_silent_when_echo_overtakes_answer(server, cache, changes, client, monkeypatch):
    def late(write):
        def slow(*args):
            result = write(*args)
            time.sleep(0.05)
            return result

        return slow

    for name in ("create", "update", "delete"):
        monkeypatch.setattr(client, name, late(getattr(client, name)))
    stored = cache.create(make_slice("n"))
    stored = cache.update(bump(stored))
    assert cache.snapshot() == [stored]
    cache.delete(stored["metadata"]["name"], stored["metadata"]["uid"])
    settle(server, cache)
    assert cache.snapshot() == []
    assert changes.count == 1


def test_foreign_changes_are_told(server, cache, changes, connect):
    other = foreign(server, connect)
    stored = other.create(make_slice("n"))
    wait_until(lambda: changes.count == 2)
    assert cache.snapshot() == [stored]
    stored = other.update(bump(stored))
    wait_until(lambda: changes.count == 3)
    assert cache.snapshot() == [stored]
    other.delete(stored["metadata"]["name"], stored["metadata"]["uid"])
    wait_until(lambda: changes.count == 4)
    assert cache.snapshot() == []


def test_foreign_delete_of_a_fresh_slice_is_told(server, cache, changes, connect):
    stored = cache.create(make_slice("n"))
    foreign(server, connect).delete(stored["metadata"]["name"], stored["metadata"]["uid"])
    wait_until(lambda: changes.count == 2)
    assert cache.snapshot() == []


def test_foreign_change_during_own_write_is_told_after_it(
    server, cache, changes, connect, client, monkeypatch
):
    other, real = foreign(server, connect), client.create
    seen = []

    def create(obj):
        other.create(make_slice("n", index=7))
        time.sleep(0.05)
        seen.append(changes.count)
        return real(obj)

    monkeypatch.setattr(client, "create", create)
    cache.create(make_slice("n"))
    wait_until(lambda: changes.count == 2)
    assert seen == [1]
    assert len(cache.snapshot()) == 2


@pytest.mark.parametrize("write", ["create", "update"])
def test_foreign_delete_that_overtakes_the_answer_to_a_write_is_not_forgotten(
    server, cache, changes, connect, client, monkeypatch, write
):
    """A kubelet that starts wipes the slices that are just being written: its event may come first."""
    stored = cache.create(make_slice("n")) if write == "update" else None
    other, real, seen = foreign(server, connect), getattr(client, write), []

    def overtaken(obj):
        answer = real(obj)
        other.delete(answer["metadata"]["name"], answer["metadata"]["uid"])
        settle(server, cache)
        seen.append(changes.count)
        return answer

    monkeypatch.setattr(client, write, overtaken)
    getattr(cache, write)(bump(stored) if stored else make_slice("n"))
    wait_until(lambda: changes.count == 2)
    assert cache.snapshot() == []
    assert seen == [1]


def test_foreign_delete_that_only_a_list_shows_during_a_write_is_told(client, changes, monkeypatch):
    cache, real = SliceCache(client, changes), client.create

    def listed_meanwhile(obj):
        answer = real(obj)
        client.delete(answer["metadata"]["name"], answer["metadata"]["uid"])
        cache._relist()
        return answer

    monkeypatch.setattr(client, "create", listed_meanwhile)
    cache.create(make_slice("n"))
    assert changes.count == 2, "the first list, and what it showed"
    assert cache.snapshot() == []


def test_what_we_deleted_and_a_later_list_shows_is_there_again(client, changes, monkeypatch):
    cache = SliceCache(client, changes)
    stored = cache.create(make_slice("n"))
    cache.delete(stored["metadata"]["name"], stored["metadata"]["uid"])
    assert cache.snapshot() == []
    monkeypatch.setattr(client, "list", lambda: ([stored], str(cache._store.newest + 100)))
    cache._relist()
    assert cache.snapshot() == [stored]


def test_wipe_is_told_within_a_second(server, cache, changes):
    for index in range(3):
        cache.create(make_slice("n", index=index))
    for item in server.objects("resourceslices"):
        server.operations.delete(server.resource("resourceslices"), ("", item["metadata"]["name"]), {})
    wait_until(lambda: cache.snapshot() == [], 1)
    assert changes.count >= 2


def test_cache_lists_again_when_history_is_forgotten(server, cache, changes, connect):
    foreign(server, connect).create(make_slice("n"))
    wait_until(lambda: changes.count == 2)
    lists = _lists(server)
    server.store.forget()
    wait_until(lambda: _lists(server) > lists)
    stored = foreign(server, connect).create(make_slice("n", index=1))
    wait_until(lambda: stored in cache.snapshot())
    assert changes.count == 3, "the list brought nothing new"


@pytest.mark.parametrize("end", AN_END_OF_EACH_WATCH.values(), ids=AN_END_OF_EACH_WATCH)
def test_lists_and_watches_become_rare_when_each_watch_ends_at_once(server, client, changes, end):
    client.create(make_slice("n"))
    end(server.faults)
    before = len(server.requests)
    caches, patience = [SliceCache(client, changes) for _ in range(2)], [Patience(600) for _ in range(2)]
    for cache, stop in zip(caches, patience, strict=True):
        cache._stop = stop
        cache._run()
    one, other = (stop.waits for stop in patience)
    for waits in (one, other):
        assert sum(waits) >= 600, "ended by the waits"
        steps = chain([1.6, 3.2, 6.4, 12.8, 25.6], repeat(30.0))
        assert all(step / 2 <= wait <= step for wait, step in zip(waits, steps, strict=False))
    assert one != other
    assert len(server.requests) - before <= 2 * (len(one) + len(other)), "a list and a watch before each wait"


@pytest.mark.parametrize(("code", "asked_s", "least_s"), [(429, 40, 40), (503, 40, 40), (429, 10**9, 300)])
def test_next_watch_waits_as_long_as_asked_when_an_event_says_so(
    server, client, changes, code, asked_s, least_s
):
    server.faults.end_watches(bookmark("1000000"), busy(code, asked_s))
    cache = SliceCache(client, changes)
    cache._stop = stop = Patience(3600)
    cache._run()
    assert sum(stop.waits) >= 3600, "ended by the waits"
    assert all(least_s <= wait <= 1.2 * least_s for wait in stop.waits)
    assert len(set(stop.waits)) == len(stop.waits)
    assert (_lists(server), _watches(server)) == (1, len(stop.waits))


class Waits(threading.Event):
    """An event that remembers for how long it was waited for."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def wait(self, timeout=None):
        self.seconds.append(timeout)
        return super().wait(timeout)


@pytest.mark.parametrize("end", ["cut", "expired"])
def test_wait_is_the_first_again_when_a_watch_has_lived(connect, changes, request, end):
    with PlaygroundApiServer() as server:
        client = SliceClient(ResourceApi(connect(server)), DRIVER, "n")
        cache = SliceCache(client, changes, backoff_s=(0.02, 0.08))
        cache._stop = waits = Waits()
        server.faults.end_watches()
        request.addfinalizer(cache.stop)
        cache.start()
        wait_until(lambda: len(waits.seconds) >= 5)
        assert waits.seconds[4] >= 0.04, "the longest"
        server.faults.clear()

        def has_lived():
            stream = cache._stream
            time.sleep(0.1)  # longer than the longest wait
            return stream is not None and cache._stream is stream

        wait_until(has_lived)
        lists, watches, before = _lists(server), _watches(server), len(waits.seconds)
        if end == "cut":
            server.faults.cut_watches()
        else:
            server.store.forget()
        wait_until(lambda: _watches(server) > watches)
        assert 0.01 <= waits.seconds[before] <= 0.02
        assert _lists(server) == lists + (end == "expired")


def test_cache_resumes_without_list_when_watch_is_cut(server, cache, changes, connect):
    lists = _lists(server)
    server.faults.cut_watches()
    stored = foreign(server, connect).create(make_slice("n"))
    wait_until(lambda: cache.snapshot() == [stored])
    assert _lists(server) == lists
    wait_until(lambda: cache.healthy)


def test_cache_recovers_when_server_restarts(server, cache, changes, connect):
    server.stop()
    wait_until(lambda: not cache.healthy)
    server.start()
    wait_until(lambda: cache.healthy)
    stored = foreign(server, connect).create(make_slice("n"))
    wait_until(lambda: cache.snapshot() == [stored])


def test_cache_sees_what_happened_while_server_was_away_and_forgot(server, cache, changes):
    stored = cache.create(make_slice("n"))
    server.stop()
    server.operations.delete(server.resource("resourceslices"), ("", stored["metadata"]["name"]), {})
    server.store.forget()
    server.start()
    wait_until(lambda: cache.snapshot() == [])
    wait_until(lambda: changes.count == 2)


def set_back(server, version, objects):
    """What an etcd restored from a snapshot looks like: old objects, old versions, no history."""
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
    assert void in cache.snapshot()
    count = changes.count
    server.stop()
    wait_until(lambda: not cache.healthy)
    set_back(server, then, [kept, deleted])
    time.sleep(0.2)  # it is looked for in vain meanwhile
    server.start()
    wait_until(lambda: cache.snapshot() == [kept, deleted])
    assert changes.count == count + 1
    newer = foreign(server, connect).update(bump(kept))
    wait_until(lambda: cache.snapshot() == [newer, deleted])


def test_cache_lists_again_when_an_event_comes_from_an_earlier_version(server, cache):
    stored = cache.create(make_slice("n"))
    lists = _lists(server)
    server.faults.end_watches(bookmark("1"))
    server.faults.cut_watches()
    wait_until(lambda: _lists(server) > lists)
    server.faults.clear()
    wait_until(lambda: cache.healthy)
    assert cache.snapshot() == [stored]


def test_cache_survives_a_refusal(server, cache, connect):
    server.faults.fail(3, 403, reason="Forbidden", path="resourceslices")
    server.faults.cut_watches()
    wait_until(lambda: not cache.healthy)
    wait_until(lambda: cache.healthy)
    stored = foreign(server, connect).create(make_slice("n"))
    wait_until(lambda: cache.snapshot() == [stored])


def test_cache_survives_a_callback_that_raises(client, server, connect):
    def explode() -> None:
        raise RuntimeError("bug in a listener")

    cache = SliceCache(client, explode, backoff_s=(0.01, 0.02))
    cache.start()
    assert cache.synced.wait(20)
    stored = foreign(server, connect).create(make_slice("n"))
    wait_until(lambda: cache.snapshot() == [stored])
    cache.stop()


def test_cache_starts_when_server_comes_later(server, client, changes):
    server.stop()
    cache = SliceCache(client, changes, backoff_s=(0.01, 0.05))
    cache.start()
    assert not cache.synced.wait(0.05)
    assert not cache.healthy
    server.start()
    assert cache.synced.wait(20)
    cache.stop()


@pytest.mark.parametrize("state", ["watching", "backing-off", "expired", "never-started"])
def test_stop_is_prompt_and_leaves_no_thread(server, client, changes, state):
    if state == "backing-off":
        server.stop()
    if state == "expired":
        server.faults.end_watches(EXPIRED)
    cache = SliceCache(client, changes, backoff_s=(60, 60))
    if state != "never-started":
        cache.start()
        wait_until(lambda: cache.synced.is_set() or state == "backing-off")
    start = time.monotonic()
    cache.stop()
    cache.stop()
    assert time.monotonic() - start < 5
    assert not cache.healthy
    assert [t.name for t in threading.enumerate() if t.name in ("slice-cache", "watch-stopper")] == []


def test_idle_cache_sends_nothing(server, cache):
    settle(server, cache)
    before = len(server.requests)
    time.sleep(0.25)
    assert len(server.requests) == before


def test_snapshot_is_a_copy(cache):
    cache.create(make_slice("n"))
    cache.snapshot()[0]["spec"].clear()
    assert cache.snapshot()[0]["spec"]["driver"] == DRIVER


def _lists(server):
    return sum("watch" not in query for query in _queries(server))


def _watches(server):
    return sum("watch" in query for query in _queries(server))


def _queries(server):
    return [r.query for r in server.requests if r.method == "GET" and r.path.endswith("/resourceslices")]


def _obj(version, uid="u", name="s"):
    return {"metadata": {"name": name, "uid": uid, "resourceVersion": str(version)}}


@given(st.permutations([1, 2, 3, 4, 5]))
def test_newest_version_wins_in_any_order(versions):
    store = SliceStore()
    for version in versions:
        store.put(_obj(version))
    assert store.objects() == [_obj(5)]


def test_late_event_does_not_revive_a_deleted_slice():
    store = SliceStore()
    store.put(_obj(1))
    store.deleted_by_us("s", "u")
    assert not store.put(_obj(2))
    assert store.objects() == []
    assert not store.remove(_obj(3))
    assert store.put(_obj(4, uid="new"))


def test_deletion_that_comes_before_the_creation_is_remembered_while_writes_are_under_way():
    store = SliceStore()
    assert store.remove(_obj(3))
    assert not store.put(_obj(2))
    assert store.objects() == []
    store.all_answered()
    assert store.put(_obj(4)), "nothing is remembered for ever"


def test_what_a_list_no_longer_shows_is_not_stored():
    store = SliceStore()
    store.replace([], "7")
    assert not store.put(_obj(6))
    assert store.put(_obj(8))


def test_own_write_outlives_an_older_list():
    store = SliceStore()
    store.put(_obj(9, uid="a", name="fresh"))
    store.put(_obj(5, uid="b", name="gone"))
    assert store.replace([_obj(3, uid="c", name="listed")], "7")
    assert [obj["metadata"]["name"] for obj in store.objects()] == ["fresh", "listed"]
    assert not store.replace([_obj(3, uid="c", name="listed"), _obj(9, uid="a", name="fresh")], "9")


def test_deletion_of_an_earlier_object_is_ignored():
    store = SliceStore()
    store.put(_obj(5, uid="new"))
    assert not store.remove(_obj(6, uid="old"))
    assert store.objects() == [_obj(5, uid="new")]


def test_list_from_before_what_was_known_is_taken_as_it_is():
    store = SliceStore()
    store.put(_obj(90, uid="a", name="rolled-back"))
    store.put(_obj(91, uid="b", name="void"))
    store.put(_obj(92, uid="c", name="deleted"))
    store.deleted_by_us("deleted", "c")
    known = store.newest
    listed = [_obj(40, uid="c", name="deleted"), _obj(50, uid="a", name="rolled-back")]
    assert store.replace(listed, "60", known)
    assert store.objects() == listed
    assert store.newest == 60
    assert store.put(_obj(61, uid="a", name="rolled-back")), "versions count from the list on"
    assert store.put(_obj(62, uid="c", name="deleted"))


def test_list_that_shows_an_older_version_of_what_it_should_have_is_believed():
    """The store was set back and wrote so much since that its version is not below what was known."""
    store = SliceStore()
    store.put(_obj(8, uid="a", name="rolled-back"))
    store.put(_obj(9, uid="b", name="void"))
    assert store.replace([_obj(4, uid="a", name="rolled-back")], "9", store.newest)
    assert store.objects() == [_obj(4, uid="a", name="rolled-back")]


def test_what_we_deleted_before_the_list_and_it_shows_is_there():
    store = SliceStore()
    for version, uid in enumerate(("before", "during"), 1):
        store.put(_obj(version, uid=uid, name=uid))
    store.deleted_by_us("before", "before")
    known = store.gone
    store.deleted_by_us("during", "during")
    store.replace([_obj(1, uid="before", name="before"), _obj(2, uid="during", name="during")], "7", 2, known)
    assert store.objects() == [_obj(1, uid="before", name="before")]
    assert not store.put(_obj(6, uid="during", name="during"))
    assert store.put(_obj(8, uid="before", name="before"))


def test_own_write_during_a_list_outlives_it():
    store = SliceStore()
    store.put(_obj(5, uid="b", name="gone"))
    known = store.newest
    store.put(_obj(9, uid="a", name="fresh"))
    store.replace([], "7", known)
    assert [obj["metadata"]["name"] for obj in store.objects()] == ["fresh"]
    assert store.newest == 9


@pytest.mark.parametrize("apply", ["put", "remove"])
def test_every_event_counts_for_the_newest_version(apply):
    store = SliceStore()
    getattr(store, apply)(_obj(8))
    store.put(_obj(3, name="older"))
    assert store.newest == 8
