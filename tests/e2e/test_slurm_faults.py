"""Every fault on a real SLURM ends in the right status, reason and rank; the other points finish; nothing is left.

All scenes are submitted at once and share the machine. Reference: the contract's table of statuses; for runs that were
interrupted, the unbroken run of the same spec.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from slurm_kit import TINY, Slurm, run_dir, steps

from bench import store
from bench.ranks import read_ranks
from bench.result import RunResult

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
TWO_RANKS = ["parallel.dp_shard=2", "train.steps=6"]
ROOMY = "cluster.cpus_per_task=8"  # two jobs a node at once
OK, OK_TOO, RAISE, SIGKILL, HANG, SCANCEL, EAT = range(7)
FAULTS = {
    RAISE: {"kind": "raise", "rank": 1, "step": 3},
    SIGKILL: {"kind": "sigkill", "rank": 1, "step": 3},
    HANG: {"kind": "hang", "rank": 1, "step": 3},
    SCANCEL: {"step_s": 5},
    EAT: {"kind": "eat", "rank": 1, "step": 3},
}
SLOW = {"step_s": 3}
CURVE = 50
"""The seed of the points that are interrupted: compared with one unbroken run."""
INTERRUPTED = ["parallel.dp_shard=2", "train.steps=16", f"train.seed={CURVE}"]


@pytest.fixture(scope="module")
def root() -> Path:
    """On the disk and short."""
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def scenes(slurm: Slurm, root: Path) -> dict[str, list[str]]:
    """Everything submitted, the longest first: scene -> job ids. Folder: root / scene."""
    go = slurm.submit
    return {
        "limit": go(root / "limit", *INTERRUPTED, "cluster.time_min=1", "cluster.signal_s=20", ROOMY,
                    "cluster.max_attempts=5", faults={CURVE: SLOW}),
        "deaf": go(root / "deaf", *TWO_RANKS, "cluster.time_min=1", "cluster.signal_s=20", ROOMY,
                   faults={0: {"kind": "block", "rank": 1, "step": 3}}),
        "preempted": go(root / "preempted", *INTERRUPTED, "cluster.partition=low", "cluster.cpus_per_task=16",
                        faults={CURVE: SLOW}),
        "node": go(root / "node", *INTERRUPTED, "checkpoint.every=1", "cluster.partition=spare", ROOMY,
                   faults={CURVE: {"step_s": 5}}),
        "node_once": go(root / "node_once", *INTERRUPTED, "cluster.partition=spare", "cluster.max_attempts=1", ROOMY,
                        faults={CURVE: {"step_s": 5}}),
        "array": go(root / "array", *TWO_RANKS, "run.hang_s=20", "train.seed=range(0,7)", "cluster.mem=2500M", ROOMY,
                    "cluster.array_parallelism=3", faults=FAULTS),
    }  # fmt: skip


@pytest.fixture(scope="module")
def array(slurm: Slurm, root: Path, scenes: dict[str, list[str]]) -> dict[int, RunResult]:
    results = root / "array"
    slurm.wait(results, lambda points: points[SCANCEL].step >= 1)
    slurm.call("scancel", f"{scenes['array'][0]}_{SCANCEL}")
    return slurm.finish(results)


def wait_for_step(slurm: Slurm, results: Path, step: int) -> None:
    slurm.wait(results, lambda points: points[CURVE].step >= step)


def test_a_node_that_dies(slurm: Slurm, root: Path, scenes: dict[str, list[str]]) -> None:
    """slurmd is killed under two jobs: the one that may start again goes on from its checkpoint, the other is lost."""
    assert scenes["node"]
    for scene in ("node", "node_once"):
        wait_for_step(slurm, root / scene, 2)
    subprocess.run(["kill", "-9", (slurm.folder / "slurmd.n3.pid").read_text().strip()], check=True)
    slurm.wait(root / "node", lambda points: points[CURVE].status == "queued")
    Slurm.start(slurm.folder)
    lost = slurm.finish(root / "node_once")[CURVE]
    assert lost.status == "lost" and "NODE_FAIL" in (lost.reason or "") and lost.steps_done >= 2
    again = slurm.finish(root / "node")[CURVE]
    assert (again.status, again.attempts) == ("ok", 2)
    assert_on_the_curve(root / "node", again, scenes)


def test_preempted_by_a_higher_partition(slurm: Slurm, root: Path, scenes: dict[str, list[str]]) -> None:
    assert scenes["preempted"]
    wait_for_step(slurm, root / "preempted", 2)
    slurm.call("srun", "--partition=high", "--cpus-per-task=16", "--mem=100", "true")
    row = slurm.finish(root / "preempted")[CURVE]
    assert (row.status, row.attempts) == ("ok", 2)
    assert_on_the_curve(root / "preempted", row, scenes)


def test_time_limit(slurm: Slurm, root: Path, scenes: dict[str, list[str]]) -> None:
    assert scenes["limit"]
    row = slurm.finish(root / "limit")[CURVE]
    assert row.status == "ok" and row.attempts >= 2
    assert_on_the_curve(root / "limit", row, scenes)


_curve: list[dict] = []


def assert_on_the_curve(results: Path, row: RunResult, scenes: dict[str, list[str]]) -> None:
    """Every step once, each with the loss of the run that nothing interrupted."""
    if not _curve:
        argv = [sys.executable, "-m", "bench", "run", *TINY, *INTERRUPTED, "-o", str(results.parent / "unbroken")]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        _curve.extend(steps(results.parent / "unbroken", store.load_all(results.parent / "unbroken")[0]))
    mine = steps(results, row)
    assert [s["step"] for s in mine] == list(range(1, 17))
    assert [s["loss"] for s in mine] == pytest.approx([s["loss"] for s in _curve], rel=1e-6)
    resumed = read_ranks(run_dir(results, row))[0].resumed_at
    assert resumed and all(step >= 1 for step in resumed)


def test_time_limit_inside_a_collective(slurm: Slurm, root: Path, scenes: dict[str, list[str]]) -> None:
    assert scenes["deaf"]
    (row,) = slurm.finish(root / "deaf").values()
    assert row.status == "timeout" and "TIMEOUT" in (row.reason or "") and row.steps_done == 2


def test_other_points_finish(array: dict[int, RunResult]) -> None:
    assert [array[seed].status for seed in (OK, OK_TOO)] == ["ok", "ok"] and len(array) == 7


@pytest.mark.parametrize(
    ("seed", "status", "reason", "rank"),
    [
        (RAISE, "failed", "ValueError: planted", 1),
        (SIGKILL, "failed", "SIGKILL", 1),
        (HANG, "hung", "run.hang_s=20", 1),
        (SCANCEL, "cancelled", "CANCELLED", None),
        (EAT, "oom", "exceeded memory limit", None),
    ],
)
def test_endings(array: dict[int, RunResult], seed: int, status: str, reason: str, rank: int | None) -> None:
    row = array[seed]
    assert (row.status, row.first_failed_rank) == (status, rank), row.reason
    assert reason in (row.reason or "")
    assert row.steps_done <= (2 if seed != SCANCEL else 5)


def test_rerun_takes_only_what_is_not_done(slurm: Slurm, root: Path, array: dict[int, RunResult]) -> None:
    overrides = [*TWO_RANKS, "run.hang_s=20", "train.seed=range(0,7)", "cluster.mem=4G", ROOMY]
    (job,) = slurm.submit(root / "array", *overrides)
    assert len(slurm.call("squeue", "-h", "-r", "-t", "all", "-j", job).splitlines()) == 5
    slurm.wait(root / "array", lambda points: all(p.status == "ok" for p in points.values()))
    assert len([r for r in store.load_all(root / "array") if r.status == "ok"]) == 7


def shim(folder: Path, body: str) -> str:
    """A PATH whose sbatch is ``body`` around the real one."""
    (folder / "sbatch").write_text(f"#!/bin/sh\n{body.format(real=shutil.which('sbatch'))}\n")
    (folder / "sbatch").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_submitter_killed_right_after_submission(slurm: Slurm, tmp_path: Path) -> None:
    """Between sbatch's acceptance and the note of the job id: found again by its unique name."""
    path = shim(tmp_path, 'case "$*" in *version*) exec {real} "$@";; esac\n{real} "$@"; kill -9 $PPID')
    process = slurm.python("sweeps", "hydra/launcher=slurm", "cluster=local", f"results={tmp_path}/r", *TINY,
                           *TWO_RANKS, PATH=path)  # fmt: skip
    process.communicate(timeout=60)
    assert process.returncode == -9
    assert [p.status for p in slurm.status(tmp_path / "r").values()] in (["queued"], ["running"])
    (row,) = slurm.finish(tmp_path / "r").values()
    assert row.status == "ok"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_results_folder_full(slurm: Slurm, root: Path) -> None:
    results = root / "full"
    results.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", results], check=True)
    try:
        slurm.submit(results, *TWO_RANKS, faults={0: {"kind": "fill", "rank": 1, "step": 3}})
        (row,) = slurm.finish(results).values()
        assert row.status == "failed" and "no space left" in (row.reason or "").lower()
        assert store.load_result(run_dir(results, row)).status == "failed"
    finally:
        time.sleep(1)
        subprocess.run(["umount", results], check=True)
