"""SVG figures whose text is text and whose colours are CSS variables, so that one file serves light and dark. No torch.

matplotlib draws with marker colours (one per variable), which :func:`to_svg` replaces. Sizes are CSS pixels: a figure
is :data:`WIDTH` wide, fits a phone, and is never scaled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 330
SERIES = 6
"""Curves in one figure: as many as a person can tell apart."""
HEAT = 9
"""Steps of the sequential scale."""

THEME: dict[str, tuple[str, str]] = {
    "surface": ("#ffffff", "#1b1f25"), "ink": ("#1a1f26", "#e9ecf0"), "muted": ("#5a6472", "#a3adba"),
    "line": ("#dfe3e8", "#353c46"), "accent": ("#1f5fa8", "#7db5f0"), "bad": ("#b3431c", "#f0936c"),
    "s0": ("#1f5fa8", "#7db5f0"), "s1": ("#c8501e", "#f0936c"), "s2": ("#0b7f6b", "#4cc2a8"),
    "s3": ("#9a4f92", "#d79ad0"), "s4": ("#8a6a00", "#e0b83e"), "s5": ("#4d5562", "#b9c1cc"),
}  # fmt: skip
"""Variable -> (light, dark). The series keep apart under the common colour deficiencies (after Okabe and Ito)."""

_NAMES = [*THEME, *(f"{kind}{i}" for kind in "ht" for i in range(HEAT))]
_MARK = {name: f"#0000{i + 16:02x}" for i, name in enumerate(_NAMES)}


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def _mix(low: str, high: str, t: float) -> str:
    return "#" + "".join(f"{round(a + (b - a) * t):02x}" for a, b in zip(_rgb(low), _rgb(high), strict=True))


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.1)."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in _rgb(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Contrast ratio (WCAG 2.1): 4.5 is the least for text."""
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def variables(dark: bool) -> dict[str, str]:
    """CSS variables of one theme; the heat scale h0.. goes from near the surface to the accent, with text in t0.."""
    low, high = (("#e9f0f8", "#174a85"), ("#22303f", "#8fc1f5"))[dark]
    heat = [_mix(low, high, i / (HEAT - 1)) for i in range(HEAT)]
    text = [max(("#ffffff", "#05080b"), key=lambda ink: contrast(ink, h)) for h in heat]
    out = {name: pair[dark] for name, pair in THEME.items()}
    return out | {f"h{i}": h for i, h in enumerate(heat)} | {f"t{i}": t for i, t in enumerate(text)}


def css(dark: bool) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in variables(dark).items())


def color(name: str) -> str:
    """The marker colour that stands for a CSS variable while matplotlib draws."""
    return _MARK[name]


def heat_step(value: float, low: float, high: float) -> int:
    """Step 0..HEAT-1 of the sequential scale; one value alone is in its middle."""
    return round((value - low) / (high - low) * (HEAT - 1)) if high > low else HEAT // 2


def clean(text: str, limit: int = 52) -> str:
    """One printable line of at most ``limit`` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


@contextmanager
def style() -> Iterator[Any]:
    """matplotlib.pyplot with the report's look."""
    import matplotlib

    matplotlib.use("svg")
    from cycler import cycler
    from matplotlib import pyplot

    rc: dict[Any, Any] = {
        "svg.fonttype": "none", "text.parse_math": False, "font.size": 11.5, "figure.dpi": 72, "savefig.dpi": 72,
        "axes.titlesize": 11.5, "axes.labelsize": 11.5, "xtick.labelsize": 11, "ytick.labelsize": 11,
        "legend.fontsize": 11.5, "legend.frameon": False, "legend.handlelength": 1.2, "lines.linewidth": 1.6,
        "figure.facecolor": color("surface"), "axes.facecolor": color("surface"), "savefig.facecolor": color("surface"),
        "text.color": color("ink"), "axes.labelcolor": color("muted"), "axes.edgecolor": color("line"),
        "xtick.color": color("line"), "ytick.color": color("line"), "xtick.labelcolor": color("muted"),
        "ytick.labelcolor": color("muted"), "grid.color": color("line"), "grid.linewidth": 0.8, "axes.grid": False,
        "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "hatch.linewidth": 0.8,
        "axes.prop_cycle": cycler(color=[color(f"s{i}") for i in range(SERIES)]),
        "axes.formatter.useoffset": False, "axes.unicode_minus": True, "path.simplify": True,
    }  # fmt: skip
    with matplotlib.rc_context(rc):
        yield pyplot


def blank(pyplot: Any, height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    figure, axes = pyplot.subplots(figsize=(width / 72, height / 72), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.04, h_pad=0.04)
    return figure, axes


_FONT = re.compile(r"font: ([^;\"]*?)([0-9.]+)px [^;\"]*")


def to_svg(pyplot: Any, figure: Figure, name: str) -> str:
    """The figure as SVG text without size-changing units, ids unique to ``name``, colours as variables."""
    import io

    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"\s*<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'(width|height)="([0-9.]+)pt"', r'\1="\2"', text)
    text = re.sub(r'\bid="(?!m[0-9a-f]{10}|p[0-9a-f]{10}|h[0-9a-f])[^"]*"', "", text)
    text = _FONT.sub(r"font: \1\2px var(--sans)", text)
    for variable, mark in _MARK.items():
        text = text.replace(mark, f"var(--{variable})")
    return text.replace("<svg ", f'<svg class="figure" role="img" data-figure="{name}" ', 1).strip() + "\n"


def standalone(svg: str) -> str:
    """The same figure as a file of its own: its variables come along, light and dark."""
    fonts = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
    dark = f"@media (prefers-color-scheme: dark){{svg{{{css(True)}}}}}"
    sheet = f"<style>svg{{--sans:{fonts};{css(False)}}}{dark}</style>"
    head, _, body = svg.partition(">")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}>{sheet}{body}'
