"""What a rank measures: lines that are strict JSON, memory, compile counts, traces and their report, stability."""

import gzip
import json
import random
import subprocess
import sys
import types

import psutil
import pytest
import torch

from bench import profile_report as report
from trainer_core import metrics
from trainer_core.profile import Profiler
from trainer_core.stability import stability

CPU = torch.device("cpu")


def test_lines_are_strict_json_and_name_what_was_not_finite(tmp_path):
    writer = metrics.RankWriter(tmp_path / "ranks" / "0.jsonl")
    writer.write("start", rank=0, host='odd "host"\n')
    writer.step(metrics.StepRecord(1, float("nan"), float("inf"), 0.1, 32, 0.5))
    writer.step(metrics.StepRecord(2, None, 1.0, 0.1, 32, 0.5, excluded="warmup"))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = (tmp_path / "ranks" / "0.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [r["kind"] for r in rows] == ["start", "step", "step"] and rows[0]["host"] == 'odd "host"\n'
    assert rows[1]["loss"] is None and rows[1]["not_finite"] == ["loss", "grad_norm"]
    assert rows[2]["loss"] is None and "not_finite" not in rows[2] and rows[2]["excluded"] == "warmup"
    assert all(isinstance(r["time"], float) for r in rows)
    writer.close()


def test_peak_resident_set_keeps_what_was_freed():
    """Against psutil's current resident set; 200 MiB touched and freed stay in the peak."""
    meter = metrics.MemoryMeter(CPU)
    before = psutil.Process().memory_info().rss / 2**30
    ballast = torch.ones(200 * 2**20, dtype=torch.uint8)
    full = psutil.Process().memory_info().rss / 2**30
    del ballast
    read = meter.read()
    assert full > before + 0.19 and read["peak_rss_gib"] >= full - 1e-3
    assert read["peak_active_gib"] is None and read["peak_reserved_gib"] is None and read["alloc_retries"] == 0


def test_cuda_peaks_are_those_of_the_step(monkeypatch):
    """With a stand-in for the allocator: GiB, retries since the last call, peaks reset."""
    stats = {"active_bytes.all.peak": 3 * 2**30, "reserved_bytes.all.peak": 4 * 2**30, "num_alloc_retries": 2}
    reset = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    meter = metrics.MemoryMeter(torch.device("cuda", 0))
    first, second = meter.read(), meter.read()
    assert (first["peak_active_gib"], first["peak_reserved_gib"], first["alloc_retries"]) == (3, 4, 2)
    assert second["alloc_retries"] == 0 and len(reset) == 2


def test_compile_counts():
    """Two graphs from a break, then one frame compiled again for a new dtype."""

    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    counter = metrics.CompileCounter()
    before = counter.evidence()
    compiled = torch.compile(broken, backend="eager")
    compiled(torch.ones(2))
    assert counter.take() == (2, 0)
    compiled(torch.ones(2))
    assert counter.take() == (0, 0)
    compiled(torch.ones(2, dtype=torch.float64))
    graphs, again = counter.take()
    assert graphs == 2 and again == 2
    after = counter.evidence()
    assert after["graph_breaks"] > before["graph_breaks"] and after["graphs_compiled"] == before["graphs_compiled"] + 4
    torch._dynamo.reset()


def test_sampler_without_a_gpu_says_why():
    with metrics.GpuSampler(CPU) as sampler:
        assert sampler.summary() == {"reason": "the device is cpu, no GPU"}


def test_sampler_reads_nvml(monkeypatch):
    """With a stand-in for NVML: the GPU is found by its UUID, units are converted."""
    asked = []
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError, nvml.NVML_CLOCK_SM = RuntimeError, 1
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: asked.append(uuid) or "handle"
    nvml.nvmlDeviceGetMemoryInfo = lambda h: types.SimpleNamespace(used=2 * 2**30)
    nvml.nvmlDeviceGetUtilizationRates = lambda h: types.SimpleNamespace(gpu=50)
    nvml.nvmlDeviceGetPowerUsage = lambda h: 350_000
    nvml.nvmlDeviceGetClockInfo = lambda h, kind: 1980
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: types.SimpleNamespace(uuid="ab-cd"))
    with metrics.GpuSampler(torch.device("cuda", 0), interval_s=0.001) as sampler:
        while len(sampler.samples) < 3:
            pass
    summary = sampler.summary()
    assert asked == ["GPU-ab-cd"] and summary["n"] >= 3
    assert summary["power_w"] == {"mean": 350.0, "max": 350.0} and summary["utilisation_frac"]["mean"] == 0.5
    assert summary["memory_used_gib"]["max"] == 2.0 and summary["sm_clock_mhz"]["max"] == 1980.0


def test_profiler_traces_the_chosen_steps(tmp_path):
    profiler = Profiler(tmp_path, 3, range(2, 4), CPU)
    traced = []
    for step in range(1, 6):
        with profiler.step(step) as on:
            traced.append(on)
            torch.ones(200, 200) @ torch.ones(200, 200)
    assert traced == [False, True, True, False, False]
    found = report.profile_report(tmp_path)
    assert list(found["ranks"]) == ["3"] and found["steps"] == 2 and found["ranks"]["3"]["device"] == "cpu"
    assert "aten::mm" in [o["name"] for o in found["top_ops"]]
    assert 0 < found["mean"]["compute_frac"] <= 1 and found["mean"]["exposed_comm_frac"] == 0
    assert found["mean"]["overlap_frac"] is None


def event(name, start, duration, cat="kernel", tid=0):
    return {"ph": "X", "name": name, "ts": start, "dur": duration, "cat": cat, "tid": tid}


