"""Result folders in; points out. A point is one spec on one machine with one code, however often it ran. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench import store
from bench.result import LIVE, METRICS, RunResult, Value
from reports import interval, strategy

MEMORY = {"peak_active_gib": "active", "peak_reserved_gib": "reserved", "peak_rss_gib": "resident set"}
"""Memory figures in the order of preference, and what they mean. Two kinds are never compared."""

WORDS = {"measure": "measured", "simulate": "simulated"}
"""The word that stands beside every figure of an engine."""


@dataclass(frozen=True)
class Scope:
    """What must be equal before two speeds may be compared at all. A simulation does not depend on its machine."""

    engine: str
    device: str
    machine: str
    code_id: str

    @property
    def text(self) -> str:
        where = [] if self.engine == "simulate" else [f"machine {self.machine}"]
        return " · ".join(
            [WORDS.get(self.engine, self.engine), self.device, *where, f"code {self.code_id or 'unknown'}"]
        )


@dataclass(frozen=True)
class Run:
    """One run folder and what it says."""

    path: Path
    result: RunResult

    @property
    def machine(self) -> str:
        return str(self.result.environment.get("fingerprint") or "unknown")


@dataclass(frozen=True, eq=False)
class Point:
    """Equal runs as one cell. ``runs`` newest first; the first successful one is the ``head``."""

    runs: tuple[Run, ...]
    flat: dict[str, Any]
    name: str

    @cached_property
    def head(self) -> Run:
        return next((r for r in self.runs if r.result.status == "ok"), self.runs[0])

    @property
    def result(self) -> RunResult:
        return self.head.result

    @property
    def run_id(self) -> str:
        return self.result.run_id

    @property
    def status(self) -> str:
        return self.result.status

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def engine(self) -> str:
        return self.result.engine

    @property
    def simulated(self) -> bool:
        return self.engine == "simulate"

    @cached_property
    def scope(self) -> Scope:
        machine = "" if self.simulated else self.head.machine
        return Scope(self.engine, str(self.flat["hardware.device"]), machine, self.result.code_id)

    @cached_property
    def identity(self) -> tuple[tuple[str, Any], ...]:
        """The settings that can change a step's speed, as hashable items."""
        return tuple((k, v) for k, v in self.flat.items() if strategy.matters(k))

    @cached_property
    def reason(self) -> str:
        """Why it did not succeed; of a success, its notes and which of its repeats failed."""
        if not self.ok:
            return self.result.reason or ("no result yet" if self.status in LIVE else "no reason was stored")
        lost = Counter(r.result.status for r in self.runs if r.result.status != "ok")
        failed = f"{sum(lost.values())} of {len(self.runs)} runs ended as {', '.join(sorted(lost))}" if lost else None
        return "; ".join(filter(None, (self.result.reason, failed)))

    @cached_property
    def metrics(self) -> dict[str, Value]:
        """Every figure over all successful repeats; null with the reason where there is none."""
        return {name: self._metric(name) for name in METRICS}

    def _metric(self, name: str) -> Value:
        if not self.ok:
            return Value.none(name, f"{self.status}: {self.reason}")
        values = [r.result.metrics[name] for r in self.runs if r.result.status == "ok" and name in r.result.metrics]
        if not values:
            return Value.none(name, "not recorded")
        if name == "stability" and all(v.value is not None for v in values):
            count = sum(v.value or 0.0 for v in values)
            return Value(count, n=sum(v.n for v in values), unit="count", reason=values[0].reason)
        return values[0] if self.simulated else interval.pool(values)

    @property
    def tps(self) -> Value:
        return self.metrics["tps_per_gpu"]

    @cached_property
    def memory(self) -> tuple[str, Value]:
        """(name of the figure, the figure)."""
        for name in MEMORY:
            value = self.metrics[name]
            if value.value is not None:
                return name, value
        return "peak_active_gib", self.metrics["peak_active_gib"]


def load(results: Path) -> list[Point]:
    """The points below ``results``, in the order in which they lie there."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for folder, r in store.rows(results):
        run = Run(folder.path, r)
        key = (r.run_id, r.engine, r.code_id, "" if r.engine == "simulate" else run.machine)
        groups.setdefault(key, []).append(run)
    flats = [strategy.flatten(runs[0].result.spec) for runs in groups.values()]
    points = []
    for runs, flat, name in zip(groups.values(), flats, strategy.names(flats), strict=True):
        runs.sort(key=lambda r: (r.result.started_at, r.result.repeat), reverse=True)
        points.append(Point(tuple(runs), flat, name if runs[0].result.spec else "settings unknown"))
    return points


def by_scope(points: Iterable[Point]) -> dict[Scope, list[Point]]:
    """Points that may be compared, the largest group first."""
    groups: dict[Scope, list[Point]] = {}
    for point in points:
        groups.setdefault(point.scope, []).append(point)
    return dict(sorted(groups.items(), key=lambda kv: -len(kv[1])))
