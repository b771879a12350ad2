"""Predicted against published: every row by fits that have not seen it, with an interval, and the sum of the errors.

Trained on are rows without a pipeline of devices that have constants of their own; rows of other devices and of
pipelines are predicted only.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.published import Published
from bench.sim import fit as fitting
from bench.sim import hardware, predict
from bench.sim.cost import CONSTANTS, Constants, Cost
from bench.sim.fit import Fit, Line, Point, Prediction
from bench.sim.predict import Traced
from bench.spec import RunSpec
from trainer_core.counts import GIB

TPS, MEMORY = "tps_per_gpu", "peak_reserved_gib"


@dataclass(frozen=True)
class Case:
    """A row with its traces."""

    row: Published
    spec: RunSpec
    plan: Traced

    def seconds(self, constants: Constants) -> float:
        prices = Cost(hardware.resolve(self.spec.hardware), constants, self.spec.world_size)
        return predict.step_time(self.plan, prices).seconds

    def tps(self, constants: Constants) -> float:
        return self.spec.config.tokens_per_step / self.spec.world_size / self.seconds(constants)

    @property
    def piped(self) -> bool:
        return self.spec.config.parallel.pp > 1

    @property
    def trains(self) -> bool:
        device = hardware.load(self.spec.hardware.device)
        return (self.row.fault is None and TPS in self.row.figures and not self.piped
                and device.kind == "cuda" and device.like is None)  # fmt: skip

    @property
    def point(self) -> Point:
        figure = self.row.figures[TPS]
        return Point(self.row.id, self.row.table, self.row.workload, figure.value, figure.rounding, self.tps)

    @property
    def groups(self) -> list[str]:
        """The groups that a figure of this row counts in; a row of a known faulty run counts in its own only."""
        p, device = self.spec.config.parallel, self.spec.hardware.device
        if self.row.fault is not None:
            return ["known upstream fault"]
        kind = "PP" if p.pp > 1 else "CP 4 and more" if p.cp >= 4 else "non-PP"
        out = [kind, f"{kind} {device}", self.row.table, self.row.workload]
        return [*out, "non-PP"] if kind == "CP 4 and more" else out


@dataclass(frozen=True)
class Score:
    """One figure: ``predicted`` and its 80 % interval come from the fit without the row's workload."""

    case: Case
    metric: str
    published: float
    predicted: float
    spread: float
    error_in: float
    error_table: float
    error_workload: float
    low: float = math.nan
    high: float = math.nan

    @property
    def covered(self) -> bool:
        return self.low <= self.published <= self.high

    def to_dict(self, assumptions: list[str]) -> dict[str, Any]:
        row = self.case.row
        return {"id": row.id, "metric": self.metric, "published": self.published, "predicted": self.predicted,
                "low": self.low, "high": self.high, "error_in": self.error_in, "error_table": self.error_table,
                "error_workload": self.error_workload, "group": self.case.groups[0],
                "assumptions": assumptions}  # fmt: skip


@dataclass
class Fidelity:
    """What ``bench fidelity`` found. ``folds``: left-out workload -> constants of that fit."""

    scores: list[Score]
    fit: Fit
    folds: dict[str, Constants] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)

    def scored(self, metric: str) -> list[Score]:
        return [s for s in self.scores if s.metric == metric and s.case.row.fault is None]

    def half_width(self, metric: str | None = None) -> float:
        """Median relative half-width of the intervals of one metric, or of all."""
        asked = [s for m in (TPS, MEMORY) if metric in (None, m) for s in self.scored(m)]
        return statistics.median((s.high - s.low) / 2 / s.predicted for s in asked)

    def coverage(self, metric: str | None = None) -> float:
        asked = [s for m in (TPS, MEMORY) if metric in (None, m) for s in self.scored(m)]
        return sum(s.covered for s in asked) / len(asked)

    def groups(self) -> dict[str, dict[str, Any]]:
        """"metric: group" -> n, mean and maximum of the absolute held-out errors."""
        errors: dict[str, list[float]] = {}
        for s in self.scores:
            for group in dict.fromkeys(s.case.groups):
                errors.setdefault(f"{s.metric}: {group}", []).append(abs(s.error_workload))
        return {name: {"n": len(e), "mean_abs": statistics.fmean(e), "max_abs": max(e)} for name, e in errors.items()}

    def pairs(self) -> list[dict[str, Any]]:
        """Every row against its baseline, as a relative change of throughput; both by fits without their workload."""
        by_id = {s.case.row.id: s for s in self.scores if s.metric == TPS}
        out = []
        for s in by_id.values():
            base = by_id.get(s.case.row.baseline or "")
            if base is not None:
                change, predicted = s.published / base.published - 1, s.predicted / base.predicted - 1
                out.append({"id": s.case.row.id, "baseline": base.case.row.id, "published": change,
                            "predicted": predicted, "sign_ok": change * predicted > 0,
                            "fault": s.case.row.fault is not None})  # fmt: skip
        return out