def test_report_of_a_gpu_trace(tmp_path):
    """A 100 us step drawn by hand: compute 0-50 and 80-90, all-gather 40-70 (20 exposed), receive 85-95 (5 exposed)."""
    events = [
        event("ProfilerStep#7", 0, 100, "user_annotation"),
        event("ProfilerStep#7", 0, 90, "gpu_user_annotation"),
        event("aten::mm", 0, 10, "cpu_op"),
        event("gemm", 0, 50), event("gemm", 80, 10, tid=1), event("outside", -50, 10),
        event("ncclDevKernel_AllGather_RING_LL", 40, 30, tid=2),
        event("ncclDevKernel_SendRecv", 85, 10, tid=3),
    ]  # fmt: skip
    (tmp_path / "profile").mkdir()
    with gzip.open(tmp_path / "profile" / "rank0.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = report.profile_report(tmp_path)
    shares = found["ranks"]["0"]
    assert shares["device"] == "cuda" and shares["window_s"] == pytest.approx(1e-4)
    expected = {"compute_frac": 0.6, "comm_frac": 0.4, "exposed_comm_frac": 0.25, "idle_frac": 0.15}
    assert {k: shares[k] for k in expected} == pytest.approx(expected)
    assert shares["overlap_frac"] == pytest.approx(1 - 25 / 40)
    assert shares["exposed"] == pytest.approx({"all_gather": 0.2, "send_recv": 0.05})
    top = found["top_ops"][0]
    assert (top["name"], top["count"]) == ("gemm", 2) and top["time_s"] == pytest.approx(6e-5)
    assert top["share"] == pytest.approx(60 / 110)


def test_report_of_a_cpu_trace():
    """A 100 us step on the main thread (1), gloo's thread (2): compute 10-40 and 70-90, the collective 30-65 of which
    25 us are exposed; the autograd engine's wrapper and gloo's own copy are not compute."""
    shares = report.rank_report([
        event("ProfilerStep#1", 0, 100, "user_annotation", 1),
        event("aten::linear", 10, 30, "cpu_op", 1), event("aten::addmm", 12, 20, "cpu_op", 1),
        event("autograd::engine::evaluate_function: MmBackward0", 45, 50, "cpu_op", 1),
        event("c10d::allreduce_", 45, 15, "cpu_op", 1), event("aten::mm", 70, 20, "cpu_op", 1),
        event("gloo:all_reduce", 30, 35, "user_annotation", 2), event("aten::copy_", 31, 5, "cpu_op", 2),
    ])  # fmt: skip
    expected = {"compute_frac": 0.5, "comm_frac": 0.35, "exposed_comm_frac": 0.25, "idle_frac": 0.25}
    assert {k: shares[k] for k in expected} == pytest.approx(expected)
    assert shares["exposed"] == pytest.approx({"all_reduce": 0.25}) and shares["device"] == "cpu"


def test_own_time_of_nested_operators():
    times = report.operation_times([
        event("outer", 0, 100, "cpu_op"), event("inner", 10, 30, "cpu_op"), event("leaf", 15, 5, "cpu_op"),
        event("inner", 50, 10, "cpu_op"), event("outer", 0, 7, "cpu_op", tid=1),
    ])  # fmt: skip
    assert {name: seconds for name, (seconds, _) in times.items()} == pytest.approx(
        {"outer": 67e-6, "inner": 35e-6, "leaf": 5e-6}
    )
    assert {name: count for name, (_, count) in times.items()} == {"outer": 2, "inner": 2, "leaf": 1}


def test_intervals_against_sets_of_points():
    rng = random.Random(0)
    for _ in range(200):
        a, b = ([(s, s + rng.randint(1, 6)) for s in (rng.randint(0, 40) for _ in range(6))] for _ in range(2))
        points = [{p for s, e in x for p in range(s, e)} for x in (a, b)]
        left = report.subtract(report.union(a), report.union(b))
        assert {p for s, e in left for p in range(s, e)} == points[0] - points[1]
        assert report.measure(report.clip(report.union(a), (10, 30))) == len(points[0] & set(range(10, 30)))


@pytest.mark.parametrize("name", ["rank0.pt.trace.json", "rank0.pt.trace.json.gz"])
def test_a_broken_trace_is_named(name, tmp_path):
    with pytest.raises(FileNotFoundError, match="run.profile=on"):
        report.profile_report(tmp_path)
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / name).write_bytes(b'{"traceEvents": [')
    with pytest.raises(ValueError, match="no Chrome trace"):
        report.profile_report(tmp_path)


def test_stability_of_a_run():
    """A noisy fall of the loss with one spike, one NaN and one missing norm."""
    rng = random.Random(1)
    losses = [3 - 0.01 * i + rng.uniform(-0.05, 0.05) for i in range(100)]
    norms = [1.0, 3.0] * 50
    assert stability(losses, norms).count == 0
    assert stability(losses, norms).grad_norm_variation == pytest.approx(0.5, rel=0.01)
    losses[60] += 1.0
    losses[70] = float("nan")
    norms[80] = None
    found = stability(losses, norms)
    assert found.spikes == [60] and found.not_finite == [70, 80] and found.count == 3
    assert "2 steps not finite, 1 loss spikes" in found.text


def test_stability_without_enough_to_judge():
    assert stability([], []).count == 0 and stability([], []).grad_norm_variation is None
    assert stability([1.0, 9.0, 1.0], [1.0, 1.0, 1.0]).spikes == []
    assert stability([1.0] * 40, [0.0] * 40) == stability([1.0 + 1e-9 * (i % 2) for i in range(40)], [0.0] * 40)


def test_stability_is_importable_without_torch():
    code = "import sys; sys.modules['torch'] = None; import trainer_core.stability, bench.profile_report"
    subprocess.run([sys.executable, "-c", code], check=True)
