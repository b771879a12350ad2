"""The main job, ``make bench``, as a user runs it: its promises on time, layouts, parity and figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import store
from bench.result import RunResult
from sweeps.work import loss_deviation

ROOT = Path(__file__).resolve().parents[2]
PARITY = 5e-6
"""Largest relative deviation of the loss from one rank's that fp32 summation order explains (measured: below 1e-6)."""


def layout(row: RunResult) -> tuple[object, ...]:
    p = row.spec["parallel"]
    return tuple(p[k] for k in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "schedule", "cp_method"))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str], float]:
    """(folder, the finished make, seconds)."""
    folder = tmp_path_factory.mktemp("bench")
    argv = ["make", "bench", f"PY={sys.executable}", f"RESULTS={folder / 'results'}", f"REPORT={folder / 'report'}"]
    begin = time.monotonic()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "CI": "1"})
    return folder, done, time.monotonic() - begin


@pytest.mark.budget
@pytest.mark.compiler
@pytest.mark.timeout(1200)
def test_the_main_job_keeps_its_promises(
    job: tuple[Path, subprocess.CompletedProcess[str], float], budget: Callable[[str, float, float, str], None]
) -> None:
    folder, done, seconds = job
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    results = folder / "results"
    rows = [r for r in store.load_all(results / "strategies") if r.status == "ok"]
    assert len(rows) >= 14 and len({layout(r) for r in rows}) >= 12
    assert {"18 points: 18 ok, 0 failed"} <= set(done.stdout.splitlines())
    for row in rows:
        tps = row.metrics["tps_global"]
        assert tps.value is not None and tps.n >= 5 and tps.low is not None and tps.low <= tps.value
    baseline_id = json.loads((results / "strategies" / "sweep.json").read_text())["baseline"]
    (baseline,) = (r for r in rows if r.run_id == baseline_id)
    for row in rows:
        deviation = loss_deviation(row, baseline, results)
        assert deviation is not None, f"{row.command} is not comparable with one rank"
        assert deviation <= PARITY or row.spec["precision"]["float8"] != "off", (row.command, deviation)
    for name in ("index.html", "report.md", "results.csv"):
        assert (folder / "report" / name).stat().st_size > 0
    budget("make bench on this machine", seconds, 600, "s")
