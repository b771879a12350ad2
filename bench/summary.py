"""From the ranks' lines to the figures of a run: steps merged over ranks, the steady window, medians with intervals.

No torch. The rank files are the truth; ``python -m bench summarize`` computes everything again from them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench import mfu
from bench.ranks import RankLog, Row, read_ranks
from bench.result import METRICS, RunResult, Value, Window, finite
from bench.spec import RunSpec
from bench.store import RunDir, write_text

LEVEL = 0.95
WINDOWS = 5
"""Windows of a run whose repeats are whole runs."""
LOSS_STEPS = 5
"""The final loss is the mean of so many last steps."""
GROWTH_LIMIT = 0.01
"""Memory growth in 10 steps that is worth a note."""
WORST = ("step_time_s", "peak_active_gib", "peak_reserved_gib", "peak_rss_gib", "alloc_retries", "recompiles")
"""Fields of a step of which the largest over the ranks counts."""
MEDIAN_EFFICIENCY = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, for normal samples."""


def summarize(result: RunResult, spec: RunSpec, run: RunDir) -> RunResult:
    """``result`` (an ending without figures) with all that the rank files say; writes steps.jsonl."""
    logs = read_ranks(run)
    steps = merge(logs, spec)
    write_text(run.steps, "".join(json.dumps(finite(row), allow_nan=False) + "\n" for row in steps))
    figures, window, worst = metrics(steps, logs, spec, result)
    figures |= profiled(spec, run)
    evidence = {**result.evidence, **merge_evidence(logs)}
    notes = [result.reason] if result.reason else []
    growth = memory_growth([s for s in steps if s["excluded"] is None])
    if growth is not None:
        evidence["memory_growth_10_steps"] = growth
        if growth > GROWTH_LIMIT:
            notes.append(f"memory grew {growth:.1%} in 10 steps")
    p = spec.config.parallel
    if p.async_tp == "fallback" and not evidence.get("async_tp_ops"):
        evidence["async_tp"] = "plain TP ran instead"
    return replace(
        result, steps_done=len(steps) and int(steps[-1]["step"]), attempts=max([log.attempts for log in logs] or [1]),
        metrics=figures, memory_rank=worst, window=window, evidence=evidence, reason="; ".join(notes) or None,
    )  # fmt: skip


def merge(logs: list[RankLog], spec: RunSpec) -> list[Row]:
    """One row a step that *every* rank has done, in the form of steps.jsonl.

    Loss comes from the ranks that own it (each has the global, token-weighted mean), time and memory from the worst
    rank. The first steps of each attempt are warm-up.
    """
    if len(logs) < spec.world_size:
        return []
    common = set.intersection(*(set(log.steps) for log in logs))
    length = spec.config.train.warmup_steps
    warm = {start + n for start in [0, *logs[0].resumed_at] for n in range(1, length + 1)}
    return [_merge_step([log.steps[n] for log in logs], n in warm) for n in sorted(common)]


def _merge_step(rows: list[Row], warmup: bool) -> Row:
    def present(key: str) -> list[Any]:
        return [r[key] for r in rows if r.get(key) is not None]

    losses = set(present("loss"))
    # Ranks agree bit for bit or nearly; a mean of equal floats need not equal them.
    loss = losses.pop() if len(losses) == 1 else statistics.fmean(losses) if losses else None
    merged = {"step": rows[0]["step"], "loss": loss}
    merged |= {key: next(iter(present(key)), None) for key in ("grad_norm", "lr", "tokens")}
    merged |= {key: max(present(key), default=None) for key in WORST}
    reasons = present("excluded")
    merged["excluded"] = reasons[0] if reasons else "warmup" if warmup else None
    return merged


def merge_evidence(logs: list[RankLog]) -> Row:
    """Evidence of all ranks: what only some have is taken from the first that has it; ``layout`` is kept per rank."""
    merged: Row = {}
    layout: Row = {}
    for log in logs:
        for key, value in log.evidence.items():
            if key == "layout":
                layout[str(log.rank)] = value
            else:
                merged.setdefault(key, value)
    return merged | ({"layout": layout} if layout else {})


