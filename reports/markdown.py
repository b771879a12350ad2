"""The report as GitHub Markdown, for a pull request: the same table, the same figures as files. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from reports import table, words
from reports.points import WORDS
from reports.report import Headline, Report

LIMIT = 60
"""Rows of a table; results.csv holds all."""

COLUMNS = ("run_id", "strategy", "engine", "status", "tps_per_gpu", "tps_global", "memory_gib", "mfu", "final_loss",
           "stability", "n", "advice", "reason")  # fmt: skip


def text(value: object) -> str:
    """Any text as text: no markup, no HTML, no table cell or line of its own."""
    line = " ".join(str(value).split())
    line = re.sub(r"[\\`*_{}\[\]<>|~#!$^]", lambda m: f"&#{ord(m[0])};", line.replace("&", "&amp;"))
    return re.sub(r"(?i)(https?|ftp|www)(?=[:.])|@", lambda m: m[0] + "\u200b", line)


def code(value: str) -> str:
    """One line of code: a fence longer than any run of backticks inside."""
    line = " ".join(value.split())
    fence = "`" * (max((len(m) for m in re.findall(r"`+", line)), default=0) + 1)
    return f"{fence} {line} {fence}"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    rule = ["---:" if i in right else "---" for i in range(len(head))]
    return ["", *(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)), ""]


def write(report: Report, path: Path) -> None:
    sections = (_summary, _figures, _ladder, _loss, _published, _runs, _environment)
    parts = [line for section in sections for line in section(report)]
    path.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


def _summary(report: Report) -> list[str]:
    out = [f"# {text(report.results.resolve().name)}", "", text(words.asked(report)), ""]
    for h in report.headlines[:6]:
        out.append(f"- **{text(h.text)}**{_sim(h.engine)}: {_answer(report, h)}")
    if not report.points:
        out.append("There is no run here.")
    for status, n, reasons in report.failures():
        shown = "; ".join(
            f"{text(p.name)}: {text(r)}" + (f" (and {k - 1} more)" if k > 1 else "") for r, k, p in reasons[:3]
        )
        out.append(f"- **{status} {n}**: {shown}" + (f"; {len(reasons) - 3} other reasons" if len(reasons) > 3 else ""))
    out += [f"- **{text(n.kind)}**: {text(n.text)}" for n in report.notices]
    return [*out, ""]


def _answer(report: Report, h: Headline) -> str:
    if h.best is None:
        return f"no successful run of {len(h.points)}"
    row = report.rows[report.points.index(h.best)]
    figure = table.show(row["tps_per_gpu"], "tokens/s")
    if row["tps_per_gpu_low"] is not None:
        figure += (
            f" ({table.show(row['tps_per_gpu_low'], 'tokens/s')} to {table.show(row['tps_per_gpu_high'], 'tokens/s')})"
        )
    over = f" over {text(h.base.name)}" if h.base else ""
    return (f"{text(h.best.name)}, {figure} tokens/s a GPU, {table.show(row['memory_gib'], 'GiB')} GiB; gain "
            f"{text(table.gain_text(h.gain))}{over}; {h.failed} of {len(h.points)} failed")  # fmt: skip


def _sim(engine: str) -> str:
    return " (simulated)" if engine == "simulate" else ""


def _figures(report: Report) -> list[str]:
    out = []
    for d in report.drawings:
        out += [f"![{text(d.title)}](figures/{d.name}.svg)", *([f"<br>{text(d.caption)}"] if d.caption else []), ""]
    return ["## Figures", "", *out] if out else []


def _ladder(report: Report) -> list[str]:
    rows = []
    for e in report.effects[:LIMIT]:
        best, technique = e.best, e.technique.text(e.best.point.flat)
        rows.append((text(technique) + _sim(e.scope.engine), text(best.point.name),
                     text(best.base.name) if best.base else "–", text(table.gain_text(best.speed)),
                     table.gain(best.memory.value), table.gain(e.median), str(len(e.pairs))))  # fmt: skip
    head = ("Technique", "Run", "Baseline", "TPS/GPU", "Memory", "Median", "Pairs")
    return ["## What each technique brings", *grid(head, rows, (4, 5, 6))] if rows else []


def _loss(report: Report) -> list[str]:
    rows, out = [], list[str]()
    for v in sorted(report.parity, key=lambda v: -(v.loss or 0.0))[:LIMIT]:
        deviations = words.small(v.loss), words.small(v.grad_norm), str(v.steps or "–")
        rows.append((text(v.point.name), v.verdict, *deviations, text(v.text)))
    if rows:
        head = ("Layout", "Verdict", "Loss", "Grad norm", "Steps", "Limit, loss / grad norm")
        out += ["## Parity with one rank", *grid(head, rows, (2, 3, 4))]
    costs = [
        (text(c.point.name), text(c.base.name), words.signed(c.loss.value), text(c.verdict)) for c in report.precision
    ]
    if costs:
        columns = ("Run", "Against", text("precision_loss, nats"), "Loss of quality")
        out += ["## What low precision costs", *grid(columns, costs[:LIMIT], (2,))]
    return out


def _published(report: Report) -> list[str]:
    rows = []
    for r in report.published:
        ours = words.either(r.ours.value, r.unit) + _sim(r.point.engine)
        ratio = table.value_text(r.ratio, "ratio")
        rows.append((text(r.id), text(r.metric), words.either(r.published.value, r.unit), ours, ratio,
                     text(f"{r.source}, {r.title}")))  # fmt: skip
    head = ("Published row", "Figure", "Published", "Ours", "Ratio", "Source")
    return ["## Against published figures", *grid(head, rows, (2, 3, 4))] if rows else []


def _runs(report: Report) -> list[str]:
    columns = [table.BY_KEY[k] for k in COLUMNS]
    rows = [[text(table.show(r[c.key], c.unit)) for c in columns] for r in report.rows[:LIMIT]]
    units = {"tokens/s": ", tokens/s", "GiB": ", GiB", "nats": ", nats"}
    head = [c.title + units.get(c.unit, "") for c in columns]
    out = ["## Runs", *grid(head, rows, [i for i, c in enumerate(columns) if c.unit])]
    if len(report.rows) > LIMIT:
        out += [f"The first {LIMIT} of {len(report.rows):,}; all are in results.csv.", ""]
    again = [f"- {text(r['strategy'])}: {code(r['command'])}" for r in report.rows[:5] if r["command"]]
    return [*out, "Run again:", "", *again, ""] if again else out


def _environment(report: Report) -> list[str]:
    out = []
    for p in report.places[:LIMIT]:
        where = f"machine {text(p.machine)}, code {text(p.code_id or 'unknown')}"
        out.append(f"- {text(WORDS.get(p.engine, p.engine))}, {where}: {p.points} points")
    return ["## Where it ran", "", *out, ""] if out else []
