"""Every fault on a real SLURM ends in the right status, reason and rank; the other points finish; nothing is left.

All scenes are submitted at once and share the machine; what a scene waits for (a killed node, a preempting job, a
scancel) happens as soon as it has come far enough. Reference: the contract's table of statuses; for runs that were
interrupted, the unbroken run of the same spec.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import ANY

import pytest
from slurm_kit import TINY, Slurm, live, processes, run_dir, steps

from bench import store
from bench.ranks import read_ranks
from bench.result import RunResult

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
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
ARRAY = [*TWO_RANKS, "run.hang_s=25", "train.seed=range(0,7)", ROOMY, "cluster.array_parallelism=3"]
CURVE = 50
"""The seed of the points that are interrupted: each is compared with one unbroken run."""
INTERRUPTED = ["parallel.dp_shard=2", "train.steps=16", f"train.seed={CURVE}", ROOMY]
SLOW, SLOWER = {CURVE: {"step_s": 3}}, {CURVE: {"step_s": 5}}
ONE_MINUTE = ["cluster.time_min=1", "cluster.signal_s=10"]
"""SLURM looks at its limits every half minute, so the warning comes after 20 to 50 s."""
PATIENCE_S = 600
Rows = dict[str, dict[int, RunResult]]
"""scene -> seed -> result."""


def shim(folder: Path, body: str) -> str:
    """A PATH whose sbatch is ``body`` around the real one."""
    folder.mkdir()
    (folder / "sbatch").write_text(f"#!/bin/sh\n{body.format(real=shutil.which('sbatch'))}\n")
    (folder / "sbatch").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A folder a scene; ``full`` is a small tmpfs where we may mount one."""
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))
    full = folder / "full"
    full.mkdir()
    if os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", full], check=True)
    yield folder
    if full.is_mount():
        subprocess.run(["umount", full], check=True)
    shutil.rmtree(folder)


def submit_all(slurm: Slurm, root: Path) -> str:
    """Every scene, the longest first; the id of the job of ``array``."""
    go = slurm.submit
    go(root / "node", *INTERRUPTED, "checkpoint.every=1", "cluster.partition=spare", faults=SLOWER)
    go(root / "node_once", *INTERRUPTED, "cluster.partition=spare", "cluster.max_attempts=1", faults=SLOWER)
    go(root / "limit", *INTERRUPTED, *ONE_MINUTE, "cluster.max_attempts=8", faults=SLOW)
    go(root / "given_up", *INTERRUPTED, *ONE_MINUTE, "cluster.max_attempts=1", faults=SLOWER)
    deaf = {0: {"kind": "block", "rank": 1, "step": 3}}
    go(root / "deaf", *TWO_RANKS, *ONE_MINUTE, "cluster.signal_s=1", ROOMY, faults=deaf)
    go(root / "preempted", *INTERRUPTED, "cluster.partition=low", "cluster.cpus_per_task=16", faults=SLOW)
    (array,) = go(root / "array", *ARRAY, "cluster.mem=2500M", faults=FAULTS)
    if (root / "full").is_mount():
        go(root / "full", *TWO_RANKS, faults={0: {"kind": "fill", "rank": 1, "step": 3}})
    path = shim(root / "shim", 'case "$*" in *version*) exec {real} "$@";; esac\n{real} "$@"; kill -9 $PPID')
    killed = slurm.python("sweeps", "hydra/launcher=slurm", "cluster=local", f"results={root / 'killed'}", *TINY,
                          *TWO_RANKS, PATH=path)  # fmt: skip
    assert killed.wait(60) == -9
    return array


@pytest.fixture(scope="module")
def ended(slurm: Slurm, root: Path) -> Rows:
    """The stored results of all scenes."""
    array = submit_all(slurm, root)
    scenes = sorted(path.parent for path in root.glob("*/.jobs"))
    points = {scene.name: slurm.status(scene) for scene in scenes}

    def reached(scene: str, seed: int, step: int) -> bool:
        return points[scene][seed].step >= step

    def lose_node() -> None:
        subprocess.run(["kill", "-9", (slurm.folder / "slurmd.n3.pid").read_text().strip()], check=True)

    def preempt() -> None:
        slurm.call("sbatch", "--partition=high", "--cpus-per-task=16", "--mem=100", "--output=/dev/null", "--wrap=true")

    events: list[tuple[Callable[[], bool], Callable[[], object]]] = [
        (lambda: reached("preempted", CURVE, 2), preempt),
        (lambda: reached("array", SCANCEL, 1), lambda: slurm.call("scancel", f"{array}_{SCANCEL}")),
        (lambda: reached("node", CURVE, 2) and reached("node_once", CURVE, 2), lose_node),
        (lambda: points["node_once"][CURVE].status == "lost", lambda: Slurm.start(slurm.folder)),
    ]
    deadline = time.monotonic() + PATIENCE_S
    while events or any(live(found) for found in points.values()):
        assert time.monotonic() < deadline, f"{points}\n{slurm.call('squeue', '-r')}"
        for event in [event for event in events if event[0]()]:
            event[1]()
            events.remove(event)
        slurm.hurry()
        time.sleep(1)
        points = {scene.name: slurm.status(scene) for scene in scenes}
    return {scene.name: slurm.finish(scene) for scene in scenes}


