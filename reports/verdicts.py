"""``reports verdicts``: whether each published figure that a run answers holds, by one stated rule. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reports import published
from reports.points import load
from reports.published import PublishedRow

WIDEST = 0.25
"""An interval wider than this fraction to either side says nothing."""
RULE = (
    "reproduced: the published figure lies in the interval of ours. refuted: it lies outside the interval of twice the "
    f"width. inconclusive: between the two, or the interval is wider than +-{WIDEST:.0%}. unsupported: no figure."
)


def verdict(row: PublishedRow) -> str:
    """The distance of the published figure from ours in widths of our interval, on logarithms, decides (see RULE)."""
    ours, stated = row.ours, row.published.value
    if ours.value is None or stated is None:
        return "unsupported"
    if ours.low is None or ours.high is None or ours.low <= 0:
        return "inconclusive"
    width = math.log(ours.high / ours.value) if stated > ours.value else math.log(ours.value / ours.low)
    distance = abs(math.log(stated / ours.value))
    if width > math.log1p(WIDEST):
        return "inconclusive"
    return "reproduced" if distance <= width else "inconclusive" if distance <= 2 * width else "refuted"


def verdicts(results: Path) -> list[dict[str, Any]]:
    """One entry a published figure, in the form of verdicts.json (claim_id, verdict, rule, evidence, text)."""
    return [_entry(row) for row in published.rows(load(results))]


def _entry(row: PublishedRow) -> dict[str, Any]:
    ours = row.ours
    engine = "simulated" if row.point.simulated else "measured"
    figure = "none" if ours.value is None else f"{ours.value:,.5g}"
    if ours.low is not None and ours.high is not None:
        figure += f" [{ours.low:,.5g}, {ours.high:,.5g}]"
    stated = row.published.value or 0.0
    ratio = f", ratio {row.ratio.value:.3f}" if row.ratio.value is not None else f" ({ours.reason})"
    return {
        "claim_id": f"{row.id}: {row.metric}",
        "verdict": verdict(row),
        "rule": RULE,
        "evidence": [
            {"kind": "published", "ref": f"{row.source}, {row.title}", "value": row.published.value, "unit": row.unit},
            {"kind": "run", "ref": row.point.run_id, "value": ours.value, "unit": row.unit, "low": ours.low,
             "high": ours.high, "engine": engine, "command": row.point.result.command},
        ],
        "text": f"published {stated:,.5g} {row.unit}, {engine} {figure}{ratio}",
    }  # fmt: skip


def write(found: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "verdict", "", box=None, pad_edge=False)
    for entry in found:
        table.add_row(entry["claim_id"], entry["verdict"], entry["text"])
    console = Console(width=None if Console().is_terminal else 150, highlight=False, markup=False)
    console.print(table)
    counts = {v: sum(e["verdict"] == v for e in found) for v in dict.fromkeys(e["verdict"] for e in found)}
    console.print(", ".join(f"{n} {v}" for v, n in counts.items()) or "no published row among the runs")
    console.print(RULE, soft_wrap=True)
