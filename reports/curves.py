"""Loss curves as figures: over steps, tokens and time, and how far each leaves the reference. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reports import figures, loss
from reports.figures import blank, clean, color
from reports.loss import Curve
from reports.plots import Drawing, axes_style
from reports.points import Point

POINTS = 300
"""Points of one line."""

OVER = {"steps": ("loss_steps", "step"), "tokens": ("loss_tokens", "tokens, millions"),
        "time": ("loss_time", "step times summed, s")}  # fmt: skip


def draw(points: Sequence[Point], reference: Point | None, floor: float | None, legend: bool) -> list[Drawing]:
    """At most figures.SERIES runs, the reference first; ``floor``, the relative noise between equal runs, as a band."""
    lines = [(p, loss.curve(p.head.path)) for p in points]
    if not lines:
        return []
    base = loss.curve(reference.head.path) if reference else None
    height = 218 + (18 * len(lines) + 6) * legend
    with figures.style() as pyplot:
        out = [_over(pyplot, kind, lines, base, floor, height, legend) for kind in OVER]
        if base and len(lines) > 1:
            out.append(_deviation(pyplot, lines[1:], base, floor, height, legend))
    return out


def _over(pyplot: Any, kind: str, lines: Sequence[tuple[Point, Curve]], base: Curve | None, floor: float | None,
          height: float, legend: bool) -> Drawing:  # fmt: skip
    fig, ax = blank(pyplot, height)
    name, label = OVER[kind]
    for i, (p, c) in enumerate(lines):
        xs, ys = _line(kind, c)
        ax.plot(xs, ys, label=clean(p.name, 44), color=color(f"s{i}"), marker="o" if len(xs) == 1 else None,
                linestyle="-" if i == 0 else (0, (4 + i, i)))  # fmt: skip
    if base and floor:
        xs, ys = _line(kind, base)
        low, high = [y * (1 - floor) for y in ys], [y * (1 + floor) for y in ys]
        ax.fill_between(xs, low, high, color=color("s0"), alpha=0.25, linewidth=0)
    axes_style(ax, label, "loss, nats", whole=kind == "steps")
    return _finish(pyplot, fig, name, f"Loss over {kind}", legend)


def _line(kind: str, c: Curve) -> tuple[list[float], list[float]]:
    xs: Sequence[float] = {"steps": c.steps, "tokens": [t / 1e6 for t in c.tokens], "time": c.seconds}[kind]
    return _thin([(x, y) for x, y in zip(xs, c.loss, strict=True) if y is not None])


def _deviation(pyplot: Any, lines: Sequence[tuple[Point, Curve]], base: Curve, floor: float | None, height: float,
               legend: bool) -> Drawing:  # fmt: skip
    fig, ax = blank(pyplot, height)
    for i, (p, c) in enumerate(lines, 1):
        # A deviation of zero has no place on a logarithmic axis: it is drawn at 1e-9, below any rounding.
        xs, ys = _thin([(s, max(d, 1e-9)) for s, d, _ in loss.deviations(c, base)])
        ax.plot(xs, ys, label=clean(p.name, 44), color=color(f"s{i}"), marker="o" if len(xs) == 1 else None)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.0e}".replace("e-0", "e−"))
    ax.yaxis.set_minor_formatter(lambda v, _: "")
    if floor:
        ax.axhspan(ax.get_ylim()[0], floor, color=color("muted"), alpha=0.18, linewidth=0)
    axes_style(ax, "step", "relative deviation of loss", whole=True)
    return _finish(pyplot, fig, "loss_deviation", "Deviation from one rank", legend)


def _finish(pyplot: Any, fig: Any, name: str, title: str, legend: bool) -> Drawing:
    if legend:
        fig.legend(loc="outside lower left", ncols=1)
    return Drawing(name, title, "", figures.to_svg(pyplot, fig, name), "loss")


def _thin(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """At most about POINTS of the pairs, evenly taken, the last one included."""
    stride = -(-len(pairs) // POINTS) or 1
    kept = [*pairs[::stride], *([pairs[-1]] if pairs and (len(pairs) - 1) % stride else [])]
    return [x for x, _ in kept], [y for _, y in kept]
