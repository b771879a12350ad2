"""The figures of a report but its loss curves: ladder, memory, time, scaling, static heatmaps. No torch.

Each draws a bounded number of runs, whatever the size of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.result import Value
from reports import figures, heatmap, strategy, table
from reports.figures import blank, clean, color
from reports.heatmap import Axis
from reports.points import MEMORY, Point

BARS = 10
"""Bars in one figure."""


@dataclass(frozen=True)
class Drawing:
    """A figure with its name (the file's too), title and a caption that says what is shown and what is not."""

    name: str
    title: str
    caption: str
    svg: str
    group: str


def sim(point: Point) -> str:
    """What stands behind a simulated figure."""
    return " sim" if point.simulated else ""


def _names(points: Sequence[Point]) -> tuple[str, list[str]]:
    """(a sentence on what all runs share, their names without it)."""
    common, rest = strategy.without_common([p.name for p in points])
    return f"All: {clean(common, 90)}. " if common else "", rest


def _bars(pyplot: Any, rows: Sequence[tuple[str, str]], top: float, legend: int = 0) -> tuple[Any, Any]:
    """An empty bar chart: every row's label stands above its bar, so that it fits a phone; its figure at the right."""
    fig, ax = blank(pyplot, 40 * len(rows) + 14 + 18 * legend)
    ax.set_xlim(0, top / (1 - 0.04 - 0.0215 * max(len(figure) for _, figure in rows)) or 1.0)
    ax.set_ylim(len(rows) - 0.45, -0.62)
    for i, (label, figure) in enumerate(rows):
        ax.text(0, i - 0.27, clean(label, 47), va="bottom", fontsize=11.5)
        ax.text(1, i, figure, va="center", ha="right", fontsize=11.5, transform=ax.get_yaxis_transform())
    ax.axis("off")
    return fig, ax


def ladder(rungs: Sequence[Point], gains: Sequence[Value]) -> Drawing:
    """TPS/GPU of each rung with its interval; the gain over the first rung beside it."""
    with figures.style() as pyplot:
        top = max((p.tps.high or p.tps.value or 0.0) for p in rungs)
        texts = [table.show(p.tps.value, "tokens/s") + sim(p) + ("" if g.value == 1 else f"  {table.gain(g.value)}")
                 for p, g in zip(rungs, gains, strict=True)]  # fmt: skip
        common, names = _names(rungs)
        fig, ax = _bars(pyplot, list(zip(names, texts, strict=True)), top)
        for i, p in enumerate(rungs):
            value = p.tps.value or 0.0
            ax.barh(i, value, 0.38, color=color("s0"), alpha=0.35 + 0.65 * (i + 1) / len(rungs))
            if p.tps.low is not None and p.tps.high is not None:
                ax.plot([p.tps.low, p.tps.high], [i, i], color=color("ink"), linewidth=1.4, marker="|", markersize=7)
        caption = common + "Tokens/s a GPU with interval, gain over the first rung; each rung adds one technique."
        return Drawing(
            "ladder", "The ladder to the fastest run", caption, figures.to_svg(pyplot, fig, "ladder"), "ladder"
        )


def stacked(
    name: str,
    title: str,
    caption: str,
    points: Sequence[Point],
    parts: Sequence[Mapping[str, float]],
    total: Sequence[str],
) -> Drawing:
    """Stacked bars; the categories share one legend. ``total``: the text at each bar's end."""
    kinds = list(dict.fromkeys(k for p in parts for k in p))
    if len(kinds) > figures.SERIES:
        largest = sorted(kinds, key=lambda k: -max(p.get(k, 0.0) for p in parts))[: figures.SERIES - 1]
        kinds = [*(k for k in kinds if k in largest), "other"]
        parts = [{**{k: p[k] for k in largest if k in p}, "other": sum(v for k, v in p.items() if k not in largest)}
                 for p in parts]  # fmt: skip
    with figures.style() as pyplot:
        columns = 2 if max(map(len, kinds)) > 14 else 3
        common, names = _names(points)
        top = max(sum(p.values()) for p in parts)
        fig, ax = _bars(pyplot, list(zip(names, total, strict=True)), top, -(-len(kinds) // columns))
        left = [0.0] * len(parts)
        for j, kind in enumerate(kinds):
            widths = [p.get(kind, 0.0) for p in parts]
            ax.barh(range(len(parts)), widths, 0.38, left=left, color=color(f"s{j}"), edgecolor=color("surface"),
                    linewidth=0.8, label=clean(kind.replace("_", " "), 20))  # fmt: skip
            left = [a + b for a, b in zip(left, widths, strict=True)]
        fig.legend(loc="outside lower left", ncols=columns, columnspacing=1.2, handlelength=0.8, handleheight=0.8)
        return Drawing(name, title, common + caption, figures.to_svg(pyplot, fig, name), "memory")


def memory(points: Sequence[Point]) -> Drawing | None:
    """Peak memory of the worst rank: by category where that was tracked, else the peak as one bar."""
    shown = [p for p in points if p.memory[1].value is not None][:BARS]
    if not shown:
        return None
    parts = [categories(p) or {MEMORY[p.memory[0]]: p.memory[1].value or 0.0} for p in shown]
    rank = [f", rank {p.result.memory_rank}" if p.result.memory_rank is not None else "" for p in shown]
    total = [f"{table.show(p.memory[1].value, 'GiB')} GiB{sim(p)}{r}" for p, r in zip(shown, rank, strict=True)]
    split = any(categories(p) for p in shown)
    caption = "GiB on the worst rank" + (", by what holds it" if split else "; no categories were tracked")
    return stacked("memory", "Memory", caption + _first(points, shown), shown, parts, total)


def categories(point: Point) -> dict[str, float]:
    """GiB by category from the evidence (simulated or tracked); empty where there is none."""
    found = point.result.evidence.get("memory")
    found = found.get("categories", found) if isinstance(found, Mapping) else {}
    numbers = {str(k).removesuffix("_gib"): float(v) for k, v in found.items()
               if isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0}  # fmt: skip
    return {k: v for k, v in numbers.items() if k not in ("total", "peak", "rank", "worst_rank")}


def time(points: Sequence[Point]) -> Drawing | None:
    """Where a step's seconds go, for the runs whose evidence says so."""
    known = [p for p in points if breakdown(p)]
    if not known:
        return None
    shown = known[:BARS]
    total = [f"{table.show(sum(breakdown(p).values()), 's')} s{sim(p)}" for p in shown]
    caption = "Seconds of one optimizer step" + _first(known, shown)
    return stacked("time", "Time of a step", caption, shown, [breakdown(p) for p in shown], total)


def breakdown(point: Point) -> dict[str, float]:
    """Seconds by kind: compute, memory_bound, exposed communication by axis, bubble, optimizer."""
    found = point.result.evidence.get("time_breakdown")
    out: dict[str, float] = {}
    for kind, value in found.items() if isinstance(found, Mapping) else ():
        for axis, x in value.items() if isinstance(value, Mapping) else [("", value)]:
            if isinstance(x, (int, float)) and x > 0:
                label = "comm" if kind == "exposed_comm" else str(kind)
                out[f"{label} {axis}".strip()] = float(x)
    return out


def _first(all_: Sequence[Point], shown: Sequence[Point]) -> str:
    return f"; the {len(shown)} fastest of {len(all_)}" if len(all_) > len(shown) else ""


def axes_style(ax: Any, x: str, y: str, whole: bool = False) -> None:
    """Titles, a light grid and few ticks; ``whole``: x counts something."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel(x)
    ax.set_title(y, loc="left", color=color("muted"))
    ax.grid(axis="y")
    ax.tick_params(length=0)
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=whole))
    if ax.get_yscale() == "linear":
        ax.yaxis.set_major_locator(MaxNLocator(5))
        if ax.get_ylim()[1] >= 1000:
            ax.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")


MOVES = ("parallel.world_size", ("FSDP ", "HSDP ", "DDP ", "1 rank", "local batch ", "global batch "))
"""Along a scaling line these parts of a name follow from the number of GPUs."""


def _line_name(point: Point, key: str) -> str:
    """What stays along a line over ``key``."""
    moving = (f"{strategy.title(key)} ", *(MOVES[1] if key == MOVES[0] else ()))
    return " · ".join(part for part in point.name.split(" · ") if not part.startswith(moving))


def lines(name: str, title: str, key: str, series: Sequence[Sequence[Point]]) -> Drawing:
    """TPS/GPU with intervals against a numeric setting; over GPUs, the first value carried on is perfect scaling."""
    ideal = key == MOVES[0]
    with figures.style() as pyplot:
        shown = series[:4]
        common, names = strategy.without_common([_line_name(line[0], key) for line in shown])
        fig, ax = blank(pyplot, 218 + 18 * len(shown) + 6)
        for i, line in enumerate(shown):
            xs, tps = [p.flat[key] for p in line], [p.tps for p in line]
            ys = [v.value or 0.0 for v in tps]
            low = [y - (y if v.low is None else v.low) for v, y in zip(tps, ys, strict=True)]
            high = [(y if v.high is None else v.high) - y for v, y in zip(tps, ys, strict=True)]
            label = clean((names[i] or "plain") + sim(line[0]), 44)
            ax.errorbar(xs, ys, [low, high], label=label, color=color(f"s{i}"), marker="o", markersize=4, capsize=3)
            if ideal:
                ax.axhline(ys[0], color=color(f"s{i}"), linewidth=0.8, linestyle=":")
        ticks = sorted({p.flat[key] for line in shown for p in line})
        ax.set_xscale("log", base=2)
        ax.margins(x=0.1)
        ax.set_ylim(bottom=0)
        axes_style(ax, strategy.title(key), "tokens/s a GPU")
        step = -(-len(ticks) // 6)
        ax.set_xticks(ticks[::step], [f"{t:,}" for t in ticks[::step]])
        ax.minorticks_off()
        fig.legend(loc="outside lower left", ncols=1)
        svg = figures.to_svg(pyplot, fig, name)
    note = "Dotted: the first point's rate kept (perfect scaling)" if ideal else "All else is equal along a line"
    more = f"; {len(shown)} of {len(series)} such lines" if len(series) > len(shown) else ""
    shared = f"All: {clean(common, 90)}. " if common else ""
    return Drawing(name, title, shared + note + more, svg, "scaling")


def heat(points: Sequence[Point], x: Axis, y: Axis, told: heatmap.Told, memory: bool) -> Drawing:
    """The map as a file: value, and the winner's other settings; failed cells hatched and named."""
    name, title, unit = ("heatmap_memory", "Memory", "GiB") if memory else ("heatmap_tps", "TPS/GPU", "tokens/s")
    grid = heatmap.cells(points, x, y, heatmap.by_memory if memory else heatmap.by_speed)
    xs = heatmap.order({k[0] for k in grid})[: heatmap.LIMIT[0]]
    ys = heatmap.order({k[1] for k in grid})[: heatmap.LIMIT[1]]
    with figures.style() as pyplot:
        fig, ax = blank(pyplot, 56 * len(ys) + 96, max(figures.WIDTH, 190 + 136 * len(xs)))
        _paint(ax, grid, xs, ys, memory, lambda c: heatmap.winner(c, told))
        ax.set_xticks([i + 0.5 for i in range(len(xs))], [_wrap(_label(v), 18) for v in xs])
        ax.set_yticks([i + 0.5 for i in range(len(ys))], [_wrap(_label(v), 26) for v in ys], rotation=0)
        ax.tick_params(length=0)
        ax.set_xlabel(x.title)
        ax.set_ylabel(y.title)
        ax.set_title(f"{title}, {unit}", loc="left")
        for spine in ax.spines.values():
            spine.set_visible(False)
        return Drawing(name, title, "", figures.to_svg(pyplot, fig, name), "heatmaps")


def _label(value: object) -> str:
    return {"True": "on", "False": "off", heatmap.ALL: ""}.get(str(value), str(value))


def _wrap(text: str, width: int) -> str:
    """At most two lines of a cell's width."""
    import textwrap

    return "\n".join(textwrap.wrap(clean(text, 2 * width), width, max_lines=2, placeholder=" …"))


def _paint(ax: Any, grid: Mapping[tuple[Any, Any], heatmap.Cell], xs: Sequence[Any], ys: Sequence[Any], memory: bool,
           winner: Callable[[heatmap.Cell], str]) -> None:  # fmt: skip
    """seaborn fills the grid; texts and hatches are laid over it."""
    import numpy as np
    import seaborn
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    def figure(p: Point) -> float:
        return (p.memory[1].value if memory else p.tps.value) or 0.0

    best = {k: c.best for k, c in grid.items() if c.best is not None}
    low, high = min(map(figure, best.values()), default=0.0), max(map(figure, best.values()), default=0.0)
    steps = np.full((len(ys), len(xs)), np.nan)
    for i, row in enumerate(ys):
        for j, column in enumerate(xs):
            cell = grid.get((column, row))
            if cell is None:
                continue
            if cell.best is None:
                ax.add_patch(Rectangle((j, i), 1, 1, fill=False, hatch="///", edgecolor=color("line"), linewidth=0))
                ax.text(
                    j + 0.5, i + 0.5, clean(cell.failed[0].status, 16), ha="center", va="center", color=color("bad")
                )
                continue
            step = figures.heat_step(figure(cell.best), low, high)
            steps[i, j] = step
            text = table.show(figure(cell.best), "GiB" if memory else "tokens/s") + (
                " sim" if cell.best.simulated else ""
            )
            rest, ink = winner(cell), color(f"t{step}")
            ax.text(j + 0.5, i + (0.27 if rest else 0.5), text, ha="center", va="center", color=ink, fontsize=12)
            ax.text(j + 0.5, i + 0.67, _wrap(rest, 20), ha="center", va="center", color=ink, fontsize=11)
    cmap = ListedColormap([color(f"h{i}") for i in range(figures.HEAT)])
    seaborn.heatmap(
        steps, ax=ax, cmap=cmap, vmin=0, vmax=figures.HEAT - 1, cbar=False, linewidths=2, linecolor=color("surface")
    )
