"""From rank files to figures. References: hand-made rank files whose figures are known, and t tables."""

import json
import math
import random
import statistics

import pytest

from bench.endings import Ending
from bench.measure import empty
from bench.result import Value
from bench.run import claim
from bench.spec import from_overrides
from bench.summary import median_value, memory_growth, summarize, t_quantile, windows


def step(n: int, **values) -> dict:
    row = {"kind": "step", "time": float(n), "step": n, "loss": 4.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 1000,
           "step_time_s": 0.5, "peak_active_gib": None, "peak_reserved_gib": None, "peak_rss_gib": 1.0,
           "alloc_retries": 0, "recompiles": 0, "excluded": None}  # fmt: skip
    return row | values


def start(time: float = 0.0) -> dict:
    return {"kind": "start", "time": time, "rank": 0, "pid": 1, "host": "h"}


@pytest.fixture
def figures(tmp_path):
    """The result and steps.jsonl of ranks that wrote these lines."""

    def run(ranks: list[list[dict]], *overrides: str):
        spec = from_overrides([f"parallel.dp_shard={len(ranks)}", "train.steps=12", "train.warmup_steps=2", *overrides])
        folder = claim(spec, tmp_path)
        for rank, rows in enumerate(ranks):
            folder.rank_file(rank).write_text("".join(json.dumps(row) + "\n" for row in rows))
        result = summarize(empty(spec, folder, Ending("ok")), spec, folder)
        return result, [json.loads(line) for line in folder.steps.read_text().splitlines()]

    return run


def test_ranks_are_merged(figures):
    """Time and memory are the worst rank's, the loss the owners'; a token is counted once."""
    zero = [start(), *(step(n, loss=None, step_time_s=0.4, peak_rss_gib=3.0) for n in range(1, 13))]
    one = [start(), *(step(n, loss=5.0 - n / 10) for n in range(1, 13))]
    result, steps = figures([zero, one])
    assert steps[0] == {"step": 1, "loss": 4.9, "grad_norm": 1.0, "lr": 1e-3, "tokens": 1000, "step_time_s": 0.5,
                        "peak_active_gib": None, "peak_reserved_gib": None, "peak_rss_gib": 3.0, "alloc_retries": 0,
                        "recompiles": 0, "excluded": "warmup"}  # fmt: skip
    m = result.metrics
    assert m["tps_global"] == Value(2000.0, 2000.0, 2000.0, 0.95, 5, "tokens/s") and m["tps_per_gpu"].value == 1000.0
    assert (m["peak_rss_gib"].value, result.memory_rank) == (3.0, 0)
    assert m["final_loss"].value == pytest.approx(statistics.fmean(5.0 - n / 10 for n in range(8, 13)))
    assert m["mfu"].value is None and "CPU" in m["mfu"].reason
    assert (result.window.first, result.window.last) == (3, 12) and result.steps_done == 12


def test_marked_steps_are_left_out(figures):
    """A slow recompile, checkpoint and profile step change no figure; a step that one rank marks is marked."""
    marks = {5: "recompile", 7: "checkpoint", 9: "profile"}
    rows = [step(n, excluded=marks.get(n), step_time_s=9.0 if n in marks else 0.5) for n in range(1, 13)]
    plain = [step(n, step_time_s=9.0 if n in marks else 0.5) for n in range(1, 13)]
    result, _ = figures([[start(), *rows], [start(), *plain]])
    assert result.metrics["tps_global"].value == 2000.0 and result.metrics["step_time_s"].high == 0.5
    assert result.window.excluded == {"1": "warmup", "2": "warmup", "5": "recompile", "7": "checkpoint", "9": "profile"}


def test_compile_time_is_the_excess_of_the_first_steps(figures):
    rows = [step(1, step_time_s=20.5), step(2, step_time_s=1.0), *(step(n) for n in range(3, 13))]
    result, _ = figures([[start(), *rows]], "compile.enable=true")
    assert result.metrics["compile_time_s"].value == pytest.approx(20.5)
    assert figures([[start(), *rows]])[0].metrics["compile_time_s"].value is None


def test_restart_is_merged(figures):
    """Killed after step 7, gone on from the checkpoint at 5: steps 6 and 7 count once, as they were done last."""
    first = [start(), *(step(n, loss=1.0) for n in range(1, 8))]
    second = [start(50.0), {"kind": "resume", "time": 51.0, "step": 5}, *(step(n, loss=2.0) for n in range(6, 13))]
    result, steps = figures([first + second])
    assert (result.attempts, [s["step"] for s in steps]) == (2, list(range(1, 13)))
    assert [s["loss"] for s in steps] == [1.0] * 5 + [2.0] * 7
    assert [s["step"] for s in steps if s["excluded"]] == [1, 2, 6, 7], "a restart warms up again"


def test_a_step_counts_when_every_rank_did_it(figures):
    result, steps = figures([[start(), *map(step, range(1, 8))], [start(), *map(step, range(1, 6))]])
    assert result.steps_done == 5 and len(steps) == 5


def test_a_half_written_line_is_no_step(figures, tmp_path):
    spec = from_overrides(["train.steps=12", "train.warmup_steps=2"])
    folder = claim(spec, tmp_path)
    text = "".join(json.dumps(row) + "\n" for row in [start(), *map(step, range(1, 5))])
    folder.rank_file(0).write_text(text[:-20])
    assert summarize(empty(spec, folder, Ending("failed", "x")), spec, folder).steps_done == 3


def test_no_step_no_figure(figures):
    result, _ = figures([[start()]])
    assert all(v.value is None and v.reason for v in result.metrics.values())
    short, _ = figures([[start(), step(1), step(2)]])
    assert short.metrics["tps_global"].value is None and "2 left out" in short.metrics["tps_global"].reason


def test_windows():
    rows = [{"step": n} for n in range(13)]
    parts = windows(rows, 5)
    assert [r for w in parts for r in w] == rows and {len(w) for w in parts} <= {2, 3} and len(parts) == 5
    assert len(windows(rows[:3], 5)) == 3 and windows([], 5) == []


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (4, 2.776), (30, 2.042)])
def test_t_quantile(degrees, quantile):
    assert t_quantile(0.95, degrees) == pytest.approx(quantile, abs=5e-4)


def test_interval_covers():
    """2,000 sets of 5 normal windows: the stated 95 % interval of the median holds the truth at least so often."""
    rng = random.Random(0)
    held = 0
    for _ in range(2000):
        v = median_value([rng.gauss(100, 3) for _ in range(5)], "tokens/s")
        held += v.low <= 100 <= v.high
    assert 0.95 <= held / 2000 <= 0.985
    assert median_value([7.0], "s") == Value(7.0, n=1, unit="s")


def test_memory_growth():
    flat = [{"step": n, "peak_active_gib": None, "peak_rss_gib": 2.0} for n in range(30)]
    assert memory_growth(flat) == 0.0 and memory_growth(flat[:9]) is None
    leak = [row | {"peak_rss_gib": 2.0 * (1 + 0.002 * row["step"])} for row in flat]
    assert math.isclose(memory_growth(leak), 0.02, rel_tol=0.05)
