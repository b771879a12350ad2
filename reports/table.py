"""The one table: every number of the page, the Markdown and the CSV is read from it, rounded once. No torch."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.result import METRICS, Value

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """``unit`` decides how a number is rounded and printed; "" is text. ``note`` says what the figure means."""

    key: str
    title: str
    unit: str = ""
    note: str = ""


_FIGURES = (
    ("tps_per_gpu", "TPS/GPU"), ("tps_global", "TPS"), ("step_time_s", "Step"), ("peak_active_gib", "Active memory"),
    ("peak_reserved_gib", "Reserved memory"), ("peak_rss_gib", "Resident set"), ("compile_time_s", "Compile time"),
    ("mfu", "MFU"), ("hfu", "HFU"), ("final_loss", "Loss"), ("exposed_comm_frac", "Exposed comm."),
    ("bubble_frac", "Bubble"), ("stability", "Stability"),
)  # fmt: skip
FIGURES = {key: title for key, title in _FIGURES if key in METRICS}

COLUMNS: tuple[Column, ...] = (
    Column("run_id", "Run"),
    Column("strategy", "Strategy"),
    Column("model", "Model"),
    Column("engine", "Engine", note="measured or simulated"),
    Column("status", "Status"),
    Column("gpus", "GPUs", "count"),
    Column("seq_len", "Sequence", "count"),
    Column("global_batch_size", "Global batch", "count"),
    *(c for key, title in FIGURES.items() for c in (
        Column(key, title, METRICS[key].unit, METRICS[key].text),
        Column(f"{key}_low", f"{title} low", METRICS[key].unit),
        Column(f"{key}_high", f"{title} high", METRICS[key].unit))),
    Column("mfu_reason", "Why no MFU"),
    Column("n", "n", "count", "samples behind TPS/GPU: steps, windows or runs"),
    Column("level", "Level", "fraction", "confidence of the interval of TPS/GPU"),
    Column("memory_gib", "Memory", "GiB", "peak of the worst rank"),
    Column("memory_kind", "Memory kind"),
    Column("memory_rank", "Worst rank", "count"),
    Column("score", "Score", "fraction", "TPS/GPU over that of the fastest comparable run"),
    Column("advice", "Advice"),
    Column("parity", "Loss parity"),
    Column("reason", "Reason"),
    Column("repeats", "Repeats", "count"),
    Column("attempts", "Attempts", "count"),
    Column("published", "Published row"),
    Column("sweep", "Sweep"),
    Column("device", "Device"),
    Column("machine", "Machine"),
    Column("code_id", "Code"),
    Column("folder", "Folder"),
    Column("command", "Command"),
)  # fmt: skip
BY_KEY = {c.key: c for c in COLUMNS}


def decimals(value: float, unit: str) -> int:
    """Digits after the point: about four that count, and never more than the measurement can carry."""
    size = abs(value)
    if unit == "tokens/s":
        return 0 if size >= 100 else 1 if size >= 10 else 3
    if unit == "GiB":
        return 1 if size >= 100 else 2 if size >= 1 else 3
    if unit == "s":
        return 1 if size >= 100 else 2 if size >= 10 else 3 if size >= 1 else 4
    return {"fraction": 4, "nats": 4, "ratio": 3}.get(unit, 0)


def rounded(value: float | int | None, unit: str) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    places = decimals(value, unit)
    return round(value, places) if places else round(value)


def show(value: Any, unit: str) -> str:
    """A number as text, with thousands separators; fractions in percent; without its unit. None is an en dash."""
    if value is None or value == "":
        return "–"
    if not unit or isinstance(value, str):
        return str(value)
    value = rounded(value, unit)
    if value is None:
        return "–"
    if unit == "fraction":
        return f"{100 * value:.2f} %"
    return f"{value:,.{decimals(value, unit)}f}".replace("-", "−")


def gain(value: float | None) -> str:
    """A ratio as a gain in percent: 1.481 is +48.1 %."""
    return "–" if value is None else f"{100 * (round(value, 3) - 1):+.1f} %".replace("-", "−")


def gain_text(ratio: Value) -> str:
    """``+48.1 % (+46.2 % to +50.0 %)``, or why there is none."""
    if ratio.value is None:
        return f"n/a: {ratio.reason}"
    if ratio.low is None or ratio.high is None:
        return f"{gain(ratio.value)} ({ratio.reason})"
    return f"{gain(ratio.value)} ({gain(ratio.low)} to {gain(ratio.high)})"


def value_text(value: Value, unit: str = "") -> str:
    """``5,762 (5,721 to 5,803)``, or an en dash."""
    unit = unit or value.unit
    text = show(value.value, unit)
    if value.value is None or value.low is None or value.high is None:
        return text
    return f"{text} ({show(value.low, unit)} to {show(value.high, unit)})"


def figure_cells(name: str, value: Value) -> Row:
    unit = METRICS[name].unit
    return {name: rounded(value.value, unit), f"{name}_low": rounded(value.low, unit),
            f"{name}_high": rounded(value.high, unit)}  # fmt: skip


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Numbers plain; text that a spreadsheet would take for a formula gets a leading apostrophe."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([c.key for c in COLUMNS])
        for row in rows:
            writer.writerow([_csv_cell(row.get(c.key)) for c in COLUMNS])


def _csv_cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, str) and value.lstrip()[:1] in ("=", "+", "-", "@", "|", "%") or _control(value):
        return "'" + str(value)
    return value


def _control(value: Any) -> bool:
    return isinstance(value, str) and value[:1] in ("\t", "\r", "\n", "\0")


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """The same table with types: counts and numbers as float64 (null where absent), the rest as text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def cell(column: Column, row: Mapping[str, Any]) -> Any:
        value = row.get(column.key)
        return (
            value if value is None else float(value) if column.unit else str(value).encode("utf-8", "replace").decode()
        )

    columns = {c.key: pa.array([cell(c, r) for r in rows], pa.float64() if c.unit else pa.string()) for c in COLUMNS}
    pq.write_table(pa.table(columns), path)
