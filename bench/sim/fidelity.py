"""``bench fidelity``: how far the simulator's predictions are from published figures, and why one may believe them.

Refits the constants from scratch in every fold, prints tables, writes fidelity.json (contract.md), and with ``--write``
puts the constants into the device's hardware file.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import published
from bench.published import Published, foreign
from bench.sim import hardware, scores
from bench.sim.cost import CONSTANTS
from bench.sim.scores import MEMORY, TPS, Case, Fidelity
from bench.spec import HARDWARE_DIR, RunSpec
from bench.store import write_json


def cases(rows: Sequence[Published]) -> tuple[list[Case], dict[str, str]]:
    """(rows with their traces, id -> reason of rows that can not be traced). New traces are made on all cores."""
    from bench.sim.cache import Unsupported, traces_of

    specs = [row.spec() for row in rows]
    workers = max(1, min(os.cpu_count() or 1, len(specs)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_warm, specs))
    found, failed = [], {}
    for row, spec in zip(rows, specs, strict=True):
        try:
            found.append(Case(row, spec, traces_of(spec, hardware.load(spec.hardware.device).kind)))
        except Unsupported as error:
            failed[row.id] = str(error)
    return found, failed


def _warm(spec: RunSpec) -> None:
    """Put the traces of a row into the cache; what can not be traced is found again by the caller."""
    from bench.sim.cache import Unsupported, traces_of

    warnings.filterwarnings("ignore")
    try:
        traces_of(spec, hardware.load(spec.hardware.device).kind)
    except Unsupported:
        return


def document(result: Fidelity, wall_s: float) -> dict[str, Any]:
    """fidelity.json."""
    texts = scores.assumptions([s.case for s in result.scores if s.metric == TPS])
    return {
        "schema_version": 1,
        "rows": [s.to_dict(texts.get(s.case.row.id, [])) for s in result.scores],
        "groups": result.groups(),
        "pairs": result.pairs(),
        "coverage_80": result.coverage(),
        "median_half_width": result.half_width(),
        "by_metric": {m: {"coverage_80": result.coverage(m), "median_half_width": result.half_width(m)}
                      for m in (TPS, MEMORY) if result.scored(m)},
        "constants": scores.constants(result, fitted_device(result)),
        "folds": {name: {c: getattr(constants, c) for c in CONSTANTS} for name, constants in result.folds.items()},
        "wall_s": wall_s,
    }


def fitted_device(result: Fidelity) -> str:
    return next(s.case.spec.hardware.device for s in result.scores if s.case.trains)


def percent(x: float) -> str:
    return f"{100 * x:+.1f}%"


def score_table(result: Fidelity, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("row", "metric", "published", "simulated", "80 % interval", "in-sample", "table out", "workload out"):
        table.add_column(name, justify="left" if name in ("row", "metric") else "right", no_wrap=True)
    for s in result.scores:
        table.add_row(s.case.row.id, "TPS/GPU" if s.metric == TPS else "GiB", f"{s.published:g}", f"{s.predicted:.5g}",
                      f"{s.low:.4g} - {s.high:.4g}{'' if s.covered else ' !'}", percent(s.error_in),
                      percent(s.error_table), percent(s.error_workload))  # fmt: skip
    return table


def group_table(result: Fidelity) -> Table:
    table = Table(title="Absolute error of rows that were not fitted", title_justify="left")
    for name in ("group", "n", "mean", "max"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for name, g in sorted(result.groups().items()):
        table.add_row(name, str(g["n"]), f"{100 * g['mean_abs']:.1f}%", f"{100 * g['max_abs']:.1f}%")
    return table


def show(result: Fidelity, console: Console) -> None:
    """The tables: rows, groups, pairs, constants, assumptions."""
    console.print(score_table(result, "Simulated against published; simulated by the fit without the row's workload"))
    console.print(group_table(result))
    pairs = Table(title="Change against the baseline row", title_justify="left")
    for name in ("row", "published", "simulated", "sign"):
        pairs.add_column(name, justify="left" if name == "row" else "right", no_wrap=True)
    for pair in result.pairs():
        sign = "fault" if pair["fault"] else "ok" if pair["sign_ok"] else "WRONG"
        pairs.add_row(pair["id"], percent(pair["published"]), percent(pair["predicted"]), sign)
    fitted = Table(title=f"Constants of {fitted_device(result)}: fractions of its datasheet; per left-out workload",
                   title_justify="left")  # fmt: skip
    for name in ("constant", "fit", "spread", *result.folds):
        fitted.add_column(name, justify="left" if name == "constant" else "right")
    for c in scores.constants(result, fitted_device(result)):
        fitted.add_row(c["name"], f"{c['value']:.3f}", f"{c['spread']:.3f}",
                       *(f"{getattr(fold, c['name']):.3f}" for fold in result.folds.values()))  # fmt: skip
    console.print(pairs)
    console.print(fitted)
    texts = scores.assumptions([s.case for s in result.scores if s.metric == TPS])
    by_text: dict[str, list[str]] = {}
    for row, own in texts.items():
        for text in own:
            by_text.setdefault(text, []).append(row)
    console.print("Assumptions beyond the sources (rows)")
    for text, ids in by_text.items():
        console.print(f"  {len(ids):2d}  {text}", highlight=False)
    for metric in (TPS, MEMORY):
        if result.scored(metric):
            console.print(f"80 % intervals of {metric} cover {100 * result.coverage(metric):.0f} % of the rows, median "
                          f"half-width {100 * result.half_width(metric):.1f} %")  # fmt: skip


def write_constants(result: Fidelity, path: Path) -> None:
    """Put the fitted constants and the half-widths of held-out intervals into a hardware file."""
    text = path.read_text()
    start = re.search(r"^calibrated:.*$", text, re.MULTILINE)
    assert start is not None
    rows = ", ".join(result.trained)
    spread = result.fit.spread()
    fitted = result.fit.constants
    values = {name: f"value: {getattr(fitted, name):.4g}, spread: {spread[name]:.3f}" for name in CONSTANTS}
    lines = [f'  {name}: {{{text}, unit: fraction, source: "bench fidelity", fitted_on: *rows}}'
             for name, text in values.items()]  # fmt: skip
    lines[0] = lines[0].replace("*rows", f"&rows [{rows}]")
    metrics = [(short, metric) for short, metric in (("time", TPS), ("memory", MEMORY)) if result.scored(metric)]
    lines += ["errors: # half-widths of the 80 % intervals of rows that were not fitted"]
    lines += [f'  {short}: {{value: {result.half_width(metric):.3g}, unit: fraction, source: "bench fidelity"}}'
              for short, metric in metrics]  # fmt: skip
    path.write_text(text[: start.end()] + "\n" + "\n".join(lines) + "\n")


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--rows", type=Path, metavar="FILE", help="also score the rows of this file (they are never fitted)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write fidelity.json")
    p.add_argument("--write", action="store_true", help="put the fitted constants into the hardware file")


def main(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    found, failed = cases(list(published.rows().values()))
    result = scores.score(found)
    console = Console(width=160)
    show(result, console)
    if args.rows is not None:
        extra, skipped = foreign.read(args.rows)
        own = {case.row.id for case in found}
        more, unsupported = cases([row for row in extra if row.id not in own])
        failed |= unsupported
        if more:
            new = scores.unseen(result, more)
            console.print(score_table(new, f"Rows of {args.rows}, none of them fitted"))
            console.print(group_table(new))
            result.scores += new.scores
        for name, reason in skipped.items():
            console.print(f"skipped {name}: {reason}", highlight=False)
    for name, reason in failed.items():
        print(f"no figure for {name}: {reason}", file=sys.stderr)
    if args.write:
        write_constants(result, HARDWARE_DIR / f"{fitted_device(result)}.yaml")
    wall = time.perf_counter() - start
    console.print(f"{len(found)} rows in {wall:.0f} s")
    if args.json is not None:
        write_json(args.json, document(result, wall))
    return 1 if failed else 0
