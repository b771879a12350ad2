"""The engine from spec to result. References: the contract's keys, closed forms, and a direct trace of another size."""

from __future__ import annotations

import json

import pytest

from bench import cli
from bench.result import METRICS, RunResult
from bench.sim import cache, engine, predict
from bench.sim.resize import resize
from bench.sim.trace import trace_rank
from bench.spec import from_overrides
from trainer_core.config import ConfigError

SMALL = ["hardware=h100_80g", "model.dim=128", "model.ffn_dim=256", "model.heads=4", "model.kv_heads=2",
         "model.vocab_size=512", "model.layers=8", "data.seq_len=64", "train.local_batch_size=4"]  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """One cache for the module, apart from the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def simulate(*overrides: str) -> RunResult:
    return engine.simulate(from_overrides([*SMALL, "engine=simulate", *overrides]))


def test_result_is_complete_and_consistent():
    result = simulate("parallel.dp_shard=2", "parallel.tp=2")
    assert (result.status, result.engine, result.world_size) == ("ok", "simulate", 4)
    assert set(result.metrics) == set(METRICS)
    m = result.metrics
    for value in m.values():
        if value.value is None:
            assert value.reason
        else:
            assert value.low <= value.value <= value.high and value.level == 0.8
    step = m["step_time_s"].value
    assert m["tps_global"].value == pytest.approx(8 * 64 / step)
    assert m["tps_per_gpu"].value == pytest.approx(m["tps_global"].value / 4)
    parts = result.evidence["time_breakdown"]
    total = sum(v for v in parts.values() if not isinstance(v, dict)) + sum(parts["exposed_comm"].values())
    assert total == pytest.approx(step)
    assert sum(result.evidence["memory"].values()) == pytest.approx(m["peak_active_gib"].value)
    assert {"dp_shard", "tp"} <= set(result.evidence["collectives"])
    assert RunResult.from_dict(json.loads(result.to_json())).metrics == result.metrics


def test_memory_by_category_is_the_closed_form():
    """fp32 parameters, gradients and two Adam moments of the shard; at the peak of a tiny batch all are there."""
    spec = from_overrides([*SMALL, "parallel.dp_shard=4", "optim.impl=fused"])
    trace = trace_rank(spec, depth=8)
    size = {c: sum(s.bytes for s in trace.storages if s.category == c) for c in ("params", "optimizer")}
    # the step counter of each parameter comes on top
    assert size["params"] * 2 == pytest.approx(size["optimizer"], rel=1e-3)


def test_another_number_of_ranks_resizes_the_cached_trace(monkeypatch):
    spec = {n: from_overrides([*SMALL, f"parallel.dp_shard={n}"]) for n in (2, 8)}
    small, large = (cache.assemble(spec[n], {0: trace_rank(spec[n])}) for n in (2, 8))
    grown = resize(small.traces[0], spec[2].config.parallel.degrees, spec[8].config.parallel.degrees)
    grown = cache.assemble(spec[8], {0: grown})
    assert predict.collectives(grown) == predict.collectives(large)
    a, b = (predict.footprint(p)[0] for p in (grown, large))
    assert a.live_peak == pytest.approx(b.live_peak, rel=1e-3)
    assert a.by_category == pytest.approx(b.by_category, rel=1e-3, abs=64)
    assert cache.key_of(spec[2], "cuda") == cache.key_of(spec[8], "cuda")
    cache.traces_of(spec[2], "cuda")
    monkeypatch.setattr(cache, "_make", lambda *_: pytest.fail("the trace of 2 ranks serves 8"))
    simulate("parallel.dp_shard=8")


def test_a_plan_that_does_not_fit_is_oom_with_a_way_out():
    result = engine.simulate(from_overrides(["hardware=h100_80g", "model=llama3_8b", "parallel.dp_shard=2",
                                             "data.seq_len=8192", "train.local_batch_size=16"]))  # fmt: skip
    assert result.status == "oom"
    assert "What would make it fit" in result.reason and "ac.mode=full" in result.reason
    assert result.metrics["peak_reserved_gib"].value > 80
    assert result.evidence["memory"]["activations"] > 10


def test_unsupported_says_why():
    result = simulate("precision.float8=mxfp8", "hardware=b200")
    assert result.status == "unsupported" and "Triton" in result.reason
    assert all(v.value is None and v.reason for v in result.metrics.values())


def test_invalid_plan_and_unknown_device():
    with pytest.raises(ConfigError, match="does not divide"):
        simulate("parallel.tp=3")
    with pytest.raises(ConfigError, match="not one of"):
        from_overrides(["hardware=h1000"])


def test_unbalanced_context_parallel_traces_the_last_rank():
    """Without balancing the last of cp ranks attends to 2 - 1/cp times the mean, up to the diagonal's share."""
    args = ("parallel.cp=4", "data.seq_len=4096", "model.layers=1")
    flops = {}
    for flag in ("true", "false"):
        plan = cache.traces_of(from_overrides([*SMALL, *args, f"parallel.cp_balance={flag}"]), "cuda")
        flops[flag] = sum(e.flops for e in plan.traces[0].table if getattr(e, "kind", "") == "attention")
    assert predict.flops(plan) > 0
    assert 1.5 < flops["false"] / flops["true"] < 2


def test_trace_command_writes_a_timeline(tmp_path, capsys):
    out = tmp_path / "step.json"
    assert cli.main(["trace", *SMALL, "parallel.dp_shard=2", "-o", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"compute", "fsdp_all_gather", "fsdp_reduce_scatter"} <= names
    kernels = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert len(kernels) > 300
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in zip(kernels, kernels[1:], strict=False))
