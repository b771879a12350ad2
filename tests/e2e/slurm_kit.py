"""A real SLURM for the tests, sweeps that are submitted to it, and waiting for their points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench import store
from bench.result import RunResult
from bench.status import Point, collect

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ROOT / "tests" / "slurm" / "local.py"
PLANTED = ROOT / "tests" / "slurm" / "planted"
TINY = ["model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=32", "data.seq_len=32",
        "train.local_batch_size=2", "train.warmup_steps=1", "data.corpus=synthetic", "precision=fp32"]  # fmt: skip
SETTLE_S = 8.0
Fault = dict[str, Any]


@dataclass
class Slurm:
    """The folder of a running single-machine SLURM and the environment of its users."""

    folder: Path
    env: dict[str, str]
    requeued: dict[str, float] = field(default_factory=dict)
    """Jobs that wait after a requeue: since when we know of it."""

    @classmethod
    def start(cls, folder: Path) -> Slurm:
        done = subprocess.run([sys.executable, LOCAL, "up", folder], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        exports = dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())
        os.environ.update(exports)  # bench.scheduler asks in this process too
        return cls(folder, dict(os.environ))

    def stop(self) -> None:
        subprocess.run([sys.executable, LOCAL, "down", self.folder], check=True, timeout=120)

    def call(self, *command: str) -> str:
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=True, timeout=60).stdout

    def python(self, *arguments: str, faults: dict[int, Fault] | None = None, **env: str) -> subprocess.Popen[str]:
        """``python -m ARGUMENTS``; the planted faults, by the seed of the point, go with the jobs that it submits."""
        planted = {"PYTHONPATH": str(PLANTED), "MESHMARK_TEST_FAULTS": json.dumps(faults)} if faults else {}
        return subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, env={**self.env, **planted, **env},
                                text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip

    def submit(self, results: Path, *overrides: str, faults: dict[int, Fault] | None = None) -> list[str]:
        """Submit a sweep of the tiny model on the cluster ``local``; the ids of its jobs."""
        process = self.python("sweeps", "-m", "hydra/launcher=slurm", "cluster=local", f"results={results}", *TINY,
                              *overrides, faults=faults)  # fmt: skip
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
        first = out.splitlines()[0].split(";")[0].split()
        return first[1:] if first[0] == "jobs" else []

    def status(self, results: Path) -> dict[int, Point]:
        """The points as ``bench status`` shows them, by their seed; of several runs of a point the newest."""
        points, trouble = collect(results)
        assert trouble is None, trouble
        specs = {p.folder: json.loads((Path(p.folder) / store.SPEC).read_text()) for p in points}
        return {specs[p.folder]["train"]["seed"]: p for p in points}

    def wait(self, results: Path, done: Callable[[dict[int, Point]], bool], seconds: float = 240) -> dict[int, Point]:
        """The points of ``results`` once ``done(points)``."""
        deadline = time.monotonic() + seconds
        while True:
            points = self.status(results)
            if done(points):
                return points
            assert time.monotonic() < deadline, f"{points}\n{self.call('squeue', '-r')}"
            self.hurry()
            time.sleep(1)

    def hurry(self) -> None:
        """Have requeued jobs start after SETTLE_S instead of two minutes: slurmd still clears the last attempt away."""
        rows = [line.split("|") for line in self.call("squeue", "-h", "-r", "-t", "PD", "-o", "%i|%r").splitlines()]
        waiting = [job_id for job_id, reason in rows if reason == "BeginTime"]
        self.requeued = {job_id: self.requeued.get(job_id, time.monotonic()) for job_id in waiting}
        for job_id in [job_id for job_id, since in self.requeued.items() if time.monotonic() - since > SETTLE_S]:
            self.call("scontrol", "update", f"JobId={job_id}", "StartTime=now")

    def finish(self, results: Path, seconds: float = 240) -> dict[int, RunResult]:
        """The stored results by seed once no point lives any more, and no process of them is left."""
        self.wait(results, lambda points: not live(points), seconds)
        rows = {r.spec["train"]["seed"]: r for r in store.load_all(results)}
        deadline = time.monotonic() + 15
        while processes(results) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert processes(results) == []
        return rows


def live(points: dict[int, Point]) -> list[int]:
    return [seed for seed, p in points.items() if p.status in ("queued", "running")]


def processes(results: Path) -> list[str]:
    """Command lines of living processes that name the results folder."""
    found = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline", "status"])
             if p.info["status"] != psutil.STATUS_ZOMBIE]  # fmt: skip
    return [line for line in found if str(results) in line and "pytest" not in line]


def run_dir(results: Path, row: RunResult) -> store.RunDir:
    return store.RunDir(results / row.sweep / row.run_id / f"r{row.repeat:03d}")


def steps(results: Path, row: RunResult) -> list[dict[str, Any]]:
    return list(store.read_jsonl(run_dir(results, row).steps))
