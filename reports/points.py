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

UNKNOWN = "unknown"
"""The machine of a run that stored none."""


@dataclass(frozen=True)
class Scope:
    """What must be equal before two speeds may be compared at all. A simulation does not depend on its machine."""

    engine: str
    device: str
    machine: str
    code_id: str

    @property
    def whole(self) -> bool:
        return self.machine != UNKNOWN and bool(self.code_id)

    def may_be(self, other: Scope) -> bool:
        """All that is known of this one equals the other's."""
        return (
            (self.engine, self.device) == (other.engine, other.device)
            and self.machine in (UNKNOWN, other.machine)
            and self.code_id in ("", other.code_id)
        )

    @property
    def where(self) -> str:
        machine = [] if self.engine == "simulate" else [f"machine {self.machine}"]
        return " · ".join([*machine, f"code {self.code_id or UNKNOWN}"])

    @property
    def text(self) -> str:
        return " · ".join([WORDS.get(self.engine, self.engine), self.device, self.where])


@dataclass(frozen=True)
class Run:
    """One run folder and what it says."""

    path: Path
    result: RunResult
    flat: dict[str, Any]

    @property
    def machine(self) -> str:
        return str(self.result.environment.get("fingerprint") or UNKNOWN)

    @property
    def scope(self) -> Scope:
        r = self.result
        machine = "" if r.engine == "simulate" else self.machine
        return Scope(r.engine, str(self.flat["hardware.device"]), machine, r.code_id)


@dataclass(frozen=True, eq=False)
class Point:
    """Equal runs as one cell. ``runs`` newest first; the first successful one is the ``head``."""

    runs: tuple[Run, ...]
    flat: dict[str, Any]
    name: str
    scope: Scope

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
    """The points below ``results``, in the order in which they lie there.

    A run that ended before it stored its machine or code joins the one scope here that it may be of.
    """
    all_runs = [Run(folder.path, r, strategy.flatten(r.spec)) for folder, r in store.rows(results)]
    known = list(dict.fromkeys(run.scope for run in all_runs if run.scope.whole))
    groups: dict[tuple[str, Scope], list[Run]] = {}
    for run in all_runs:
        scope = run.scope
        fits = [] if scope.whole else [k for k in known if scope.may_be(k)]
        groups.setdefault((run.result.run_id, fits[0] if len(fits) == 1 else scope), []).append(run)
    flats = [next((run for run in runs if run.result.spec), runs[0]).flat for runs in groups.values()]
    points = []
    for ((_, scope), runs), flat, name in zip(groups.items(), flats, strategy.names(flats), strict=True):
        runs.sort(key=lambda r: (r.result.started_at, r.result.repeat), reverse=True)
        told = any(run.result.spec for run in runs)
        points.append(Point(tuple(runs), flat, name if told else "settings unknown", scope))
    return points


def by_scope(points: Iterable[Point]) -> dict[Scope, list[Point]]:
    """Points that may be compared, the largest group first."""
    groups: dict[Scope, list[Point]] = {}
    for point in points:
        groups.setdefault(point.scope, []).append(point)
    return dict(sorted(groups.items(), key=lambda kv: -len(kv[1])))
