"""What threads share: lent to one at a time, bounded, and given back whatever happens."""

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
    """Notices when two hold it."""

    def __init__(self) -> None:
        self.held = threading.Lock()
        self.uses = 0


def test_no_two_threads_hold_the_same_and_no_more_are_made_than_allowed() -> None:
    pool = Pool(Thing, 3)

    def use(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(200):
            with pool.borrow() as thing:
                assert thing.held.acquire(blocking=False)
                thing.uses += 1
                if order.random() < 0.05:
                    time.sleep(0.0005)
                thing.held.release()

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(use, range(16)))
    assert pool.made == len(pool.items()) == 3
    assert sum(thing.uses for thing in pool.items()) == 16 * 200


def test_one_thread_alone_needs_one() -> None:
    pool = Pool(Thing, 8)
    for _ in range(5):
        with pool.borrow():
            pass
    assert pool.made == 1


def test_the_preferred_is_lent_before_a_new_one_is_made_and_a_new_one_before_another() -> None:
    pool: Pool[Thing] = Pool(Thing, 2)
    with pool.borrow() as first:
        first.uses = 7
    with pool.borrow(lambda thing: thing.uses == 7) as again:
        assert again is first
    with pool.borrow(lambda thing: thing.uses == 9) as second:
        assert second is not first and pool.made == 2
    with pool.borrow(lambda thing: thing.uses == 7) as again:
        assert again is first
    with pool.borrow(lambda thing: False) as any_one:
        assert any_one in (first, second) and pool.made == 2


def test_what_fails_in_use_comes_back_and_what_cannot_be_made_is_not_counted() -> None:
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


def test_closing_waits_for_what_is_lent_frees_all_and_refuses_who_comes_later() -> None:
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


def test_who_waits_while_it_is_closed_is_refused() -> None:
    pool, refused, in_use, leave = Pool(Thing, 1), [], threading.Event(), threading.Event()

    def hold() -> None:
        with pool.borrow():
            in_use.set()
            leave.wait()

    def wait() -> None:
        try:
            with pool.borrow():
                pass
        except UsageError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=hold), threading.Thread(target=wait)]
    threads[0].start()
    in_use.wait()
    threads[1].start()
    closing = threading.Thread(target=pool.close, args=(lambda thing: None,))
    closing.start()
    threads[1].join(timeout=10)
    leave.set()
    closing.join(timeout=10)
    threads[0].join(timeout=10)
    assert refused == ["the session was closed; load the bundle again"]


def test_what_was_used_longest_ago_gives_way() -> None:
    dropped: list[int] = []
    recent: Recent[str, int] = Recent(2, dropped.append)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1 and recent.get("c") is None
    recent.put("c", 3)
    assert dropped == [2] and "b" not in recent and "a" in recent and len(recent) == 2
    recent.put("a", 4)  # what is replaced goes too
    assert dropped == [2, 1] and recent.get("a") == 4
    recent.clear()
    assert sorted(dropped) == [1, 2, 3, 4] and len(recent) == 0


# --- memory for results -----------------------------------------------------------------------------------------------

SHAPE = (64, 512)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", [np.float32, "float16", BFLOAT16, np.int64])
def test_memory_comes_back_when_the_last_array_of_it_is_gone(dtype: object) -> None:
    outputs = HostOutputs()
    first = outputs.empty(SHAPE, dtype)
    assert first.shape == SHAPE and first.dtype == np.dtype(dtype) and first.flags.writeable  # type: ignore[call-overload]
    where, part = address(first), first[3:5].T
    del first
    gc.collect()
    other = outputs.empty(SHAPE, dtype)
    assert address(other) != where  # a part of it is still held
    del part
    gc.collect()
    assert address(outputs.empty(SHAPE, dtype)) == where


def test_other_sizes_do_not_get_it_and_do_not_lose_it() -> None:
    outputs = HostOutputs()
    held = address(outputs.empty(SHAPE, np.float32))
    other = outputs.empty((65, 512), np.float32)
    assert address(other) != held
    assert address(outputs.empty((512, 64), np.float32)) == held


def test_only_some_is_kept() -> None:
    outputs = HostOutputs()
    arrays = [outputs.empty(SHAPE, np.float32) for _ in range(3 * HostOutputs.KEPT)]
    arrays.clear()
    assert len(outputs._idle) == HostOutputs.KEPT


def test_what_is_small_or_empty_is_as_numpy_gives_it() -> None:
    outputs = HostOutputs()
    for shape in ((3,), (0, 4096), ()):
        assert outputs.empty(shape, np.float32).shape == shape
    assert not outputs._idle


def test_no_two_callers_share_any() -> None:
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