def score(cases: Sequence[Case]) -> Fidelity:
    """Fit in-sample and in every fold; predict every figure of every row."""
    points = {c.row.id: c.point for c in cases if TPS in c.row.figures}
    training = [points[c.row.id] for c in cases if c.trains]
    everything = fitting.fit(training)
    lines = [fitting.linearize(point, everything.constants) for point in points.values()]
    trained = {p.id for p in training}
    folds: dict[str, Fit] = {}
    by_table = _held_out(lines, trained, everything, lambda p: p.table, {})
    by_workload = _held_out(lines, trained, everything, lambda p: p.workload, folds)
    scores = []
    for case in cases:
        for metric, figure in case.row.figures.items():
            if metric == TPS:
                inside = points[case.row.id].predict(everything.constants)
                table, outside = by_table[case.row.id].value, by_workload[case.row.id]
            elif metric == MEMORY:
                inside = table = predict.footprint(case.plan)[0].reserved / GIB
                outside = Prediction(inside, 1.0)
            else:
                continue
            errors = [value / figure.value - 1 for value in (inside, table, outside.value)]
            scores.append(Score(case, metric, figure.value, outside.value, outside.spread, *errors))
    return Fidelity(_with_intervals(scores), everything, {k: f.constants for k, f in folds.items()},
                    sorted(trained))  # fmt: skip


def unseen(result: Fidelity, cases: Sequence[Case]) -> Fidelity:
    """Rows that no fit has seen, predicted by the whole fit and judged by the errors of the known rows' folds."""
    new = []
    for case in cases:
        for metric, figure in case.row.figures.items():
            if metric == TPS:
                found = fitting.predict(fitting.linearize(case.point, result.fit.constants), result.fit)
            elif metric == MEMORY:
                found = Prediction(predict.footprint(case.plan)[0].reserved / GIB, 1.0)
            else:
                continue
            error = found.value / figure.value - 1
            half = found.spread * fitting.interval_factor(
                (math.log1p(s.error_workload), s.spread) for s in result.scored(metric)
                if s.case.piped == case.piped)  # fmt: skip
            new.append(Score(case, metric, figure.value, found.value, found.spread, error, error, error,
                             found.value * math.exp(-half), found.value * math.exp(half)))  # fmt: skip
    return Fidelity(new, result.fit, {}, result.trained)


def _held_out(lines: Sequence[Line], trained: set[str], everything: Fit, key: Callable[[Point], str],
              fits: dict[str, Fit]) -> dict[str, Prediction]:  # fmt: skip
    """Predictions by fits without the rows that share a point's key; rows that no fit has seen take the whole one."""
    training = [line for line in lines if line.point.id in trained]
    for left in {key(line.point) for line in training}:
        fits[left] = fitting.solve([line for line in training if key(line.point) != left])
    return {line.point.id: fitting.predict(line, fits.get(key(line.point), everything)) for line in lines}


def _with_intervals(scores: list[Score]) -> list[Score]:
    """80 % intervals: a row's spread, times what the held-out errors of *other* workloads say about such spreads.

    Pipelines, on which nothing is fitted, are judged by other pipelines.
    """
    out = []
    for s in scores:
        others = [(math.log1p(o.error_workload), o.spread) for o in scores if o.metric == s.metric
                  and o.case.piped == s.case.piped and o.case.row.workload != s.case.row.workload
                  and o.case.row.fault is None]  # fmt: skip
        half = fitting.interval_factor(others) * s.spread
        out.append(Score(**{**vars(s), "low": s.predicted * math.exp(-half), "high": s.predicted * math.exp(half)}))
    return out


def assumptions(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Row -> "setting=value: source" of each of its assumptions; one that a single row uses says so."""
    texts = {
        c.row.id: [f"{key}={value}: {a.source}" for a in c.row.assumed for key, value in a.settings.items()]
        for c in cases
    }  # fmt: skip
    uses = Counter(text for own in texts.values() for text in own)
    return {name: [t + (" (used by this row only: counts as a constant)" if uses[t] == 1 else "") for t in own]
            for name, own in texts.items()}  # fmt: skip


def constants(result: Fidelity, device: str) -> list[dict[str, Any]]:
    """The fitted constants as contract.md lists them."""
    spread = result.fit.spread()
    return [{"name": name, "value": getattr(result.fit.constants, name), "spread": spread[name], "unit": "fraction",
             "device": device, "fitted_on": result.trained} for name in CONSTANTS]  # fmt: skip
