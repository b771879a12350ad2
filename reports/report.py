"""Everything a report says, computed once; the page and the Markdown only write it down. No torch."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from bench.result import METRICS, Value
from reports import compare, curves, figures, heatmap, interval, loss, plots, published, strategy, table
from reports.compare import Advice, Effect
from reports.heatmap import Axis
from reports.loss import Parity, Precision
from reports.notices import Notice, Place, find, places
from reports.plots import Drawing
from reports.points import MEMORY, WORDS, Point, by_scope, load
from reports.published import PublishedRow
from reports.table import Row


@dataclass(frozen=True)
class Headline:
    """The answer for one workload: the fastest run and its gain over the plainest like run (None with the reason)."""

    text: str
    engine: str
    best: Point | None
    base: Point | None
    gain: Value
    ladder: tuple[Point, ...]
    points: tuple[Point, ...]

    @property
    def failed(self) -> int:
        return sum(not p.ok for p in self.points)


@dataclass(frozen=True)
class Report:
    """``rows`` is parallel to ``points``; every number that is printed comes from it.

    ``curves`` are the runs of the loss figures, ``inline_losses`` those figures without a legend (the page has one),
    ``floor`` the relative noise of the loss between equal runs. ``axes`` are all settings that vary, ``map_axes`` the
    columns and rows of the map.
    """

    results: Path
    out: Path
    points: tuple[Point, ...]
    rows: tuple[Row, ...]
    headlines: tuple[Headline, ...]
    effects: tuple[Effect, ...]
    parity: tuple[Parity, ...]
    precision: tuple[Precision, ...]
    advice: dict[Point, Advice]
    published: tuple[PublishedRow, ...]
    notices: tuple[Notice, ...]
    places: tuple[Place, ...]
    drawings: tuple[Drawing, ...]
    curves: tuple[Point, ...]
    inline_losses: tuple[Drawing, ...]
    floor: float | None
    axes: tuple[Axis, ...]
    map_axes: tuple[Axis, Axis]

    def failures(self) -> list[tuple[str, int, list[tuple[str, int, Point]]]]:
        """(status, count, [(reason of the first, count, first run)]), the most frequent first.

        Reasons that differ in their numbers only (a rank, a size) are one.
        """
        by_status: dict[str, list[Point]] = {}
        for p in self.points:
            if not p.ok:
                by_status.setdefault(p.status, []).append(p)
        out = []
        for status, members in sorted(by_status.items(), key=lambda kv: -len(kv[1])):
            alike = Counter(_numberless(p.reason) for p in members)
            first = {_numberless(p.reason): p for p in reversed(members)}
            out.append((status, len(members), [(first[r].reason, n, first[r]) for r, n in alike.most_common()]))
        return out

    def link(self, point: Point, file: str = "") -> str:
        return relative(point.head.path, self.out, file)


def _numberless(reason: str) -> str:
    return re.sub(r"\d+", "#", reason)


def relative(folder: Path, out: Path, file: str = "") -> str:
    """A link from the report to a file of a run's folder, percent-encoded."""
    return quote(os.path.relpath(folder / file, out))


def make(results: Path, out: Path) -> Report:
    points = load(results)
    parity = loss.parity(points)
    advice = compare.advise(points, [p.point for p in parity if p.verdict == "deviates"])
    headlines = _headlines(points, advice)
    points = [p for h in headlines for p in sorted(h.points, key=lambda p: -(advice[p].score or -1.0))]
    verdicts = {p.point: p for p in parity}
    rows = [_row(p, advice[p], verdicts.get(p), out) for p in points]
    drawn, reference, floor = shown_curves(points, parity)
    drawn = drawn[: figures.SERIES]
    axes = heatmap.axes(points)
    main = next((h for h in headlines if h.best is not None), None)
    mapped, map_axes = _mapped(points, main, axes)
    drawings = _drawings(points, main, _maps(mapped, axes, map_axes))
    drawings += curves.draw(drawn, reference, floor, legend=True)
    return Report(
        results, out, tuple(points), tuple(rows), tuple(headlines), tuple(compare.effects(points)), tuple(parity),
        tuple(loss.precision_losses(points)), advice, tuple(published.rows(points)),
        (*find(points), *_faster_but_rejected(headlines, advice)),
        tuple(places(points)), tuple(drawings), tuple(drawn),
        tuple(curves.draw(drawn, reference, floor, legend=False)), floor, tuple(axes), map_axes,
    )  # fmt: skip


