"""Which ending a run had: from what its ranks wrote, how they exited and what the supervisor did. No torch."""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass, field

from bench.ranks import RankLog, Row
from bench.result import Status

OOM = re.compile(
    r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|OutOfMemoryError|\bMemoryError\b|can't allocate memory|"
    r"Cannot allocate memory"
)
ILLEGAL = re.compile(r"illegal memory access")
MEMORY_KILL = re.compile(r".*(exceeded memory limit|oom[-_ ]kill|out of memory handler).*", re.IGNORECASE)
"""What SLURM writes into the log of a job that it ends for its memory: the job's state may be FAILED only."""
SECONDARY = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|Socket|Timed out waiting|remote process exited|"
    r"Watchdog caught collective|NCCL communicator was aborted|DistNetworkError|DistStoreError|failed to recv"
)
"""What a rank says because another one is gone."""
FAULT = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): |Fatal Python error|terminate called|.*: error: ")
STATUS_OF_ERROR: dict[str, Status] = {
    "ConfigError": "invalid",
    "Unsupported": "unsupported",
    "UnsupportedError": "unsupported",
    "Diverged": "diverged",
    "DivergedError": "diverged",
    "FloatingPointError": "diverged",
}
"""Exceptions of the trainer that say what the ending is."""


@dataclass(frozen=True)
class Outcome:
    """What the supervisor saw. ``stopped``: it ended the run itself, with this status and reason. ``exit_code``: of the
    process it started (negative: a signal). ``exits``: rank -> exit code, as the node agents report it.
    """

    began: float
    exit_code: int
    stopped: tuple[Status, str] | None = None
    exits: dict[int, int] = field(default_factory=dict)
    kernel_oom: bool = False
    log_tail: str = ""


@dataclass(frozen=True)
class Ending:
    status: Status
    reason: str | None = None
    first_failed_rank: int | None = None
    error: Row | None = None


def classify(logs: list[RankLog], steps: int, world_size: int, outcome: Outcome) -> Ending:
    """The ending of a run of ``steps`` on ``world_size`` ranks. What the ranks wrote outweighs any exit code."""
    present = [log for log in logs if log.started_since(outcome.began)]
    bad = next((n for log in present for n, row in log.steps.items() if not_finite(row)), None)
    complete = len(present) == world_size and all(log.end and log.steps_done == steps for log in present)
    if bad is not None:
        return Ending("diverged", f"loss or gradient norm is not finite in step {bad}")
    if complete:
        return Ending("ok", _note(outcome))
    if outcome.stopped and outcome.stopped[0] != "failed":
        status, reason = outcome.stopped
        return Ending(status, reason, _furthest_behind(present) if status == "hung" else None)
    interrupted = next((log.interrupted for log in present if log.interrupted), None)
    if interrupted and not any(log.error for log in present):
        return Ending("cancelled", f"interrupted after step {interrupted['step']}, a checkpoint is kept")
    killed = MEMORY_KILL.search(outcome.log_tail)
    if killed:
        return Ending("oom", f"the scheduler ended the run for its memory: {killed[0].strip()[:300]}")
    return _failure(present, outcome) or _silent(present, steps, world_size, outcome)


def not_finite(row: Row) -> bool:
    """The trainer writes such a figure as null and names it in ``not_finite``."""
    if row.get("not_finite"):
        return True
    values = (row.get("loss"), row.get("grad_norm"))
    return any(isinstance(v, (int, float)) and not math.isfinite(v) for v in values)


def _note(outcome: Outcome) -> str | None:
    if outcome.stopped:
        return f"complete; then {outcome.stopped[1]}"
    if outcome.exit_code:
        codes = [f"rank {rank} {exit_text(code)}" for rank, code in outcome.exits.items()]
        return f"complete; after that, {', '.join(codes) or 'the launcher ' + exit_text(outcome.exit_code)}"
    return None


def exit_text(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _furthest_behind(logs: list[RankLog]) -> int | None:
    """The rank that the others most likely wait for: the fewest steps, then the longest silence."""
    waiting = [log for log in logs if not log.end]
    return min(waiting, key=lambda log: (log.steps_done, log.last["time"])).rank if waiting else None


def _failure(logs: list[RankLog], outcome: Outcome) -> Ending | None:
    """The first cause among the ranks' own errors and the ranks that a signal ended or that fell silent."""
    errors = sorted((log.error for log in logs if log.error), key=lambda e: float(e["time"]))
    causes = [e for e in errors if not SECONDARY.search(_text(e))]
    signalled = [rank for rank, code in outcome.exits.items() if code < 0]
    quiet = [log.rank for log in logs if not log.error and not log.end] if errors or outcome.exits else []
    killed = next((r for r in signalled if r in quiet), None)
    if killed is None and not causes and len(quiet) < len(logs):
        # A rank that the kernel or a person killed writes nothing; its peers then complain of a lost connection.
        killed = next(iter(quiet), None)
    if killed is not None and not causes:
        code = outcome.exits.get(killed)
        how = exit_text(code) if code is not None else "ended without a word, as after SIGKILL"
        if outcome.kernel_oom:
            return Ending("oom", f"rank {killed} {how}: the kernel was out of memory", killed)
        return Ending("failed", f"rank {killed} {how}{_quote(outcome.log_tail)}", killed)
    first = next(iter(causes or errors), None)
    if first is None:
        return None
    rank, text = int(first["rank"]), f"{first['type']}: {first['message']}"
    return Ending(_status_of(first), f"rank {rank}: {text}", rank, first)


def _text(error: Row) -> str:
    return f"{error.get('type')}: {error.get('message')}"


def _status_of(error: Row) -> Status:
    name = str(error.get("type")).rpartition(".")[2]
    if name in STATUS_OF_ERROR:
        return STATUS_OF_ERROR[name]
    text = _text(error)
    return "oom" if OOM.search(text) and not ILLEGAL.search(text) else "failed"


def _silent(logs: list[RankLog], steps: int, world_size: int, outcome: Outcome) -> Ending:
    """No rank named a cause."""
    done = min((log.steps_done for log in logs), default=0) if len(logs) == world_size else 0
    if outcome.kernel_oom:
        return Ending("oom", "the kernel was out of memory and killed a process of the run")
    if outcome.stopped:
        return Ending(*outcome.stopped)
    if outcome.exit_code == 0:
        return Ending("incomplete", f"exit code 0, but only {done} of {steps} steps are done")
    rank = next(iter(outcome.exits), None)
    if rank is not None:
        how = exit_text(outcome.exits[rank])
        return Ending("failed", f"rank {rank} {how}{_quote(outcome.log_tail)}", rank)
    if outcome.exit_code < 0:
        return Ending("lost", f"the launcher {exit_text(outcome.exit_code)}; {done} of {steps} steps are done")
    return Ending("failed", f"the launcher {exit_text(outcome.exit_code)}{_quote(outcome.log_tail)}")


def _quote(tail: str) -> str:
    """The last line of the log that names a fault: an uncaught exception, or a crash that faulthandler saw."""
    telling = [line.strip() for line in tail.splitlines() if FAULT.match(line.strip())]
    return f": {telling[-1][:300]}" if telling else ""
