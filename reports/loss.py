"""Is it right? Loss curves, the noise floor over equal runs, parity with one rank, what low precision costs. No torch.

Losses of two layouts are compared only from one shared initialisation and one global batch order; everything else is
"not comparable", with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.result import Value
from bench.store import RunDir, read_jsonl
from reports import interval
from reports.points import Point, Scope

ROUNDING = {"fp32": (5e-6, 2e-5), "bf16": (5e-4, 1e-2), "float8": (1e-3, 1e-2)}
"""Allowed relative deviation of (loss, grad_norm) from one rank, from rounding alone. Well above what layouts of a
small model showed over ten steps: fp32 1.5e-7 / 5.5e-7, bf16 5e-5 / 1.3e-3, Float8 1.7e-4 / 1.5e-3."""


@dataclass(frozen=True)
class Curve:
    """One run, step by step. ``seconds`` is the sum of step times; a step without a finite loss has None."""

    steps: tuple[int, ...]
    loss: tuple[float | None, ...]
    grad_norm: tuple[float | None, ...]
    lr: tuple[float | None, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Parity:
    """A layout against one rank. ``verdict``: agrees, deviates or not comparable; the worst relative deviations."""

    point: Point
    reference: Point | None
    verdict: str
    loss: float | None
    grad_norm: float | None
    steps: int
    tolerance: tuple[float, float] | None
    text: str


@dataclass(frozen=True)
class Precision:
    """What a lower precision did to the final loss, the layout being equal. ``loss``: difference in nats."""

    point: Point
    base: Point
    loss: Value
    verdict: str


@cache
def curve(folder: Path) -> Curve:
    """Reads steps.jsonl. A number that is not finite, and -1 as a loss, is absent rather than plotted."""
    rows = {int(r["step"]): r for r in read_jsonl(RunDir(folder).steps) if isinstance(r.get("step"), int)}
    steps = sorted(rows)
    tokens, seconds, t, s = [], [], 0.0, 0.0
    for step in steps:
        t += _number(rows[step].get("tokens")) or 0.0
        s += _number(rows[step].get("step_time_s")) or 0.0
        tokens.append(t)
        seconds.append(s)
    loss, norm, lr = (tuple(_number(rows[i].get(key)) for i in steps) for key in ("loss", "grad_norm", "lr"))
    return Curve(tuple(steps), loss, norm, lr, tuple(tokens), tuple(seconds))


def _number(value: object) -> float | None:
    """A finite number that is not negative: no loss, norm, token count or time is below zero."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) and value >= 0 else None


def has_losses(point: Point) -> bool:
    return point.engine == "measure" and any(x is not None for x in curve(point.head.path).loss)


SAME = ("model.", "precision.", "data.", "optim.", "train.global_batch_size", "train.seed",
        "train.init_from")  # fmt: skip
"""Settings that change the loss by themselves: equal between a layout and its reference.

The number of steps is not among them: it changes only the learning rate's decay, and the rates themselves are compared.
"""


def problem(point: Point, precision: bool = True) -> tuple[Scope, Hashable]:
    """What is trained, whatever the layout; the machine and the code belong to it."""
    items = tuple((k, v) for k, v in point.flat.items()
                  if k.startswith(SAME) and (precision or not k.startswith("precision.")))  # fmt: skip
    return point.scope, items


def deviations(a: Curve, b: Curve) -> list[tuple[int, float, float | None]]:
    """(step, relative deviation of the loss, of grad_norm) over the steps that both have."""
    other = {s: (x, g) for s, x, g in zip(b.steps, b.loss, b.grad_norm, strict=True)}
    out = []
    for step, loss, norm in zip(a.steps, a.loss, a.grad_norm, strict=True):
        ref, ref_norm = other.get(step, (None, None))
        if loss is None or not ref:
            continue
        out.append((step, abs(loss - ref) / ref, abs(norm - ref_norm) / ref_norm if norm and ref_norm else None))
    return out


def noise(points: Iterable[Point]) -> tuple[float, float, int] | None:
    """(loss, grad_norm, runs): the largest relative deviation between equal runs; None where nothing ran twice."""
    loss = norm = 0.0
    runs = 0
    for p in points:
        equal = [curve(r.path) for r in p.runs if r.result.status == "ok"]
        if len(equal) < 2:
            continue
        runs += len(equal)
        for c in equal[1:]:
            found = deviations(c, equal[0])
            loss = max([loss, *(d for _, d, _ in found)])
            norm = max([norm, *(g for _, _, g in found if g is not None)])
    return (loss, norm, runs) if runs else None


