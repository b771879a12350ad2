"""From traces and prices to figures: step time with its breakdown, and memory. No torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.sim import memory, pipeline, schedule
from bench.sim.events import Collective, Event, Prices, Trace
from bench.sim.expand import Expanded, expand
from bench.sim.memory import Footprint, Lifetimes
from bench.sim.schedule import Breakdown, Listener, PriceList

Placement = list[list[int]]
"""Stage numbers of every pipeline rank."""


@dataclass
class Traced:
    """The traces of a plan: pipeline rank -> trace of a rank of its kind, to be grown to ``depths`` layers a stage."""

    traces: list[Trace]
    of_rank: list[int]
    depths: list[list[int]]
    placement: Placement
    lockstep: bool = False
    _grown: dict[tuple[int, tuple[int, ...]], Expanded] = field(default_factory=dict)

    def grown(self, rank: int) -> Expanded:
        """The events of a pipeline rank at its full depth."""
        key = self.of_rank[rank], tuple(self.depths[rank])
        if key not in self._grown:
            self._grown[key] = expand(self.traces[key[0]], self.depths[rank])
        return self._grown[key]

    def trace(self, rank: int) -> Trace:
        return self.traces[self.of_rank[rank]]

    def kinds(self) -> dict[tuple[int, tuple[int, ...]], int]:
        """Every distinct kind of pipeline rank and the first rank that is of it."""
        out: dict[tuple[int, tuple[int, ...]], int] = {}
        for rank in range(len(self.of_rank)):
            out.setdefault((self.of_rank[rank], tuple(self.depths[rank])), rank)
        return out


@dataclass(frozen=True)
class StepTime:
    seconds: float
    parts: Breakdown
    bubble_frac: float


def step_time(plan: Traced, prices: Prices, listener: Listener | None = None) -> StepTime:
    """Time of the steady step (the last traced one)."""
    lists = [schedule.price(t.table, prices) for t in plan.traces]
    if len(plan.of_rank) == 1:
        events, trace = plan.grown(0), plan.trace(0)
        streams = schedule.play(events, *schedule.step_bounds(events, trace.marks), lists[0], listener)
        streams.settle()
        return StepTime(streams.end, streams.parts, 0.0)
    kinds = {key: _actions(plan.grown(rank), plan.trace(rank), lists[key[0]]) for key, rank in plan.kinds().items()}
    ranks = [kinds[plan.of_rank[r], tuple(plan.depths[r])] for r in range(len(plan.of_rank))]
    transfer = _transfer(plan, prices)
    facts = plan.traces[0].facts
    table = facts["slots"] if plan.lockstep else facts["actions"]
    placed = None
    if listener:
        placed = lambda rank, action, start, seconds: listener(action, rank, start, seconds)
    timeline = pipeline.lay_out(table, ranks, plan.placement, transfer, plan.lockstep, placed)
    return StepTime(timeline.seconds, timeline.parts, timeline.bubble_frac)


def _transfer(plan: Traced, prices: Prices) -> float:
    """Seconds of the largest message between stages."""
    messages = [e for t in plan.traces for e in t.table if isinstance(e, Collective) and e.axis == "pp"
                and e.kind in ("send", "recv")]  # fmt: skip
    return max((prices.collective(m) for m in messages), default=0.0)


def _actions(events: Expanded, trace: Trace, prices: PriceList) -> pipeline.Rank:
    """Cut the last step of a rank into its actions and time each.

    The pass between the marks ``step`` and ``finish`` (of the last accumulation pass) is the schedule's, what follows
    the clipping's and the optimizer's.
    """
    first, end = schedule.step_bounds(events, trace.marks)
    free = _without_transfers(trace, prices)
    rows = [int(r) for r in np.flatnonzero(events.kind == Event.MARK.value) if first <= r <= end]
    names = [trace.marks[int(events.arg[r])][0] for r in rows]
    passes = names.count("finish")
    out = pipeline.Rank(passes=passes)
    begins = [i for i, name in enumerate(names) if name in ("step", "finish")][passes - 1]
    for i in range(begins, len(rows) - 1):
        streams = schedule.play(events, rows[i], rows[i + 1], free)
        streams.settle()
        if i == begins:
            out.start = streams.parts
        elif names[i] == "finish":
            out.finish = streams.parts
        else:
            kind, slot = names[i].split(":")
            out.actions.setdefault((int(slot), kind), []).append(streams.parts)
    return out


def _without_transfers(trace: Trace, prices: PriceList) -> PriceList:
    """The price list with transfers between stages for nothing: :mod:`bench.sim.pipeline` places them."""
    seconds = prices.seconds.copy()
    for i, entry in enumerate(trace.table):
        if isinstance(entry, Collective) and entry.axis == "pp" and entry.kind in ("send", "recv"):
            seconds[i] = 0.0
    return PriceList(seconds, prices.part, prices.axes, prices.links, prices.names, prices.contention)


def lifetimes(events: Expanded, trace: Trace) -> Lifetimes:
    """Allocations and frees of all traced steps, in program order."""
    empty = trace.storages[0]
    known = [trace.storages[i] if i >= 0 else empty for i in events.storage.tolist()]
    out = Lifetimes([], [s.bytes for s in known], [s.stream for s in known], [s.category for s in known])
    relevant = (events.kind == Event.ALLOC.value) | (events.kind == Event.FREE.value)
    arg = events.arg[relevant]
    out.order = np.where(events.kind[relevant] == Event.ALLOC.value, arg, ~arg).tolist()
    return out


def footprint(plan: Traced, expandable_segments: bool = False) -> tuple[Footprint, int]:
    """What the pipeline rank that reserves the most reserves, and which it is."""
    best: tuple[Footprint, int] | None = None
    for rank in plan.kinds().values():
        found = memory.replay(lifetimes(plan.grown(rank), plan.trace(rank)), expandable_segments)
        if best is None or found.reserved > best[0].reserved:
            best = found, rank
    assert best is not None
    return best


def collectives(plan: Traced) -> dict[str, dict[str, list[int]]]:
    """axis -> kind -> [count, bytes] of the steady step of the first pipeline rank."""
    events, trace = plan.grown(0), plan.trace(0)
    first, end = schedule.step_bounds(events, trace.marks)
    rows = np.flatnonzero(events.kind[first:end] == Event.COLLECTIVE.value) + first
    out: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    index, counts = np.unique(events.arg[rows], return_counts=True)
    for i, n in zip(index.tolist(), counts.tolist(), strict=True):
        entry: Any = trace.table[i]
        total = out[entry.axis][entry.kind]
        total[0] += n
        total[1] += int(n * entry.bytes)
    return {axis: {kind: list(v) for kind, v in sorted(kinds.items())} for axis, kinds in sorted(out.items())}


def flops(plan: Traced, rank: int = 0) -> float:
    """FLOPs of GEMMs and attention in the steady step of a pipeline rank."""
    events, trace = plan.grown(rank), plan.trace(rank)
    first, end = schedule.step_bounds(events, trace.marks)
    rows = events.arg[first:end][events.kind[first:end] == Event.OP.value]
    per = np.asarray([getattr(e, "flops", 0.0) for e in trace.table])
    return float(per[rows].sum())
