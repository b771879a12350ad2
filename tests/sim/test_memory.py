"""Replay of the caching allocator. Reference: the rules of c10/cuda/CUDACachingAllocator.cpp, worked by hand."""

import random

import pytest

from bench.sim.memory import MIB, CachingAllocator, Lifetimes, live_peak, replay


def run(*events: tuple[int, int] | int, expandable: bool = False, streams: dict[int, int] | None = None):
    """Play (number, bytes) as an allocation and a bare number as its free."""
    allocator = CachingAllocator(expandable)
    for event in events:
        if isinstance(event, tuple):
            allocator.allocate(event[0], event[1], (streams or {}).get(event[0], 0))
        else:
            allocator.free(event)
    return allocator


@pytest.mark.parametrize(
    ("size", "reserved", "allocated"),
    [
        (1, 2 * MIB, 512),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 11 * MIB + 512),
    ],
)
def test_size_classes(size, reserved, allocated):
    allocator = run((0, size))
    # a segment of 12 MiB keeps its last MiB - 512 B in the block: too little to split off
    assert (allocator.reserved, allocator.allocated) == (reserved, reserved if size > 11 * MIB else allocated)


def test_small_pool_splits_and_joins():
    allocator = run((0, MIB), (1, MIB))
    assert allocator.reserved == 2 * MIB
    assert run((0, MIB), (1, MIB), 0, 1, (2, MIB), (3, MIB)).reserved == 2 * MIB


def test_best_fit_not_first_fit():
    # free blocks of 40 and 30 MiB: 30 goes into the 30, so that the 40 that follows needs no segment
    allocator = run((0, 40 * MIB), (1, 30 * MIB), 0, 1, (2, 30 * MIB), (3, 40 * MIB))
    assert allocator.reserved == 70 * MIB


def test_large_blocks_split_only_above_one_mebibyte():
    # 21 MiB in a free block of 22: the rest of exactly 1 MiB is not split off, so nothing is free for the next
    assert run((0, 22 * MIB), 0, (1, 21 * MIB), (2, 2 * MIB)).reserved == 42 * MIB
    assert run((0, 30 * MIB), 0, (1, 21 * MIB), (2, 8 * MIB)).reserved == 30 * MIB


def test_streams_do_not_share():
    assert run((0, 30 * MIB), 0, (1, 30 * MIB), streams={1: 7}).reserved == 60 * MIB


def test_neighbours_join_across_frees():
    allocator = run((0, 60 * MIB), 0, (1, 20 * MIB), (2, 20 * MIB), (3, 20 * MIB), 1, 3, 2, (4, 60 * MIB))
    assert allocator.reserved == 60 * MIB


def test_segments_fragment_and_expandable_ones_grow():
    grow = [event for i in range(1, 6) for event in ((i, 20 * i * MIB), i)]
    assert run(*grow).reserved == 20 * (1 + 2 + 3 + 4 + 5) * MIB
    assert run(*grow, expandable=True).reserved == 100 * MIB


def test_live_peak_and_its_categories():
    lifetimes = Lifetimes([0, 1, ~0, 2, ~1, ~2], [100, 50, 70], [0, 0, 0], ["params", "temp", "activations"])
    peak, parts = live_peak(lifetimes)
    assert peak == 150
    assert {k: v for k, v in parts.items() if v} == {"params": 100, "temp": 50}


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap_and_books_balance(expandable):
    """Random traffic: what is allocated fits what is reserved, and freeing all joins every segment again."""
    rng, live = random.Random(3), []
    order, sizes = [], []
    for number in range(3000):
        sizes.append(int(2 ** rng.uniform(6, 27)))
        order.append(number)
        live.append(number)
        while live and rng.random() < 0.52:
            order.append(~live.pop(rng.randrange(len(live))))
    lifetimes = Lifetimes(order, sizes, [n % 3 for n in range(3000)], ["temp"] * 3000)
    found = replay(lifetimes, expandable)
    assert found.live_peak <= found.allocated_peak <= found.reserved == sum(found.by_stream.values())
    allocator = CachingAllocator(expandable)
    for n in order + [~n for n in live]:
        allocator.allocate(n, sizes[n], n % 3) if n >= 0 else allocator.free(~n)
    assert allocator.allocated == 0
    for pool in allocator.pools.values():
        assert sum(size for size, _, _ in pool.free) == pool.mapped
        assert all(block.prev is None or not block.prev.free for _, _, block in pool.free)