def tolerance(point: Point, floor: tuple[float, float, int] | None) -> tuple[float, float]:
    """The larger of the rounding allowance of the precision and the noise floor."""
    kind = "float8" if point.flat["precision.float8"] != "off" else str(point.flat["precision.param"])
    loss, norm = ROUNDING[kind if kind in ROUNDING else "bf16"]
    return (max(loss, floor[0]), max(norm, floor[1])) if floor else (loss, norm)


def parity(points: Sequence[Point]) -> list[Parity]:
    """Every measured run against the plainest one-rank run of the same problem."""
    groups: dict[tuple[Scope, Hashable], list[Point]] = {}
    for p in points:
        if p.ok and p.engine == "measure":
            groups.setdefault(problem(p), []).append(p)
    elsewhere = {key[1] for key, members in groups.items() if any(_single(p) for p in members)}
    out = []
    for key, members in groups.items():
        single = [p for p in members if _single(p)]
        reference = min(single, key=_plainness, default=None)
        floor = noise(members) if reference else None
        alone = [p for p in members if p.flat["parallel.world_size"] == 1] if reference is None else [reference]
        why = "the one-rank run is of another code or machine" if key[1] in elsewhere else NO_REFERENCE
        out += [_judge(p, reference, floor, why) for p in members if p not in alone]
    return out


NO_REFERENCE = "no one-rank run with the same model, data, seed, global batch and precision"


def _single(point: Point) -> bool:
    return point.flat["parallel.world_size"] == 1 and has_losses(point)


def _plainness(point: Point) -> tuple[bool, bool, int]:
    """The reference is the run with the least machinery: eager, no checkpointing, one forward a step."""
    flat = point.flat
    return bool(flat["compile.enable"]), flat["ac.mode"] != "none", -int(flat["train.local_batch_size"])


def _judge(point: Point, reference: Point | None, floor: tuple[float, float, int] | None, without: str) -> Parity:
    """``without``: what to say where there is no reference."""

    def unlike(why: str) -> Parity:
        return Parity(point, reference, "not comparable", None, None, 0, None, why)

    if reference is None:
        return unlike(without)
    for digest, what in (("init_digest", "initialisation"), ("data_digest", "batch order")):
        a, b = point.result.evidence.get(digest), reference.result.evidence.get(digest)
        if not a or not b:
            return unlike(f"the {what} was not recorded ({digest})")
        if a != b:
            return unlike(f"another {what} ({digest} {a} against {b})")
    mine, theirs = curve(point.head.path), curve(reference.head.path)
    rates = dict(zip(theirs.steps, theirs.lr, strict=True))
    other = next((s for s, lr in zip(mine.steps, mine.lr, strict=True) if s in rates and rates[s] != lr), None)
    if other is not None:
        return unlike(f"another learning rate from step {other} on")
    found = deviations(mine, theirs)
    if not found:
        return unlike("no common step with a loss")
    loss = max(d for _, d, _ in found)
    norm = max((g for _, _, g in found if g is not None), default=None)
    limit = tolerance(point, floor)
    agrees = loss <= limit[0] and (norm is None or norm <= limit[1])
    basis = f"noise floor of {floor[2]} equal runs" if floor and floor[0] >= limit[0] else "rounding"
    text = f"{limit[0]:.1g} / {limit[1]:.1g}, {basis}"
    return Parity(point, reference, "agrees" if agrees else "deviates", loss, norm, len(found), limit, text)


def precision_losses(points: Sequence[Point]) -> list[Precision]:
    """Final loss of each Float8 (or bf16) run less that of the like run in bf16 (or fp32)."""
    done = [p for p in points if p.ok and p.engine == "measure" and p.metrics["final_loss"].value is not None]
    groups: dict[Hashable, list[Point]] = {}
    for p in done:
        layout = tuple((k, v) for k, v in p.flat.items() if k.startswith(("parallel.", "ac.", "compile.")))
        groups.setdefault((problem(p, precision=False), layout), []).append(p)
    out = []
    for members in groups.values():
        plain = [p for p in members if p.flat["precision.float8"] == "off"]
        for kind in ("fp32", "bf16"):
            base = next((p for p in plain if p.flat["precision.param"] == kind), None)
            others = [p for p in members if p.flat["precision.param"] in (kind, "bf16")
                      and (p.flat["precision.param"], p.flat["precision.float8"]) != (kind, "off")]  # fmt: skip
            if base is not None:
                out += [_cost(p, base) for p in others]
                break
    return out


def _cost(point: Point, base: Point) -> Precision:
    d = interval.difference(point.metrics["final_loss"], base.metrics["final_loss"])
    if d.value is None or d.low is None or d.high is None:
        return Precision(point, base, d, d.reason or "no interval")
    meets = d.low <= 0 <= d.high
    return Precision(point, base, d, "none shown" if meets else "worse" if d.value > 0 else "better")
