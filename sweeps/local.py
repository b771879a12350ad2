"""The local launcher: every point in a process of its own, as many at once as the machine has cores or GPUs for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType

from bench import store
from bench.environment import fingerprint, gpus
from bench.result import LIVE
from bench.run import require_writable
from bench.spec import RunSpec, rule_device
from bench.tether import end_with_parent
from sweeps.display import Display, print_summary
from sweeps.points import OwnKeys, Point, unique
from sweeps.work import Outcome, Rows, exit_code, outcome, read_rows, store_invalid, summary_line, todo, write_manifest

CANCEL_S = 30.0
"""How long a run may take to end its ranks and write its result after Ctrl-C."""


@dataclass
class Slots:
    """What the machine can run at once without one run disturbing another's timing.

    A measured run on CPU takes a core a rank and one for its supervisor (one rank alone is threaded and takes all,
    unless OMP_NUM_THREADS is set), on GPUs the GPUs themselves; a simulated run takes a core. What is larger than the
    machine runs alone.
    """

    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    gpu_ids: list[int] = field(default_factory=lambda: list(range(len(gpus()))))
    at_once: int | None = None
    taken: dict[int, tuple[int, list[int]]] = field(default_factory=dict)

    def need(self, spec: RunSpec) -> tuple[int, int]:
        """(cores, GPUs) of a run."""
        if spec.engine == "simulate":
            return 1, 0
        if rule_device(spec.hardware).kind == "cuda":
            return 1, spec.world_size
        threaded = spec.world_size == 1 and "OMP_NUM_THREADS" not in os.environ
        return (self.cores if threaded else spec.world_size + 1), 0

    def take(self, key: int, spec: RunSpec) -> list[int] | None:
        """The ids of the GPUs for this run (empty on CPU), or None while there is no room."""
        cores, wanted = self.need(spec)
        free_cores = self.cores - sum(c for c, _ in self.taken.values())
        used = {i for _, ids in self.taken.values() for i in ids}
        free = [i for i in self.gpu_ids if i not in used]
        full = self.at_once is not None and len(self.taken) >= self.at_once
        if self.taken and (full or cores > free_cores or wanted > len(free)):
            return None
        self.taken[key] = cores, free[:wanted]
        return free[:wanted]


@dataclass
class Running:
    """One started run and the end of the pipe on which it reports."""

    point: Point
    process: ForkServerProcess
    pipe: Connection
    began: float = field(default_factory=time.monotonic)
    progress: tuple[int, str, float | None, float | None] = (0, "start", None, None)
    crash: str | None = None

    def read(self) -> None:
        """Take in what the run reported: the newest progress, or the traceback of a fault of ours."""
        with suppress(EOFError):
            while self.pipe.poll():
                kind, value = self.pipe.recv()
                if kind == "progress":
                    self.progress = value
                else:
                    self.crash = value


def work(spec: RunSpec, results: Path, sweep: str, gpu_ids: list[int], pipe: Connection) -> None:
    """The body of a run's process: a session of its own, so that Ctrl-C reaches it only through the launcher."""
    os.setsid()
    end_with_parent(os.getppid())
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    if gpu_ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
    try:
        from bench.run import run

        run(spec, results, sweep, lambda p: pipe.send(("progress", (p.step, p.phase, p.tps, p.loss))))
    except BaseException:
        pipe.send(("crash", traceback.format_exc()))
        sys.exit(4)


def launch(jobs: Sequence[Sequence[str]], own: OwnKeys, at_once: int | None = None) -> int:
    """Run every point that is not finished; the exit code of the sweep."""
    points = build(jobs)
    results, machine = Path(own.results), fingerprint()
    if points and all(p.problems for p in points):
        print("\n".join(f"{p.name or 'the plan'}: {p.reason}" for p in points), file=sys.stderr)
        print(summary_line([Outcome(p, "invalid") for p in points]))
        return 2
    require_writable(results)
    stored = wait_for_others(points, results, machine)
    store_invalid(points, results, stored)
    write_manifest(points, results)
    runs = todo(points, stored, machine, own.only == "failed")
    context = multiprocessing.get_context("forkserver")
    simulated = any(p.spec and p.spec.engine == "simulate" for p in runs)
    context.set_forkserver_preload(["bench.tethered", "bench.run", *(["bench.sim.engine"] if simulated else [])])
    with Display(points, runs) as display:
        pool = Pool(results, Slots(at_once=at_once), display)
        pool.run(runs)
    stored = read_rows(results, points)
    outcomes = [pool.ended.get(id(p)) or outcome(p, stored[p.sweep], machine) for p in points]
    print_summary(outcomes, results)
    return 4 if pool.crashed else exit_code(outcomes)


