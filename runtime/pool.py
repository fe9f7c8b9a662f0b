"""Objects that threads share: a pool, the most recently used values, and memory for outputs."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np

from attnforge.arrays import Array
from attnforge.errors import UsageError

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Pool(Generic[T]):
    """At most `limit` expensive items, each made when it is first needed and lent to one thread at a time.

    Args:
        make: makes an item.
        limit: maximum number of items, at least 1; a thread waits while all are lent.

    Attributes:
        made: number of items.
    """

    def __init__(self, make: Callable[[], T], limit: int) -> None:
        self._make, self._limit = make, limit
        self._idle: list[T] = []
        self._all: list[T] = []
        self.made = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextmanager
    def borrow(self, prefer: Callable[[T], bool] = lambda item: True) -> Iterator[T]:
        """Lend an item for a block: the preferred idle item used last, else a new item, else any idle item.

        Args:
            prefer: whether an idle item suits this call.

        Raises:
            UsageError: the pool is closed.
        """
        item = self._take(prefer)
        try:
            yield item
        finally:
            with self._changed:
                self._idle.append(item)
                self._changed.notify()

    def items(self) -> list[T]:
        """All items, including those that are lent."""
        with self._changed:
            return list(self._all)

    def close(self, free: Callable[[T], None]) -> None:
        """Free every item, once those that are lent are returned. Threads that wait for an item are refused.

        Args:
            free: frees an item.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._idle) == self.made)
            self._idle, self.made = [], 0
            items, self._all = self._all, []
        for item in items:
            free(item)

    def _take(self, prefer: Callable[[T], bool]) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._idle or self.made < self._limit)
            if self._closed:
                raise UsageError("the session was closed; load the bundle again")
            for i in reversed(range(len(self._idle))):
                if prefer(self._idle[i]):
                    return self._idle.pop(i)
            if self.made == self._limit:
                return self._idle.pop()
            self.made += 1
        try:
            item = self._make()
            with self._changed:
                self._all.append(item)
            return item
        except BaseException:
            with self._changed:
                self.made -= 1
                self._changed.notify()
            raise


class Recent(Generic[K, T]):
    """A mapping of at most `limit` values that evicts the least recently used one. For one thread at a time.

    Args:
        limit: maximum number of values.
        drop: called with every value that is evicted or replaced.
    """

    def __init__(self, limit: int, drop: Callable[[T], None] = lambda value: None) -> None:
        self._limit, self._drop = limit, drop
        self._values: OrderedDict[K, T] = OrderedDict()

    def get(self, key: K) -> T | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: K, value: T) -> None:
        old = self._values.pop(key, None)
        self._values[key] = value
        if old is not None and old is not value:
            self._drop(old)
        while len(self._values) > self._limit:
            self._drop(self._values.popitem(last=False)[1])

    def clear(self) -> None:
        while self._values:
            self._drop(self._values.popitem(last=False)[1])

    def __len__(self) -> int:
        return len(self._values)


class HostOutputs:
    """Arrays on the host for outputs, in memory of earlier outputs that callers have released. For any number of
    threads.

    A large array that is allocated at every call costs time at every call: the operating system provides its memory
    page by page, on first touch, and takes it back when the array is freed.

    Attributes:
        LARGE: bytes from which memory is reused.
        KEPT: how many blocks are kept for later calls.
    """

    LARGE, KEPT = 2**16, 4

    def __init__(self) -> None:
        self._idle: deque[Array] = deque(maxlen=self.KEPT)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised array of the given shape and dtype, like `numpy.empty`."""
        size = prod(shape) * np.dtype(dtype).itemsize
        if size < self.LARGE:
            return np.empty(shape, dtype)
        for _ in range(len(self._idle)):
            with suppress(IndexError):  # another thread took it
                memory = self._idle.popleft()
                if memory.nbytes == size:
                    break
                self._idle.append(memory)
        else:
            memory = np.empty(size, np.uint8)
        array: Array = np.asarray(_Lent(memory, self._idle)).view(dtype).reshape(shape)
        return array


class _Lent:
    """Memory that returns to `home` once no array refers to it."""

    def __init__(self, memory: Array, home: deque[Array]) -> None:
        self._memory, self._home = memory, home
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._home.append(self._memory)
