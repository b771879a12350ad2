"""One array task: ``python -m sweeps.task SUBMISSION_DIR``, the batch script of a point on the job's first node.

It supervises the run as ``bench run`` does at home; srun starts one node agent a node. The signals:
    USR2, ``cluster.signal_s`` before the time limit and at a preemption: the ranks write a checkpoint and end, and the
    job goes back into the queue. TERM: SLURM is ending the job; the scheduler knows why, so ``bench status`` writes the
    result. A newer attempt has taken the run over (a node that SLURM gave up lives on): end without a word.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from bench import run as bench_run
from bench import scheduler, store
from bench.endings import Ending
from bench.measure import empty
from bench.ranks import read_ranks
from bench.result import RunResult
from bench.spec import RunSpec
from bench.store import RunDir
from sweeps.cluster import Cluster

POLL_S = 1.0
GOES_ON = 75
"""Exit code of an attempt that leaves the run to a later one (EX_TEMPFAIL of sysexits.h)."""
FENCE_S = 5.0
"""A new attempt waits so long for processes of an earlier one to see that it has taken over."""
FIRST_PORT, PORTS = 20_000, 10_000


@dataclass
class Task:
    """The run of this array task and what has happened to its job."""

    run: RunDir
    spec: RunSpec
    cluster: Cluster
    job_id: str
    nodes: int
    ranks: int
    attempt: int
    cancel: threading.Event = field(default_factory=threading.Event)
    interrupted: bool = False
    ending: bool = False
    owner: bytes = b""
    began: float = field(default_factory=time.time)

    def keep(self, result: RunResult) -> RunResult | None:
        """The result to store, or None where the run goes on in a later attempt or the scheduler knows its ending."""
        if self.superseded or self.ending:
            return None
        if result.status == "ok":
            return result
        try:
            return self.judge(result)
        except scheduler.SchedulerError as error:
            return replace(result, reason=f"{result.reason}; the scheduler could not be asked: {error.message}")

    def judge(self, result: RunResult) -> RunResult | None:
        """As :meth:`keep`, of a run that is not ok. A job that does not run any more has lost a node, or was ended."""
        job = scheduler.jobs([self.job_id]).get(self.job_id)
        if job is not None and job.state != "RUNNING":
            return None
        stopped = self.interrupted or any(log.interrupted for log in read_ranks(self.run))
        if result.status != "cancelled" or not stopped:
            return result
        limit = self.cluster.max_attempts
        if self.attempt >= limit:
            reason = f"{result.reason}; given up after {self.attempt} attempts (cluster.max_attempts={limit})"
            return replace(result, status="timeout", reason=reason)
        scheduler.requeue(self.job_id)
        return None

    @property
    def superseded(self) -> bool:
        """Whether a newer attempt owns the run folder."""
        try:
            return self.run.owner.read_bytes() != self.owner
        except FileNotFoundError:
            return True

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGUSR2:
            self.interrupted = True
        else:
            self.ending = True
            self.cancel.set()

    def execute(self) -> None:
        """Supervise in a thread of its own; this one takes the signals and watches for a newer attempt."""
        arguments, launcher = agent_arguments(self), self.cluster.agent_launcher(self.nodes)
        python = self.cluster.python if self.cluster.container and self.cluster.python else sys.executable
        worker = threading.Thread(
            target=bench_run.execute, args=(self.spec, self.run),
            kwargs={"launcher": [*launcher, python], "agent_args": arguments, "cancel": self.cancel, "keep": self.keep},
        )  # fmt: skip
        worker.start()
        told = False
        while worker.is_alive():
            worker.join(POLL_S)
            if self.superseded:
                self.cancel.set()
            if self.interrupted and not told:
                told = True
                self.ask_for_checkpoint()

    def ask_for_checkpoint(self) -> None:
        """Pass the warning on to the ranks of all nodes; where none has begun there is nothing to keep."""
        if not any(log.started_since(self.began) for log in read_ranks(self.run)):
            self.cancel.set()
            return
        try:
            scheduler.signal_steps(self.job_id, "USR2")
        except scheduler.SchedulerError as error:  # the job then runs into its limit, as without a warning
            print(error, file=sys.stderr, flush=True)


def agent_arguments(task: Task) -> list[str]:
    """Where the agents of all nodes meet: a port of this, the first, node."""
    arguments = ["--nproc", str(task.ranks), "--numa", task.cluster.numa]
    if task.nodes > 1:
        node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        endpoint = f"{scheduler.node_address(node)}:{free_port(int(os.environ['SLURM_JOB_ID']))}"
        name = f"{task.job_id}-{task.attempt}"
        arguments += ["--nnodes", str(task.nodes), "--rdzv-endpoint", endpoint, "--rdzv-id", name]
    return arguments


def free_port(seed: int) -> int:
    """A free TCP port of this machine below the range of outgoing connections; jobs on one node start apart."""
    for offset in range(PORTS):
        port = FIRST_PORT + (seed * 7 + offset) % PORTS
        with socket.socket() as s:
            try:
                s.bind(("", port))
                return port
            except OSError:
                continue
    raise OSError(f"no free port between {FIRST_PORT} and {FIRST_PORT + PORTS}")


def open_task(folder: Path) -> Task:
    tasks = json.loads((folder / "tasks.json").read_text())
    cluster = Cluster(**json.loads((folder / "cluster.json").read_text()))
    env = os.environ
    run = RunDir(Path(tasks["runs"][int(env["SLURM_ARRAY_TASK_ID"])]))
    spec = RunSpec.from_dict(json.loads(run.spec.read_text()))
    job_id = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    attempt = int(env.get("SLURM_RESTART_COUNT", 0)) + 1
    return Task(run, spec, cluster, job_id, tasks["nodes"], tasks["ranks"], attempt)


def main(arguments: Sequence[str]) -> int:
    task = open_task(Path(arguments[0]))
    for signum in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(signum, task.on_signal)
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    print(f"attempt {task.attempt} of job {task.job_id} on {nodes}: {task.run.path}", flush=True)
    if task.run.result.exists():
        return 0
    if task.attempt > task.cluster.max_attempts:
        reason = f"given up: {task.cluster.max_attempts} attempts ended without a result (cluster.max_attempts)"
        store.write_result(task.run, empty(task.spec, task.run, Ending("lost", reason)))
        return 1
    store.own(task.run)
    task.owner = task.run.owner.read_bytes()
    if task.attempt > 1:
        time.sleep(FENCE_S)
    task.execute()
    if not task.run.result.exists():
        return GOES_ON
    return 0 if store.load_result(task.run).status == "ok" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
