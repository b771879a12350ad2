"""The local launcher on real runs of a tiny model: selection, faults, a killed controller, folders of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import psutil
import pytest

from bench import store
from sweeps.local import Slots
from sweeps.points import Point, expand

ROOT = Path(__file__).resolve().parents[2]
TINY = ["model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=32", "data.seq_len=32",
        "train.local_batch_size=2", "train.steps=3", "train.warmup_steps=1", "data.corpus=synthetic"]  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code: what makes a point finished is the code, which must not change while a test runs."""
    return copy_tree(tmp_path_factory.mktemp("tree"))


def copy_tree(target: Path) -> Path:
    for package in ("trainer_core", "bench", "sweeps"):
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def sweep(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sweeps", *TINY, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd=tree, check=False, timeout=500)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.strip().splitlines()[-1]


def statuses(results: Path) -> list[str]:
    return sorted(r.status for r in store.load_all(results))


def marked(mark: str) -> list[psutil.Process]:
    """Every living process with ``MESHMARK_TEST_MARK=mark`` in its environment, which children inherit."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MESHMARK_TEST_MARK") == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture
def controller(tree: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``controller(*arguments)`` starts a sweep in the background; what a failed test leaves running is killed."""

    def start(*arguments: str) -> subprocess.Popen[str]:
        env = {**os.environ, "MESHMARK_TEST_MARK": str(tmp_path)}
        argv = [sys.executable, "-m", "sweeps", *TINY, f"results={tmp_path}", *arguments]
        return subprocess.Popen(argv, cwd=tree, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    yield start
    for process in marked(str(tmp_path)):
        process.kill()


def wait_for(condition: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def stepping(results: Path) -> bool:
    """Whether a run without a result has done a step."""
    live = [f for f in results.glob("runs/*/r*/ranks/0.jsonl") if not (f.parent.parent / "result.json").exists()]
    return any('"kind": "step"' in f.read_text() for f in live)


def test_one_raising_and_one_invalid_point_do_not_stop_the_others(tree: Path, tmp_path: Path) -> None:
    """6 points: 4 ok, one whose corpus can not be decoded, one whose corpus is none. The rerun runs the failed one."""
    corpora = ["synthetic", "nonsense"]
    for name in ("bad, one", "a", "b", "c"):
        path = tmp_path / f"{name}.jsonl"
        text = json.dumps({"text": " ".join(f"{name}{n} word" for n in range(3000))}).encode()
        path.write_bytes(b"\xff" + text if name.startswith("bad") else text)
        corpora.append(f"'jsonl:{path}'")
    results = tmp_path / "r"
    grid = [f"data.corpus={','.join(corpora)}", f"results={results}", "model.vocab_size=512"]
    done = sweep(tree, *grid)
    assert done.returncode == 1
    assert last_line(done) == "6 points: 4 ok, 2 failed (1 failed, 1 invalid)", done.stdout + done.stderr
    assert "bad, one.jsonl: rank 0: UnicodeDecodeError" in done.stdout
    assert "invalid: corpus=nonsense: data.corpus='nonsense' is not one of synthetic" in done.stdout
    assert statuses(results) == ["failed", "invalid", "ok", "ok", "ok", "ok"]
    for arguments in ([], ["only=failed"]):
        again = sweep(tree, *grid, *arguments)
        assert "6 points: 1 to run, 4 left as they are" in again.stdout
        assert again.returncode == 1 and last_line(again) == last_line(done)
    assert statuses(results) == ["failed", "failed", "failed", "invalid", "ok", "ok", "ok", "ok"]


def test_new_code_runs_everything_again_beside_the_old_results(tmp_path: Path) -> None:
    """code_id covers trainer_core: a changed copy of the project repeats both points and keeps the first results."""
    tree, results = copy_tree(tmp_path / "tree"), tmp_path / "r"
    arguments = ["train.seed=0,1", f"results={results}"]
    assert last_line(sweep(tree, *arguments)) == "2 points: 2 ok, 0 failed"
    assert "2 points: 0 to run, 2 left as they are" in sweep(tree, *arguments).stdout
    with open(tree / "trainer_core" / "counts.py", "a") as file:
        file.write("\n# changed\n")
    done = sweep(tree, *arguments)
    assert "2 points: 2 to run" in done.stdout and last_line(done) == "2 points: 2 ok, 0 failed"
    rows = store.load_all(results)
    assert len(rows) == 4 and len({r.code_id for r in rows}) == 2


def test_a_killed_controller_leaves_nothing_running_and_the_next_call_finishes(
    tree: Path, tmp_path: Path, controller: Callable[..., subprocess.Popen[str]]
) -> None:
    grid = ["train.seed=0,1,2", "train.steps=60"]
    first = controller(*grid)
    wait_for(lambda: any(tmp_path.glob("runs/*/*/result.json")) and stepping(tmp_path))
    first.kill()
    first.wait()
    wait_for(lambda: not marked(str(tmp_path)), 20)
    assert statuses(tmp_path) == ["lost", "ok"]
    done = sweep(tree, *grid, f"results={tmp_path}")
    assert "3 points: 2 to run, 1 left as they are" in done.stdout
    assert done.returncode == 0 and last_line(done) == "3 points: 3 ok, 0 failed"
    for run, row in store.rows(tmp_path):
        if row.status == "ok":
            steps = [json.loads(line)["step"] for line in run.steps.read_text().splitlines()]
            assert steps == list(range(1, 61))


def test_ctrl_c_ends_the_children_and_the_same_command_goes_on(
    tmp_path: Path, controller: Callable[..., subprocess.Popen[str]]
) -> None:
    grid = ["train.seed=0,1", "train.steps=100000"]
    for signum, before, after in (
        (signal.SIGINT, "2 points: 2 to run", ["cancelled"]),
        (signal.SIGTERM, "2 points: 2 to run", ["cancelled", "cancelled"]),
    ):
        running = controller(*grid)
        wait_for(lambda: stepping(tmp_path))
        running.send_signal(signum)
        out, _ = running.communicate(timeout=60)
        assert before in out and running.returncode == 1
        assert out.strip().splitlines()[-1] == "2 points: 0 ok, 1 failed (1 cancelled), 1 not run"
        assert not marked(str(tmp_path))
        assert statuses(tmp_path) == after


def _claim(results: Path, barrier: Barrier) -> None:
    barrier.wait()
    store.claim(results, "sweep", "0123456789ab")


def test_16_runs_started_at_once_get_16_folders(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(16)
    claimers = [context.Process(target=_claim, args=(tmp_path, barrier)) for _ in range(16)]
    for process in claimers:
        process.start()
    for process in claimers:
        process.join()
    folders = sorted((tmp_path / "sweep" / "0123456789ab").iterdir())
    assert [f.name for f in folders] == [f"r{n:03d}" for n in range(16)]


@pytest.mark.parametrize(
    ("cores", "overrides", "at_once"),
    [
        (2, "parallel.dp_shard=2", 1),
        (2, "parallel.dp_shard=1", 1),
        (2, "parallel.dp_shard=8", 1),
        (16, "parallel.dp_shard=2", 5),
        (16, "parallel.dp_shard=1", 1),
        (2, "engine=simulate", 2),
    ],
)
def test_runs_side_by_side_never_share_a_core(
    cores: int, overrides: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of N ranks takes N + 1 cores, one rank alone is threaded and takes all, a simulation takes one."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    spec = Point.build(expand([overrides])[0]).spec
    assert spec is not None
    slots = Slots(cores=cores, gpu_ids=[])
    assert sum(slots.take(n, spec) is not None for n in range(20)) == at_once


def test_runs_side_by_side_get_gpus_of_their_own() -> None:
    spec = Point.build(expand(["hardware=h100_80g", "parallel.tp=2"])[0]).spec
    assert spec is not None
    slots = Slots(cores=16, gpu_ids=[0, 1, 2, 3, 4])
    assert [slots.take(n, spec) for n in range(3)] == [[0, 1], [2, 3], None]
