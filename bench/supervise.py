"""Watches a run's processes from outside and ends them, all of them, when they should end. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

from bench.endings import Outcome
from bench.ranks import Row, Tail
from bench.result import Status
from bench.spec import RunOptions
from bench.store import RunDir, read_jsonl
from trainer_core.counts import GIB

POLL_S = 0.1
MEMORY_POLL_S = 0.5
GRACE_S = 2.0
"""Between SIGTERM and SIGKILL."""
START_S = 60.0
"""How long the ranks may be silent, at least, before the first one is up: imports on a busy machine or a slow disk."""
STACK_S = 0.1
"""What a rank may take to print its stacks."""
SETTLE_S = 8.0
"""How long the others may take to end after one rank failed, or to leave after all are done."""


@dataclass
class Progress:
    """Where a live run is: the newest step, its tokens a second and loss, or the phase before the first step."""

    step: int = 0
    phase: str = "start"
    tps: float | None = None
    loss: float | None = None
    ranks: dict[int, Row] = field(default_factory=dict)
    errors: dict[int, Row] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def add(self, rank: int, row: Row) -> None:
        kind = row.get("kind")
        if kind == "start":
            self.ranks[rank] = row
        elif kind == "error":
            self.errors[rank] = row
        elif kind == "end":
            self.ended.add(rank)
        elif kind == "phase":
            self.phase = str(row.get("name"))
        elif kind == "step":
            self.step, self.phase = max(self.step, int(row["step"])), "step"
            self.tps = row["tokens"] / row["step_time_s"] if row.get("step_time_s") else self.tps
            self.loss = row["loss"] if row.get("loss") is not None else self.loss


OnProgress = Callable[[Progress], None]


class Group:
    """A child in a session of its own, with everything it starts. The child ends when this process is killed."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], log: Path):
        with open(log, "ab") as out:
            self.process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                            start_new_session=True)  # fmt: skip

    def members(self) -> list[psutil.Process]:
        """The child and all below it, also those that made a session of their own (compile workers)."""
        try:
            child = psutil.Process(self.process.pid)
            return [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def resident_bytes(self, limit: int, ranks: Iterable[int]) -> int:
        """Resident bytes of all members and of the pids ``ranks``, which a scheduler's daemon started if not we.

        Above ``limit`` shared pages count once (PSS, which takes longer to ask).
        """
        found = {p.pid: p for p in self.members()}
        elsewhere = set(ranks) - found.keys()
        found |= {p.pid: p for p in psutil.process_iter() if p.pid in elsewhere} if elsewhere else {}
        total = sum(_memory(p, shared=True) for p in found.values())
        return total if total <= limit else sum(_memory(p, shared=False) for p in found.values())

    def end(self, grace_s: float = GRACE_S) -> int:
        """SIGTERM, ``grace_s``, SIGKILL to every member; the child's exit code."""
        members = self.members()
        self._signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(members, timeout=grace_s)
        self._signal(signal.SIGKILL)
        for member in {*members, *self.members()}:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=grace_s)
        return self.process.wait()

    def _signal(self, signum: int) -> None:
        try:
            os.killpg(self.process.pid, signum)
        except ProcessLookupError:
            return


