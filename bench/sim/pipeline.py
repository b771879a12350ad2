"""Lay the actions of pipeline stages out on all ranks by torch's action lists: step time, bubble, the slowest rank.

An action's time comes from the traced rank that has a stage of its kind; what differs between ranks is the order of
actions and how long they wait for each other. Transfers between stages take their links' time and overlap with other
actions; in lock step every slot waits for the neighbours. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.sim.schedule import Breakdown

_ACTION = re.compile(r"(\d+)(F|B|I|W)(\d+)")
Placed = Callable[[int, str, float, float], None]
"""Called with (pp rank, action, start, seconds)."""


@dataclass
class Rank:
    """Times of one pipeline rank. ``actions``: (slot, kind) -> the breakdown of each, in the order they run; all of it
    but ``finish`` is done ``passes`` times (gradient accumulation)."""

    start: Breakdown = field(default_factory=Breakdown)
    finish: Breakdown = field(default_factory=Breakdown)
    actions: dict[tuple[int, str], list[Breakdown]] = field(default_factory=dict)
    passes: int = 1


@dataclass(frozen=True)
class Timeline:
    """``parts`` is the breakdown of the rank with the most work, its bubble included; ``busy`` every rank's work."""

    seconds: float
    parts: Breakdown
    busy: list[float]

    @property
    def bubble_frac(self) -> float:
        """Share of all ranks' time in which they have no work."""
        return 1 - sum(self.busy) / len(self.busy) / self.seconds


def parse(action: str) -> tuple[int, str, int]:
    """``3F0`` -> (stage 3, F, microbatch 0)."""
    match = _ACTION.fullmatch(action)
    if match is None:
        raise ValueError(f"{action!r} is not a compute action")
    return int(match[1]), match[2], int(match[3])


def lay_out(
    table: dict[int, list[str]], ranks: list[Rank], rank_stages: list[list[int]], transfer: float,
    lockstep: bool = False, placed: Placed | None = None,
) -> Timeline:  # fmt: skip
    """Run every rank's list. ``table``: rank -> actions (with empty slots for ``lockstep``); ``transfer``: seconds of
    one message between neighbouring stages. Raises ValueError for lists that wait for each other in a circle."""
    last = max(s for stages in rank_stages for s in stages)
    home = {s: (rank, slot) for rank, stages in enumerate(rank_stages) for slot, s in enumerate(stages)}
    clock = [r.start.total for r in ranks]
    parts = [Breakdown() for _ in ranks]
    for mine, r in zip(parts, ranks, strict=True):
        mine.add(r.start)
    done: dict[tuple[int, str, int], float] = {}
    counters: dict[tuple[int, int, str], int] = {}
    position = [0] * len(ranks)
    while any(position[r] < len(table[r]) for r in range(len(ranks))):
        progress = False
        slot_start = list(clock)
        for rank in range(len(ranks)):
            while position[rank] < len(table[rank]):
                text = table[rank][position[rank]]
                if lockstep and text == "":
                    position[rank], progress = position[rank] + 1, True
                    break
                stage, kind, microbatch = parse(text)
                ready = _ready(stage, kind, microbatch, last, done, home, transfer)
                if ready is None:
                    break
                slot = home[stage][1]
                number = counters.get((rank, slot, kind), 0)
                counters[rank, slot, kind] = number + 1
                cost = ranks[rank].actions[slot, kind][number]
                begin = max(clock[rank], ready)
                if lockstep:
                    begin = max(begin, *(slot_start[n] for n in (rank - 1, rank, rank + 1) if 0 <= n < len(ranks)))
                clock[rank] = done[stage, kind, microbatch] = begin + cost.total
                parts[rank].add(cost)
                if placed:
                    placed(rank, text, begin, cost.total)
                position[rank], progress = position[rank] + 1, True
                if lockstep:
                    break
        if not progress:
            raise ValueError("the action lists wait for each other: no rank can go on")
    for rank, r in enumerate(ranks):
        for reduce in (costs for (_, kind), costs in r.actions.items() if kind == "REDUCE"):
            for cost in reduce:
                clock[rank] += cost.total
                parts[rank].add(cost)
        parts[rank].add(parts[rank], r.passes - 1)
        parts[rank].add(r.finish)
    seconds = ranks[0].passes * max(clock) + max(r.finish.total for r in ranks)
    busy = [p.total for p in parts]
    slowest = parts[busy.index(max(busy))]
    slowest.bubble = seconds - max(busy)
    return Timeline(seconds, slowest, busy)


def _ready(
    stage: int, kind: str, microbatch: int, last: int, done: dict[tuple[int, str, int], float],
    home: dict[int, tuple[int, int]], transfer: float,
) -> float | None:  # fmt: skip
    """When the inputs of an action are there; None while what it waits for has not run."""
    own = done.get((stage, "F", microbatch))
    if kind == "F":
        needs = None if stage == 0 else done.get((stage - 1, "F", microbatch))
        waits = stage > 0
        neighbour = stage - 1
    elif kind == "W":
        return done.get((stage, "I", microbatch))
    else:
        waits = stage < last
        neighbour = stage + 1
        backward = [done.get((stage + 1, k, microbatch)) for k in ("B", "I")]
        needs = next((t for t in backward if t is not None), None)
        if own is None:
            return None
    if not waits:
        return own or 0.0
    if needs is None:
        return None
    return needs + (transfer if home[neighbour][0] != home[stage][0] else 0.0)
