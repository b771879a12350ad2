"""Sweeps on a real single-machine SLURM: arrays over two nodes, what sbatch reads, status, cancel, reruns, the report.

References: the local launcher's losses for the same points; scontrol and sacct for what SLURM understood.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_kit import TINY, Slurm, live, processes, run_dir, steps

from bench import store
from bench.result import RunResult
from sweeps.slurm import Script

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
PARITY = 5e-6
"""Largest relative deviation that the order of fp32 sums explains."""
SIX = ["parallel.dp_shard=4", "hardware.gpus_per_node=2", "train.steps=4", "train.seed=range(0,6)"]
HOSTILE = "sp ace 'single' \"double\" $HOME `id` $(id) ; , # % \\ \\\\ ünï ☃ -x =*?"


@pytest.fixture(scope="module")
def submitted(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], float]:
    """(results, job ids, seconds until the prompt came back) of six points, two at once, two nodes each."""
    results = tmp_path_factory.mktemp("six")
    begin = time.monotonic()
    ids = slurm.submit(
        results, *SIX, "report=after", f"hydra.launcher.report={results}/report", "cluster.gpu_request=gpus_per_node"
    )
    return results, ids, time.monotonic() - begin


@pytest.fixture(scope="module")
def finished(slurm: Slurm, submitted: tuple[Path, list[str], float]) -> dict[int, RunResult]:
    """Its results; slurmctld is stopped and started again under the running jobs."""
    results = submitted[0]
    slurm.wait(results, lambda points: any(p.step for p in points.values()))
    subprocess.run(["kill", "-9", (slurm.folder / "slurmctld.pid").read_text().strip()], check=True)
    time.sleep(2)
    away = json.loads(slurm.python("bench", "status", str(results), "--json").communicate(timeout=90)[0])
    assert away["scheduler"] and not {"lost", "failed"} & set(away["counts"])
    Slurm.start(slurm.folder)
    return slurm.finish(results, 420)


def test_submission_returns_while_the_points_wait(slurm: Slurm, submitted: tuple[Path, list[str], float]) -> None:
    results, ids, seconds = submitted
    assert seconds < 20 and len(ids) == 2
    points = slurm.status(results)
    assert len(live(points)) == 6 and any(p.status == "queued" for p in points.values())
    shown = slurm.call("scontrol", "show", "job", f"{ids[0]}_0")
    assert "NumNodes=2" in shown and "gres" in shown and "ArrayTaskThrottle=2" in shown


def test_six_points_equal_the_local_launchers(
    finished: dict[int, RunResult], submitted: tuple[Path, list[str], float], tmp_path: Path
) -> None:
    assert {r.status for r in finished.values()} == {"ok"} and len(finished) == 6
    local = [sys.executable, "-m", "sweeps", "-m", *TINY, *SIX, f"results={tmp_path}"]
    done = subprocess.run(local, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in store.load_all(tmp_path):
        mine = steps(submitted[0], finished[row.spec["train"]["seed"]])
        theirs = steps(tmp_path, row)
        assert [s["step"] for s in mine] == [s["step"] for s in theirs] == [1, 2, 3, 4]
        assert [s["loss"] for s in mine] == pytest.approx([s["loss"] for s in theirs], rel=PARITY)


def test_ranks_lay_on_two_nodes(finished: dict[int, RunResult], submitted: tuple[Path, list[str], float]) -> None:
    row = finished[0]
    log = (submitted[0] / ".jobs").glob(f"*/{submitted[1][0]}_0.log")
    assert "on n[1-2]:" in next(log).read_text()
    assert row.world_size == 4 and row.attempts == 1


def test_the_same_command_runs_nothing_again(
    slurm: Slurm, finished: dict[int, RunResult], submitted: tuple[Path, list[str], float]
) -> None:
    assert len(finished) == 6
    assert slurm.submit(submitted[0], *SIX) == []


def test_only_what_is_corrupt_runs_again(
    slurm: Slurm, finished: dict[int, RunResult], submitted: tuple[Path, list[str], float]
) -> None:
    results = submitted[0]
    run_dir(results, finished[3]).result.write_text('{"run_id": ')
    assert slurm.status(results)[3].status == "corrupt"
    slurm.submit(results, *SIX, "only=failed")
    slurm.finish(results)
    again = [r for r in store.load_all(results) if r.run_id == finished[3].run_id]
    assert [r.status for r in again] == ["corrupt", "ok"]
    assert len(store.load_all(results)) == 7


def test_report_is_built_after_the_last_job(
    slurm: Slurm, finished: dict[int, RunResult], submitted: tuple[Path, list[str], float]
) -> None:
    assert finished
    results, ids, _ = submitted
    deadline = time.monotonic() + 120
    while slurm.call("squeue", "-h", "-j", ids[1], "-o", "%T").strip() and time.monotonic() < deadline:
        time.sleep(1)
    page = (results / "report" / "index.html").read_text()
    assert all(f'data-run-id="{r.run_id}"' in page for r in finished.values())


def test_sbatch_reads_hostile_values_back(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "a %j b"
    folder.mkdir()
    text = Script.text(folder, "echo read", 1, job_name=HOSTILE, comment=HOSTILE, mem="100M")
    (folder / "job.sh").write_text(text)
    job_id = slurm.call("sbatch", "--parsable", str(folder / "job.sh")).strip()
    assert slurm.call("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%j\t%k") == f"{HOSTILE}\t{HOSTILE}\n"
    deadline = time.monotonic() + 60
    while not (folder / f"{job_id}_0.log").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (folder / f"{job_id}_0.log").read_text() == "read\n"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("cluster.partition=nosuch", ("invalid partition", "cluster.partition=NAME")),
        ("cluster.constraint=nosuch", ("invalid feature", "cluster.constraint=NAME")),
        ("cluster.sbatch_args.nonsense=1", ("unrecognized option", "cluster.sbatch_args")),
    ],
)
def test_a_rejected_array_is_explained_and_leaves_nothing(
    slurm: Slurm, tmp_path: Path, change: str, told: tuple[str, str]
) -> None:
    process = slurm.python("sweeps", "hydra/launcher=slurm", "cluster=local", "cluster.gpu_request=gres", change,
                           f"results={tmp_path}", *TINY, "train.seed=1,2")  # fmt: skip
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert told[0] in err.lower() and f"command: sbatch --parsable {tmp_path}" in err and told[1] in err
    assert not list(tmp_path.glob(f"**/{store.SPEC}")) and not list(tmp_path.glob(".jobs/*"))


def test_three_hundred_points(slurm: Slurm, tmp_path: Path, budget) -> None:  # type: ignore[no-untyped-def]
    """Submitted, shown and cancelled within the promised times; every point keeps a row."""
    begin = time.monotonic()
    slurm.submit(tmp_path, "train.seed=range(0,300)", "train.steps=1000", "cluster.array_parallelism=1")
    submitted = time.monotonic()
    points = slurm.status(tmp_path)
    shown = time.monotonic()
    assert len(live(points)) == 300
    out = slurm.python("bench", "cancel", str(tmp_path)).communicate(timeout=120)[0]
    assert "cancelled 300 submitted" in out
    assert {r.status for r in store.load_all(tmp_path)} == {"cancelled"} and processes(tmp_path) == []
    budget("submit 300 points", submitted - begin, 30, "s")
    budget("status of 300 submitted points", shown - submitted, 2, "s")