def _memory(process: psutil.Process, shared: bool) -> int:
    try:
        return int(process.memory_info().rss if shared else process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


@contextmanager
def cancel_on_signals(cancel: threading.Event) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP set ``cancel`` (in the main thread; elsewhere the caller sets it)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        cancel.set()

    old = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, before in old.items():
            signal.signal(signum, before)


class Watch:
    """The rules that end a run, asked every POLL_S."""

    def __init__(self, group: Group, run: RunDir, options: RunOptions, world_size: int, cancel: threading.Event):
        self.group, self.run, self.options = group, run, options
        self.world_size, self.cancel = world_size, cancel
        self.progress = Progress()
        self.began = self.moved = time.monotonic()
        self.settling: tuple[float, str] | None = None
        self.memory_asked = 0.0

    def take(self, rows: list[tuple[int, Row]]) -> None:
        now = time.monotonic()
        if rows:
            self.moved = now
        for rank, row in rows:
            self.progress.add(rank, row)
        if self.settling is None:
            if len(self.progress.ended) == self.world_size:
                self.settling = now, "the ranks did not leave after their last step"
            elif self.progress.errors or self._dead():
                self.settling = now, "a rank failed and the others did not end"

    def _dead(self) -> bool:
        """Whether a rank of this machine is gone that neither ended nor wrote an error."""
        here = os.uname().nodename
        return any(
            start["host"] == here and rank not in self.progress.ended and not psutil.pid_exists(start["pid"])
            for rank, start in self.progress.ranks.items()
        )  # fmt: skip

    def verdict(self) -> tuple[Status, str] | None:
        """The status and reason to end the run with now."""
        now, o = time.monotonic(), self.options
        if self.cancel.is_set():
            return "cancelled", "cancelled by a signal or by the caller"
        if self.settling and now - self.settling[0] > SETTLE_S:
            return "failed", self.settling[1]
        if now - self.began > o.wall_s:
            return "timeout", f"the wall limit run.wall_s={o.wall_s:g} s is over in step {self.progress.step + 1}"
        silence = now - self.moved
        if self.settling is None and silence > (o.hang_s if self.progress.ranks else max(o.hang_s, START_S)):
            return "hung", f"no rank made progress for {silence:.0f} s (run.hang_s={o.hang_s:g}){self._where()}"
        if o.memory_limit_gib is not None and now - self.memory_asked > MEMORY_POLL_S:
            self.memory_asked = now
            here = [start["pid"] for start in self.progress.ranks.values() if start["host"] == os.uname().nodename]
            used = self.group.resident_bytes(int(o.memory_limit_gib * GIB), here) / GIB
            if used > o.memory_limit_gib:
                return "oom", f"{used:.2f} GiB resident, run.memory_limit_gib={o.memory_limit_gib:g}"
        return None

    def _where(self) -> str:
        return f", after step {self.progress.step}" if self.progress.step else f" in phase {self.progress.phase}"

    def print_stacks(self) -> None:
        """Have each rank of this machine print its stacks into the log, one after the other: where it hangs."""
        here = os.uname().nodename
        for start in self.progress.ranks.values():
            if start["host"] == here and psutil.pid_exists(start["pid"]):
                os.kill(start["pid"], signal.SIGUSR1)
                time.sleep(STACK_S)


def supervise(
    argv: Sequence[str], env: dict[str, str], run: RunDir, options: RunOptions, world_size: int,
    cancel: threading.Event, on_progress: OnProgress | None = None,
) -> Outcome:  # fmt: skip
    """Run ``argv`` until it ends or a limit ends it; nothing that it started is left."""
    tail = Tail(run)
    tail.skip()
    began, ooms = time.time(), kernel_ooms()
    log_start = run.log.stat().st_size if run.log.exists() else 0
    group = Group(argv, env, run.log)
    stopped = None
    watch = Watch(group, run, options, world_size, cancel)
    try:
        while group.process.poll() is None and stopped is None:
            rows = tail.read()
            watch.take(rows)
            if rows and on_progress:
                on_progress(watch.progress)
            stopped = watch.verdict()
            cancel.wait(POLL_S)
        if stopped and stopped[0] in ("hung", "timeout"):
            watch.print_stacks()
    finally:
        code = group.end()
    exits = {row["rank"]: row["exit_code"] for row in read_jsonl(run.agents) if row["time"] >= began}
    return Outcome(began, code, stopped, exits, kernel_ooms() > ooms, log_tail(run.log, log_start))


def log_tail(log: Path, start: int = 0, size: int = 8192) -> str:
    """The last ``size`` bytes of a log, of what was written after ``start``."""
    with open(log, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - size))
        return file.read().decode(errors="replace")


def kernel_ooms() -> int:
    """How many processes the kernel has killed for lack of memory, in this control group or on this machine."""
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
        except OSError:
            continue
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return 0
