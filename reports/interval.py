"""Arithmetic on figures with intervals: repeats into one, ratios, differences. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.result import Value
from bench.summary import LEVEL, t_quantile


def pool(values: Sequence[Value]) -> Value:
    """Equal runs as one figure: the mean of the runs' values, with Student's t over the *runs*.

    mean +- t(0.975, k - 1) s / sqrt(k). What varies from run to run does not show inside one run, so a single run's
    own interval is kept only where there is no second run.
    """
    present = [v for v in values if v.value is not None]
    if not present:
        return values[0] if values else Value(reason="no run")
    if len(present) == 1:
        return present[0]
    xs = [float(v.value) for v in present if v.value is not None]
    k, mean = len(xs), sum(xs) / len(xs)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in xs) / (k - 1))
    half = t_quantile(LEVEL, k - 1) * deviation / math.sqrt(k)
    return Value(mean, mean - half, mean + half, LEVEL, k, present[0].unit)


def _sides(v: Value, log: bool) -> tuple[float, float] | None:
    """Distances from the value down to ``low`` and up to ``high``, in logarithms if ``log``."""
    if v.value is None or v.low is None or v.high is None or v.level is None or (log and v.low <= 0):
        return None
    return (math.log(v.value / v.low), math.log(v.high / v.value)) if log else (v.value - v.low, v.high - v.value)


def ratio(a: Value, b: Value) -> Value:
    """a / b of two independent figures; interval by MOVER on the logarithms (Zou and Donner 2008).

    low = r exp(-sqrt(da^2 + ub^2)), high = r exp(+sqrt(ua^2 + db^2)) with d, u the logarithmic distances of each
    figure to its bounds. Two predictions of one simulator err alike, so for them the interval is too wide, not too
    narrow.
    """
    if a.value is None or b.value is None or a.value <= 0 or b.value <= 0:
        missing = a if a.value is None or a.value <= 0 else b
        return Value(unit="ratio", reason=missing.reason or "one of the two figures is missing")
    n, r = min(a.n, b.n), a.value / b.value
    sides_a, sides_b = _sides(a, log=True), _sides(b, log=True)
    if sides_a is None or sides_b is None or a.level != b.level:
        return Value(r, n=n, unit="ratio", reason=_no_interval(a, b))
    low, high = math.hypot(sides_a[0], sides_b[1]), math.hypot(sides_a[1], sides_b[0])
    return Value(r, r * math.exp(-low), r * math.exp(high), a.level, n, "ratio")


def difference(a: Value, b: Value) -> Value:
    """a - b of two independent figures, interval by MOVER."""
    if a.value is None or b.value is None:
        return Value(unit=a.unit, reason=(a if a.value is None else b).reason or "one of the two figures is missing")
    d, sides_a, sides_b = a.value - b.value, _sides(a, log=False), _sides(b, log=False)
    if sides_a is None or sides_b is None or a.level != b.level:
        return Value(d, n=min(a.n, b.n), unit=a.unit, reason=_no_interval(a, b))
    low, high = math.hypot(sides_a[0], sides_b[1]), math.hypot(sides_a[1], sides_b[0])
    return Value(d, d - low, d + high, a.level, min(a.n, b.n), a.unit)


def _no_interval(a: Value, b: Value) -> str:
    if a.level is not None and b.level is not None and a.level != b.level:
        return f"no interval: levels {a.level:g} and {b.level:g}"
    return "no interval: one run each, no interval stored"


def overlap(a: Value, b: Value) -> bool:
    """Whether the intervals meet; without intervals, whether the values are equal."""
    if a.value is None or b.value is None:
        return False
    return (a.value if a.low is None else a.low) <= (b.value if b.high is None else b.high) and (
        b.value if b.low is None else b.low
    ) <= (a.value if a.high is None else a.high)
