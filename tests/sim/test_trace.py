"""Traces of the trainer's step. References: the closed-form counts, a real gloo run, and the trace of all layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from bench.sim import cache, predict
from bench.sim.events import Event, Op, Trace
from bench.sim.expand import expand
from bench.sim.trace import trace_rank, trace_ranks
from bench.spec import RunSpec, from_overrides
from tests.dist.pool import Pool
from tests.sim.real import two_steps
from trainer_core import counts, model
from trainer_core.parallel import tensor

SMALL = ["model.dim=128", "model.ffn_dim=256", "model.heads=4", "model.kv_heads=2", "model.vocab_size=512",
         "data.seq_len=64", "train.local_batch_size=4"]  # fmt: skip


@pytest.fixture(scope="module")
def pool():
    ranks = Pool(4)
    yield ranks
    ranks.close()


def spec_of(*overrides: str) -> RunSpec:
    return from_overrides([*SMALL, *overrides])


def plan_of(spec: RunSpec, traces: dict[int, Trace]) -> predict.Traced:
    return cache.assemble(spec, traces)


def rows(trace: Trace) -> list[list[Any]]:
    """The events of every step, numbers replaced by what they stand for."""
    steps: list[list[Any]] = []
    e = trace.events
    for kind, arg, stream, layer in zip(e.kind, e.arg, e.stream, e.layer, strict=True):
        if kind == Event.MARK:
            steps.append([])
        elif steps:
            what: Any = trace.table[arg] if kind in (Event.OP, Event.COLLECTIVE) else None
            if kind in (Event.ALLOC, Event.FREE):
                what = trace.storages[arg].bytes, trace.storages[arg].stream
            steps[-1].append((kind, what, stream, layer))
    return steps


@pytest.mark.parametrize("layout", [
    ["parallel.dp_shard=4", "ac.mode=selective"],
    ["parallel.dp_shard=2", "parallel.tp=2", "compile.enable=true"],
])  # fmt: skip
def test_steps_repeat(layout):
    """Step 2 equals step 3, kernel by kernel and byte by byte: nothing leaks, nothing is still warming up."""
    steps = rows(trace_rank(spec_of("model.layers=2", *layout), steps=3))
    assert len(steps[1]) > 300
    assert steps[1] == steps[2]


LAYOUTS = {
    "fsdp": ["parallel.dp_shard=4", "ac.mode=selective"],
    "tp": ["parallel.dp_shard=2", "parallel.tp=2", "ac.mode=full"],
    "hsdp": ["parallel.dp_shard=2", "parallel.dp_replicate=2", "optim.impl=fused"],
    "every_k": ["parallel.dp_shard=2", "ac.mode=every_k", "ac.k=2"],
    "compiled": ["parallel.dp_shard=2", "compile.enable=true"],
    "accumulated": ["parallel.dp_shard=2", "train.global_batch_size=16"],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_growing_is_exact(name):
    """A trace grown from a few layers equals the trace of all layers: events, collectives, live and reserved memory."""
    spec = spec_of(f"model.layers={15 if name == 'every_k' else 9}", *LAYOUTS[name])
    full = trace_rank(spec, depth=9)
    grown = trace_rank(spec, depth=6)
    assert sum(grown.depths) < sum(full.depths)
    a, b = plan_of(spec, {0: grown}), plan_of(spec, {0: full})
    assert np.array_equal(a.grown(0).kind, b.grown(0).kind)
    assert predict.collectives(a) == predict.collectives(b)
    assert predict.flops(a) == predict.flops(b)
    for expandable in (False, True):
        assert predict.footprint(a, expandable) == predict.footprint(b, expandable)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_gemm_flops_are_the_closed_form(mode):
    """GEMM and attention FLOPs a step: tokens x (model FLOPs, causal, + what checkpointing computes again)."""
    spec = spec_of("model.layers=2", f"ac.mode={mode}")
    c = spec.config
    trace = trace_rank(spec)
    steps = [[r[1] for r in step if r[0] == Event.OP] for step in rows(trace)]
    gemms = sum(op.flops for op in steps[1] if op.kind == "gemm")
    attention = Counter({d: sum(op.flops for op in steps[1] if op.kind == "attention" and op.dims[-1] == d)
                         for d in (0, 1)})  # fmt: skip
    tokens = c.tokens_per_step
    forward = c.model.layers * 4 * c.model.heads * c.model.head_dim * (c.data.seq_len + 1) / 2 * tokens
    again = counts.recompute_flops_per_token(c, causal=True) * tokens
    if mode == "full":
        again -= forward
    assert gemms == pytest.approx(6 * counts.gemm_params(c.model) * tokens + again, rel=1e-9)
    # the backward's five matmuls: the scores are formed again, which the model's FLOPs do not count
    assert attention[0] == pytest.approx(forward * (2 if mode == "full" else 1))
    assert attention[1] == pytest.approx(2.5 * forward)


def test_parameter_bytes():
    """fp32 shards of all parameters, exactly, at a degree that divides every matrix."""
    spec = spec_of("model.layers=3", "parallel.dp_shard=4")
    trace = trace_rank(spec)
    params = sum(s.bytes for s in trace.storages if s.category == "params")
    assert params == 4 * counts.params(spec.config.model) // 4


@pytest.mark.parametrize("layout", [
    ["parallel.dp_shard=4", "model.layers=2"],
    ["parallel.dp_shard=2", "parallel.tp=2", "model.layers=2"],
    ["parallel.dp_shard=2", "parallel.cp=2", "parallel.cp_method=ring", "model.layers=2"],
    ["parallel.dp_shard=2", "parallel.dp_replicate=2", "model.layers=2", "ac.mode=full"],
])  # fmt: skip
def test_against_a_real_run(pool, layout):
    """Collectives (count and bytes, by axis and kind) equal those of gloo ranks; live tensor bytes within 2 %."""
    spec = spec_of(*layout)
    real = pool.run(two_steps, 4, spec.config)
    plan = plan_of(spec, {0: trace_rank(spec, kind="cpu")})
    assert predict.collectives(plan) == real[0][1]
    assert predict.footprint(plan)[0].live_peak == pytest.approx(max(peak for peak, _ in real), rel=0.02)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_pipeline_actions(schedule):
    """The traced ranks run exactly the actions of torch's own table, in its order."""
    spec = spec_of("model.layers=8", "parallel.pp=2", f"parallel.schedule={schedule}", "parallel.microbatches=4")
    c = spec.config
    for rank, trace in trace_ranks(spec, (0, 1)).items():
        stages = c.rank_stages(rank)
        first = next(i for i, mark in enumerate(trace.marks) if mark[0] == "finish")
        ran = [(n.split(":"), number) for n, number in trace.marks[:first] if ":" in n and "REDUCE" not in n]
        assert [f"{stages[int(slot)]}{kind}{number}" for (kind, slot), number in ran] == trace.facts["actions"][rank]


