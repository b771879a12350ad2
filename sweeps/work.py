"""What of a sweep is still to be done, what its points came to, and the rows of points that can not run."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import environment, store
from bench.result import LIVE, STATUSES, RunResult
from bench.spec import RunSpec, code_id, merge, parse_override, plain
from sweeps.points import ADHOC, Point, SweepFile
from trainer_core.config import ConfigError

MANIFEST = "sweep.json"
Rows = dict[str, list[RunResult]]
"""run_id -> its rows, oldest first."""
UNREADABLE = ("lost", "corrupt")
"""Rows that name no code and no machine."""


@dataclass(frozen=True)
class Outcome:
    """What a point came to: a status of bench.result, or ``not run``; ``row`` is the result it is read from.

    ``crash``: the traceback of a fault in the launcher's own process of the run.
    """

    point: Point
    status: str
    row: RunResult | None = None
    crash: str | None = None

    @property
    def reason(self) -> str:
        return self.crash or (self.row.reason if self.row else None) or self.point.reason or "no reason is known"


def read_rows(results: Path, points: Iterable[Point]) -> dict[str, Rows]:
    """The stored rows of every sweep that ``points`` belong to, read once."""
    found: dict[str, Rows] = {}
    for sweep in {p.sweep for p in points}:
        by_id: Rows = defaultdict(list)
        for row in store.load_all(results / sweep):
            by_id[row.run_id].append(row)
        found[sweep] = by_id
    return found


def _current(row: RunResult, machine: str | None) -> bool:
    """Whether the row is of today's code, as far as its device is concerned, and of this machine (None: any)."""
    return store.current(row, code_id(row.spec.get("hardware", {}).get("device", "cpu")), machine)


def outcome(point: Point, rows: Rows, machine: str | None) -> Outcome:
    """A point is ok when as many whole runs are as it asks for; otherwise its newest row says what it is."""
    mine = [r for r in rows.get(point.run_id, []) if r.status in (*LIVE, *UNREADABLE) or _current(r, machine)]
    if point.problems:
        return Outcome(point, "invalid", mine[-1] if mine else None)
    good = [r for r in mine if r.status == "ok"]
    if good and len(good) >= wanted(point):
        return Outcome(point, "ok", good[-1])
    rest = [r for r in mine if r.status != "ok"]
    return Outcome(point, rest[-1].status, rest[-1]) if rest else Outcome(point, "not run")


def wanted(point: Point) -> int:
    """Folders that a point asks for: ``run.repeats`` whole runs, or one run with that many windows."""
    assert point.spec is not None
    return point.spec.run.repeats if point.spec.run.repeat_as == "run" else 1


def todo(points: Sequence[Point], stored: dict[str, Rows], machine: str | None, only_failed: bool) -> list[Point]:
    """The runs to start, one entry a folder. Live ones are left alone.

    ``only_failed`` starts no point anew, and says so on stderr where none has failed.
    """
    runs: list[Point] = []
    for point in points:
        if point.problems:
            continue
        rows = stored[point.sweep]
        state = outcome(point, rows, machine).status
        if state == "ok" or state in LIVE or (only_failed and state == "not run"):
            continue
        good = sum(r.status == "ok" and _current(r, machine) for r in rows.get(point.run_id, []))
        runs += [point] * (wanted(point) - good)
    if only_failed and not runs:
        print(f"none of the {len(points)} points that these arguments name has failed: repeat the sweep's own "
              "arguments with only=failed", file=sys.stderr)  # fmt: skip
    return runs


def store_invalid(points: Iterable[Point], results: Path, stored: dict[str, Rows]) -> None:
    """Write the row of every point that can not run, once: its cell is drawn with the reason."""
    here = environment.capture() if any(p.problems for p in points) else {}
    for point in points:
        if not point.problems or outcome(point, stored[point.sweep], None).row is not None:
            continue
        spec = point.spec.to_dict() if point.spec else _unresolved(point)
        run = store.claim(results, point.sweep, point.run_id)
        store.write_json(run.spec, spec)
        result = RunResult(
            point.run_id,
            "invalid",
            spec,
            run.repeat,
            sweep=point.sweep,
            engine=spec["engine"],
            reason=point.reason,
            steps_requested=spec["train"]["steps"],
            code_id=code_id(spec["hardware"]["device"]),
            started_at=datetime.now(UTC).isoformat(),
            environment=here,
            command=shlex.join(["python", "-m", "bench", "run", *point.overrides, "-o", str(results)]),
        )
        store.write_text(run.result, result.to_json())