def _row(p: Point, advice: Advice, parity: Parity | None, out: Path) -> Row:
    """One line of the one table."""
    flat, kind, memory = p.flat, *p.memory
    row: Row = {
        "run_id": p.run_id, "strategy": p.name, "model": flat["model.name"], "engine": WORDS.get(p.engine, p.engine),
        "status": p.status, "gpus": p.result.world_size, "seq_len": flat["data.seq_len"],
        "global_batch_size": flat["train.global_batch_size"], "mfu_reason": p.metrics["mfu"].reason,
        "n": p.tps.n, "level": p.tps.level,
        "memory_gib": table.rounded(memory.value, "GiB"),
        "memory_kind": None if memory.value is None else MEMORY[kind], "memory_rank": p.result.memory_rank,
        "score": table.rounded(advice.score, "fraction"), "advice": advice.word,
        "parity": parity.verdict if parity else None, "reason": p.reason, "repeats": len(p.runs),
        "attempts": max(r.result.attempts for r in p.runs), "published": flat.get("published"),
        "sweep": p.result.sweep, "device": flat["hardware.device"], "machine": p.scope.machine or None,
        "code_id": p.result.code_id, "folder": os.path.relpath(p.head.path, out), "command": p.result.command,
    }  # fmt: skip
    for name in METRICS:
        row |= table.figure_cells(name, p.metrics[name])
    return row


def _headlines(points: Sequence[Point], advice: dict[Point, Advice]) -> list[Headline]:
    """One a workload, the largest first; measured before simulated where they are as large. Equal texts say where."""
    groups: dict[Hashable, list[Point]] = {}
    for p in points:
        groups.setdefault(compare.workload(p), []).append(p)
    ordered = sorted(groups.values(), key=lambda g: (-len(g), g[0].simulated))
    made = [_headline(group, advice) for group in ordered]
    same = Counter((h.text, h.engine) for h in made)
    return [replace(h, text=f"{h.text} · {h.points[0].scope.where}") if same[h.text, h.engine] > 1 else h for h in made]


def _headline(members: list[Point], advice: dict[Point, Advice]) -> Headline:
    """The fastest run that is not rejected; the fastest at all where every one is."""
    flat, engine = members[0].flat, members[0].engine
    where = f"{flat['parallel.world_size']} × {flat['hardware.device']}"
    text = f"{flat['model.name']} · {where} · sequence {table.show(flat['data.seq_len'], 'count')}"
    best = compare.fastest(p for p in members if advice[p].word != "rejected") or compare.fastest(members)
    if best is None:
        return Headline(text, engine, None, None, Value(reason="no successful run"), (), tuple(members))
    baselines = compare.Baselines(members)
    rungs = compare.ladder(best, baselines)
    if len(rungs) == 1:
        none = Value(unit="ratio", reason=_no_gain(best, baselines))
        return Headline(text, engine, best, None, none, tuple(rungs), tuple(members))
    return Headline(text, engine, best, rungs[0], interval.ratio(best.tps, rungs[0].tps), tuple(rungs), tuple(members))


def _faster_but_rejected(headlines: Sequence[Headline], advice: dict[Point, Advice]) -> list[Notice]:
    """Runs that would lead their workload if they were right."""
    out = []
    for h in headlines:
        top = compare.fastest(h.points)
        if top is not None and top is not h.best:
            out.append(Notice("faster but rejected", f"{h.text}: {advice[top].why}", (top,)))
    return out


def _no_gain(best: Point, baselines: compare.Baselines) -> str:
    """Why the fastest run has no baseline."""
    on = [t for t in strategy.TECHNIQUES if t.name != "ac" and t.on(best.flat)]
    if not on or len(baselines.points) == 1:
        return "it is the plainest run of this workload" if not on else "no other run of this workload"
    return f"without {on[-1].text(best.flat)}: {baselines.pair(best, on[-1]).speed.reason}"


FOLLOWS = ("train.local_batch_size", "train.global_batch_size", "parallel.dp_shard", "parallel.dp_replicate")


