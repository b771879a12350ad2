"""``python -m reports diff A B``: settings, environment and figures that differ between two runs. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.result import METRICS, RunResult, Value
from bench.store import RESULT, RunDir, load_result, run_dirs
from reports import interval, strategy, table


def locate(run: str, results: Path) -> RunResult:
    """The result of a folder, or of the newest repeat of a run id below ``results``. Raises ValueError for neither."""
    folders = [RunDir(Path(run))] if Path(run).is_dir() else [d for d in run_dirs(results) if d.path.parent.name == run]
    found, faults = [], []
    for folder in folders:
        try:
            found.append(load_result(folder))
        except FileNotFoundError:
            hint = f": give one of its repeats, such as {below[0].path}" if (below := run_dirs(folder.path)) else ""
            faults.append(f"{folder.path} holds no {RESULT}{hint}")
        except (OSError, ValueError) as error:
            faults.append(f"{folder.path}: {error}")
    if found:
        return max(found, key=lambda r: r.started_at)
    raise ValueError("; ".join(faults) or f"{run} is neither a run's folder nor a run id below {results}")


def diff(a: RunResult, b: RunResult) -> dict[str, Any]:
    """{spec, environment: key -> [a, b]; metrics: name -> {a, b, ratio}; comparable: null or why not}."""
    spec = _differences(strategy.flatten(a.spec), strategy.flatten(b.spec))
    environment = _differences(_flat(a.environment), _flat(b.environment))
    if a.code_id != b.code_id:
        environment["code_id"] = [a.code_id, b.code_id]
    metrics = {}
    for name in METRICS:
        x, y = a.metrics.get(name, Value()), b.metrics.get(name, Value())
        if x.value is not None or y.value is not None:
            metrics[name] = {"a": x, "b": y, "ratio": interval.ratio(y, x)}
    return {
        "runs": [_name(a), _name(b)],
        "comparable": _unlike(a, b),
        "spec": spec,
        "environment": environment,
        "metrics": metrics,
    }


def _name(r: RunResult) -> str:
    return f"{r.run_id} r{r.repeat:03d} {r.status} · {strategy.name(strategy.flatten(r.spec))}"


def _unlike(a: RunResult, b: RunResult) -> str | None:
    """Why the two speeds may not be compared."""
    if a.engine != b.engine:
        return f"{a.engine} against {b.engine}: a measured figure is never compared with a simulated one"
    machines = [r.environment.get("fingerprint") for r in (a, b)]
    if a.engine != "simulate" and machines[0] != machines[1]:
        return "two machines"
    return "two versions of the code" if a.code_id != b.code_id else None


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {k: [a.get(k), b.get(k)] for k in dict.fromkeys((*a, *b)) if a.get(k) != b.get(k)}


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        out.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return out


def write(found: dict[str, Any], as_json: bool) -> None:
    """To stdout, as JSON or as aligned text."""
    if as_json:
        print(json.dumps(found, indent=1, default=lambda v: vars(v), allow_nan=False))
        return
    print(f"A  {found['runs'][0]}\nB  {found['runs'][1]}")
    if found["comparable"]:
        print(f"not comparable: {found['comparable']}")
    for part in ("spec", "environment"):
        print(f"\n{part}: " + ("no difference" if not found[part] else ""))
        for key, (x, y) in found[part].items():
            print(f"  {key:<34} {_cell(x)}  ->  {_cell(y)}")
    print("\nfigures (B over A):")
    for name, m in found["metrics"].items():
        change = "" if found["comparable"] or m["ratio"].value is None else table.gain_text(m["ratio"])
        print(f"  {name:<18} {_figure(name, m['a']):>32}  ->  {_figure(name, m['b']):<32} {change}".rstrip())


def _cell(value: Any) -> str:
    return "absent" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _figure(name: str, value: Value) -> str:
    return table.value_text(value, METRICS[name].unit)
