"""Synthetic result folders, written with bench's own types: a stand-in for sweeps in tests and in the budgets."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.result import METRICS, RunResult, Status, Value, Window
from bench.spec import RunSpec
from bench.store import RESULT, SPEC, STEPS

HOSTILE = "<img src=x onerror=alert(1)>|</script>\n=cmd()"
STARTED = "2026-03-01T09:00:00+00:00"

BASE: dict[str, Any] = {
    "model": {"name": "debug"},
    "parallel": {"dp_shard": 4},
    "train": {"steps": 20, "global_batch_size": 8, "local_batch_size": 2},
    "data": {"corpus": "stdlib", "seq_len": 256},
}


def spec(**sections: dict[str, Any] | str | None) -> RunSpec:
    """The base spec with some keys of some sections changed: ``spec(parallel={"tp": 2})``."""
    data = json.loads(json.dumps(BASE))
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values} if isinstance(values, dict) else values
    return RunSpec.from_dict(data)


def value(name: str, x: float, rel: float = 0.01, n: int = 15, level: float = 0.95) -> Value:
    return Value(x, x * (1 - rel), x * (1 + rel), level, n, METRICS[name].unit)


def result(s: RunSpec, tps: float, status: Status = "ok", memory: float = 1.0, **changes: Any) -> RunResult:
    """A result whose other figures follow from ``tps`` (tokens/s a GPU) and ``memory`` (GiB)."""
    simulated, world = s.engine == "simulate", s.world_size
    figures = {
        "tps_per_gpu": tps, "tps_global": tps * world, "step_time_s": s.config.tokens_per_step / (tps * world),
        "peak_active_gib": memory, "peak_reserved_gib": memory * 1.1, "compile_time_s": 0.0, "final_loss": 6.25,
        "stability": 0.0, "bubble_frac": 0.1, "exposed_comm_frac": 0.2,
    }  # fmt: skip
    metrics = {name: Value.none(name, "no device peak") for name in METRICS}
    if status == "ok":
        metrics |= {k: value(k, x, 0.08 if simulated else 0.01, 0 if simulated else 15) for k, x in figures.items()}
        metrics["stability"] = Value(0.0, n=20, unit="count")
    steps = s.config.train.steps
    made = RunResult(
        s.run_id, status, s.to_dict(), engine=s.engine, reason=None if status == "ok" else f"{status} on rank 1",
        steps_requested=steps, steps_done=steps if status == "ok" else 3, world_size=world, code_id="c0de00000001",
        started_at=STARTED, metrics=metrics, memory_rank=0, window=Window(6, steps), command=s.command(),
        environment={"fingerprint": "ma0000000001", "host": "node1", "cpu": "Synthetic CPU", "cores": 2},
        evidence={"init_digest": "1n17", "data_digest": "da7a"},
    )  # fmt: skip
    return replace(made, **changes)


def write(folder: Path, r: RunResult, sweep: str = "sweep", losses: list[float] | None = None) -> Path:
    """One run folder; ``losses`` become its steps.jsonl."""
    path = folder / sweep / r.run_id / f"r{r.repeat:03d}"
    path.mkdir(parents=True)
    (path / SPEC).write_text(json.dumps(r.spec))
    (path / RESULT).write_text(replace(r, sweep=sweep).to_json())
    if losses is not None:
        tokens = r.spec["train"]["global_batch_size"] * r.spec["data"]["seq_len"]
        rows = [{"step": i + 1, "loss": x, "grad_norm": 1 + x / 10, "lr": 1e-3, "tokens": tokens,
                 "step_time_s": tokens / 4000, "excluded": "warmup" if i < 5 else None}
                for i, x in enumerate(losses)]  # fmt: skip
        (path / STEPS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def decay(steps: int = 20, shift: float = 0.0) -> list[float]:
    """A loss curve from ln 2048 down, ``shift`` relative."""
    return [(4.5 + 3.1 * math.exp(-i / 8)) * (1 + shift) for i in range(steps)]


LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2},
    {"dp_shard": 2, "pp": 2}, {"dp_shard": 1, "tp": 2, "pp": 2}, {"dp_shard": 1, "tp": 4},
    {"dp_shard": 1, "cp": 2, "tp": 2},
]  # fmt: skip
RECIPES: list[dict[str, Any]] = [
    {}, {"compile": {"enable": True}}, {"compile": {"enable": True}, "precision": {"float8": "rowwise"}},
    {"compile": {"enable": True}, "precision": {"float8": "tensorwise"}}, {"ac": {"mode": "full"}},
]  # fmt: skip


def forty(folder: Path) -> None:
    """Eight layouts by five recipes on four ranks, two of them failed, with a one-rank reference and equal runs."""
    rng = random.Random(0)
    for layout, recipe in itertools.product(LAYOUTS, RECIPES):
        replicas = layout.get("dp_replicate", 1) * layout["dp_shard"]
        s = spec(parallel={**layout, "schedule": "1F1B"}, train={"local_batch_size": 8 // replicas}, **recipe)
        speed = 1500 * (1 + 0.12 * bool(recipe.get("compile"))) * (1.25 if "precision" in recipe else 1)
        speed *= (0.8 if "ac" in recipe else 1) * (0.85 ** (layout.get("tp", 1) - 1)) * rng.uniform(0.97, 1.03)
        speed *= 0.9 if layout.get("pp") else 1
        memory = (1.2 if "ac" in recipe else 2.0) / layout.get("pp", 1) * rng.uniform(0.9, 1.1)
        status: Status = "oom" if layout.get("cp") and "ac" not in recipe and not recipe else "ok"
        status = "hung" if layout.get("tp") == 4 and recipe.get("precision", {}).get("float8") == "rowwise" else status
        bf16 = "precision" not in recipe
        made = result(s, speed, status, memory, memory_rank=layout.get("pp", 1) - 1)
        parts = {"params": 0.25, "grads": 0.2, "optimizer": 0.3, "activations": 0.25}
        times = {"compute": 0.6, "exposed_comm": {"fsdp": 0.1, "tp": 0.1}, "bubble": 0.1 if layout.get("pp") else 0.0,
                 "optimizer": 0.1}  # fmt: skip
        step = s.config.tokens_per_step / (speed * 4)
        evidence = {**made.evidence, "memory": {k: v * memory for k, v in parts.items()},
                    "time_breakdown": {k: {a: x * step for a, x in v.items()} if isinstance(v, dict) else v * step
                                       for k, v in times.items()}}  # fmt: skip
        shift = rng.uniform(-1, 1) * 1e-4 + (0 if bf16 else 0.004) + (0.02 if layout.get("tp") == 4 and bf16 else 0)
        write(folder, replace(made, evidence=evidence), "forty", decay(shift=shift))
        if recipe == {} and layout == {"dp_shard": 4}:
            for i in (1, 2):
                again = result(
                    s, speed * (1 + 0.01 * i), "ok", memory, repeat=i, started_at=f"2026-03-01T1{i}:00:00+00:00"
                )
                write(folder, replace(again, evidence=evidence), "forty", decay(shift=shift + i * 1e-5))
    single = spec(parallel={"dp_shard": 1}, train={"local_batch_size": 8})
    write(folder, result(single, 2100, memory=5.5), "forty", decay())


def many(folder: Path, runs: int = 4100) -> None:
    """A sweep of thousands of points, half of them simulated, a tenth failed.

    bench's types make one result; the others change its keys in place, since thousands of specs take half a minute.
    """
    rng = random.Random(1)
    seed = json.loads(result(spec(hardware={"device": "h100_80g"}, model={"name": "llama3_8b"}), 1.0).to_json())
    grid = itertools.product((2048, 4096, 8192), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 4), (False, True),
                             ("off", "rowwise"), ("none", "full"), ("simulate", "measure"))  # fmt: skip
    for i, (seq, batch, tp, cp, pp, compiled, float8, ac, engine) in enumerate(itertools.islice(grid, runs)):
        made, dp = json.loads(json.dumps(seed)), 64 // (tp * cp * pp)
        for section, changes in {
            "data": {"seq_len": seq}, "compile": {"enable": compiled}, "precision": {"float8": float8},
            "ac": {"mode": ac},
            "parallel": {"dp_shard": dp, "tp": tp, "cp": cp, "pp": pp, "world_size": 64, "microbatches": pp},
            "train": {"local_batch_size": batch * pp, "global_batch_size": dp * batch * pp},
        }.items():  # fmt: skip
            made["spec"][section] |= changes
        made["spec"]["engine"] = engine
        speed = 6000 * (1.15 if compiled else 1) * (1.3 if float8 != "off" else 1) / (tp**0.2 * cp**0.2 * pp**0.1)
        speed *= (0.8 if ac == "full" else 1) * rng.uniform(0.97, 1.03)
        memory = 90 * (0.6 if ac == "full" else 1) * batch**0.2 / (tp * cp * pp) ** 0.4
        status = ("oom", "hung", "failed", "timeout")[i % 4] if rng.random() < 0.1 else "ok"
        made |= {"run_id": f"{i:012x}", "engine": engine, "world_size": 64, "status": status,
                 "reason": None if status == "ok" else f"{status} on rank {i % 64}"}  # fmt: skip
        figures = {"tps_per_gpu": speed, "tps_global": 64 * speed, "peak_active_gib": memory,
                   "step_time_s": seq * batch * pp * dp / (64 * speed)}  # fmt: skip
        for name, x in figures.items():
            made["metrics"][name] |= {"value": x, "low": x * 0.98, "high": x * 1.02}
        path = folder / "many" / made["run_id"] / "r000"
        path.mkdir(parents=True)
        (path / SPEC).write_text(json.dumps(made["spec"]))
        (path / RESULT).write_text(json.dumps(made))
