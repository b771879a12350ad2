"""``bench status``: every point of a results folder, from its own files first, then from the scheduler. No torch."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench import store
from bench.cli import FAILED, OK, UsageError, emit
from bench.ranks import RankLog, read_ranks
from bench.result import LIVE, RunResult
from bench.spec import RunSpec
from bench.store import RunDir
from trainer_core.config import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

REFRESH_S = 2.0
MIN_WIDTH = 120
COLOURS = {"ok": "green", "running": "cyan", "queued": "dim", "unsupported": "yellow", "invalid": "yellow"}


@dataclass(frozen=True)
class Point:
    """A row. ``step`` of ``steps``; ``tps`` and ``loss`` of the newest step of a live run, else the result's."""

    run_id: str
    sweep: str
    repeat: int
    folder: str
    status: str
    plan: str
    step: int
    steps: int
    ranks: int
    tps: float | None = None
    loss: float | None = None
    left_s: float | None = None
    reason: str | None = None


def collect(results: Path) -> tuple[list[Point], str | None]:
    """(a point for every run folder, why the scheduler could not be asked)."""
    jobs, trouble = _scheduled(results)
    points = []
    for run, row in store.rows(results):
        status, reason = jobs.get(run.path, (row.status, row.reason)) if row.status in (*LIVE, "lost") else (
            row.status, row.reason)  # fmt: skip
        points.append(_point(run, row, status, reason))
    return points, trouble


def _scheduled(results: Path) -> tuple[dict[Path, tuple[str, str]], str | None]:
    """What the scheduler says of the runs that have a job and no result; those that have ended get a result."""
    if next(results.glob(f"**/{store.JOB}"), None) is None:
        return {}, None
    from bench.reconcile import reconcile
    from bench.scheduler import SchedulerError

    try:
        return {run.path: verdict for run, verdict in reconcile(results).items()}, None
    except SchedulerError as error:
        return {}, str(error)


def _point(run: RunDir, row: RunResult, status: str, reason: str | None) -> Point:
    point = Point(row.run_id, row.sweep, row.repeat, str(run.path), status, _plan(row), row.steps_done,
                  row.steps_requested, row.world_size, reason=reason)  # fmt: skip
    if status in LIVE or row.status in (*LIVE, "lost"):
        return _with_progress(point, read_ranks(run), row)
    figures = {name: row.metrics[name].value for name in ("tps_global", "final_loss") if name in row.metrics}
    return Point(**{**asdict(point), "tps": figures.get("tps_global"), "loss": figures.get("final_loss")})


def _with_progress(point: Point, logs: list[RankLog], row: RunResult) -> Point:
    """Step, speed and time left of a run from the newest lines of its ranks."""
    steps = min((log.steps_done for log in logs), default=0) if len(logs) == row.world_size else 0
    newest = [log.steps[steps] for log in logs if steps in log.steps]
    if not newest:
        return point
    slowest = max(r["step_time_s"] for r in newest)
    loss = next((r["loss"] for r in newest if r["loss"] is not None), None)
    live = point.status == "running"
    return Point(**{
        **asdict(point), "step": steps, "loss": loss,
        "tps": newest[0]["tokens"] / slowest if live and slowest else None,
        "left_s": (row.steps_requested - steps) * slowest if live else None,
    })  # fmt: skip


def _plan(row: RunResult) -> str:
    """The keys by which the point differs from the defaults."""
    try:
        return " ".join(RunSpec.from_dict(row.spec).overrides())
    except (ConfigError, TypeError, AttributeError):
        return "?"


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("results", type=Path, metavar="RESULTS")
    p.add_argument("--watch", action="store_true", help="refresh until no point is queued or running")
    p.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    if not args.results.is_dir():
        raise UsageError(f"{args.results} is no folder")
    if args.watch and not args.json:
        _watch(args.results)
    points, trouble = collect(args.results)
    counts = Counter(p.status for p in points)
    if args.json:
        emit({"counts": counts, "scheduler": trouble, "points": [asdict(p) for p in points]}, True, "")
    else:
        from rich.console import Console

        console = Console(width=max(Console().width, MIN_WIDTH))
        console.print(_table(points))
        console.print(_summary(points), highlight=False)
        if trouble:
            console.print(f"the scheduler can not be asked, so queued and running are what the files say: {trouble}")
    return OK if all(p.status in (*LIVE, "ok") for p in points) else FAILED


def _watch(results: Path) -> None:
    from rich.console import Group
    from rich.live import Live

    with Live(refresh_per_second=4) as live:
        while True:
            points, _ = collect(results)
            live.update(Group(_table(points), _summary(points)))
            if not any(p.status in LIVE for p in points):
                return
            time.sleep(REFRESH_S)


def _summary(points: list[Point]) -> str:
    counts = Counter(p.status for p in points)
    return f"{len(points)} points: " + (", ".join(f"{n} {status}" for status, n in counts.most_common()) or "none")


def _table(points: list[Point]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("run", "ranks", "status", "step", "tokens/s", "loss", "left"):
        table.add_column(name, justify="left" if name in ("run", "status") else "right", no_wrap=True)
    table.add_column("what differs, why", overflow="fold", min_width=40)
    words = [p.plan.split() for p in points]
    common = set.intersection(*map(set, words)) if len(points) > 1 else set()
    for p, plan in zip(points, words, strict=True):
        differs = " ".join(w for w in plan if w not in common and not w.startswith("parallel.world_size="))
        status = f"[{COLOURS.get(p.status, 'red')}]{p.status}[/]"
        table.add_row(
            f"{escape(p.sweep)}/{p.run_id}/r{p.repeat:03d}",
            str(p.ranks),
            status,
            f"{p.step}/{p.steps}",
            f"{p.tps:,.0f}" if p.tps else "",
            f"{p.loss:.4f}" if p.loss is not None else "",
            f"{p.left_s:,.0f} s" if p.left_s is not None else "",
            escape("\n".join(filter(None, (differs, p.reason)))),
        )
    return table
