"""Published rows beside our figure for them: three columns that are never mixed. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.result import METRICS, Value
from reports import interval
from reports.points import Point
from reports.table import FIGURES


@dataclass(frozen=True)
class PublishedRow:
    """One figure of a published row and ours for the same settings; ``ratio`` is ours over the published one."""

    id: str
    title: str
    source: str
    link: str
    metric: str
    unit: str
    published: Value
    point: Point
    ours: Value
    ratio: Value
    note: str


def rows(points: Sequence[Point]) -> list[PublishedRow]:
    """Every figure of every published row that has a run among ``points``; none reads no data file."""
    mine = [p for p in points if p.flat.get("published")]
    if not mine:
        return []
    from bench import published

    known, out = published.rows(), []
    for p in mine:
        row = known.get(str(p.flat["published"]))
        if row is None:
            continue
        s = row.source
        link = f"https://github.com/{s.repository}/blob/{s.commit}/{s.path}" if "/" in s.repository else ""
        about = (row.id, f"{s.table}: {s.row}", f"{s.title}, {s.date}", link)
        note = row.fault or row.note or ""
        for name, figure in row.figures.items():
            ours = p.metrics[name]
            stated = Value(figure.value, unit=METRICS[name].unit)
            title = FIGURES.get(name, name)
            out.append(PublishedRow(*about, title, stated.unit, stated, p, ours, _over(ours, figure.value), note))
        base = known.get(row.baseline or "")
        below = next((q for q in mine if base and q.flat["published"] == base.id and q.scope == p.scope), None)
        if base and below and "tps_per_gpu" in row.figures and "tps_per_gpu" in base.figures:
            stated = Value(row.figures["tps_per_gpu"].value / base.figures["tps_per_gpu"].value, unit="ratio")
            ours = interval.ratio(p.tps, below.tps)
            out.append(PublishedRow(*about, f"gain over {base.source.row}", "ratio", stated, p, ours,
                                    _over(ours, stated.value or 1.0), note))  # fmt: skip
    return out


def _over(ours: Value, published: float) -> Value:
    """Ours over an exact number: the source gives no interval, so only ours counts."""
    return interval.ratio(ours, Value(published, published, published, ours.level, ours.n))
