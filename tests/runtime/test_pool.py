"""Objects shared between threads: lent to one thread at a time, bounded in number, and always returned."""

from __future__ import annotations

import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from attnforge.arrays import BFLOAT16
from attnforge.errors import UsageError
from attnforge.runtime.pool import HostOutputs, Pool, Recent


class Thing:
    """An object with a lock, which detects simultaneous use by two threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.uses = 0


def test_no_two_threads_share_an_object_and_the_bound_is_respected() -> None:
    pool = Pool(Thing, 3)

    def use(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(200):
            with pool.borrow() as thing:
                assert thing.lock.acquire(blocking=False)
                thing.uses += 1
                if order.random() < 0.05:
                    time.sleep(0.0005)
                thing.lock.release()

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(use, range(16)))
    assert pool.made == len(pool.items()) == 3
    assert sum(thing.uses for thing in pool.items()) == 16 * 200


def test_a_single_thread_needs_one_object() -> None:
    pool = Pool(Thing, 8)
    for _ in range(5):
        with pool.borrow():
            pass
    assert pool.made == 1


def test_preferred_objects_come_before_new_ones_and_new_ones_before_the_rest() -> None:
    pool: Pool[Thing] = Pool(Thing, 2)
    with pool.borrow() as first:
        first.uses = 7
    with pool.borrow(lambda thing: thing.uses == 7) as again:
        assert again is first
    with pool.borrow(lambda thing: thing.uses == 9) as second:
        assert second is not first and pool.made == 2
    with pool.borrow(lambda thing: thing.uses == 7) as again:
        assert again is first
    with pool.borrow(lambda thing: False) as any_thing:
        assert any_thing in (first, second) and pool.made == 2


def test_objects_come_back_after_an_error_and_failed_constructions_do_not_count() -> None:
    pool = Pool(Thing, 1)
    with pytest.raises(KeyError), pool.borrow():
        raise KeyError
    with pool.borrow():
        assert pool.made == 1

    failures = iter([True, False])

    def make() -> Thing:
        if next(failures):
            raise MemoryError
        return Thing()

    pool = Pool(make, 1)
    with pytest.raises(MemoryError), pool.borrow():
        pass
    with pool.borrow():
        assert pool.made == 1


def test_closing_waits_for_lent_objects_frees_all_and_refuses_later_borrows() -> None:
    pool, freed, in_use = Pool(Thing, 2), [], threading.Event()

    def use() -> None:
        with pool.borrow() as thing:
            in_use.set()
            time.sleep(0.05)
            thing.uses = 1

    thread = threading.Thread(target=use)
    thread.start()
    in_use.wait()
    pool.close(lambda thing: freed.append(thing.uses))
    thread.join()
    assert freed == [1] and pool.made == 0
    with pytest.raises(UsageError, match="closed"), pool.borrow():
        pass


def test_a_waiting_thread_is_refused_when_the_pool_closes() -> None:
    pool, refused, in_use, release = Pool(Thing, 1), [], threading.Event(), threading.Event()

    def occupy() -> None:
        with pool.borrow():
            in_use.set()
            release.wait()

    def wait() -> None:
        try:
            with pool.borrow():
                pass
        except UsageError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=occupy), threading.Thread(target=wait)]
    threads[0].start()
    in_use.wait()
    threads[1].start()
    closing = threading.Thread(target=pool.close, args=(lambda thing: None,))
    closing.start()
    threads[1].join(timeout=10)
    release.set()
    closing.join(timeout=10)
    threads[0].join(timeout=10)
    assert refused == ["the session was closed; load the bundle again"]


def test_the_least_recently_used_entry_is_evicted() -> None:
    dropped: list[int] = []
    recent: Recent[str, int] = Recent(2, dropped.append)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1 and recent.get("c") is None
    recent.put("c", 3)
    assert dropped == [2] and recent.get("b") is None and recent.get("a") == 1 and len(recent) == 2
    recent.put("a", 4)  # a replaced value is dropped too
    assert dropped == [2, 1] and recent.get("a") == 4
    recent.clear()
    assert sorted(dropped) == [1, 2, 3, 4] and len(recent) == 0


# --- memory for results -----------------------------------------------------------------------------------------------

SHAPE = (64, 512)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", [np.float32, "float16", BFLOAT16, np.int64])
def test_memory_is_reused_when_its_last_array_is_gone(dtype: object) -> None:
    outputs = HostOutputs()
    first = outputs.empty(SHAPE, dtype)
    assert first.shape == SHAPE and first.dtype == np.dtype(dtype) and first.flags.writeable  # type: ignore[call-overload]
    location, part = address(first), first[3:5].T
    del first
    gc.collect()
    second = outputs.empty(SHAPE, dtype)
    assert address(second) != location  # a view of the first is still referenced
    del part
    gc.collect()
    assert address(outputs.empty(SHAPE, dtype)) == location


def test_memory_is_reused_for_the_same_size_only() -> None:
    outputs = HostOutputs()
    location = address(outputs.empty(SHAPE, np.float32))
    larger = outputs.empty((65, 512), np.float32)
    assert address(larger) != location
    assert address(outputs.empty((512, 64), np.float32)) == location


def test_idle_memory_is_bounded() -> None:
    outputs = HostOutputs()
    arrays = [outputs.empty(SHAPE, np.float32) for _ in range(3 * HostOutputs.KEPT)]
    arrays.clear()
    assert len(outputs._idle) == HostOutputs.KEPT


def test_small_and_empty_arrays_are_allocated_by_numpy() -> None:
    outputs = HostOutputs()
    for shape in ((3,), (0, 4096), ()):
        assert outputs.empty(shape, np.float32).shape == shape
    assert not outputs._idle


def test_no_two_callers_share_memory() -> None:
    outputs = HostOutputs()

    def call(number: int) -> bool:
        for _ in range(200):
            mine = outputs.empty(SHAPE, np.float32)
            mine[:] = number
            if not (mine == number).all():
                return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(call, range(8)))


def test_arrays_outlive_the_session() -> None:
    outputs = HostOutputs()
    array = outputs.empty(SHAPE, np.float32)
    array[:] = 7
    del outputs
    gc.collect()
    assert (array == 7).all()