def windows(steps: list[Row], count: int) -> list[list[Row]]:
    """``steps`` cut into at most ``count`` runs of neighbours, sizes within 1."""
    count = min(count, len(steps))
    edges = [round(i * len(steps) / count) for i in range(count + 1)] if count else []
    return [steps[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def t_quantile(level: float, degrees: int) -> float:
    """The two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + level) / 2))


def median_value(samples: Sequence[float], unit: str) -> Value:
    """The median of positive ``samples`` with a Student t interval on their logarithms: median exp(+- t s k / sqrt(n)).

    k s / sqrt(n) with k = sqrt(pi/2) is the median's standard error for independent normal samples; speeds vary by
    factors, so on the logarithms the interval stays positive and that of a time is that of the speed turned over. One
    sample has no interval.
    """
    n = len(samples)
    middle = statistics.median(samples)
    if n < 2:
        return Value(middle, n=n, unit=unit)
    deviation = statistics.stdev(map(math.log, samples))
    factor = math.exp(t_quantile(LEVEL, n - 1) * deviation * MEDIAN_EFFICIENCY / math.sqrt(n))
    return Value(middle, middle / factor, middle * factor, LEVEL, n, unit)


def metrics(
    steps: list[Row], logs: list[RankLog], spec: RunSpec, result: RunResult
) -> tuple[dict[str, Value], Window, int | None]:
    """(metrics, the steady window, the rank that held most memory)."""
    steady = [s for s in steps if s["excluded"] is None and s["step_time_s"]]
    window = Window(
        first=int(steady[0]["step"]) if steady else None,
        last=int(steady[-1]["step"]) if steady else None,
        excluded={str(s["step"]): s["excluded"] for s in steps if s["excluded"]},
    )
    why = _without(result, steps)
    out = {name: Value.none(name, why) for name in METRICS}
    worst = None
    if steps:
        memory, worst = _memory(logs, {int(s["step"]) for s in steps})
        out |= memory
        out["final_loss"] = _final_loss(steps)
        out["stability"] = _stability(steps)
    if steady:
        out |= _speed(steps, steady, spec)
    return out, window, worst


def _without(result: RunResult, steps: list[Row]) -> str:
    """Why there is no figure."""
    if steps:
        return f"no step after the {steps[-1]['step']} left out"
    return f"{result.status}: {result.reason}" if result.reason else f"{result.status}: no step done"


def _speed(steps: list[Row], steady: list[Row], spec: RunSpec) -> dict[str, Value]:
    """Throughput and step time: one sample a window, the median over windows."""
    parts = windows(steady, spec.run.repeats if spec.run.repeat_as == "window" else WINDOWS)
    rates = [sum(s["tokens"] for s in w) / sum(s["step_time_s"] for s in w) for w in parts]
    tps = median_value(rates, METRICS["tps_global"].unit)
    per_gpu = median_value([r / spec.world_size for r in rates], METRICS["tps_per_gpu"].unit)
    times = [statistics.fmean(s["step_time_s"] for s in w) for w in parts]
    return {
        "tps_global": tps,
        "tps_per_gpu": per_gpu,
        "step_time_s": median_value(times, METRICS["step_time_s"].unit),
        "compile_time_s": _compile_time(steps, steady, spec),
        **mfu.utilization(per_gpu, spec),
    }


def _compile_time(steps: list[Row], steady: list[Row], spec: RunSpec) -> Value:
    """What the steps before the window took above the steady step."""
    if not (spec.config.compile.enable or spec.config.compile.loss):
        return Value.none("compile_time_s", "nothing is compiled (compile.enable=false)")
    usual = statistics.median(s["step_time_s"] for s in steady)
    first = [s["step_time_s"] for s in steps if s["step"] < steady[0]["step"] and s["step_time_s"]]
    if not first:
        return Value.none("compile_time_s", "no step before the window (train.warmup_steps=0)")
    return Value(sum(max(0.0, t - usual) for t in first), n=len(first), unit="s")


def _memory(logs: list[RankLog], common: set[int]) -> tuple[dict[str, Value], int | None]:
    """Peaks of the worst rank over all steps but the first, after which the optimizer state exists."""
    out: dict[str, Value] = {}
    worst = None
    for name in ("peak_rss_gib", "peak_reserved_gib", "peak_active_gib"):
        peaks = {}
        for log in logs:
            values = [r[name] for n, r in log.steps.items() if n in common and r.get(name) is not None]
            if values:
                peaks[log.rank] = max(values[1:] or values)
        if peaks:
            worst = max(peaks, key=lambda rank: peaks[rank])
            out[name] = Value(peaks[worst], n=len(peaks), unit="GiB")
        else:
            out[name] = Value.none(name, "the caching allocator is CUDA's: see the resident set, peak_rss_gib")
    return out, worst


def memory_growth(steady: list[Row]) -> float | None:
    """Relative growth of the worst rank's memory in 10 steps: last third of the window against the first."""
    key = "peak_active_gib" if any(s["peak_active_gib"] is not None for s in steady) else "peak_rss_gib"
    points = [(s["step"], s[key]) for s in steady if s[key]]
    third = len(points) // 3
    if len(points) < 10:
        return None
    (x0, y0), (x1, y1) = (
        (statistics.fmean(x for x, _ in part), statistics.median(y for _, y in part))
        for part in (points[:third], points[-third:])
    )
    return float((y1 - y0) / y0 * 10 / (x1 - x0))


def _final_loss(steps: list[Row]) -> Value:
    losses = [s["loss"] for s in steps[-LOSS_STEPS:] if s["loss"] is not None]
    if not losses:
        return Value.none("final_loss", "no rank reported a loss")
    return Value(statistics.fmean(losses), n=len(losses), unit=METRICS["final_loss"].unit)


def _stability(steps: list[Row]) -> Value:
    from trainer_core.stability import stability

    found = stability([s["loss"] for s in steps], [s["grad_norm"] for s in steps])
    return Value(float(found.count), n=len(steps), unit=METRICS["stability"].unit, reason=found.text)


def profiled(spec: RunSpec, run: RunDir) -> dict[str, Value]:
    """What only a profile shows: mean over ranks."""
    none = "no pipeline (parallel.pp=1)" if spec.config.parallel.pp == 1 else (
        "a profile does not tell a bubble from another wait; engine=simulate predicts it")  # fmt: skip
    out = {"bubble_frac": Value.none("bubble_frac", none)}
    name = "exposed_comm_frac"
    if spec.world_size == 1 or spec.run.profile == "off":
        why = "one rank does not communicate" if spec.world_size == 1 else "only a profile shows it: run.profile=on"
        return {**out, name: Value.none(name, why)}
    from bench.profile_report import profile_report

    try:
        share = profile_report(run.path)["mean"][name]
    except (FileNotFoundError, ValueError) as error:
        return {**out, name: Value.none(name, str(error))}
    return {**out, name: Value(share, n=1, unit="fraction", reason=None if share is not None else "not in the trace")}
