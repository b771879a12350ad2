"""What SLURM says about jobs: the one place that calls sbatch, squeue, sacct, scancel and scontrol. No torch.

slurmctld (squeue) is the truth about live jobs; it forgets ended ones after MinJobAge. The accounting (sacct) remembers
those, but lags by seconds, and many sites have none. So each question is put to both, in one call for all jobs.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bench.endings import MEMORY_KILL
from bench.result import Status

QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
ENDINGS: dict[str, Status] = {
    "CANCELLED": "cancelled", "TIMEOUT": "timeout", "DEADLINE": "timeout", "OUT_OF_MEMORY": "oom",
}  # fmt: skip
"""SLURM's terminal states that are a status of their own; a job that ended in any other without a result is lost."""

SUBMIT_GRACE_S = 120.0
"""How long a run may wait for the job id of a submission that has begun."""

CALL_LIMIT_S = 60
ADVICE = {
    "invalid partition": "choose one that `sinfo -s` lists: cluster.partition=NAME",
    "invalid account": "choose one that `sacctmgr show associations user=$USER` lists: cluster.account=NAME",
    "invalid qos": "choose one that `sacctmgr show qos` lists: cluster.qos=NAME",
    "requested node configuration is not available": "no node has so many GPUs, CPUs or so much memory: see `sinfo -N "
    "-o '%N %c %m %G'`, and set or leave out cluster.gpus_per_node, cluster.cpus_per_task, cluster.mem",
    "memory specification can not be satisfied": "no node has so much memory (`sinfo -o '%N %m'`): set cluster.mem",
    "requested time limit": "cluster.time_min is above the partition's limit: see `sinfo -o '%P %l'`",
    "invalid generic resource": "the site names its GPUs otherwise (`sinfo -o '%N %G'`): set cluster.gpu_type, or "
    "cluster.gpu_request=gres or none",
    "invalid job array": "the site's MaxArraySize is smaller: set cluster.max_array",
    "invalid feature": "choose one that `sinfo -o '%N %f'` lists: cluster.constraint=NAME",
    "unrecognized option": "this SLURM does not know an option of cluster.sbatch_args or cluster.srun_args",
    "unable to contact slurm controller": "slurmctld does not answer: is SLURM_CONF right? (`scontrol ping`)",
    "could not establish a configuration source": "this machine is not set up for a SLURM: set SLURM_CONF",
    "unable to process configuration file": "SLURM_CONF names no readable slurm.conf",
    "is not on path": "go to a login node of the cluster, or bring up a local SLURM: eval \"$(make -s slurm-up)\"",
    "job violates accounting/qos policy": "more jobs or resources than the account may have: see `sacctmgr show qos`",
}
"""Part of a scheduler's message, in lower case -> what to change."""


class SchedulerError(RuntimeError):
    """A scheduler command that failed: what it said, the command, and what to change."""

    def __init__(self, command: Sequence[str], message: str):
        self.command, self.message = list(command), message.strip() or "no message"
        known = [text for part, text in ADVICE.items() if part in self.message.lower()]
        self.advice = known[0] if known else "run the command by hand to see more"
        super().__init__(f"{self.message}\n  command: {' '.join(command)}\n  what to do: {self.advice}")


GONE = "GONE"
"""Our own word for a task of a known array that the scheduler says nothing of."""


@dataclass(frozen=True)
class Job:
    """One job or array task, as the scheduler sees it now."""

    id: str
    state: str
    reason: str = ""
    exit_code: str = ""
    nodes: str = ""

    @property
    def live(self) -> Literal["queued", "running"] | None:
        """``queued`` or ``running``; None once it has ended."""
        return "queued" if self.state in QUEUED else "running" if self.state in RUNNING else None