@pytest.fixture(scope="module")
def curve(ended: Rows, root: Path) -> list[float]:
    """The losses of the run that nothing interrupts."""
    overrides = [text for text in INTERRUPTED if not text.startswith("cluster.")]
    argv = [sys.executable, "-m", "bench", "run", *TINY, *overrides, "-o", str(root / "unbroken")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = store.load_all(root / "unbroken")
    return [s["loss"] for s in steps(root / "unbroken", row)]


@pytest.mark.parametrize("scene", ["limit", "preempted", "node"])
def test_interrupted_runs_go_on_on_the_same_curve(ended: Rows, root: Path, curve: list[float], scene: str) -> None:
    """A time limit, a preemption by a higher partition, a lost node: every step once, with the unbroken run's loss."""
    row = ended[scene][CURVE]
    assert row.status == "ok" and row.attempts >= 2, row.reason
    mine = steps(root / scene, row)
    assert [s["step"] for s in mine] == list(range(1, 17))
    assert [s["loss"] for s in mine] == pytest.approx(curve, rel=1e-6)
    resumed = read_ranks(run_dir(root / scene, row))[0].resumed_at
    assert len(resumed) == row.attempts - 1 and all(step >= 1 for step in resumed)


@pytest.mark.parametrize(
    ("scene", "seed", "status", "reason", "rank", "done"),
    [
        ("array", RAISE, "failed", "ValueError: planted", 1, 2),
        ("array", SIGKILL, "failed", "SIGKILL", 1, 2),
        ("array", HANG, "hung", "run.hang_s=25", ANY, 2),
        ("array", SCANCEL, "cancelled", "CANCELLED", None, None),
        ("array", EAT, "oom", "exceeded memory limit", None, 2),
        ("node_once", CURVE, "lost", "NODE_FAIL", None, None),
        ("given_up", CURVE, "timeout", "given up after 1 attempts", None, None),
        ("deaf", 0, "timeout", "TIMEOUT", None, 2),
        ("full", 0, "failed", "no space left", ANY, None),
    ],
)
def test_endings(
    ended: Rows, root: Path, scene: str, seed: int, status: str, reason: str, rank: int | None, done: int | None
) -> None:
    """``rank`` is the first failing one. Of two ranks that wait for each other, either may be named; a rank on a full
    disk can not leave its name."""
    if scene == "full" and scene not in ended:
        pytest.skip("mounting a small tmpfs needs root")
    row = ended[scene][seed]
    assert row.status == status and reason in (row.reason or ""), row.reason
    assert row.first_failed_rank == rank
    assert done is None or row.steps_done == done
    assert store.load_result(run_dir(root / scene, row)).status == status


def test_other_points_finish(ended: Rows) -> None:
    assert [ended["array"][seed].status for seed in (OK, OK_TOO)] == ["ok", "ok"] and len(ended["array"]) == 7


def test_submitter_killed_right_after_submission(ended: Rows) -> None:
    """Between sbatch's acceptance and the note of the job id: found again by its unique name."""
    assert [row.status for row in ended["killed"].values()] == ["ok"]


def test_nothing_is_left_running(ended: Rows, root: Path) -> None:
    assert ended and processes(root) == []


def test_rerun_takes_only_what_is_not_done(slurm: Slurm, root: Path, ended: Rows) -> None:
    assert ended
    (job,) = slurm.submit(root / "array", *ARRAY, "cluster.mem=4G")
    assert len(slurm.call("squeue", "-h", "-r", "-t", "all", "-j", job).splitlines()) == 5
    slurm.wait(root / "array", lambda points: all(p.status == "ok" for p in points.values()))
    assert len([r for r in store.load_all(root / "array") if r.status == "ok"]) == 7