def build(jobs: Sequence[Sequence[str]]) -> list[Point]:
    """Read and check every point, with a word on stderr every so often; repetitions are left out."""
    points, last = [], time.monotonic()
    for n, texts in enumerate(jobs, 1):
        points.append(Point.build(texts))
        if time.monotonic() - last > 1:
            last = time.monotonic()
            print(f"checked {n} of {len(jobs)} points", file=sys.stderr)
    return unique(points)


def wait_for_others(points: Sequence[Point], results: Path, machine: str) -> dict[str, Rows]:
    """The stored rows, once no other sweep on this machine is at work on these points."""
    told = False
    while True:
        stored = read_rows(results, points)
        live = sum(outcome(p, stored[p.sweep], machine).status in LIVE for p in points)
        if not live:
            return stored
        if not told:
            print(f"{live} of these points are being run by another sweep: waiting for them", file=sys.stderr)
        told = True
        time.sleep(0.5)


class Pool:
    """Starts runs in order as room allows and follows them to their ends."""

    def __init__(self, results: Path, slots: Slots, display: Display):
        self.results, self.slots, self.display = results, slots, display
        self.running: dict[int, Running] = {}
        self.ended: dict[int, Outcome] = {}
        """id(point) -> what it came to here, also where someone changed the code while it ran."""
        self.crashed = False

    def run(self, runs: Sequence[Point]) -> None:
        """Every run to its end, or until Ctrl-C or SIGTERM."""
        waiting = list(enumerate(runs))

        def stop(signum: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, stop)
        try:
            while waiting or self.running:
                while waiting and self._start(*waiting[0]):
                    waiting.pop(0)
                self._follow(0.25)
        except KeyboardInterrupt:
            self.display.note("stopping: what is done is kept, the same command goes on from here")
            self._cancel()
        finally:
            signal.signal(signal.SIGTERM, before)

    def _start(self, key: int, point: Point) -> bool:
        assert point.spec is not None
        gpu_ids = self.slots.take(key, point.spec)
        if gpu_ids is None:
            return False
        context = multiprocessing.get_context("forkserver")
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(point.spec, self.results, point.sweep, gpu_ids, send))
        process.start()
        send.close()
        self.running[key] = Running(point, process, receive)
        self.display.started(self.running[key])
        return True

    def _follow(self, timeout_s: float) -> None:
        """Wait for news of the running ones, at most ``timeout_s``; take out those that ended."""
        wait([r.process.sentinel for r in self.running.values()], timeout_s)
        for key, run in list(self.running.items()):
            alive = run.process.is_alive()
            run.read()
            if not alive:
                run.process.join()
                del self.running[key], self.slots.taken[key]
                if run.crash is None and run.process.exitcode:
                    run.crash = f"the process of the run ended with exit code {run.process.exitcode}"
                self.crashed |= run.crash is not None
                self._take(run)
        self.display.show(self.running.values())

    def _take(self, run: Running) -> None:
        """Keep what a run came to: of the whole runs of one point the first that is not ok, else the newest."""
        rows = store.load_all(self.results / run.point.sweep / run.point.run_id)
        newest = max(rows, key=lambda r: r.repeat, default=None)
        status = "failed" if run.crash or newest is None else newest.status
        mine = Outcome(run.point, status, newest, run.crash)
        before = self.ended.get(id(run.point))
        if before is None or before.status == "ok":
            self.ended[id(run.point)] = mine
        self.display.ended(run, mine)

    def _cancel(self) -> None:
        """Tell every run to end, wait until it wrote its result, and kill what does not."""
        for run in self.running.values():
            assert run.process.pid is not None
            os.kill(run.process.pid, signal.SIGINT)
        deadline = time.monotonic() + CANCEL_S
        while self.running and time.monotonic() < deadline:
            self._follow(0.25)
        for run in self.running.values():
            run.process.kill()
