"""The page: one file with its style, script, figures and data inside. No torch."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from bench.store import LOG, RESULT, SPEC, STEPS
from reports import compare, embed, figures, table, words
from reports.plots import Drawing
from reports.points import WORDS, Point
from reports.report import Headline, Report, relative

SECTIONS = (
    ("summary", "Summary"), ("heatmaps", "Heatmaps"), ("ladder", "Ladder"), ("loss", "Loss"),
    ("memory", "Memory and time"), ("scaling", "Scaling"), ("verdicts", "Published"), ("claims", "Claims"),
    ("runs", "Runs"), ("environment", "Environment"),
)  # fmt: skip

HEAD = {"strategy": "Strategy", "status": "Status", "tps_per_gpu": "TPS/GPU", "tps_global": "TPS, step",
        "memory_gib": "Memory, GiB", "mfu": "MFU, HFU", "final_loss": "Loss, nats", "stability": "Stability", "n": "n",
        "score": "Advice, score"}  # fmt: skip
"""Columns of the runs table that sort: key in the one table, and heading."""


def write(report: Report, path: Path) -> None:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    env = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    path.write_text(env.get_template("page.html.j2").render(_context(report)), encoding="utf-8")


def _context(report: Report) -> dict[str, Any]:
    main = next((h for h in report.headlines if h.best is not None), None)
    groups = _groups(report)
    return {
        "report": report, "main": main, "rows": dict(zip(report.points, report.rows, strict=True)),
        "title": report.results.resolve().name, **_summary(report, main), **_losses(report), **_formats(),
        "figures": groups, "sections": [s for s in SECTIONS if s[0] != "scaling" or groups["scaling"]],
        "scopes": len({p.scope for p in report.points}), "levels": words.levels(report), "words": WORDS,
        "no_mfu": _no_mfu(report),
        "counts": Counter(p.status for p in report.points).most_common(), "head": _head(), "advice": compare.ADVICE,
        "files": partial(_files, report), "data": embed.script_json(embed.data(report, main, tuple(HEAD))),
        "light": Markup(figures.css(False)), "dark": Markup(figures.css(True)), "steps": figures.HEAT,
    }  # fmt: skip


def _summary(report: Report, main: Headline | None) -> dict[str, Any]:
    failed = sum(not p.ok for p in report.points)
    return {
        "asked": words.asked(report), "failed": failed, "failures": report.failures(), "top": _top(main, report),
        "right": words.right(report, main.best) if main and main.best else "",
        "leads": main is not None and compare.fastest(main.points) is main.best,
        "nothing": "No run succeeded." if report.points else "There is no run here.",
        "nothing_hint": "What happened is below." if failed else "python -m sweeps fills this folder.",
    }  # fmt: skip


def _losses(report: Report) -> dict[str, Any]:
    """Compared layouts, the worst first; the others by reason."""
    compared = sorted((v for v in report.parity if v.loss is not None), key=lambda v: -(v.loss or 0.0))
    unlike: dict[str, list[str]] = {}
    for v in report.parity:
        if v.loss is None:
            unlike.setdefault(v.text, []).append(v.point.name)
    return {
        "parity": compared, "unlike": list(unlike.items()),
        "floor": words.small(report.floor) if report.floor else None,
        "reference": any(v.reference is report.curves[0] for v in compared) if report.curves else False,
        "hidden_curves": max(0, len(compared) - len(report.curves) + 1),
        "only_simulated": bool(report.points) and all(p.simulated for p in report.points),
    }  # fmt: skip


def _formats() -> dict[str, Any]:
    return {"show": table.show, "gain_value": table.gain, "either": words.either, "small": words.small,
            "signed": words.signed, "again": _again}  # fmt: skip


def _groups(report: Report) -> dict[str, list[Drawing]]:
    """Figures by section; the maps are drawn by the script, the loss figures share the page's legend."""
    drawings = [d for d in report.drawings if d.group not in ("loss", "heatmaps")]
    groups: dict[str, list[Drawing]] = {g: [] for g in ("ladder", "loss", "memory", "scaling")}
    for d in (*drawings, *report.inline_losses):
        groups[d.group].append(d)
    return groups


def _top(main: Headline | None, report: Report) -> list[Point]:
    """The five runs after the fastest."""
    ranked = [p for p in main.points if report.advice[p].score is not None] if main else []
    ranked.sort(key=lambda p: -(report.advice[p].score or 0.0))
    return [p for p in ranked if main and p is not main.best][:5]


def _no_mfu(report: Report) -> str | None:
    """The reason that no successful run has an MFU, where they share one."""
    reasons = {r["mfu_reason"] for r in report.rows if r["status"] == "ok"}
    return reasons.pop() if len(reasons) == 1 and all(r["mfu"] is None for r in report.rows) else None


def _head() -> list[tuple[str, str, bool, str]]:
    named = [(key, name, bool(table.BY_KEY[key].unit), table.BY_KEY[key].note) for key, name in HEAD.items()]
    return [*named, ("", "Run again", False, ""), ("", "Files", False, "")]


def _again(command: str) -> Markup:
    if not command:
        return Markup("–")
    return Markup('<div class="run"><button class="copy" type="button">copy</button><code>{}</code></div>').format(
        command
    )


def _files(report: Report, point: Point) -> list[tuple[str, str]]:
    names = (("result", RESULT), ("spec", SPEC), ("steps", STEPS), ("log", LOG))
    run = point.head
    return [(name, relative(run.path, report.out, file)) for name, file in names if (run.path / file).exists()]
