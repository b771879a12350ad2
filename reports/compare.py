"""Like against like: what a technique brings, the ladder up to the fastest run, which run to choose. No torch.

Two runs are alike for a technique if they have the same engine, device, machine, code, model, sequence, global batch,
number of GPUs and every other setting, except the technique's own keys and what must follow from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from bench.result import Value
from reports import interval, strategy
from reports.points import Point, Scope, by_scope
from reports.strategy import TECHNIQUES, Technique


@dataclass(frozen=True)
class Pair:
    """A run with a technique, and the like run without it (None with the reason)."""

    technique: Technique
    point: Point
    base: Point | None
    speed: Value
    memory: Value


@dataclass(frozen=True)
class Effect:
    """What one technique brings inside one scope: at the fastest run that has a baseline, and over all pairs."""

    technique: Technique
    scope: Scope
    best: Pair
    pairs: tuple[Pair, ...]

    @property
    def median(self) -> float | None:
        ratios = [p.speed.value for p in self.pairs if p.speed.value is not None]
        return statistics.median(ratios) if ratios else None


def signature(point: Point, technique: Technique) -> Hashable:
    """All that must be equal for the runs with and without ``technique``."""
    free = {*technique.keys, *technique.follows}
    return tuple(item for item in point.identity if item[0] not in free)


class Baselines:
    """Finds the like-for-like baseline of a run: an index per technique over the successful runs of one scope."""

    def __init__(self, points: Iterable[Point]):
        self.points = [p for p in points if p.ok and p.tps.value is not None]
        self._index: dict[str, dict[Hashable, Point]] = {}
        for t in TECHNIQUES:
            off: dict[Hashable, Point] = {}
            for p in self.points:
                if not t.on(p.flat):
                    key = signature(p, t)
                    off[key] = max(off.get(key, p), p, key=lambda q: q.tps.value or 0.0)
            self._index[t.name] = off

    def without(self, point: Point, technique: Technique) -> Point | None:
        return self._index[technique.name].get(signature(point, technique))

    def pair(self, point: Point, technique: Technique) -> Pair:
        base = self.without(point, technique)
        if base is None:
            none = Value(unit="ratio", reason=self._why(point, technique))
            return Pair(technique, point, None, none, none)
        return Pair(technique, point, base, interval.ratio(point.tps, base.tps), _memory_ratio(point, base))

    def _why(self, point: Point, technique: Technique) -> str:
        """What the nearest run without the technique does not share."""
        free = {*technique.keys, *technique.follows}
        best: list[str] | None = None
        for other in self.points:
            if technique.on(other.flat):
                continue
            keys = [
                k for k, v in point.flat.items() if k not in free and strategy.matters(k) and other.flat.get(k) != v
            ]
            if "model.name" in keys:
                keys = [k for k in keys if not k.startswith("model.") or k == "model.name"]
            if best is None or len(keys) < len(best):
                best = [f"{strategy.title(k)} {other.flat.get(k)} instead of {point.flat[k]}" for k in keys]
        if best is None:
            return "no successful run without it"
        more = f" and {len(best) - 3} more" if len(best) > 3 else ""
        return f"no like-for-like baseline; the nearest run has {', '.join(best[:3])}{more}"


def _memory_ratio(point: Point, base: Point) -> Value:
    (kind, a), (other, b) = point.memory, base.memory
    return interval.ratio(a, b) if kind == other else Value(unit="ratio", reason=f"{kind} against {other}")


def effects(points: Sequence[Point]) -> list[Effect]:
    """One row a technique that is on somewhere, in ladder order, per scope."""
    out = []
    for scope, members in by_scope(points).items():
        baselines = Baselines(members)
        fast = sorted(baselines.points, key=lambda p: -(p.tps.value or 0.0))
        for t in TECHNIQUES:
            users = [p for p in fast if t.on(p.flat)]
            pairs = [baselines.pair(p, t) for p in users if baselines.without(p, t)]
            if pairs:
                out.append(Effect(t, scope, pairs[0], tuple(pairs)))
            elif users:
                out.append(Effect(t, scope, baselines.pair(users[0], t), ()))
    return out


def ladder(point: Point, baselines: Baselines) -> list[Point]:
    """From the plainest like run up to ``point``, one technique a rung; as far down as stored runs reach.

    Checkpointing is no rung: it trades speed for memory, so all rungs share it.
    """
    rungs = [point]
    for technique in reversed(TECHNIQUES):
        if technique.name != "ac" and technique.on(rungs[-1].flat):
            below = baselines.without(rungs[-1], technique)
            if below is not None:
                rungs.append(below)
    return rungs[::-1]


def fastest(points: Iterable[Point]) -> Point | None:
    done = [p for p in points if p.ok and p.tps.value is not None]
    return max(done, key=lambda p: p.tps.value or 0.0, default=None)


WORKLOAD = ("model.", "data.", "parallel.world_size", "hardware.")
"""What a user asks for, against what a strategy may choose."""


def workload(point: Point) -> tuple[Scope, Hashable]:
    """Runs with the same workload are alternatives to each other: same scope, model, data, sequence and GPUs."""
    return point.scope, tuple(item for item in point.identity if item[0].startswith(WORKLOAD))


@dataclass(frozen=True)
class Advice:
    """``score`` = TPS/GPU over that of the fastest run of the same workload; ``word`` one of :data:`ADVICE`."""

    word: str
    score: float | None
    why: str


ADVICE = {
    "fastest": "highest TPS/GPU of its workload",
    "as fast": "its interval meets that of the fastest",
    "trade-off": "slower, but nothing as fast needs as little memory (Pareto front)",
    "dominated": "another run is faster and needs no more memory",
    "rejected": "did not finish, is not stable, or deviates from one rank",
    "pending": "has no result yet",
}


def advise(points: Sequence[Point], deviating: Iterable[Point]) -> dict[Point, Advice]:
    """A recommendation for every run, from evidence only: see :data:`ADVICE`."""
    bad = set(deviating)
    groups: dict[Hashable, list[Point]] = {}
    for p in points:
        groups.setdefault(workload(p), []).append(p)
    out: dict[Point, Advice] = {}
    for members in groups.values():
        good = []
        for p in members:
            rejection = _rejection(p, p in bad)
            if rejection is not None:
                out[p] = rejection
            else:
                good.append(p)
        out.update(_rank(sorted(good, key=lambda p: -(p.tps.value or 0.0))))
    return out


def _rejection(point: Point, deviates: bool) -> Advice | None:
    if point.status in ("queued", "running"):
        return Advice("pending", None, "no result yet")
    if not point.ok or point.tps.value is None:
        return Advice("rejected", None, point.reason or point.tps.reason or "no TPS/GPU")
    unstable = point.metrics["stability"].value
    if unstable:
        return Advice("rejected", None, f"{unstable:g} non-finite steps or loss spikes")
    return Advice("rejected", None, "its loss or gradient norm deviates from one rank's") if deviates else None


def _rank(good: list[Point]) -> dict[Point, Advice]:
    """``good``: runs of one workload, fastest first. One pass: the least memory so far is the front."""
    out: dict[Point, Advice] = {}
    least: dict[str, tuple[float, Point]] = {}
    for p in good:
        top = good[0]
        score = (p.tps.value or 0.0) / (top.tps.value or 1.0)
        kind, memory = p.memory
        rival = least.get(kind)
        if p is top:
            out[p] = Advice("fastest", score, ADVICE["fastest"])
        elif interval.overlap(p.tps, top.tps):
            out[p] = Advice("as fast", score, ADVICE["as fast"])
        elif memory.value is not None and (rival is None or memory.value < rival[0]):
            out[p] = Advice("trade-off", score, ADVICE["trade-off"])
        else:
            better = rival[1].name if rival else top.name
            out[p] = Advice("dominated", score, f"{better} is faster and needs no more memory")
        if memory.value is not None and (rival is None or memory.value < rival[0]):
            least[kind] = (memory.value, p)
    return out


def series(points: Iterable[Point], key: str, follows: Sequence[str], least: int = 2) -> list[list[Point]]:
    """Runs that differ in ``key`` only (and in what follows from it), ordered by it; the longest series first."""
    groups: dict[Hashable, dict[int, Point]] = {}
    for p in points:
        value = p.flat.get(key)
        if not (p.ok and p.tps.value is not None and isinstance(value, int)):
            continue
        same = tuple(item for item in p.identity if item[0] != key and item[0] not in follows)
        line = groups.setdefault((p.scope, same), {})
        line[value] = max(line.get(value, p), p, key=lambda q: q.tps.value or 0.0)
    found = [[line[v] for v in sorted(line)] for line in groups.values() if len(line) >= least]
    return sorted(found, key=lambda s: (-len(s), -max(p.tps.value or 0.0 for p in s)))
