"""Sentences and number formats that the page and the Markdown share. No torch."""

from __future__ import annotations

from reports import strategy, table
from reports.points import WORDS, Point
from reports.report import Report


def asked(report: Report) -> str:
    """What the results are about, in one line."""
    points = report.points
    if not points:
        return f"No run below {report.results}."
    runs = sum(len(p.runs) for p in points)
    what = f"{len(points):,} strateg{'y' if len(points) == 1 else 'ies'}, {runs:,} run{'' if runs == 1 else 's'}"
    engines = " and ".join(dict.fromkeys(WORDS.get(p.engine, p.engine) for p in points))
    varied = [a.title for a in report.axes if a.key in strategy.AXIS_TITLES and a.key not in ("layout", "recipe")]
    over = f"; varied: {', '.join(varied[:8])}{' and more' if len(varied) > 8 else ''}" if varied else ""
    return f"{what}, {engines}{over}."


def right(report: Report, best: Point) -> str:
    """Why one may believe the fastest run's numbers to be those of right training."""
    found = next((v for v in report.parity if v.point is best), None)
    if best.simulated:
        return "a simulation trains nothing"
    if found is None:
        return "it is a one-rank run" if best.flat["parallel.world_size"] == 1 else "no loss to compare"
    if found.loss is None:
        return found.text
    if found.verdict == "deviates" and found.tolerance and found.loss <= found.tolerance[0]:
        return f"grad norm off by {small(found.grad_norm)}, limit {small(found.tolerance[1])}"
    return f"loss within {small(found.loss)} of one rank, {found.steps} steps"


def levels(report: Report) -> str:
    found = sorted({f"{100 * p.tps.level:.0f} %" for p in report.points if p.tps.level})
    return " and ".join(found)


def small(value: float | None) -> str:
    """A relative deviation: two digits, in powers of ten."""
    return "–" if value is None else "0" if value == 0 else f"{value:.1e}".replace("e-0", "e−").replace("e-", "e−")


def signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4f}".replace("-", "−")


def either(value: float | None, unit: str) -> str:
    """A figure, or a gain where the unit is a ratio."""
    return table.gain(value) if unit == "ratio" else table.show(value, unit)
