"""A replay of PyTorch's CUDA caching allocator: what a rank reserves, from its allocations and frees. No torch.

Rules of c10/cuda/CUDACachingAllocator.cpp: sizes are rounded to 512 B; requests up to 1 MiB come from a pool of 2 MiB
segments, larger ones from segments of 20 MiB or, from 10 MiB on, of the request rounded to 2 MiB; free blocks belong to
the stream that allocated them; the best fit is taken, split where the rest is worth keeping, and joined with its free
neighbours when freed. Segments are never returned (no empty_cache, no retry after a failed cudaMalloc), so ``reserved``
is also its own peak.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.sim.events import CATEGORIES, Category

MIB = 1024**2
MIN_BLOCK = 512
SMALL_REQUEST, SMALL_SEGMENT = 1 * MIB, 2 * MIB
LARGE_SEGMENT, LARGE_REQUEST, LARGE_ROUND = 20 * MIB, 10 * MIB, 2 * MIB


class _Block:
    """A piece of a segment; ``prev``/``next`` are its neighbours in the same segment."""

    __slots__ = ("size", "order", "free", "prev", "next")

    def __init__(self, size: int, order: float, prev: _Block | None = None, next: _Block | None = None):
        self.size, self.order, self.free, self.prev, self.next = size, order, True, prev, next


class _Pool:
    """The free blocks of one stream and size class, sorted by (size, address)."""

    def __init__(self, small: bool, expandable: bool):
        self.small, self.expandable = small, expandable
        self.free: list[tuple[int, float, _Block]] = []
        self.tail: _Block | None = None
        self.mapped = 0.0

    def allocate(self, size: int) -> tuple[_Block, int]:
        """A block of ``size`` (already rounded) and the bytes newly reserved for it."""
        i = bisect_left(self.free, (size, -1.0))
        if self.expandable and i + 1 < len(self.free) and self.free[i][2] is self.tail:
            i += 1  # the last block of an expandable segment counts as large as it may grow
        if i < len(self.free):
            block, reserved = self.free.pop(i)[2], 0
        else:
            block, reserved = self._grow(size) if self.expandable else self._segment(size)
        rest = block.size - size
        if rest >= MIN_BLOCK if self.small or self.expandable else rest > SMALL_REQUEST:
            self._split(block, size)
        block.free = False
        return block, reserved

    def _segment(self, size: int) -> tuple[_Block, int]:
        """A new cudaMalloc segment."""
        if self.small:
            length = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            length = LARGE_SEGMENT
        else:
            length = -(-size // LARGE_ROUND) * LARGE_ROUND
        self.mapped += length
        return _Block(length, self.mapped), length

    def _grow(self, size: int) -> tuple[_Block, int]:
        """Map more of the expandable segment behind its last block, in whole pages of the pool's segment size."""
        page = SMALL_SEGMENT if self.small else LARGE_SEGMENT
        tail = self.tail
        start = tail.size if tail is not None and tail.free else 0
        length = -(-(size - start) // page) * page
        self.mapped += length
        if tail is not None and tail.free:
            self._forget(tail)
            tail.size, tail.order = tail.size + length, self.mapped
            return tail, length
        block = _Block(length, self.mapped, prev=tail)
        if tail is not None:
            tail.next = block
        self.tail = block
        return block, length

    def _split(self, block: _Block, size: int) -> None:
        # Order only breaks ties between equal sizes by address: the rest lies behind the block it was cut from.
        rest = _Block(block.size - size, block.order, prev=block, next=block.next)
        block.order -= rest.size
        if block.next is not None:
            block.next.prev = rest
        block.next, block.size = rest, size
        if self.tail is block:
            self.tail = rest
        insort(self.free, (rest.size, rest.order, rest))

    def release(self, block: _Block) -> None:
        """Free ``block`` and join it with its free neighbours."""
        before, after = block.prev, block.next
        if before is not None and before.free:
            self._forget(before)
            before.size, before.order, before.next = before.size + block.size, block.order, after
            if after is not None:
                after.prev = before
            if self.tail is block:
                self.tail = before
            block = before
        if after is not None and after.free:
            self._forget(after)
            block.size, block.order, block.next = block.size + after.size, after.order, after.next
            if after.next is not None:
                after.next.prev = block
            if self.tail is after:
                self.tail = block
        block.free = True
        insort(self.free, (block.size, block.order, block))

    def _forget(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.order))]