def _mapped(
    points: Sequence[Point], main: Headline | None, axes: Sequence[Axis]
) -> tuple[Sequence[Point], tuple[Axis, Axis]]:
    """(the runs of the map, its columns and rows): those of the main answer by the two settings that fill it best.

    Where most runs of that scope differ in their number of GPUs, it becomes the columns, so that all are seen at once.
    """
    if main is None:
        return points, heatmap.choose(points, axes)
    gpus = "parallel.world_size"
    alike = {k: v for k, v in main.points[0].flat.items() if k.startswith(compare.WORKLOAD) and k != gpus}
    wider = [p for p in points if p.scope == main.points[0].scope and all(p.flat.get(k) == v for k, v in alike.items())]
    columns = next((a for a in axes if a.key == gpus), None)
    if columns is None or len(main.points) > 0.6 * len(wider):
        return main.points, heatmap.choose(main.points, axes)
    single = {a: len({a.of(p) for p in wider}) for a in axes if a.key.startswith(heatmap.STRATEGY) and a is not columns}
    fitting = {a: n for a, n in single.items() if n <= heatmap.LIMIT[1]}
    return wider, (columns, max(fitting, key=lambda a: fitting[a], default=heatmap.NOTHING))


def _maps(points: Sequence[Point], axes: Sequence[Axis], map_axes: tuple[Axis, Axis]) -> list[Drawing]:
    if not any(p.ok for p in points):
        return []
    told = heatmap.details(points, axes, *map_axes)
    return [plots.heat(points, *map_axes, told, memory=memory) for memory in (False, True)]


def _drawings(points: Sequence[Point], main: Headline | None, maps: Sequence[Drawing]) -> list[Drawing]:
    """Every figure but the losses that these runs can fill; ladder, memory and time of the first workload."""
    out: list[Drawing] = [*maps]
    if main is not None:
        fast = sorted((p for p in main.points if p.ok and p.tps.value), key=lambda p: -(p.tps.value or 0.0))
        if len(main.ladder) > 1:
            gains = [
                interval.ratio(p.tps, main.ladder[0].tps) if p is not main.ladder[0] else Value(1.0)
                for p in main.ladder
            ]
            out.append(plots.ladder(main.ladder, gains))
        out += [d for d in (plots.memory(fast), plots.time(fast)) if d is not None]
    for name, title, key, follows in (
        ("scaling", "Scaling", "parallel.world_size", FOLLOWS),
        ("microbatches", "Microbatches", "parallel.microbatches", FOLLOWS[:2]),
        ("sequence", "Sequence length", "data.seq_len", FOLLOWS[:2]),
    ):
        # One figure compares within one scope: that of the main answer, else the first that has such a series.
        groups = sorted(by_scope(points).items(), key=lambda kv: main is None or kv[0] != main.points[0].scope)
        found = next((s for _, members in groups if (s := compare.series(members, key, follows))), None)
        if found:
            out.append(plots.lines(name, title, key, found))
    return out


def shown_curves(points: Sequence[Point], parity: Sequence[Parity]) -> tuple[list[Point], Point | None, float | None]:
    """(runs to draw, the reference first; the reference; relative noise floor of the loss).

    The largest group with a reference, its worst deviations first; without a reference, the runs of one problem that
    have losses.
    """
    groups: dict[Point, list[Parity]] = {}
    for p in parity:
        if p.reference is not None and p.loss is not None:
            groups.setdefault(p.reference, []).append(p)
    if groups:
        reference, members = max(groups.items(), key=lambda kv: len(kv[1]))
        members.sort(key=lambda p: -(p.loss or 0.0))
        floor = loss.noise([reference, *(p.point for p in members)])
        return [reference, *(p.point for p in members)], reference, floor[0] if floor else None
    alike: dict[Hashable, list[Point]] = {}
    for point in points:
        if point.ok and point.engine == "measure":
            alike.setdefault(loss.problem(point, precision=False), []).append(point)
    for members_ in sorted(alike.values(), key=len, reverse=True):
        shown = [p for p in members_[: 4 * plots.BARS] if loss.has_losses(p)]
        if shown:
            return shown, None, None
    return [], None, None