def test_only_the_program_changes_the_trace(monkeypatch):
    """A patched trainer gives another trace with nothing changed in the simulator."""
    spec = spec_of("model.layers=2", "parallel.dp_shard=2", "parallel.tp=2")
    before = plan_of(spec, {0: trace_rank(spec)})
    forward = model.FeedForward.forward

    def twice(self, x):
        return forward(self, x) + forward(self, x)

    monkeypatch.setattr(model.FeedForward, "forward", twice)
    assert predict.flops(plan_of(spec, {0: trace_rank(spec)})) > 1.3 * predict.flops(before)
    monkeypatch.undo()
    plan = tensor.block_plan

    def without_norms(*args):
        return {k: v for k, v in plan(*args).items() if "norm" not in k}

    monkeypatch.setattr(tensor, "block_plan", without_norms)
    after = plan_of(spec, {0: trace_rank(spec)})
    assert predict.collectives(after)["tp"] != predict.collectives(before)["tp"]


def test_compiled_kernels_are_fewer_and_move_less():
    eager, compiled = (trace_rank(spec_of("model.layers=2", f"compile.enable={flag}")) for flag in ("false", "true"))
    assert compiled.facts["graphs"] == 2 and "graphs" not in eager.facts
    ops = [[r[1] for r in rows(t)[1] if isinstance(r[1], Op) and r[1].kind != "gemm"] for t in (eager, compiled)]
    moved = [sum(op.bytes_read + op.bytes_written for op in own) for own in ops]
    assert len(ops[1]) < len(ops[0])
    assert moved[1] < 0.8 * moved[0]


def test_uneven_depth_keeps_its_size():
    """Two stages of a rank grow on their own: 7 and 8 layers from 6 and 6."""
    spec = spec_of("model.layers=30", "parallel.pp=2", "parallel.dp_shard=2", "parallel.schedule=Interleaved1F1B")
    trace = trace_ranks(spec, (0,))[0]
    grown = expand(trace, [7, 8])
    gemms = [(trace.table[a].kind == "gemm") for a in grown.arg[grown.kind == Event.OP.value]]
    again = expand(trace, [6, 6])
    per_layer = sum(gemms) - sum(trace.table[a].kind == "gemm" for a in again.arg[again.kind == Event.OP.value])
    assert per_layer == 3 * 2 * 2 * 21  # layers x steps x microbatches x (7 forward + 14 backward)
