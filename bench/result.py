"""What came out of a run: a status for every ending, and figures that always carry their interval. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

SCHEMA_VERSION = 1

Status = Literal[
    "ok", "oom", "invalid", "unsupported", "failed", "timeout", "hung", "cancelled", "lost", "incomplete", "diverged",
    "corrupt", "queued", "running",
]  # fmt: skip
LIVE = ("queued", "running")
"""Rows of runs that have not ended: never stored."""
STATUSES: tuple[str, ...] = tuple(s for s in get_args(Status) if s not in LIVE)


@dataclass(frozen=True)
class Metric:
    """Name, unit and which direction is better."""

    name: str
    unit: str
    direction: Literal["higher", "lower", "none"]
    text: str


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("tps_global", "tokens/s", "higher", "tokens a second, all ranks; a token is counted once"),
        Metric("tps_per_gpu", "tokens/s", "higher", "tps_global / world size"),
        Metric("step_time_s", "s", "lower", "time of one optimizer step"),
        Metric("peak_active_gib", "GiB", "lower", "peak of live tensors on the worst rank"),
        Metric("peak_reserved_gib", "GiB", "lower", "peak of the caching allocator on the worst rank"),
        Metric("peak_rss_gib", "GiB", "lower", "peak resident set of the worst rank"),
        Metric("compile_time_s", "s", "lower", "excess of the first steps"),
        Metric("mfu", "fraction", "higher", "model FLOPs over the device's dense peak, full attention"),
        Metric("hfu", "fraction", "higher", "as mfu, recomputation counted"),
        Metric("final_loss", "nats", "lower", "mean loss of the last steps"),
        Metric("exposed_comm_frac", "fraction", "lower", "share of the step that waits for communication"),
        Metric("bubble_frac", "fraction", "lower", "share of the step that is pipeline bubble"),
        Metric("stability", "count", "lower", "non-finite steps and loss spikes"),
    )
}


@dataclass(frozen=True)
class Value:
    """A figure with its interval at confidence ``level`` from ``n`` samples; or null, with the ``reason``."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    n: int = 0
    unit: str = ""
    reason: str | None = None

    @classmethod
    def none(cls, name: str, reason: str) -> Value:
        return cls(unit=METRICS[name].unit, reason=reason)


@dataclass(frozen=True)
class Window:
    """The steady-state steps: first and last step number, and the excluded ones with their reasons."""

    first: int | None = None
    last: int | None = None
    excluded: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunResult:
    """One run, whatever its ending. ``spec`` is the plain form of the RunSpec; ``metrics`` name -> Value."""

    run_id: str
    status: Status
    spec: dict[str, Any]
    repeat: int = 0
    attempts: int = 1
    sweep: str = ""
    engine: str = "measure"
    reason: str | None = None
    first_failed_rank: int | None = None
    steps_requested: int = 0
    steps_done: int = 0
    world_size: int = 1
    code_id: str = ""
    started_at: str = ""
    metrics: dict[str, Value] = field(default_factory=dict)
    memory_rank: int | None = None
    window: Window = field(default_factory=Window)
    evidence: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """Strict JSON: a number that is not finite is written as null."""
        return json.dumps(finite(asdict(self)), indent=1, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunResult:
        """Raises ValueError that says what is wrong: a missing key, a status that is none, a newer schema."""
        missing = [k for k in ("run_id", "status", "spec", "schema_version") if k not in data]
        if missing:
            raise ValueError(f"result without {', '.join(missing)}")
        if data["status"] not in STATUSES:
            raise ValueError(f"status {data['status']!r} is not one of {', '.join(STATUSES)}")
        if data["schema_version"] > SCHEMA_VERSION:
            raise ValueError(f"schema_version {data['schema_version']} is newer than the {SCHEMA_VERSION} read here")
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in data.items() if k in known}
        values["metrics"] = {k: Value(**v) for k, v in data.get("metrics", {}).items()}
        values["window"] = Window(**data.get("window", {}))
        return cls(**values)


def finite(value: Any) -> Any:
    """``value`` with every non-finite float replaced by None, recursively."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value
