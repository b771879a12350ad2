"""What squeue and sacct print becomes a job's state, and a state a status.

Reference: the outputs of SLURM 22.05.8, recorded from a real cluster; for statuses the contract's table.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench import scheduler
from bench.scheduler import Job, SchedulerError, verdict


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``answers(squeue=TEXT, ...)``: what the commands print; they exit with 1 where it begins with "error:"."""

    def give(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / f"{name}.txt").write_text(text)
            stream = "cat {0} >&2; exit 1" if text.startswith("error:") else "cat {0}"
            (tmp_path / name).write_text(f"#!/bin/sh\necho $0 $* >> {tmp_path}/calls\n"
                                         f"{stream.format(tmp_path / f'{name}.txt')}\n")  # fmt: skip
            (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return give


def test_many_jobs_in_two_calls(answers, tmp_path: Path) -> None:
    answers(squeue="7_0|RUNNING|None|n1\n7_1|PENDING|JobArrayTaskLimit|\n",
            sacct="8|CANCELLED by 0|0:0|None assigned\n")  # fmt: skip
    found = scheduler.jobs(["7_0", "7_1", *(f"8_{i}" for i in range(300))])
    assert (found["7_0"].live, found["7_1"].live, found["8_299"].live) == ("running", "queued", None)
    assert found["8_299"] == Job("8_299", "CANCELLED", "by 0", "0:0", "None assigned")
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


def test_tasks_that_share_a_row(answers) -> None:
    answers(squeue="52_1|CANCELLED|None|n1\n",
            sacct="52_1|CANCELLED by 0|0:15|n1\n52_[2-4,7,9-11%2]|CANCELLED by 0|0:0|None assigned\n")  # fmt: skip
    found = scheduler.jobs([f"52_{i}" for i in range(12)])
    assert found["52_1"].exit_code == "0:15"
    assert sorted(int(i[3:]) for i, job in found.items() if job.state == "CANCELLED") == [1, 2, 3, 4, 7, 9, 10, 11]
    assert {found[f"52_{i}"].state for i in (0, 5, 6, 8)} == {scheduler.GONE}


def test_slurmctld_is_believed_while_the_accounting_lags(answers) -> None:
    answers(squeue="9_0|FAILED|NonZeroExitCode|n1\n9_1|RUNNING|None|n2\n",
            sacct="9_0|RUNNING|0:0|n1\n9_1|PENDING|0:0|\n")  # fmt: skip
    found = scheduler.jobs(["9_0", "9_1"])
    assert (found["9_0"].state, found["9_1"].state) == ("FAILED", "RUNNING")


def test_sites_without_accounting(answers) -> None:
    answers(squeue="", sacct="error: Slurm accounting storage is disabled\n")
    assert scheduler.jobs(["9_0"]) == {}


@pytest.mark.parametrize("broken", ["squeue", "sacct"])
def test_a_scheduler_that_does_not_answer_is_no_vanished_job(answers, broken: str) -> None:
    texts = {"squeue": "", "sacct": "", broken: "error: Unable to contact slurm controller (connect failure)\n"}
    answers(**texts)
    with pytest.raises(SchedulerError) as error:
        scheduler.jobs(["9_0"])
    assert "slurmctld does not answer" in str(error.value) and f"command: {broken}" in str(error.value)


def test_a_users_own_filters_hide_no_job(answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(squeue="9_0|RUNNING|None|n1\n", sacct="")
    monkeypatch.setenv("SQUEUE_PARTITION", "elsewhere")
    (tmp_path / "squeue").write_text("#!/bin/sh\n[ -z \"$SQUEUE_PARTITION\" ] && echo '9_0|RUNNING|None|n1'\nexit 0\n")
    assert scheduler.jobs(["9_0"])["9_0"].live == "running"


def test_one_request_cancels_an_array(answers, tmp_path: Path) -> None:
    answers(scancel="")
    scheduler.cancel(["7_1", "7_0", "8", "9_2"])
    assert (tmp_path / "calls").read_text().split()[1:] == ["7_[0,1]", "8", "9_[2]"]


@pytest.mark.parametrize(
    ("job", "log", "status", "reason"),
    [
        (Job("7_0", "PENDING", "Resources"), "", "queued", "job 7_0 PENDING (Resources)"),
        (Job("7_0", "COMPLETING", "None"), "", "running", "job 7_0 COMPLETING"),
        (Job("7_0", "CANCELLED", "by 0", "0:0", "n1"), "", "cancelled", "CANCELLED 0:0 by 0 on n1"),
        (Job("7_0", "TIMEOUT", "", "0:0", "n1"), "", "timeout", "TIMEOUT"),
        (Job("7_0", "OUT_OF_MEMORY", "", "0:125"), "", "oom", "OUT_OF_MEMORY 0:125"),
        (Job("7_0", "FAILED", "", "9:0"), "error: StepId=7.0 exceeded memory limit (2 > 1)", "oom", "9:0"),
        (Job("7_0", "FAILED", "", "9:0"), "Traceback", "lost", "FAILED 9:0"),
        (Job("7_0", "NODE_FAIL", "", "0:0", "n3"), "", "lost", "NODE_FAIL 0:0 on n3"),
        (Job("7_0", "COMPLETED", "", "0:0"), "", "lost", "left no result"),
        (None, "", "lost", "job 7_0 vanished"),
    ],
)
def test_verdicts(tmp_path: Path, job: Job | None, log: str, status: str, reason: str) -> None:
    (tmp_path / "log").write_text(log)
    record = {"job_id": "7_0", "name": "x", "submitted_at": 0.0, "log": str(tmp_path / "log")}
    found, why = verdict(record, job)
    assert found == status and reason in why


def test_a_run_is_being_submitted_for_two_minutes(tmp_path: Path) -> None:
    record = {"job_id": None, "name": "meshmark-x", "submitted_at": time.time(), "log": str(tmp_path / "none")}
    assert verdict(record, None) == ("queued", "being submitted")
    status, reason = verdict(record, None, now=time.time() + 200)
    assert status == "lost" and "never submitted: the scheduler knows no job named meshmark-x" in reason


def test_a_task_that_left_the_queue_before_it_began_was_cancelled(tmp_path: Path) -> None:
    record = {"job_id": "7_3", "name": "x", "submitted_at": 0.0, "log": str(tmp_path / "none")}
    assert verdict(record, Job("7_3", scheduler.GONE)) == ("cancelled", "job 7_3 left the queue before it began")
