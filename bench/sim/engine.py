"""``engine=simulate``: a RunSpec in, a RunResult out, every figure with its interval."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.mfu import utilization
from bench.result import METRICS, RunResult, Value
from bench.sim import hardware, predict
from bench.sim.cost import Cost
from bench.sim.hardware import Hardware
from bench.sim.memory import Footprint
from bench.sim.predict import StepTime, Traced
from bench.spec import RunSpec, check, from_overrides
from trainer_core.config import ConfigError
from trainer_core.counts import GIB

LEVEL = 0.8
HALF_WIDTH = {"time": 0.2, "memory": 0.1}
"""Relative half-width of the 80 % intervals on a device whose file has none of its own (``errors``)."""


def simulate(spec: RunSpec, prices: Cost | None = None) -> RunResult:
    """Predict ``spec`` without running it. ``prices`` replaces the device's own cost model (a fit in progress).

    Statuses: ok; oom where it does not fit; unsupported, with the reason, where the trace can not be made.
    Raises ConfigError for a plan that breaks a rule or names an unknown device.
    """
    from bench.sim.cache import Unsupported

    try:
        device, plan = _traced(spec)
    except Unsupported as error:
        return _result(spec, "unsupported", str(error), {}, {})
    prices = prices or Cost(device, ranks=spec.world_size)
    time = predict.step_time(plan, prices)
    memory, rank = predict.footprint(plan)
    metrics = _metrics(spec, device, time, memory)
    status, reason = _fits(spec, device, memory, plan)
    return _result(spec, status, reason, metrics, _evidence(spec, plan, time, memory, rank, device), rank)


def _traced(spec: RunSpec) -> tuple[Hardware, Traced]:
    """The device and the trace of a plan that can run. Raises ConfigError, or Unsupported with the reason."""
    errors, _ = check(spec)
    if errors:
        raise ConfigError(errors)
    from bench.sim.cache import traces_of

    device = hardware.resolve(spec.hardware)
    return device, traces_of(spec, device.kind)


def half_width(device: Hardware, kind: str) -> float:
    """What held-out predictions on this device were wrong by, as ``bench fidelity`` measured it."""
    return device.errors.get(kind, HALF_WIDTH[kind])


def _value(name: str, value: float, half: float) -> Value:
    half *= value
    return Value(value, value - half, value + half, LEVEL, 1, METRICS[name].unit)


def _metrics(spec: RunSpec, device: Hardware, time: StepTime, memory: Footprint) -> dict[str, Value]:
    tokens, in_time, in_memory = spec.config.tokens_per_step, half_width(device, "time"), half_width(device, "memory")
    tps = _value("tps_per_gpu", tokens / spec.world_size / time.seconds, in_time)
    exposed = sum(time.parts.exposed_comm.values()) / time.seconds
    out = {
        "tps_global": _value("tps_global", tokens / time.seconds, in_time),
        "tps_per_gpu": tps,
        "step_time_s": _value("step_time_s", time.seconds, in_time),
        "peak_active_gib": _value("peak_active_gib", memory.live_peak / GIB, in_memory),
        "peak_reserved_gib": _value("peak_reserved_gib", memory.reserved / GIB, in_memory),
        "exposed_comm_frac": _value("exposed_comm_frac", exposed, in_time),
        "bubble_frac": _value("bubble_frac", time.bubble_frac, in_time),
        **utilization(tps, spec),
    }
    for name in METRICS:
        if name not in out:
            out[name] = Value.none(name, "not simulated")
    return out


def _fits(spec: RunSpec, device: Hardware, memory: Footprint, plan: Traced) -> tuple[Any, str | None]:
    """Status and reason: the reserved memory and its interval against what the device leaves to the allocator."""
    if device.kind == "cpu":
        return "ok", None
    capacity = (device.memory_bytes - device.outside_allocator) / GIB
    need = memory.reserved / GIB
    half = half_width(device, "memory") * need
    if need - half > capacity:
        parts = ", ".join(f"{name} {b / GIB:.1f}" for name, b in memory.by_category.items() if b > GIB / 20)
        return "oom", (f"{need:.1f} GiB reserved, {device.name} leaves {capacity:.1f} GiB to the allocator. At the "
                       f"peak (GiB): {parts}. {_what_helps(spec, memory)}")  # fmt: skip
    if need + half > capacity:
        return "ok", f"fits: uncertain, {need:.1f} GiB +- {half:.1f} of {capacity:.1f} GiB"
    return "ok", None


def _what_helps(spec: RunSpec, memory: Footprint) -> str:
    """The settings that shrink what is largest at the peak."""
    c, out = spec.config, []
    state = sum(memory.by_category[k] for k in ("params", "grads", "optimizer"))
    activations = memory.by_category["activations"] + memory.by_category["temp"]
    if memory.by_category["logits"] > max(state, activations):
        out.append(f"train.loss_chunks={2 * c.train.loss_chunks} halves the logits")
    if activations > state and c.ac.mode != "full":
        out.append("ac.mode=full keeps only the blocks' inputs")
    if c.train.local_batch_size > c.parallel.microbatches:
        out.append("a smaller train.local_batch_size")
    if state > activations:
        out.append(f"parallel.dp_shard above {c.parallel.dp_shard} cuts parameters and optimizer")
    out.append(f"parallel.tp or parallel.cp above {max(c.parallel.tp, c.parallel.cp)}")
    return "What would make it fit: " + "; ".join(out) + "."


def _evidence(
    spec: RunSpec, plan: Traced, time: StepTime, memory: Footprint, rank: int, device: Hardware
) -> dict[str, Any]:
    facts = plan.traces[0].facts
    capacity = device.memory_bytes - device.outside_allocator
    return {
        "collectives": predict.collectives(plan),
        "memory": {k: v / GIB for k, v in memory.by_category.items()},
        "memory_fits": {"reserved": memory.reserved / GIB, "margin": (capacity - memory.reserved) / GIB,
                        "allowance": device.outside_allocator / GIB},
        "time_breakdown": time.parts.to_dict(),
        "graphs_compiled": facts.get("graphs", 0),
        "async_tp_ops": facts.get("async_tp_ops", 0),
        "reduce_dtype": spec.config.precision.reduce,
        "layout": {"layers": plan.depths, "stages": plan.placement, "memory_stage_rank": rank,
                   "traced_layers": [t.depths for t in plan.traces]},
        "pp_actions": facts.get("actions", {}),
    }  # fmt: skip


def _result(
    spec: RunSpec, status: Any, reason: str | None, metrics: dict[str, Value], evidence: dict[str, Any],
    stage_rank: int = 0,
) -> RunResult:  # fmt: skip
    """``stage_rank``: the pipeline rank that needs the most memory; its first global rank is the result's."""
    inner = spec.world_size // spec.config.parallel.pp
    metrics = metrics or {name: Value.none(name, reason or "") for name in METRICS}
    return RunResult(
        run_id=spec.run_id, status=status, spec=spec.to_dict(), engine="simulate", reason=reason,
        steps_requested=spec.config.train.steps, world_size=spec.world_size, metrics=metrics,
        memory_rank=stage_rank * inner, evidence=evidence, command=spec.command(),
    )  # fmt: skip


def trace_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for python -m sweeps")
    p.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="Chrome/Perfetto trace (JSON)")


def trace(args: argparse.Namespace) -> int:
    """``bench trace``: the simulated timeline of one step; rows are streams, or pipeline ranks."""
    from bench.cli import OK, UsageError
    from bench.sim.cache import Unsupported

    spec = from_overrides(args.overrides)
    try:
        device, plan = _traced(spec)
    except Unsupported as error:
        raise UsageError(str(error)) from None
    rows: list[dict[str, Any]] = []
    piped = len(plan.of_rank) > 1
    names = [f"pp rank {r}" for r in range(len(plan.of_rank))] if piped else plan.traces[0].streams
    for i, name in enumerate(names):
        rows.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": name}})
    add = lambda name, row, start, seconds: rows.append(
        {"name": name, "ph": "X", "pid": 0, "tid": row, "ts": start * 1e6, "dur": seconds * 1e6})  # fmt: skip
    time = predict.step_time(plan, Cost(device, ranks=spec.world_size), add)
    args.output.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
    print(f"simulated step of {time.seconds:.4f} s: {args.output}", file=sys.stderr)
    return OK
