"""What a reader must know before believing a figure, and where the runs took place. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.summary import GROWTH_LIMIT
from reports.points import WORDS, Point

NOISY = 0.05
"""Half-width of an interval, relative to its figure, above which a window is called noisy."""


@dataclass(frozen=True)
class Notice:
    """``kind`` groups notices; ``text`` says what was found and what it means; ``points`` are the runs concerned."""

    kind: str
    text: str
    points: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Place:
    """One machine with one code: how many points, and the facts of its environment."""

    engine: str
    machine: str
    code_id: str
    points: int
    facts: tuple[tuple[str, str], ...]


def find(points: Sequence[Point]) -> list[Notice]:
    done = [p for p in points if p.ok]
    measured = [p for p in done if not p.simulated]
    found = []
    machines = Counter(p.scope.machine for p in measured)
    if len(machines) > 1:
        text = f"{len(machines)} machines ({_counts(machines)}): speeds are compared only within one machine"
        found.append(Notice("mixed machines", text))
    # The code's digest holds the device's file, so two devices never share one.
    for engine, device in dict.fromkeys((p.engine, p.scope.device) for p in done):
        codes = Counter(p.scope.code_id or "unknown" for p in done if (p.engine, p.scope.device) == (engine, device))
        if len(codes) > 1:
            among = f"{WORDS.get(engine, engine)} runs on {device}"
            which = f"{len(codes)} versions of the code among {among} ({_counts(codes)})"
            found.append(Notice("mixed code", f"{which}: they are never compared with each other"))
    if measured and len(measured) < len(done):
        text = (
            "measured and simulated runs lie side by side: they are never compared, and every simulated figure says so"
        )
        found.append(Notice("two engines", text))
    for kind, among, test, meaning in CHECKS:
        pool = measured if among == "measured" else done
        hit = tuple(p for p in pool if test(p))
        if hit:
            found.append(Notice(kind, f"{len(hit)} of {len(pool)} runs: {meaning}", hit))
    return found


def _counts(counter: Counter[str]) -> str:
    shown = ", ".join(f"{name}: {n}" for name, n in counter.most_common(4))
    return shown + (", …" if len(counter) > 4 else "")


def _noisy(p: Point) -> bool:
    v = p.tps
    return bool(v.value and v.low is not None and v.high is not None and (v.high - v.low) / 2 / v.value > NOISY)


def _flagged(p: Point) -> bool:
    return any((p.metrics[name].value or 0.0) > 1 for name in ("mfu", "hfu"))


def _grows(p: Point) -> bool:
    growth = p.result.evidence.get("memory_growth_10_steps")
    return isinstance(growth, (int, float)) and growth > GROWTH_LIMIT


def _without_effect(p: Point) -> bool:
    """A technique that is on and of which the evidence shows nothing; evidence that is absent says nothing."""
    e, flat = p.result.evidence, p.flat
    return any((
        flat["compile.enable"] and e.get("graphs_compiled") == 0,
        flat["precision.float8"] != "off" and e.get("float8_converted") == [],
        flat["parallel.async_tp"] != "off" and e.get("async_tp_ops") == 0,
        flat["parallel.cp"] > 1 and flat["parallel.cp_balance"] and flat["parallel.cp_method"] != "ulysses"
        and e.get("cp_balanced") is False,
    ))  # fmt: skip


def _failed_repeats(p: Point) -> bool:
    return any(r.result.status != "ok" for r in p.runs)


CHECKS: tuple[tuple[str, str, Callable[[Point], bool], str], ...] = (
    ("noisy window", "measured", _noisy,
     f"interval wider than ±{NOISY:.0%} of TPS/GPU; repeat on a quiet machine before concluding"),
    ("implausible MFU", "all", _flagged, "MFU or HFU above 1; the throughput, the device or its peak is wrong"),
    ("technique without effect", "measured", _without_effect,
     "no compiled graph, no Float8 layer, no fused async TP or no load balancing, though it is on"),
    ("memory growth", "measured", _grows, f"memory grew more than {GROWTH_LIMIT:.0%} in 10 steps"),
    ("failed repeats", "all", _failed_repeats, "some of their repeats failed; the figure is that of the others"),
)  # fmt: skip
"""(kind, which runs, test, meaning) of what is looked for run by run."""


def places(points: Sequence[Point]) -> list[Place]:
    """One entry a (engine, machine, code), the largest first."""
    groups: dict[tuple[str, str, str], list[Point]] = {}
    for p in points:
        if p.result.environment or p.result.code_id:
            groups.setdefault((p.engine, p.head.machine, p.result.code_id), []).append(p)
    found = [Place(*key, len(g), tuple(_facts(g[0].result.environment))) for key, g in groups.items()]
    return sorted(found, key=lambda place: -place.points)


def _facts(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """The environment as name and text; a mapping becomes ``name value`` pairs, what is absent is left out."""
    out = []
    for key, value in environment.items():
        if key == "fingerprint" or value in (None, [], {}, ""):
            continue
        if isinstance(value, dict):
            text = ", ".join(f"{k} {v}" for k, v in value.items())
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        out.append((str(key), text))
    return out
