"""Which two settings span the map, and what stands in each of its cells. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from reports import strategy
from reports.points import Point

LIMIT = (16, 24)
"""Columns and rows of a map that a person can still read."""

STRATEGY = ("layout", "recipe", "parallel.", "compile.", "precision.", "ac.", "train.local_batch_size")
ALL = "all"


@dataclass(frozen=True)
class Axis:
    """A setting that spans a map; ``layout`` and ``recipe`` join several into one."""

    key: str
    title: str
    of: Callable[[Point], Any]


@dataclass(frozen=True)
class Cell:
    """The best run of a cell, or the endings of those that failed."""

    best: Point | None
    points: tuple[Point, ...]

    @property
    def failed(self) -> list[Point]:
        return [p for p in self.points if not p.ok]


NOTHING = Axis("all", "", lambda p: ALL)


def axes(points: Sequence[Point], limit: int = 60) -> list[Axis]:
    """Every setting that varies, strategy settings first; more than ``limit`` values make no axis."""
    joined = [Axis("layout", strategy.title("layout"), lambda p: strategy.layout(p.flat)),
              Axis("recipe", strategy.title("recipe"), lambda p: strategy.recipe(p.flat))]  # fmt: skip
    keys = [k for k in strategy.varying(p.flat for p in points) if strategy.matters(k) and k != "engine"]
    keys.sort(key=lambda k: not k.startswith(STRATEGY))
    plain = [Axis(k, strategy.title(k), lambda p, k=k: p.flat.get(k)) for k in keys]  # type: ignore[misc]
    return [a for a in joined + plain if 2 <= len({a.of(p) for p in points}) <= limit]


def choose(points: Sequence[Point], among: Sequence[Axis]) -> tuple[Axis, Axis]:
    """(x, y): the pair that spreads the runs over the most cells and leaves the fewest of them empty.

    Maximises filled cells x filled share, among strategy settings that vary; one that varies alone gets one column.
    """
    varied = [a for a in among if 2 <= len({a.of(p) for p in points}) <= max(LIMIT)]
    found = [a for a in varied if a.key.startswith(STRATEGY)] or varied
    best: tuple[float, Axis, Axis] = (0.0, NOTHING, NOTHING)
    for a in found:
        alone = len({a.of(p) for p in points})
        best = (alone, NOTHING, a) if best[0] < alone <= LIMIT[1] else best
    for a, b in combinations(found[:12], 2):
        cells = {(a.of(p), b.of(p)) for p in points}
        xs, ys = {x for x, _ in cells}, {y for _, y in cells}
        x, y = (a, b) if len(xs) <= len(ys) else (b, a)
        if min(len(xs), len(ys)) > LIMIT[0] or max(len(xs), len(ys)) > LIMIT[1]:
            continue
        score = len(cells) ** 2 / (len(xs) * len(ys))
        if score > best[0]:
            best = (score, x, y)
    return best[1:]


def order(values: set[Any]) -> list[Any]:
    """Numbers by size; then text, what joins fewer settings first."""
    return sorted(values, key=lambda v: (0, v, "") if isinstance(v, (int, float)) else (1, _parts(str(v)), str(v)))


def _parts(text: str) -> int:
    return -1 if text in ("plain", "none", "off") else text.count("·")


def cells(
    points: Sequence[Point], x: Axis, y: Axis, better: Callable[[Point], float | None]
) -> dict[tuple[Any, Any], Cell]:
    """(x, y) -> the cell; ``better`` is larger for a better run and None where a run has no figure."""
    groups: dict[tuple[Any, Any], list[Point]] = {}
    for p in points:
        groups.setdefault((x.of(p), y.of(p)), []).append(p)
    out = {}
    for key, members in groups.items():
        scored = [(s, p) for p in members if p.ok and (s := better(p)) is not None]
        best = max(scored, key=lambda sp: sp[0], default=(0.0, None))[1]
        out[key] = Cell(best, tuple(members))
    return out


def by_speed(point: Point) -> float | None:
    return point.tps.value


def by_memory(point: Point) -> float | None:
    value = point.memory[1].value
    return None if value is None else -value


DETAILS = ("layout", "recipe", "train.local_batch_size", "data.seq_len")
"""Settings that a winning configuration is told by; the first two are joined of parts."""


Told = Sequence[tuple[Axis, set[str]]]


def details(points: Sequence[Point], among: Sequence[Axis], x: Axis, y: Axis) -> Told:
    """The settings that the axes do not say, each with the parts that all runs of the map share."""
    found = []
    for a in among:
        if a.key in DETAILS and a.key not in (x.key, y.key):
            parts = [set(str(a.of(p)).split(" · ")) for p in points]
            found.append((a, set.intersection(*parts) if a.key in DETAILS[:2] else set()))
    return found


def winner(cell: Cell, told: Told) -> str:
    """The rest of the winning configuration; batch and sequence only where the cell had a choice."""
    out = []
    for a, common in told if cell.best else ():
        value = str(a.of(cell.best)) if cell.best else ""
        if a.key in DETAILS[:2]:
            out += [part for part in value.split(" · ") if part not in common and part != "plain"]
        elif len({a.of(p) for p in cell.points}) > 1:
            out.append(f"{a.title} {value}")
    return " · ".join(out)