class CachingAllocator:
    """Allocations by number; ``reserved``, ``allocated`` (rounded to blocks) and their peaks, in bytes."""

    def __init__(self, expandable_segments: bool = False):
        self.expandable = expandable_segments
        self.pools: dict[tuple[int, bool], _Pool] = {}
        self.live: dict[int, tuple[_Pool, _Block]] = {}
        self.reserved = self.allocated = self.allocated_peak = 0

    def allocate(self, storage: int, size: int, stream: int) -> None:
        """``size`` bytes on ``stream``; nothing is reserved for an empty storage."""
        if size <= 0:
            return
        size = -(-size // MIN_BLOCK) * MIN_BLOCK
        key = (stream, size <= SMALL_REQUEST)
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = _Pool(key[1], self.expandable)
        block, reserved = pool.allocate(size)
        self.live[storage] = pool, block
        self.reserved += reserved
        self.allocated += block.size
        if self.allocated > self.allocated_peak:
            self.allocated_peak = self.allocated

    def free(self, storage: int) -> None:
        if storage in self.live:
            pool, block = self.live.pop(storage)
            self.allocated -= block.size
            pool.release(block)

    def reserved_by_stream(self) -> dict[int, int]:
        out: dict[int, int] = {}
        for (stream, _), pool in self.pools.items():
            out[stream] = out.get(stream, 0) + int(pool.mapped)
        return out


@dataclass
class Lifetimes:
    """Allocations and frees in program order: ``order`` has ``n`` where storage n is allocated, ``~n`` where freed."""

    order: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    categories: list[Category] = field(default_factory=list)


@dataclass(frozen=True)
class Footprint:
    """Bytes. ``live_peak`` is the peak of requested bytes, ``by_category`` what was alive then."""

    reserved: int
    allocated_peak: int
    live_peak: int
    by_category: dict[Category, int]
    by_stream: dict[int, int]


def live_peak(lifetimes: Lifetimes) -> tuple[int, dict[Category, int]]:
    """Peak of live bytes and their categories at that moment."""
    order, sizes = np.asarray(lifetimes.order, dtype=np.int64), np.asarray(lifetimes.sizes, dtype=np.int64)
    by_category = dict.fromkeys(CATEGORIES, 0)
    if not len(order):
        return 0, by_category
    number = np.where(order >= 0, order, ~order)
    live = np.cumsum(np.where(order >= 0, sizes[number], -sizes[number]))
    at = int(live.argmax())
    count = np.zeros(len(sizes), dtype=np.int64)
    np.add.at(count, number[: at + 1], np.where(order[: at + 1] >= 0, 1, -1))
    for n in np.flatnonzero(count).tolist():
        by_category[lifetimes.categories[n]] += int(sizes[n])
    return int(live[at]), by_category


def replay(lifetimes: Lifetimes, expandable_segments: bool = False) -> Footprint:
    """The allocator's state after all events; a free without its allocation is ignored."""
    allocator = CachingAllocator(expandable_segments)
    sizes: Sequence[int] = lifetimes.sizes
    allocate, free, streams = allocator.allocate, allocator.free, lifetimes.streams
    for n in lifetimes.order:
        if n >= 0:
            allocate(n, sizes[n], streams[n])
        else:
            free(~n)
    peak, by_category = live_peak(lifetimes)
    return Footprint(allocator.reserved, allocator.allocated_peak, peak, by_category, allocator.reserved_by_stream())