def call(command: Sequence[str]) -> str:
    """The output of a scheduler command. Raises SchedulerError where it is not installed, fails or does not answer.

    SQUEUE_* and SACCT_* variables are a user's filters for his own eyes: they must not hide jobs from us.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SQUEUE_", "SACCT_"))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_LIMIT_S, env={**env, "LC_ALL": "C"})
    except FileNotFoundError:
        raise SchedulerError(command, f"{command[0]} is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(command, f"no answer in {CALL_LIMIT_S} s") from None
    if done.returncode:
        raise SchedulerError(command, done.stderr)
    return done.stdout


def jobs(ids: Iterable[str]) -> dict[str, Job]:
    """id (``12`` or ``12_3``) -> Job, of those that the scheduler still knows. Two calls, however many ids.

    Raises SchedulerError where the scheduler can not be asked: a job that is not in the answer has really vanished.
    """
    wanted = set(ids)
    if not wanted:
        return {}
    lines = call(["squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%N"]).splitlines()
    rows = [line.split("|") for line in lines]
    found = _assign(wanted, [Job(number, state, reason, nodes=nodes) for number, state, reason, nodes in rows])
    ended = {i for i in wanted if i not in found or not found[i].live}
    if ended:
        mains = ",".join(sorted({main_id(i) for i in ended}))
        rows = [line.split("|") for line in _sacct(["-j", mains, "-o", "JobID,State,ExitCode,NodeList"])]
        remembered = _assign(ended, [
            Job(number, state.split()[0], state.partition(" ")[2], exit_code, nodes)  # "CANCELLED by 1000" is a state
            for number, state, exit_code, nodes in rows if state
        ])  # fmt: skip
        found |= {i: job for i, job in remembered.items() if i not in found or not job.live}
    return found


def main_id(job_id: str) -> str:
    """The id of the whole array: ``12`` of ``12_3``."""
    return job_id.partition("_")[0]


def _assign(wanted: set[str], told: Sequence[Job]) -> dict[str, Job]:
    """Give every wanted task the row that speaks of it.

    Tasks that were cancelled in the queue have no row of their own, but one together, ``12_[3-9%2]`` or ``12``, or none
    at all: of a task of a known array that no row speaks of we know only that it has left the queue.
    """
    exact = {job.id: job for job in told}
    found = {i: exact[i] for i in wanted & exact.keys()}
    known = {main_id(job.id) for job in told}
    shared = [job for job in told if "[" in job.id or "_" not in job.id]
    for i in wanted - found.keys():
        main, _, task = i.partition("_")
        matching = [job for job in shared if main_id(job.id) == main and _covers(job.id, task)]
        if matching:
            found[i] = replace(min(matching, key=lambda job: "[" not in job.id), id=i)
        elif main in known:
            found[i] = Job(i, GONE)
    return found


def _covers(pattern: str, task: str) -> bool:
    """Whether ``12_[3-5,9%2]`` or ``12`` speaks of the task."""
    inside = re.search(r"\[([\d,-]+)", pattern)
    if not inside or not task:
        return not inside
    ranges = [part.split("-") for part in inside[1].split(",")]
    return any(int(r[0]) <= int(task) <= int(r[-1]) for r in ranges)


def _sacct(arguments: Sequence[str]) -> list[str]:
    """Lines of sacct; none where the site keeps no accounting."""
    try:
        return call(["sacct", "-X", "-n", "-P", *arguments]).splitlines()
    except SchedulerError as error:
        if "accounting storage is disabled" in error.message.lower():
            return []
        raise


def find(name: str, since: float) -> str | None:
    """The id of the job with this unique name, submitted after ``since`` (unix seconds); None if there is none."""
    lines = call(["squeue", "--me", "-h", "-t", "all", f"--name={name}", "-o", "%F"]).split()
    if not lines:
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - 60))
        lines = _sacct([f"--name={name}", "-S", start, f"--user={getpass.getuser()}", "-o", "JobID"])
    return lines[0].split("_")[0].split(".")[0] if lines else None


def require() -> str:
    """The name of the cluster to submit to. Raises SchedulerError where this machine can not submit."""
    call(["sbatch", "--version"])
    return cluster_name()


def submit(script: Path) -> str:
    """Put a job script into the queue; the id of the job, of an array without the number of a task."""
    found = re.match(r"\d+", call(["sbatch", "--parsable", str(script)]).strip().splitlines()[-1])
    if not found:
        raise SchedulerError(["sbatch", "--parsable", str(script)], "its output names no job id")
    return found[0]


def cancel(ids: Iterable[str]) -> None:
    """End jobs, queued or running; those that have ended already are left alone. One request an array."""
    tasks: dict[str, list[str]] = {}
    for main, _, task in (i.partition("_") for i in sorted(set(ids))):
        tasks.setdefault(main, []).append(task)
    named = [f"{main}_[{','.join(numbers)}]" if numbers[0] else main for main, numbers in tasks.items()]
    if named:
        call(["scancel", *named])


def signal_steps(job_id: str, name: str) -> None:
    """Send a signal (``USR2``) to every process that srun started in the job, on all nodes; not to its batch script."""
    call(["scancel", f"--signal={name}", job_id])


def requeue(job_id: str) -> None:
    """Put a running job back into the queue; it keeps its id. Its processes are ended."""
    call(["scontrol", "requeue", job_id])


def node_address(node: str) -> str:
    """Where the node is reached: its name if that resolves here, else the address that SLURM itself uses."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        found = re.search(r"NodeAddr=(\S+)", call(["scontrol", "show", "node", node]))
        return found[1] if found else "127.0.0.1"


def cluster_name() -> str:
    """The name of the cluster that the commands of this shell talk to."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", call(["scontrol", "show", "config"]), re.MULTILINE)
    return found[1] if found else ""


def verdict(record: dict[str, Any], job: Job | None, now: float | None = None) -> tuple[Status, str]:
    """(status, reason) of a run without a result, from its ``job.json`` and what the scheduler says of its job.

    ``queued`` and ``running`` are live; every other status is final, and the reason names job, state and log.
    """
    if job is None:
        age = (time.time() if now is None else now) - record["submitted_at"]
        if record["job_id"] is None:
            return ("queued", "being submitted") if age < SUBMIT_GRACE_S else (
                "lost", f"never submitted: the scheduler knows no job named {record['name']}")  # fmt: skip
        return "lost", f"job {record['job_id']} vanished: the scheduler does not know it, and it left no result"
    if job.live:
        return job.live, f"job {job.id} {job.state}" + (f" ({job.reason})" if job.reason not in ("", "None") else "")
    status: Status = ENDINGS.get(job.state, "lost")
    log = Path(record["log"])
    if job.state == GONE and not log.exists():
        return "cancelled", f"job {job.id} left the queue before it began"
    if status == "lost" and log.exists() and MEMORY_KILL.search(log.read_text(errors="replace")[-20_000:]):
        status = "oom"
    what = " ".join(filter(None, (job.state, job.exit_code, job.reason if job.reason != "None" else "")))
    where = f" on {job.nodes}" if job.nodes and "assigned" not in job.nodes else ""
    return status, f"job {job.id} ended as {what}{where} and left no result; log: {log}"
