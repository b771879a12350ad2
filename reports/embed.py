"""The data inside the page: what its script draws maps from and sorts by. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from reports import compare, figures, heatmap, strategy, table
from reports.heatmap import Axis
from reports.points import Point
from reports.report import Headline, Report


def script_json(data: Any) -> Markup:
    """JSON that can stand inside a script element: no character of it can end that element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def data(report: Report, main: Headline | None, sort: Sequence[str]) -> dict[str, Any]:
    """{map: the runs of the maps, column by column; sort: key -> a value a row}."""
    return {"map": _map(report, main), "sort": {key: [r[key] for r in report.rows] for key in sort}}


def _map(report: Report, main: Headline | None) -> dict[str, Any]:
    """Every axis holds the number of each run's value: ``of[run]`` indexes ``values``."""
    points, rows = report.points, report.rows
    scopes = list(dict.fromkeys(p.scope for p in points))
    x, y = report.map_axes
    axes = [_axis(a, points) for a in report.axes if not _follows_model(a, points)]
    first = points.index(main.points[0]) if main else 0
    figure = [("tps", "tps_per_gpu", "tokens/s", 1), ("memory", "memory_gib", "GiB", -1)]
    return {
        "axes": axes, "scopes": [s.text for s in scopes], "scope": [scopes.index(p.scope) for p in points],
        "id": [p.run_id for p in points], "status": [p.status for p in points],
        "simulated": [int(p.simulated) for p in points], "steps": figures.HEAT,
        "figures": [{"key": key, "sign": sign, "value": [r[column] for r in rows],
                     "text": [table.show(r[column], unit) for r in rows]} for key, column, unit, sign in figure],
        "start": {"scope": scopes.index(points[first].scope) if points else 0, "x": x.key, "y": y.key,
                  "fixed": {a["key"]: a["of"][first] for a in axes if a["fixed"]}},
    }  # fmt: skip


def _axis(axis: Axis, points: Sequence[Point]) -> dict[str, Any]:
    """``fixed``: a setting of the workload, which a map holds at one value; ``detail``: names a winner."""
    values = heatmap.order({axis.of(p) for p in points})
    number = {v: i for i, v in enumerate(values)}
    return {"key": axis.key, "title": axis.title, "values": [_word(v) for v in values],
            "of": [number[axis.of(p)] for p in points], "fixed": axis.key.startswith(compare.WORKLOAD),
            "detail": axis.key in heatmap.DETAILS, "joined": axis.key in heatmap.DETAILS[:2]}  # fmt: skip


def _follows_model(axis: Axis, points: Sequence[Point]) -> bool:
    """Whether a model setting is already told by the model's name."""
    pairs = {(p.flat["model.name"], axis.of(p)) for p in points}
    return axis.key.startswith("model.") and axis.key != "model.name" and len(pairs) == len({name for name, _ in pairs})


def _word(value: Any) -> str:
    return {"True": "on", "False": "off"}.get(str(value), strategy.shorten(str(value)))