def _unresolved(point: Point) -> dict[str, Any]:
    """The plain form of a point that resolves to no spec: the defaults with what it asks for."""
    data = RunSpec().to_dict()
    data["parallel"].update(world_size=-1, microbatches=-1)
    data["train"]["global_batch_size"] = -1
    for text in sorted(point.overrides, key=lambda t: "." in t.partition("=")[0]):
        override = parse_override(text)
        with contextlib.suppress(ConfigError):  # the option that does not exist is what the row's reason names
            merge(data, override.key_or_group, plain(override.value()))
    return data


def write_manifest(points: Sequence[Point], results: Path) -> None:
    """``<results>/<sweep>/sweep.json``: name and run_id of every point ever asked for, and the baseline's run_id."""
    for sweep in {p.sweep for p in points}:
        name = None if sweep == ADHOC else SweepFile.load(sweep).baseline
        path = results / sweep / MANIFEST
        path.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(path.read_text())["points"] if path.exists() else []
        known = {r["run_id"]: r for r in before}
        mine = [p for p in points if p.sweep == sweep]
        known |= {p.run_id: {"name": p.name, "run_id": p.run_id, "overrides": list(p.overrides)} for p in mine}
        baseline = next((p.run_id for p in mine if p.name == name), None)
        store.write_json(path, {"sweep": sweep, "baseline": baseline, "points": list(known.values())})


def summary_line(outcomes: Sequence[Outcome]) -> str:
    """``N points: a ok, b failed (c timeout, ...), d not run, ...``: ok and failed always, others where they occurred.

    ``b`` counts every way to fail; the kinds stand in brackets unless all have the status failed.
    """
    counts = Counter(o.status for o in outcomes)
    apart = ("unsupported", *LIVE, "not run")
    kinds = ["failed", *(s for s in STATUSES if s not in ("ok", "failed", *apart))]
    told = [f"{counts[s]} {s}" for s in kinds if counts[s]]
    total = sum(counts[s] for s in kinds)
    failed = f"{total} failed" + (f" ({', '.join(told)})" if total > counts["failed"] else "")
    rest = [f"{counts[s]} {s}" for s in apart if counts[s]]
    return f"{len(outcomes)} points: " + ", ".join([f"{counts['ok']} ok", failed, *rest])


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 when every point is ok or unsupported here (and one is ok), 2 when no point is a valid plan, else 1."""
    states = [o.status for o in outcomes]
    if all(s == "invalid" for s in states):
        return 2
    return 0 if "ok" in states and set(states) <= {"ok", "unsupported"} else 1


def baseline_of(sweep: str, outcomes: Iterable[Outcome]) -> RunResult | None:
    """The good row of the sweep's baseline point."""
    name = None if sweep == ADHOC else SweepFile.load(sweep).baseline
    return next((o.row for o in outcomes if o.point.name == name and o.status == "ok"), None) if name else None


def loss_deviation(row: RunResult, baseline: RunResult, results: Path) -> float | None:
    """max over the common steps of |loss - baseline's| / |baseline's|.

    None where the two are not comparable: another initialisation, other data, no common step.
    """
    same = all(row.evidence.get(k) == baseline.evidence.get(k) for k in ("init_digest", "data_digest"))
    mine, theirs = (_losses(r, results) for r in (row, baseline))
    common = mine.keys() & theirs.keys()
    if not same or not common:
        return None
    return max(abs(mine[s] - theirs[s]) / abs(theirs[s]) for s in common)


def _losses(row: RunResult, results: Path) -> dict[int, float]:
    run = store.RunDir(results / row.sweep / row.run_id / f"r{row.repeat:03d}")
    return {int(r["step"]): float(r["loss"]) for r in store.read_jsonl(run.steps) if r.get("loss") is not None}
