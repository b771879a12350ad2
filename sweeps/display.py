"""What a person sees of a sweep: a live table on a terminal, plain lines elsewhere, and the closing table."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from bench.result import RunResult, Value
from sweeps.points import Point
from sweeps.work import Outcome, baseline_of, loss_deviation, summary_line

if TYPE_CHECKING:
    from sweeps.local import Running

STYLE = {"ok": "green", "unsupported": "yellow", "invalid": "yellow", "not run": "dim", "running": "cyan"}
ROWS_SHOWN = 60
"""A closing table longer than this shows only what went wrong: the report has the rest."""


class Display:
    """Follows a sweep. On a terminal a table is redrawn in place; elsewhere each start and end is one line."""

    def __init__(self, points: Sequence[Point], runs: Sequence[Point]):
        self.console = Console(highlight=False)
        self.total, self.ended_count, self.began = len(runs), 0, time.monotonic()
        self.live = Live(console=self.console, refresh_per_second=4, transient=True) if sys.stdout.isatty() else None
        done = len(points) - len({p.run_id for p in runs} | {p.run_id for p in points if p.problems})
        for point in points:
            for problem in point.problems:
                self.note(f"invalid: {point.name or 'a point'}: {problem.message}")
            for problem in point.warnings:
                self.note(f"warning: {point.name or 'a point'}: {problem.message}")
        self.note(f"{len(points)} points: {self.total} to run" + (f", {done} left as they are" if done else ""))

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.live:
            self.live.stop()

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)
        self.console.file.flush()

    def started(self, run: Running) -> None:
        if not self.live:
            self.note(f"start {label(run.point)}")

    def ended(self, run: Running, outcome: Outcome) -> None:
        self.ended_count += 1
        row, took = outcome.row, time.monotonic() - run.began
        text = f"[{self.ended_count}/{self.total}] {label(run.point)}: {outcome.status}, {took:.0f} s"
        if outcome.status == "ok" and row:
            tps, loss = _metric(row, "tps_global"), _metric(row, "final_loss")
            text += f", {_figure(tps, 0)} tokens/s" + (" simulated" if row.engine == "simulate" else "")
            text += f", loss {_figure(loss, 4)}" if loss and loss.value is not None else ""
        else:
            text += f"\n    {outcome.reason}"
        self.note(text)

    def show(self, running: Collection[Running]) -> None:
        """Redraw the live table: step k of n, tokens/s, loss, time left of every run under way."""
        if not self.live:
            return
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in ("running", "step", "tokens/s", "loss", "left"):
            table.add_column(name, justify="left" if name == "running" else "right", no_wrap=name != "running")
        for run in running:
            assert run.point.spec is not None
            (step, phase, tps, loss), train = run.progress, run.point.spec.config
            left = (train.train.steps - step) * train.tokens_per_step / tps if tps else None
            table.add_row(escape(label(run.point)), f"{step}/{train.train.steps}" if step else phase, _number(tps, 0),
                          _number(loss, 4), f"{left:.0f} s" if left is not None else "")  # fmt: skip
        elapsed = time.monotonic() - self.began
        left = elapsed / self.ended_count * (self.total - self.ended_count) if self.ended_count else None
        about = f", about {left:.0f} s left" if left else ""
        table.caption = f"{self.ended_count} of {self.total} done{about}; Ctrl-C stops, the same command goes on"
        self.live.update(table)


def label(point: Point) -> str:
    """The point's name, or its overrides where it has none."""
    return point.name or " ".join(point.overrides) or "the defaults"


def print_summary(outcomes: Sequence[Outcome], results: Path) -> None:
    """The closing table, the reasons of all that is not ok, and as the last line ``N points: a ok, b failed, ...``."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    shown = outcomes if len(outcomes) <= ROWS_SHOWN else [o for o in outcomes if o.status != "ok"]
    if len(outcomes) > 1 and shown:
        console.print(_table(shown, results))
    # a code_id covers the device's file, so each device has its own
    made = {(o.row.spec["hardware"]["device"], o.row.code_id) for o in outcomes if o.row and o.status == "ok"}
    versions = len(made) - len({device for device, _ in made}) + 1
    if versions > 1:
        text = f"{versions} versions of the code made these figures: the same command again runs the older ones"
        console.print(text, soft_wrap=True)
    for o in outcomes:
        if o.status not in ("ok", "not run"):
            console.print(f"{o.status}: {label(o.point)}: {o.reason}", markup=False, soft_wrap=True)
    print(summary_line(outcomes), flush=True)


def _table(outcomes: Sequence[Outcome], results: Path) -> Table:
    """A row a point: throughput with its interval, loss and the largest relative deviation of any step's loss from the
    baseline's, memory of the worst rank.
    """
    baselines = {o.point.sweep: baseline_of(o.point.sweep, outcomes) for o in outcomes}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("point", "status", "figures"):
        table.add_column(name)
    for name in ("ranks", "tokens/s", "from - to", "step s", "loss", "loss off by", "GiB"):
        table.add_column(name, justify="right")
    for o in outcomes:
        row, baseline = o.row, baselines[o.point.sweep]
        cells = [escape(label(o.point)), f"[{STYLE.get(o.status, 'red')}]{o.status}[/]"]
        if row and o.status == "ok":
            deviation = loss_deviation(row, baseline, results) if baseline and baseline is not row else None
            tps = _metric(row, "tps_global")
            interval = f"{_number(tps.low, 0)}-{_number(tps.high, 0)}" if tps and tps.low is not None else ""
            cells += ["simulated" if row.engine == "simulate" else "measured", str(row.world_size), _figure(tps, 0),
                      interval, _figure(_metric(row, "step_time_s"), 3), _figure(_metric(row, "final_loss"), 4),
                      "" if deviation is None else f"{deviation:.1e}", _figure(_memory(row), 2)]  # fmt: skip
        table.add_row(*cells)
    return table


def _memory(row: RunResult) -> Value | None:
    """Reserved memory where the device has an allocator of its own, else the resident set."""
    reserved = _metric(row, "peak_reserved_gib")
    return reserved if reserved and reserved.value is not None else _metric(row, "peak_rss_gib")


def _metric(row: RunResult, name: str) -> Value | None:
    return row.metrics.get(name)


def _figure(value: Value | None, digits: int) -> str:
    return _number(value.value if value else None, digits)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
