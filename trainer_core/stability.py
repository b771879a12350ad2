"""How steadily a run trained: steps that were not finite, loss spikes, unrest of the gradient norm. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 20
"""Steps before a step that say what was to be expected."""
SPIKE_MADS = 4.0
"""So many median absolute deviations above the window's median make a spike (2.7 standard deviations of a Gaussian)."""


@dataclass(frozen=True)
class Stability:
    """Positions (from 0) of the steps that were not finite and of the spikes; std/mean of the finite gradient norms."""

    not_finite: list[int]
    spikes: list[int]
    grad_norm_variation: float | None

    @property
    def count(self) -> int:
        return len(self.not_finite) + len(self.spikes)

    @property
    def text(self) -> str:
        """One line for people."""
        variation = "unknown" if self.grad_norm_variation is None else f"{self.grad_norm_variation:.2f}"
        return (f"{len(self.not_finite)} steps not finite, {len(self.spikes)} loss spikes over {SPIKE_MADS:g} MAD of a "
                f"{WINDOW}-step median, std/mean of the gradient norm {variation}")  # fmt: skip


def stability(losses: Sequence[float | None], grad_norms: Sequence[float | None]) -> Stability:
    """Judge the losses and gradient norms of consecutive steps. None is a value that was not finite (strict JSON has no
    NaN). The first WINDOW steps are no spikes: there is nothing to hold them against."""
    bad = [i for i, pair in enumerate(zip(losses, grad_norms, strict=True)) if any(_finite(v) is None for v in pair)]
    spikes = []
    for i, loss in enumerate(losses):
        before = [v for v in map(_finite, losses[max(0, i - WINDOW) : i]) if v is not None]
        value = _finite(loss)
        if i < WINDOW or len(before) < WINDOW // 2 or value is None:
            continue
        median = statistics.median(before)
        mad = statistics.median(abs(v - median) for v in before)
        # the floor keeps rounding of a constant loss from being a spike
        if value - median > max(SPIKE_MADS * mad, 1e-6 * abs(median)):
            spikes.append(i)
    norms = [v for v in map(_finite, grad_norms) if v is not None]
    mean = statistics.fmean(norms) if len(norms) > 1 else 0.0
    return Stability(bad, spikes, statistics.stdev(norms) / mean if mean > 0 else None)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
