"""Every ending of a supervised run: the status, the rank, the bound, and nothing left running.

Reference: the table of statuses in the contract; each fault is planted in a rank that follows the trainer's protocol.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from bench.ranks import read_ranks
from bench.result import RunResult
from bench.run import claim, execute
from bench.spec import from_overrides
from bench.store import RunDir, load_all, load_result

START_S = 90.0
"""What coming up may take on a busy machine (3 s on an idle one)."""


@dataclass
class Ended:
    result: RunResult
    folder: RunDir
    seconds: float


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Run the fake ranks with a planted fault; asserts that no process of the run is left."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def run(fault: dict | None = None, *overrides: str, cancel=None, on_progress=None) -> Ended:
        defaults = ["parallel.dp_shard=2", "train.steps=6", "train.warmup_steps=1"]
        folder = claim(spec := from_overrides([*defaults, *overrides]), tmp_path)
        (folder.path / "fault.json").write_text(json.dumps(fault or {}))
        began = time.monotonic()
        result = execute(spec, folder, module="fake_rank", cancel=cancel, on_progress=on_progress)
        assert living(folder) == []
        assert load_result(folder).status == result.status
        return Ended(result, folder, time.monotonic() - began)

    return run


def living(folder: RunDir) -> list[int]:
    """Processes that name the run's folder on their command line, or that a rank's start line names."""
    found = [p.pid for p in psutil.process_iter(["cmdline"]) if str(folder.path) in " ".join(p.info["cmdline"] or [])]
    started = [log.start["pid"] for log in read_ranks(folder) if log.start]
    return found + [pid for pid in started if alive(pid)]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ok(start):
    ended = start()
    r = ended.result
    assert (r.status, r.steps_done, r.attempts, r.memory_rank) == ("ok", 6, 1, 1)
    # 1000 tokens a step, and the slower rank's 20 ms
    assert r.metrics["tps_global"].value == pytest.approx(50_000)
    assert r.metrics["tps_per_gpu"].value == pytest.approx(25_000)
    rows = [json.loads(line) for line in ended.folder.steps.read_text().splitlines()]
    assert [row["loss"] for row in rows] == [5.0 / n for n in range(1, 7)], "the loss is rank 1's"
    assert [row["excluded"] for row in rows] == ["warmup", *[None] * 5]
    assert "rank 0 is up" in ended.folder.log.read_text() and "rank 1 is up" in ended.folder.log.read_text()


def test_sigkill_of_a_rank(start):
    ended = start({"kind": "sigkill", "rank": 1, "step": 3})
    assert ended.result.status == "failed" and ended.result.first_failed_rank == 1
    assert "SIGKILL" in ended.result.reason and ended.seconds < START_S + 10


def test_exception_while_the_peer_waits(start):
    ended = start({"kind": "raise", "rank": 1, "step": 3})
    assert ended.result.status == "failed" and ended.result.first_failed_rank == 1
    assert ended.result.reason == "rank 1: ValueError: planted in rank 1"
    assert 'raise ValueError("planted in rank 1")' in ended.result.evidence["error"]["traceback"]
    assert ended.seconds < START_S + 10


def test_rank_that_sleeps_for_ever(start):
    ended = start({"kind": "sleep", "rank": 1, "step": 3}, "run.hang_s=6")
    assert ended.result.status == "hung" and ended.seconds < START_S + 6 + 5
    assert re.search(r'fake_rank.py", line \d+ in fail', ended.folder.log.read_text()), "the stack of the sleeping rank"


def test_memory_limit(start):
    ended = start({"kind": "eat", "rank": -1, "step": 2}, "parallel.dp_shard=1", "run.memory_limit_gib=1.5")
    assert ended.result.status == "oom" and "run.memory_limit_gib=1.5" in ended.result.reason
    assert ended.seconds < START_S + 15


def test_wall_limit(start):
    ended = start({"step_s": 0.2}, "parallel.dp_shard=1", "train.steps=500", "run.wall_s=5")
    assert ended.result.status == "timeout" and 5 < ended.seconds < 5 + 5


def test_exit_code_0_with_steps_missing(start):
    ended = start({"kind": "quit", "rank": 0, "step": 3}, "parallel.dp_shard=1")
    assert ended.result.status == "incomplete" and "2 of 6 steps" in ended.result.reason


def test_abort_after_the_result_is_complete(start):
    ended = start({"kind": "abort_after", "rank": 1})
    assert ended.result.status == "ok" and ended.result.steps_done == 6
    assert ended.result.reason.startswith("complete; ")


def test_cancel_by_the_caller(start):
    cancel = threading.Event()
    ended = start({"step_s": 0.2}, "parallel.dp_shard=1", "train.steps=500", cancel=cancel,
                  on_progress=lambda p: p.step == 2 and cancel.set())  # fmt: skip
    assert ended.result.status == "cancelled" and 2 <= ended.result.steps_done < 50


def test_restart_counts_no_step_twice(start):
    """A second attempt in the same folder that begins again at step 1: attempts 2, each step once."""
    first = start({"kind": "raise", "rank": 0, "step": 4}, "parallel.dp_shard=1")
    (first.folder.path / "fault.json").write_text("{}")
    spec = from_overrides(["train.steps=6", "train.warmup_steps=1"])
    result = execute(spec, first.folder, module="fake_rank")
    assert (result.status, result.attempts, result.steps_done) == ("ok", 2, 6)
    assert [json.loads(line)["step"] for line in first.folder.steps.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


TINY = ("model.dim=64", "model.layers=2", "model.heads=4", "model.ffn_dim=128", "data.corpus=synthetic",
        "data.seq_len=32", "train.local_batch_size=2", "train.warmup_steps=1", "run.wall_s=120")  # fmt: skip


def test_the_real_trainer(tmp_path):
    """The same supervision over the trainer itself: one run to its end, one whose rank 1 is killed from outside."""
    spec = from_overrides([*TINY, "parallel.dp_shard=2", "train.steps=4"])
    result = execute(spec, folder := claim(spec, tmp_path))
    assert (result.status, result.steps_done, result.reason) == ("ok", 4, None)
    assert result.metrics["tps_global"].value > 0 and set(result.evidence["layout"]) == {"0", "1"}
    assert "failed to load" not in folder.log.read_text(), "torchao's complaint of a missing library"

    spec = from_overrides([*TINY, "parallel.dp_shard=2", "train.steps=100000"])
    folder = claim(spec, tmp_path)

    def kill(progress):
        if progress.step >= 2 and alive(pid := progress.ranks[1]["pid"]):
            os.kill(pid, signal.SIGKILL)

    result = execute(spec, folder, on_progress=kill)
    assert (result.status, result.first_failed_rank) == ("failed", 1) and "SIGKILL" in result.reason
    assert 1 < result.steps_done < 5000 and living(folder) == []


SUPERVISOR = """
import sys
from pathlib import Path
from bench.run import execute, open_folder
folder, spec = open_folder(Path(sys.argv[1]))
execute(spec, folder, module="fake_rank")
"""


@pytest.fixture
def supervisor(tmp_path, monkeypatch):
    """A supervisor in a process of its own, once its ranks are at work."""
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(root)]))

    started = []

    def run(ranks: int = 2) -> tuple[subprocess.Popen, RunDir]:
        spec = from_overrides([f"parallel.dp_shard={ranks}", "train.steps=5000", "train.warmup_steps=1"])
        folder = claim(spec, tmp_path)
        (folder.path / "fault.json").write_text('{"step_s": 0.05}')
        process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(folder.path)])
        started.append(process)
        until(lambda: len(logs := read_ranks(folder)) == ranks and all(log.steps for log in logs), START_S)
        return process, folder

    yield run
    for process in started:
        process.kill()
        process.wait()


def until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def test_interrupt_of_the_supervisor(supervisor):
    process, folder = supervisor()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    assert load_result(folder).status == "cancelled" and living(folder) == []


def test_supervisor_killed(supervisor, tmp_path):
    """SIGKILL leaves no time to clean up: the kernel ends the agent, and with it the ranks. The row says lost."""
    process, folder = supervisor()
    assert [r.status for r in load_all(tmp_path)] == ["running"]
    process.kill()
    process.wait()
    until(lambda: living(folder) == [], 5)
    assert [r.status for r in load_all(tmp_path)] == ["lost"]


def test_two_runs_at_once(supervisor):
    """Two groups on one machine, of one spec and second: two folders, two rendezvous, two endings."""
    (one, first), (two, second) = supervisor(), supervisor()
    assert first.path != second.path
    one.terminate()
    one.wait(10)
    done = {log.rank: log.steps_done for log in read_ranks(second)}
    until(lambda: all(log.steps_done > done[log.rank] for log in read_ranks(second)), 5)
    two.terminate()
    assert two.wait(10) == 0 and load_result(second).status == "cancelled"
    assert living(first) + living(second) == []
